"""What the native library refuses before anything is touched: plans, programs and libraries that are none."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.core.errors import EngineError
from triolet.models.memory.rows import Rows
from triolet.models.native.library import Library, _check_sources
from triolet.models.native.runner import Runner

from .fed import MOST_ROWS, PAGES, loaded
from .native_decoders import POSITIONS, SHAPE, DecoderFed, decoder_of

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


NUMBERS = st.one_of(
    st.integers(-2, 90), st.sampled_from([-(2**31), PAGES - 1, PAGES, POSITIONS - 1, POSITIONS, 2**31 - 1])
)


@st.composite
def plans(draw: st.DrawFn) -> Rows:
    """A plan, of which up to two numbers are others."""
    positions: list[int] = []
    chunks: list[tuple[int, int, int, int]] = []
    tables: list[int] = []
    lasts: list[int] = []  # the last position of each row's chunk
    for first, length in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=3)):
        positions += range(first, first + length)
        lasts += [first + length - 1] * length
        chunks.append((length, len(tables), 0, 0))
        pages = -(-(first + length) // 16)
        tables += draw(st.lists(st.integers(0, PAGES - 1), min_size=pages, max_size=pages))
    wanted = draw(st.lists(st.integers(0, len(positions) - 1), max_size=3))
    seen = draw(st.sampled_from([[], positions.copy(), lasts]))
    for _ in range(draw(st.integers(0, 2))):
        told = draw(st.sampled_from([positions, tables, wanted, seen]))
        if told:
            told[draw(st.integers(0, len(told) - 1))] = draw(NUMBERS)
    if draw(st.booleans()):
        chunks[draw(st.integers(0, len(chunks) - 1))] = draw(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS))
    return Rows(positions=positions, chunks=chunks, tables=tables, wanted=wanted, seen=seen)


@functools.cache
def llama() -> DecoderFed:
    """One for all plans."""
    return DecoderFed("llama")


@settings(max_examples=200)
@given(rows=plans())
def test_a_plan_that_is_none_is_refused(rows: Rows) -> None:
    """Before anything is touched."""
    with torch.inference_mode():
        one = llama()
        before, inputs = (
            [part.clone() for part in one.pages],
            torch.zeros(max(1, len(rows.positions)), SHAPE["hidden_size"]),
        )
        if is_plan(rows):
            found = one.runner.step(inputs, rows)
            assert found.isfinite().all() or any(rows.positions)  # pages before are not written
            return
        with pytest.raises(EngineError, match="the native library refuses a step"):
            one.runner.step(inputs, rows)
        torch.testing.assert_close(one.pages, before, rtol=0.0, atol=0.0, equal_nan=True)


def is_plan(rows: Rows, page_size: int = 16) -> bool:
    """Whether every number is in its range, and each chunk's positions are one behind the other."""
    count = len(rows.positions)
    within = 1 <= count <= MOST_ROWS and rows.tables and all(0 <= page < PAGES for page in rows.tables)
    if not within or len(rows.wanted) > count or not all(0 <= row < count for row in rows.wanted):
        return False
    at = 0
    for length, begin, _, _ in rows.chunks:
        if not 1 <= length <= count - at or not 0 <= begin < len(rows.tables):
            return False
        first = rows.positions[at]
        if list(rows.positions[at : at + length]) != list(range(first, first + length)):
            return False
        if (
            not 0 <= first <= first + length - 1 < POSITIONS
            or (first + length - 1) // page_size >= len(rows.tables) - begin
        ):
            return False
        seen, last = rows.seen[at : at + length], first + length - 1
        least = map(max, rows.positions[at : at + length], (0, *seen[:-1])) if seen else ()
        if not all(low <= one <= last for low, one in zip(least, seen, strict=True)):
            return False
        at += length
    return at == count


def test_rows_that_see_each_other_are_in_one_piece() -> None:
    rows = Rows(
        positions=range(12), chunks=[(12, 0, 0, 0)], tables=(0, 1), wanted=(), seen=[0, 1, *[6] * 5, *range(7, 12)]
    )
    pieces = list(rows.pieces(6, 6))
    assert [(start, stop) for start, stop, _, _ in pieces] == [(0, 2), (2, 8), (8, 12)]
    assert [list(piece.seen) for _, _, piece, _ in pieces] == [[0, 1], [*[6] * 5, 7], [8, 9, 10, 11]]
    with pytest.raises(AssertionError, match="more than 4 rows see each other"):
        list(rows.pieces(4, 6))


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """After a pull in a checkout. An installed package has no sources beside it; an older library does not tell."""
    calls, sources = ctypes.CDLL(loaded()._calls._name), tmp_path / "native"
    _check_sources(calls, sources)
    shutil.copytree(Path(__file__).parents[2] / "native", sources)
    (sources / "step.cpp.orig").write_text("what an editor or a merge leaves", encoding="utf-8")
    _check_sources(calls, sources)
    told = f"other sources than those in {sources}; compile it anew: pip install --no-deps --editable {tmp_path}"
    with pytest.raises(EngineError, match=re.escape(told)):
        _check_sources(ctypes.CDLL(None), sources)
    with (sources / "step.h").open("a") as header:
        header.write("\n")
    with pytest.raises(EngineError, match=re.escape(told)):
        _check_sources(calls, sources)


def test_a_program_that_would_leave_its_buffers_does_not_open() -> None:
    decoder = decoder_of("llama")
    decoder.pack()
    program = decoder.program(POSITIONS)
    program.widths[1] -= 1
    with pytest.raises(AssertionError, match="an operation would leave the buffers"):
        Runner.open(loaded(), program, torch.empty(2, 4, 16, 64), rows=8, positions=64, threads=1)
