"""Checks the models of this folder with Spin, exhaustively: ``make proofs``.

Safety: no assertion of a model can fail, in any order of events. Liveness: each ``ltl`` formula holds in every run in
which no process that can go on is passed over for ever (weak fairness). Then the same with a bug planted: the checker
must find it. Needs ``spin`` and ``gcc``, as packages of the same names have them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from triolet.core.ledger_table import TRANSITIONS, Change, Held, State

HERE = Path(__file__).resolve().parent
NAMES = {
    Change.DISPATCH: "dispatched",
    Change.ENCODED: "encoded",
    Change.ENCODE_FAILED: "encode_failed",
    Change.LOST: "lost_change",
}
FORMULAS = {"ledger": ("first", "second", "third", "freed_at_last"), "steps": ("first", "second", "third")}
WORLDS = {
    "ledger": ({}, {"LOANS": 1}, {"BORROWS": 1}, {"ROOM": 2}, {"LOANS": 1, "ROOM": 2}, {"KEYS": 3, "ROOM": 2}),
    "steps": ({}, {"AHEAD": 1}, {"ROOM": 2}, {"REQUESTS": 4}),
}
BUGS = {
    "ledger": {
        "BUG_EVICTS_HELD": "first",
        "BUG_EVICTS_LENT": "first",
        "BUG_RESURRECTS": "first",
        "BUG_HITS_OVERTAKE": "second",
    },
    "steps": {
        "BUG_EVICTS_HELD": "first",
        "BUG_PHANTOM": "first",
        "BUG_FORGETS_SHARERS": "first",
        "BUG_OVERTAKES": "second",
    },
}
ERRORS = re.compile(r"errors: (\d+)")
STATES = re.compile(r"^\s*(\d+) states, stored", re.MULTILINE)


def table() -> str:
    """`TRANSITIONS` in Promela: what is not in the table is an error."""
    states = ", ".join(_state(state) for state in State)
    changes = ", ".join(_change(change) for change in Change)
    rows = [
        f"  :: s == {_state(old)} && c == {_change(change)} && h == {list(Held).index(held)} -> s = {_state(new)}"
        for (old, change, held), new in TRANSITIONS.items()
    ]
    lines = [f"mtype = {{ {states} }}", f"mtype = {{ {changes} }}", "inline look_up(s, c, h) {", "  if"]
    return "\n".join([*lines, *rows, "  :: else -> assert(false)", "  fi", "}", ""])


def _state(state: State) -> str:
    return "freeing_state" if state is State.FREEING else state.value


def _change(change: Change) -> str:
    return NAMES.get(change, change.name.lower())


def explore(
    model: str, world: dict[str, int], formulas: Iterable[str], bug: str = ""
) -> Iterator[tuple[str, int, int]]:
    """For each formula: how many states Spin stored, and how many errors it found."""
    defined = [f"-D{name}={value}" for name, value in world.items()] + ([f"-D{bug}"] if bug else [])
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("table.pml", table()), *((path.name, path.read_text()) for path in HERE.glob("*.pml"))):
            Path(folder, name).write_text(text)
        _run(folder, "spin", *defined, "-a", f"{model}.pml")
        _run(folder, "gcc", "-O0", "-w", "-DNFAIR=4", "-DCOLLAPSE", "-o", "pan", "pan.c")
        for formula in formulas:
            told = _run(folder, "./pan", "-a", "-f", "-m4000000", "-N", formula)
            found, stored = ERRORS.search(told), STATES.search(told)
            if found is None or stored is None or (found[1] == "0" and "search not completed" in told.lower()):
                raise RuntimeError(f"Spin did not finish:\n{told}")
            yield formula, int(stored[1]), int(found[1])


def _run(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main(models: Iterable[str], *, whole: bool) -> int:
    """Checks ``models``, in all their worlds or in the first one of each. How many checks went wrong."""
    wrong = 0
    for model in models:
        for world in WORLDS[model] if whole else WORLDS[model][:1]:
            for formula, states, errors in explore(model, world, FORMULAS[model]):
                wrong += bool(errors)
                _tell(model, world, formula, f"{states:,} states, {errors} errors")
        for bug, formula in BUGS[model].items():
            [(_, _, errors)] = explore(model, {}, [formula], bug)
            wrong += not errors
            _tell(model, {}, bug, "found, as it must be" if errors else "NOT FOUND")
    return wrong


def _tell(model: str, world: dict[str, int], what: str, outcome: str) -> None:
    sizes = "".join(f" {name}={value}" for name, value in world.items())
    print(f"{model}{sizes}: {what}: {outcome}", flush=True)  # noqa: T201


if __name__ == "__main__":
    asked = [name for name in FORMULAS if name in sys.argv[1:]] or [*FORMULAS]
    raise SystemExit(main(asked, whole="--quick" not in sys.argv))
