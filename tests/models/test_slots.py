"""Cross-attention over slots: each row reads its own slot, to its end and no further."""

from __future__ import annotations

import pytest
import torch

from triolet.core.plan import Chunk
from triolet.models.memory.rows import Rows
from triolet.models.memory.slots import CrossKV, CrossStep

CPU = torch.device("cpu")
HEADS, SIZE, MOST = 2, 4, 40


def slots(lengths: list[int], *, garbage: bool = True) -> tuple[CrossKV, list[torch.Tensor]]:
    """Slots of these lengths, and the keys and values written to each, [2, kv_heads, length, head_dim]."""
    cross = CrossKV.allocate(
        layers=1, slots=len(lengths), heads=HEADS, embeddings=MOST, head_dim=SIZE, dtype=torch.float32, device=CPU
    )
    if garbage:
        cross.tensors()[0].fill_(torch.nan)
    numbers = torch.Generator().manual_seed(sum(lengths))
    written = []
    for slot, length in enumerate(lengths):
        keys, values = torch.randn(2, HEADS, length, SIZE, generator=numbers)
        cross.begin(slot, length)
        cross.write(slot, 0, keys, values)
        written.append(torch.stack([keys, values]))
    return cross, written


def chunk(number: int, slot: int, length: int = 1) -> Chunk:
    return Chunk(sequence_id=number, start=0, length=length, page_table=(number,), cross_slot=slot, samples=False)


@pytest.mark.parametrize("heads", [HEADS, 3 * HEADS])
@pytest.mark.parametrize(
    ("lengths", "readers"),
    [
        ([7], [(0, 1)]),
        ([7, 7, 7], [(0, 1), (1, 1), (2, 1)]),
        ([40, 36, 33, 5, 6, 40], [(5, 1), (0, 1), (3, 1), (4, 1), (2, 1), (1, 1)]),
        ([9, 8, 9, 1], [(2, 1), (0, 3), (2, 2), (1, 3), (3, 1), (0, 1)]),
        ([12, 40, 11], [(2, 5), (0, 5)]),
    ],
)
def test_each_row_reads_its_own_slot_whatever_lies_beside_it(heads, lengths, readers):
    """Neighbours of other lengths, slots with several readers, chunks in any order, garbage behind every end."""
    cross, written = slots(lengths)
    chunks = [chunk(number, slot, rows) for number, (slot, rows) in enumerate(readers)]
    layout = Rows.of(chunks, (), 4, cross.length)
    queries = torch.randn(sum(rows for _, rows in readers), heads, SIZE)
    found = CrossStep.of(cross, layout).attend(0, queries, scale=0.3)
    for index, start in zip(layout.order, layout.starts, strict=True):
        part = chunks[index]
        keys, values = written[part.cross_slot].repeat_interleave(heads // HEADS, 1)
        rows = queries[start : start + part.length].transpose(0, 1)
        expected = (rows @ keys.transpose(-1, -2) * 0.3).softmax(-1) @ values
        torch.testing.assert_close(found[start : start + part.length], expected.transpose(0, 1))


def test_what_lies_behind_a_slots_end_is_zeroed_where_a_longer_neighbour_is_read_beside_it():
    """Longer, shorter, longer; and nowhere else: memory that nobody reads is not even taken."""
    cross, _ = slots([5, MOST])
    pool = cross.tensors()[0][0, :, 0]
    for length in (38, 4, 33, 40, 35):
        cross.begin(0, length)
        cross.write(0, 0, *torch.full((2, HEADS, length, SIZE), torch.inf))
        CrossStep.of(cross, Rows.of([chunk(0, 0), chunk(1, 1)], (), 4, cross.length))
        assert pool[:, :, :length].isinf().all()
        assert (pool[:, :, length:] == 0).all() == (length > 30), "shorter ones are attended alone"


def test_similar_neighbours_are_attended_together_and_others_are_not():
    cross, _ = slots([40, 36, 33, 5, 6, 40])
    chunks = [chunk(number, number) for number in range(6)]
    step = CrossStep.of(cross, Rows.of(chunks, (), 4, cross.length))
    assert [(run.slot, run.slots, run.length) for run in step._runs] == [(0, 3, 40), (3, 2, 6), (5, 1, 40)]


@pytest.mark.parametrize("length", [0, MOST + 1])
def test_what_does_not_fit_a_slot_is_our_bug(length):
    cross, _ = slots([5])
    with pytest.raises(AssertionError, match="for a slot of 40"):
        cross.begin(0, length)
