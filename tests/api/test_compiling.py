"""Structures of strangers: each is compiled in a process that ends at a limit, and with its caller."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from triolet.api.inputs import compiling
from triolet.api.inputs.compiling import Compiler, _Lane
from triolet.core.errors import EngineError, InvalidRequest
from triolet.core.request import Structure
from triolet.models.sampling import grammar
from triolet.models.sampling.grammar import grammar_of
from triolet.models.sampling.structure import Tried

LONG = Structure.json_schema({"type": "integer", "multipleOf": 999_983})  # 20 s and 360 MB to compile
SMALL = Structure.json_schema({"type": "integer"})


class Kept:
    """Stands for a model: what it compiled has passed, and is kept."""

    def __init__(self) -> None:
        self.tried: list[Structure] = []
        self.found: dict[str, Any] = {}

    def find(self, structure: Structure) -> Any:
        return self.found.get(structure.text)

    def compile(self, structure: Structure) -> Structure:
        self.tried.append(structure)
        return structure

    def keep(self, found: Any) -> None:
        self.found[found.text] = found


def children() -> Iterator[int]:
    """The processes that this one has started and that still are."""
    for task in Path("/proc/self/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def chain(length: int, link: dict[str, Any]) -> Structure:
    """A schema of which each part refers to the next one."""
    parts = {f"d{index}": json.loads(json.dumps(link).replace("NEXT", f"d{index + 1}")) for index in range(length)}
    return Structure.json_schema({"$defs": {**parts, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"})


@pytest.mark.real_time
async def test_a_structure_is_tried_once_and_then_kept() -> None:
    model, compiler = Kept(), Compiler()
    for _ in range(2):
        assert (await compiler.compile(SMALL, model)).text == SMALL.text
    (tried,) = model.tried
    assert isinstance(tried, Tried)
    assert tried.grammar == grammar_of(SMALL.kind, SMALL.text)
    assert 0 <= tried.size < 2**22


@pytest.mark.real_time
async def test_what_a_forced_call_need_not_follow_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """And in one line, however many tools there are: one request wrote 384 lines."""
    rule = json.dumps(["put", {"type": "array", "uniqueItems": True}])
    model, compiler = Kept(), Compiler()
    for blanks in ("", " "):
        text = f"start: a | b{blanks}\na: %exact {rule}\nb: %exact {rule}"
        await compiler.compile(Structure(kind="lark", text=text), model)
    told = "a call of 'put' is forced without all of its schema: Unimplemented keys: [\"uniqueItems\"]"
    assert caplog.messages == [f"{told} (and 1 more of this request)"]
    compiler._quiet_until = 0.0
    await compiler.compile(Structure(kind="lark", text=f"start: a  \na: %exact {rule}"), model)
    assert caplog.messages[1:] == [told]


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("structure", "told"),
    [
        (LONG, "takes more than 0.5 s of computing; give smaller numbers in multipleOf"),
        (chain(3_000, {"type": "array", "items": {"$ref": "#/$defs/NEXT"}}), "refers too deeply"),
        (
            Structure(
                kind="lark", text="start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(20_000)) + 'a20000: "x"'
            ),
            "too deeply",
        ),
        (Structure(kind="json_schema", text='{"allOf":[' * 900 + "{}" + "]}" * 900), "nested too deeply"),
        (Structure.json_schema({"const": 2**53 + 1}), "/const=9007199254740993; allowed: "),
    ],
    ids=["time", "stack", "stack of rules", "nested", "number"],
)
async def test_what_would_harm_the_server_ends_in_its_own_process(structure: Structure, told: str) -> None:
    """The chain of references, 190 kB, ended the whole server: llguidance ran out of stack."""
    model = Kept()
    with pytest.raises(InvalidRequest, match="cannot be followed: ") as caught:
        await Compiler((_Lane(0.1), _Lane(0.5))).compile(structure, model)
    assert told in str(caught.value)
    assert not model.tried


@pytest.mark.real_time
async def test_a_grammar_of_a_client_writes_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    texts = "// a call of \x1b[31m\n", '// %exact ["\\u001b", "\\u001b\\n"]\n'
    for text in texts:
        await Compiler().compile(Structure(kind="lark", text=f'{text}start: "a"'), Kept())
    assert caplog.messages == ["a call of '\\x1b' is forced without all of its schema: "]


@pytest.mark.real_time
async def test_a_caller_that_leaves_ends_its_process() -> None:
    before = set(children())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(Compiler((_Lane(60.0),)).compile, LONG, None))
        while not (begun := set(children()) - before):  # noqa: ASYNC110  (another process)
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert begun
    assert not set(children()) - before


@pytest.mark.real_time
async def test_small_structures_do_not_wait_for_long_ones() -> None:
    """Four callers of long ones are in the second lane, two of them at work, when a small one comes."""
    lanes = (_Lane(0.1), _Lane(60.0))
    compiler = Compiler(lanes)
    async with trio.open_nursery() as nursery:
        for prime in (999_983, 999_979, 999_961, 999_959):
            long = Structure.json_schema({"type": "integer", "multipleOf": prime})
            nursery.start_soon(partial(compiler.compile, long, None))
        while lanes[1].trials.statistics().tasks_waiting < 2:  # noqa: ASYNC110  (other processes)
            await trio.sleep(0.001)
        assert await compiler.compile(SMALL, None) == SMALL
        assert lanes[1].trials.borrowed_tokens == 2
        nursery.cancel_scope.cancel()


class Trials:
    """Stands in for the processes: counts the trials, each of which takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: str = "") -> None:
        self.begun = 0
        self.fault = fault
        monkeypatch.setattr(compiling, "_try", self._try)

    async def _try(self, structure: Structure, *_: Any) -> Structure:
        self.begun += 1
        await trio.sleep(1)
        if self.fault:
            raise InvalidRequest(self.fault)
        return structure


