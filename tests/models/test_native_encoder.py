"""The native library's encoders: rows attend to all rows of their text, and many rows are computed band by band."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import layer_norm

from triolet.core.errors import EngineError
from triolet.models.memory.rows import Rows
from triolet.models.native.library import ACTIVATIONS, Ending, Library
from triolet.models.native.panels import Panels
from triolet.models.native.program import Attention, Normed, Program
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


def attending(attention: Attention, turns: tuple[Tensor, Tensor] | None = None) -> Program:
    program, width = Program(), attention.heads * attention.size
    if turns is not None:
        program.turns.append(turns)
    program.attend_all(program.buffer(3 * width), program.buffer(width), attention)
    return program


def attended(inputs: Tensor, attention: Attention, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The rows of one text, by plain operations of torch in float64."""
    heads, far = attention.heads, torch.arange(len(inputs))[None] - torch.arange(len(inputs))[:, None]
    queries, keys, values = inputs.double().view(len(inputs), 3, heads, -1).permute(1, 2, 0, 3)
    if turns is not None:
        queries, keys = (turned(one, *turns) for one in (queries, keys))
    scores = queries @ keys.transpose(1, 2) * attention.scale
    if attention.distances is not None:
        most = attention.distances.shape[1] // 2
        scores += attention.distances.double()[:, far.clamp(-most, most) + most]
    if attention.window:
        scores = scores.masked_fill(far.abs() >= attention.window, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)


def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half, length = cosines.shape[1], heads.shape[1]
    first, second, rest = heads.split([half, half, heads.shape[2] - 2 * half], -1)
    cosine, sine = cosines[:length].double(), sines[:length].double()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], -1)


def side_by_side(lengths: Sequence[int]) -> Rows:
    """Texts of some lengths in one step. Every row is wanted."""
    positions = [position for length in lengths for position in range(length)]
    return Rows(
        positions=positions,
        chunks=[(length, 0, 0, 0) for length in lengths],
        tables=(),
        wanted=range(len(positions)),
    )


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
    found, attention = [], Attention.plain(heads, size)
    for threads in (1, 3):
        with running(attending(attention), rows + spare, threads=threads, level=level) as runner:
            found.append(runner.step(inputs.clone(), Rows.all_of(rows)))
    torch.testing.assert_close(found[0].double(), attended(inputs, attention), atol=2e-3 * scale, rtol=1e-4)
    assert torch.equal(*found)


@settings(max_examples=80)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 9, 31, 32, 33, 47, 48, 49, 100]), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    size=st.sampled_from([4, 16, 40]),
    window=st.sampled_from([0, 0, 1, 5, 33, 600]),
    far=st.sampled_from([None, 0, 3, 40]),
    half=st.sampled_from([0, 2]),
    level=st.sampled_from([1, 3, 4]),
    order=st.randoms(use_true_random=False),
)
def test_each_text_has_the_bits_that_it_has_alone(
    lengths: list[int],
    heads: int,
    size: int,
    window: int,
    far: int | None,
    half: int,
    level: int,
    order: random.Random,
) -> None:
    """Texts stand side by side in a step, in any order and in one or several calls; rows attend to their own text."""
    draw = torch.Generator().manual_seed(sum(lengths))
    texts = [torch.randn(length, 3 * heads * size, generator=draw) for length in lengths]
    distances = None if far is None else torch.randn(heads, 2 * far + 1, generator=draw)
    angles = torch.rand(100, half, generator=draw) if half else None
    turns = None if angles is None else (angles.cos(), angles.sin())
    attention = Attention.plain(heads, size, 0.3, window=window, distances=distances, turned=2 * half)
    order.shuffle(texts)
    alone = []
    with running(attending(attention, turns), 100, level=level) as runner:
        for text in texts:
            alone.append(runner.step(text.clone(), Rows.all_of(len(text))))
            expected = attended(text, attention, turns)
            torch.testing.assert_close(alone[-1].double(), expected, atol=2e-3, rtol=1e-4)
        together = runner.step(torch.cat(texts), side_by_side(list(map(len, texts))))  # cut at texts
    assert torch.equal(together, torch.cat(alone))
    with running(attending(attention, turns), 600, threads=3, level=level) as runner:
        assert torch.equal(runner.step(torch.cat(texts), side_by_side(list(map(len, texts)))), together)


