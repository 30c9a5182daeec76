"""The native library's encoders: rows attend to all rows of a step, and many rows are computed band by band."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triolet.models.memory.rows import Rows
from triolet.models.native.library import ACTIVATIONS, Ending, Library
from triolet.models.native.panels import Panels
from triolet.models.native.program import Normed, Program
from triolet.models.native.runner import Runner

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


@contextmanager
def running(program: Program, rows: int, *, threads: int = 2, level: int = 0) -> Iterator[Runner]:
    library = Library.load()
    assert library is not None
    runner = Runner.open(library, program, None, rows=rows, positions=rows, threads=threads, level=level)
    try:
        yield runner
    finally:
        runner.release()


def attending(heads: int, size: int) -> Program:
    program, width = Program(), heads * size
    program.attend_all(program.buffer(3 * width), program.buffer(width), heads=heads, size=size)
    return program


def attended(inputs: Tensor, heads: int) -> Tensor:
    queries, keys, values = inputs.double().view(len(inputs), 3, heads, -1).permute(1, 2, 0, 3)
    weights = (queries @ keys.transpose(1, 2)).softmax(-1)
    return (weights @ values).transpose(0, 1).flatten(1)


@settings(max_examples=60)
@given(
    rows=st.sampled_from([1, 2, 31, 32, 33, 48, 49, 97, 161]),
    heads=st.integers(1, 3),
    size=st.sampled_from([1, 4, 12, 16, 40, 64, 80]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    level=st.sampled_from([1, 3, 4]),
    spare=st.integers(0, 40),
)
def test_rows_attend_to_all_rows(rows: int, heads: int, size: int, scale: float, level: int, spare: int) -> None:
    """Whatever the most rows are, to the same bits on three threads as on one."""
    inputs = torch.randn(rows, 3 * heads * size, generator=torch.Generator().manual_seed(rows)) * scale
    found = []
    for threads in (1, 3):
        with running(attending(heads, size), rows + spare, threads=threads, level=level) as runner:
            found.append(runner.step(inputs.clone(), Rows.all_of(rows)))
    torch.testing.assert_close(found[0].double(), attended(inputs, heads), atol=2e-3 * scale, rtol=1e-4)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_bands_of_rows_change_no_bit(dtype: torch.dtype) -> None:
    """Rows that no one band holds are what each of them is alone."""
    torch.manual_seed(3)
    program, width, inner = Program(), 48, 96
    hidden, widened = program.buffer(width), program.buffer(inner)
    widen, narrow = (Panels.of(torch.randn(*shape), dtype=dtype) for shape in ((2 * inner, width), (width, inner)))
    norm = Normed(gain=torch.randn(width), shift=torch.randn(width), epsilon=1e-5)
    program.linear(hidden, widened, widen, Ending.GATED, norm=norm, activation=ACTIVATIONS["gelu"])
    program.linear(widened, hidden, narrow, Ending.ADD)
    program.norm(hidden, program.buffer(width), norm, wanted=True)
    inputs = torch.randn(430, width)
    with running(program, len(inputs)) as runner:
        together = runner.step(inputs.clone(), Rows.all_of(len(inputs)))
        for row in (0, 191, 192, 383, 384, 429):
            assert torch.equal(runner.step(inputs[row : row + 1].clone(), Rows.all_of(1))[0], together[row])
