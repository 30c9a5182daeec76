"""Structures of strangers: each is compiled in a process that ends at a limit, and with its caller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from triolet.api.inputs.compiling import Compiler, _Lane
from triolet.core.errors import InvalidRequest
from triolet.core.request import Structure
from triolet.models.sampling.grammar import grammar_of
from triolet.models.sampling.structure import Tried

LONG = Structure.json_schema({"type": "integer", "multipleOf": 999_983})  # 20 s and 360 MB to compile
SMALL = Structure.json_schema({"type": "integer"})


class Kept:
    """Stands for a model: what it compiled has passed, and is kept."""

    def __init__(self) -> None:
        self.tried: list[Tried] = []
        self.found: dict[str, Any] = {}

    def find(self, structure: Structure) -> Any:
        return self.found.get(structure.text)

    def compile(self, structure: Structure) -> Structure:
        assert isinstance(structure, Tried)
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
    assert tried.grammar == grammar_of(SMALL.kind, SMALL.text)
    assert 0 <= tried.size < 2**22


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
        for _ in range(4):
            nursery.start_soon(partial(compiler.compile, LONG, None))
        while lanes[1].trials.statistics().tasks_waiting < 2:  # noqa: ASYNC110  (other processes)
            await trio.sleep(0.001)
        assert await compiler.compile(SMALL, None) == SMALL
        assert lanes[1].trials.borrowed_tokens == 2
        nursery.cancel_scope.cancel()
