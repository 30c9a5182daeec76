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

from attrs import frozen

from triolet.core.ledger_table import TRANSITIONS, Change, State

HERE = Path(__file__).resolve().parent
NAMES = {
    Change.DISPATCH: "dispatched",
    Change.ENCODED: "encoded",
    Change.ENCODE_FAILED: "encode_failed",
    Change.LOST: "lost_change",
}
FORMULAS = {"ledger": ("first", "second", "third", "freed_at_last"), "steps": ("first", "second", "third")}
WORLDS = {
    "ledger": ({}, {"ROOM": 2}, {"KEYS": 3, "ROOM": 2}),
    "steps": ({}, {"AHEAD": 1}, {"ROOM": 2}, {"REQUESTS": 4}, {"KEYS": 3}),
}
CYCLE = "acceptance cycle"  # a run in which the formula never comes true
BUGS = {  # of each model: a bug, the formula that is checked, and how Spin begins to tell what fails
    "ledger": (
        ("BUG_RESURRECTS", "first", "assertion violated 0"),  # not in the table
        ("BUG_EVICTS_HELD", "first", "assertion violated !(((((("),  # no free while held
        ("BUG_FREES_TWICE", "first", "assertion violated device[key]"),  # frees hit
        ("BUG_OVERBOOKS", "first", "assertion violated (taken<="),
        ("BUG_LOSES_ROOM", "first", "assertion violated (taken=="),
        ("BUG_STORES_NOTHING", "first", "assertion violated device[k"),  # no use before ready
        ("BUG_LOSS_FORGETS_THE_IDLE", "first", "assertion violated ( !(((life[i]==3)||"),  # believed, not there
        ("BUG_FREES_NOTHING", "first", "assertion violated (((((life[i]==3)||"),  # there, and in no book
        ("BUG_LOSS_LEAVES_READERS", "first", "assertion violated ( !((((((0<3)"),  # readers of what is not ready
        ("BUG_ENCODES_TWICE", "first", "assertion violated !(device[key])"),  # encode once
        ("BUG_TELLS_NO_READERS", "first", CYCLE),
        ("BUG_TELLS_OF_NO_FREE", "second", CYCLE),
        ("BUG_HITS_OVERTAKE", "second", CYCLE),
        ("BUG_TELLS_NO_READERS", "third", CYCLE),
        ("BUG_CLOSE_KEEPS_THE_IDLE", "freed_at_last", CYCLE),
    ),
    "steps": (
        ("BUG_FREES_WHAT_IS_CALLED_OFF", "first", "assertion violated device[i]"),  # frees hit
        ("BUG_ENCODES_FOR_EACH", "first", "assertion violated !(device[i])"),  # encode once
        ("BUG_IGNORES_ROOM", "first", "assertion violated (count<="),  # the room is kept
        ("BUG_EVICTS_HELD", "first", "assertion violated device[(i%2)]"),  # what is read is there
        ("BUG_PHANTOM", "first", "assertion violated device[(i%2)]"),
        ("BUG_FORGETS_SHARERS", "first", "assertion violated device[(i%2)]"),
        ("BUG_FORGETS_WHO_WAITS", "first", CYCLE),
        ("BUG_OVERTAKES", "second", CYCLE),
        ("BUG_LOSES_STEPS", "second", CYCLE),
        ("BUG_FORGETS_WHO_WAITS", "third", CYCLE),
    ),
}
ERRORS = re.compile(r"errors: (\d+)")
STATES = re.compile(r"^\s*(\d+) states, stored", re.MULTILINE)
FAILED = re.compile(r"^pan:\d+: (.*) \(at depth", re.MULTILINE)
TRUNCATED = ("search not completed", "max search depth too small")
DEPTH = 4_000_000


@frozen
class Search:
    """The report of Spin on one search. ``failed`` is empty, or what failed first."""

    formula: str
    states: int
    failed: str


def table() -> str:
    """`TRANSITIONS` in Promela: what is not in the table is an error."""
    states = ", ".join(_state(state) for state in State)
    changes = ", ".join(_change(change) for change in Change)
    rows = [
        f"  :: s == {_state(old)} && c == {_change(change)} && h == {int(held)} -> s = {_state(new)}"
        for (old, change, held), new in TRANSITIONS.items()
    ]
    lines = [f"mtype = {{ {states} }}", f"mtype = {{ {changes} }}", "inline look_up(s, c, h) {", "  if"]
    return "\n".join([*lines, *rows, "  :: else -> assert(false)", "  fi", "}", ""])


def _state(state: State) -> str:
    return "freeing_state" if state is State.FREEING else state.value


def _change(change: Change) -> str:
    return NAMES.get(change, change.name.lower())


def explore(
    model: str, world: dict[str, int], formulas: Iterable[str], bug: str = "", depth: int = DEPTH
) -> Iterator[Search]:
    """Searches for each formula. No end of a process is checked, so nothing is said of deadlocks.

    Raises:
        RuntimeError: Spin failed, or did not see all states.
    """
    defined = [f"-D{name}={value}" for name, value in world.items()] + ([f"-D{bug}"] if bug else [])
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("table.pml", table()), *((path.name, path.read_text()) for path in HERE.glob("*.pml"))):
            Path(folder, name).write_text(text)
        _run(folder, "spin", *defined, "-a", f"{model}.pml")
        _run(folder, "gcc", "-O0", "-w", "-DNFAIR=4", "-DCOLLAPSE", "-o", "pan", "pan.c")
        for formula in formulas:
            yield read(formula, _run(folder, "./pan", "-a", "-f", f"-m{depth}", "-N", formula))


def read(formula: str, told: str) -> Search:
    """Reads what a search prints.

    Raises:
        RuntimeError: nothing was found, but not all states were seen.
    """
    errors, stored, failed = ERRORS.search(told), STATES.search(told), FAILED.search(told)
    if errors is None or stored is None or (errors[1] != "0" and failed is None):
        raise RuntimeError(f"Spin did not finish:\n{told}")
    if errors[1] == "0" and any(one in told.lower() for one in TRUNCATED):
        raise RuntimeError(f"Spin did not see all states:\n{told}")
    return Search(
        formula, int(stored[1]), " ".join(failed[1].split()) if errors[1] != "0" and failed is not None else ""
    )


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
            for search in explore(model, world, FORMULAS[model]):
                wrong += bool(search.failed)
                _tell(model, world, search.formula, f"{search.states:,} states, {search.failed or 'no error'}")
        for bug, formula, expected in BUGS[model]:
            [search] = explore(model, {}, [formula], bug)
            found = search.failed.startswith(expected)
            wrong += not found
            outcome = "found, as it must be" if found else f"NOT FOUND by {expected!r}, but {search.failed!r}"
            _tell(model, {}, f"{bug}, {formula}", outcome)
    return wrong


def _tell(model: str, world: dict[str, int], what: str, outcome: str) -> None:
    sizes = "".join(f" {name}={value}" for name, value in world.items())
    print(f"{model}{sizes}: {what}: {outcome}", flush=True)  # noqa: T201


if __name__ == "__main__":
    asked = [name for name in FORMULAS if name in sys.argv[1:]] or [*FORMULAS]
    raise SystemExit(main(asked, whole="--quick" not in sys.argv))