@given(
    sequences=st.lists(
        st.lists(st.sampled_from([1, 9, 32, 33, 48, 49]), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    window=st.sampled_from([0, 0, 5, 40]),
    level=st.sampled_from([1, 3, 4]),
)
def test_rows_attend_to_their_chunk_or_to_the_sequence_of_chunks(
    sequences: list[list[int]], window: int, level: int
) -> None:
    """A sequence has several chunks, and a step several sequences, which no call cuts."""
    rows = [
        list(torch.randn(sum(one), 3 * 32, generator=torch.Generator().manual_seed(7)).split(one)) for one in sequences
    ]
    chunks = [(length, int(place > 0), 0, 0) for one in sequences for place, length in enumerate(one)]
    together = torch.cat([torch.cat(one) for one in rows])
    plan = Rows(positions=[0] * len(together), chunks=chunks, tables=(), wanted=range(len(together)))
    for by_chunk in (False, True):
        attention = Attention.plain(2, 16, 0.3, window=window, by_chunk=by_chunk)
        with running(attending(attention), 150, level=level) as runner:
            found = runner.step(together.clone(), plan)
            alone = [runner.step(each.clone(), Rows.all_of(len(each))) for one in rows for each in one]
        units = [each for one in rows for each in one] if by_chunk else [torch.cat(one) for one in rows]
        expected = torch.cat([attended(each, attention) for each in units])
        torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=1e-4)
        assert not by_chunk or torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize("second", [(1, 0), (0, 2), (0, -1)])
def test_a_chunk_that_continues_nothing_is_refused(second: tuple[int, int]) -> None:
    chunks = [(3, each, 0, 0) for each in second]
    with running(attending(Attention.plain(1, 16)), 9) as runner, pytest.raises(EngineError, match="table"):
        runner.step(torch.randn(6, 48), Rows(positions=[0] * 6, chunks=chunks, tables=(), wanted=range(6)))


@pytest.mark.parametrize("level", [1, 3, 4])
def test_a_quick_gelu_is_that_of_clip(level: int) -> None:
    program, inputs = Program(), torch.linspace(-90, 90, 64 * 9).view(9, 64)
    eye, activation = Panels.of(torch.eye(64)), ACTIVATIONS["quick_gelu"]
    program.linear(program.buffer(64), program.buffer(64), eye, Ending.ACTIVATED, activation=activation)
    with running(program, 9, level=level) as runner:
        found = runner.step(inputs.clone(), Rows.all_of(9))
    torch.testing.assert_close(found, inputs * torch.sigmoid(1.702 * inputs), atol=2e-6, rtol=1e-5)


def test_a_text_is_never_cut() -> None:
    with running(attending(Attention.plain(1, 16)), 40) as runner:
        assert runner.step(torch.randn(80, 48), side_by_side([40, 1, 39])).shape == (80, 16)
        with pytest.raises(AssertionError, match="a sequence of 41 rows that must not be cut; the most are 40"):
            runner.step(torch.randn(43, 48), side_by_side([2, 41]))


def test_types_are_added_to_embeddings() -> None:
    draw = torch.Generator().manual_seed(1)
    words, places, types = (torch.randn(count, 48, generator=draw) for count in (90, 9, 2))
    tokens, kinds, rows = [5, 89, 0, 33, 5], [0, 0, 1, 1, 1], side_by_side([3, 2])
    for dtype in (torch.float32, torch.int8):
        program, table = Program(), Panels.of(words, dtype=dtype)
        hidden = program.buffer(48)
        program.look_up(hidden, table, 1.0, places, types)
        program.norm(hidden, program.buffer(48), Normed(gain=torch.ones(48), epsilon=0.0, shift=torch.zeros(48)))
        expected = table.rows(torch.tensor(tokens)) + types[kinds] + places[[0, 1, 2, 0, 1]]
        with running(program, 9) as runner:
            found = runner.step(tokens, evolve(rows, types=kinds))
            with pytest.raises(EngineError, match="token"):
                runner.step(tokens, evolve(rows, types=[0, 0, 1, 2, 1]))
        torch.testing.assert_close(found, layer_norm(expected, [48]), atol=2e-6, rtol=1e-5)


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


def test_rows_have_the_same_bits_wherever_an_audio_was_cut() -> None:
    """Of a window with more numbers than one sum has, where each row is a block of its own."""
    program, inputs = Program(kept=140), torch.randn(300, 48)
    program.attend_all(program.buffer(48), program.buffer(16), Attention.plain(1, 16, window=141, ahead=0))
    with running(program, 300) as runner:
        state, found = runner.new_state(), list[Tensor]()
        whole = runner.step(inputs.clone(), evolve(Rows.all_of(300), states=[runner.new_state()]))
        for start, stop in ((0, 57), (57, 200), (200, 300)):
            rows = evolve(Rows.all_of(stop - start), chunks=[(stop - start, 0, 0, min(start, 140))], states=[state])
            found.append(runner.step(inputs[start:stop].clone(), rows))
    assert torch.equal(torch.cat(found), whole)


# -- int8 --------------------------------------------------------------------------------------------------------------


def quantizing(attention: Attention) -> Program:
    """Rows are [queries, keys, values] in int8, as behind a layer in int8."""
    program, width = Program(), 3 * attention.heads * attention.size
    rows, split = program.buffer(width), program.buffer(width)
    program.linear(rows, split, Panels.of(torch.eye(width), dtype=torch.int8), Ending.STORE)
    program.attend_all(split, program.buffer(width // 3), attention)
    return program


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("size", [32, 40, 64])
def test_long_chunks_are_attended_in_int8(size: int, level: int) -> None:
    attention = Attention.plain(2, size, size**-0.5, window=200 if size == 40 else 0)
    rows = torch.randn(400, 6 * size)
    with running(quantizing(attention), 400, level=level) as runner:
        split = torch.empty_like(rows)
        found = runner.step(rows, Rows.all_of(400), kept={1: split})
    expected = attended(split, attention).float()
    off = (found - expected).norm() / expected.norm()
    assert 1e-4 < off < 0.02, "in int8, and near it"


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([1, 5, 48, 255, 256, 257, 300]), min_size=1, max_size=5),
    st.sampled_from([1, 3, 4]),
    st.data(),
)
def test_a_chunk_has_the_same_bits_in_int8_beside_any_others(
    counts: list[int], level: int, data: st.DataObject
) -> None:
    size, window = data.draw(st.sampled_from([(32, 0), (40, 70), (64, 0)]))
    attention, seed = Attention.plain(1, size, size**-0.5, window=window), data.draw(st.integers(0, 99))
    rows = torch.randn(sum(counts), 3 * size, generator=torch.Generator().manual_seed(seed))
    with running(quantizing(attention), sum(counts), threads=data.draw(st.integers(1, 3)), level=level) as runner:
        together = runner.step(rows.clone(), Rows.all_of(*counts)).split(counts)
        for one, own in zip(rows.split(counts), together, strict=True):
            assert torch.equal(runner.step(one.clone(), Rows.all_of(len(one))), own)