async def test_callers_of_one_structure_share_a_trial_and_one_goes_on_when_the_first_leaves(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    trials, compiler, found = Trials(monkeypatch), Compiler(), list[Structure]()

    async def call() -> None:
        found.append(await compiler.compile(SMALL, None))

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as first:
                first.start_soon(call)
                await trio.sleep(0.1)
                for _ in range(4):
                    nursery.start_soon(call)
    assert found == [SMALL] * 4
    assert trials.begun == 2
    assert not compiler._trials, "nobody waits, nothing is left"


async def test_what_was_refused_is_refused_again_for_a_while_without_a_trial(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Each call of a structure that takes too long took all of its time, before the eyes of others who waited."""
    trials, compiler = Trials(monkeypatch, "no"), Compiler()
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="no"):
            await compiler.compile(LONG, None)
    assert trials.begun == 1
    for text in map(str, range(300)):
        with pytest.raises(InvalidRequest):
            await compiler.compile(Structure(kind="regex", text=text), None)
    assert len(compiler._refused) == 256
    trials.fault = ""
    await trio.sleep(61)
    assert await compiler.compile(Structure(kind="regex", text="299"), None)


async def test_what_is_kept_waits_for_no_trial(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    Trials(monkeypatch)
    model, compiler = Kept(), Compiler()
    model.keep(SMALL)
    async with trio.open_nursery() as nursery:
        for index in range(8):
            nursery.start_soon(compiler.compile, Structure.choice([str(index)]), None)
        await trio.sleep(0.1)
        started = trio.current_time()
        assert await compiler.compile(SMALL, model) == SMALL
        assert trio.current_time() == started


@pytest.mark.real_time
async def test_a_fault_of_the_program_is_not_blamed_on_the_structure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was told as a limit of memory."""
    program = tmp_path / "grammar.py"
    program.write_text("raise KeyError('ours')")
    monkeypatch.setattr(grammar, "__file__", str(program))
    with pytest.raises(EngineError, match=r"failed \(1\): KeyError: 'ours'"):
        await Compiler().compile(SMALL, None)


async def test_without_limits_a_structure_is_compiled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, and in frozen programs."""
    monkeypatch.setattr(compiling, "_HAS_LIMITS", False)
    model = Kept()
    assert await Compiler().compile(SMALL, model) is SMALL
    assert model.tried == [SMALL]
    assert await Compiler().compile(SMALL, None) is SMALL


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_pages_of_another_size_are_counted_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    before = grammar._memory()[1]
    monkeypatch.setattr("resource.getpagesize", lambda: 65_536)
    assert grammar._memory()[1] > 8 * before


@pytest.mark.real_time
async def test_a_trial_gives_way_to_requests_that_run() -> None:
    before = set(children())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(Compiler((_Lane(60.0),)).compile, LONG, None))
        while not any(nice(child) for child in set(children()) - before):  # noqa: ASYNC110  (another process)
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


def nice(process: int) -> bool:
    """True if the process has a lower priority than this one."""
    return os.getpriority(os.PRIO_PROCESS, process) > os.getpriority(os.PRIO_PROCESS, 0)
