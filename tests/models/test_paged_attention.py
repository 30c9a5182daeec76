"""Attention over pages, against the textbook's: whatever the lengths, windows, caps and groups of heads."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from attrs import evolve

from triolet.core.errors import UnsupportedModel
from triolet.core.model import LayerKV
from triolet.core.plan import Chunk
from triolet.models.attention import paged as module
from triolet.models.attention.layers import PAGED, PagedCall, attend_paged, register
from triolet.models.attention.paged import PagedStep
from triolet.models.memory.kv import PagedKV
from triolet.models.memory.rows import Rows

HEAD, VALUE = 8, 5


def textbook(queries, keys, values, *, start, scale, window, softcap, sinks=None, seen=()):
    """[rows, heads, value_dim] of one sequence, row by row; the first row is at position ``start``."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    rows = []
    for offset, query in enumerate(queries):
        stop = (seen[offset] if seen else start + offset) + 1
        first = 0 if window is None else max(0, start + offset + 1 - window)
        scores = torch.einsum("hd,phd->hp", query, keys[first:stop]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        rows.append(torch.einsum("hp,phd->hd", scores.softmax(-1)[:, : stop - first], values[first:stop]))
    return torch.stack(rows)


class Sequences:
    """Sequences that grow by chunks, in pages handed out at random."""

    def __init__(self, page_size, heads, kv_heads, seed):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.paged = PagedKV.allocate(
            layers=[LayerKV(heads=kv_heads, size=HEAD, value_size=value) for value in (HEAD, VALUE)],
            pages=200,
            page_size=page_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for part in self.paged.parts():
            part[:-1].fill_(torch.nan)
        self.free = self.random.sample(range(200), 200)
        self.heads, self.kv_heads = heads, kv_heads
        self.keys, self.values, self.pages = {}, {}, {}

    def draw(self, rows, heads, size=HEAD):
        return torch.randn(rows, heads, size, generator=self.generator)

    def step(self, lengths, mutual=0, in_windows=False, **options):
        """Feeds ``lengths`` (by sequence); the greatest difference from the textbook. In each chunk ``mutual`` rows see
        each other, or do so ``in_windows`` alone."""
        chunks = [self._slice(sequence, length) for sequence, length in lengths.items()]
        self.random.shuffle(chunks)
        self.paged.enter(chunks)
        layout = Rows.of(chunks, (), self.paged.page_size)
        seen = [last for index in layout.order for last in self._seen(chunks[index], mutual)]
        layout = evolve(layout, seen=seen if mutual else (), in_windows=in_windows)
        rows = sum(lengths.values())
        queries, keys, values = (
            self.draw(rows, self.heads),
            self.draw(rows, self.kv_heads),
            self.draw(rows, self.kv_heads, VALUE),
        )
        attended = PagedStep(self.paged, layout).attend(1, queries, keys, values, scale=0.4, **options)
        apart = 0.0
        for index, first in zip(layout.order, layout.starts, strict=True):
            part = chunks[index]
            mine = slice(first, first + part.length)
            assert layout.positions[mine] == list(range(part.start, part.start + part.length))
            for known, new in ((self.keys, keys), (self.values, values)):
                known[part.sequence_id] = torch.cat([known.get(part.sequence_id, new[:0]), new[mine]])
            told = textbook(
                queries[mine],
                self.keys[part.sequence_id],
                self.values[part.sequence_id],
                start=part.start,
                scale=0.4,
                seen=() if in_windows and options["window"] is None else layout.seen[mine],
                **options,
            )
            apart = max(apart, float((attended[mine] - told).abs().max()))
        return apart

    def _seen(self, part, mutual):
        first = self.random.randrange(part.length)
        stop = min(first + mutual, part.length)
        return [part.start + (stop - 1 if first <= row < stop else row) for row in range(part.length)]

    def _slice(self, sequence, length):
        start = len(self.keys.get(sequence, ()))
        pages = self.pages.setdefault(sequence, [])
        while len(pages) * self.paged.page_size < start + length:
            pages.append(self.free.pop())
        return Chunk(
            sequence_id=sequence, start=start, length=length, page_table=tuple(pages), cross_slot=None, samples=False
        )


@pytest.mark.parametrize("limits", [None, (1, 1), (3000, 600)], ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "heads", "sunk"),
    [
        *itertools.product((None, 5, 40), (None, 2.0), ((4, 2),), (False,)),
        (None, None, (3, 3), True),
        (7, None, (6, 1), True),
        (5, 2.0, (4, 2), True),
    ],
)
def test_it_is_the_textbooks(monkeypatch, limits, window, softcap, heads, sunk):
    """First, middle and single-row chunks of many lengths side by side, step after step; garbage in the pages."""
    monkeypatch.setattr(module, "_PIECE", 9)
    if limits is not None:
        chosen = module._Limits(gathered=limits[0], wasted=limits[1])
        monkeypatch.setattr(module._Limits, "of", lambda device: chosen)
    sequences = Sequences(4, *heads, seed=1)
    steps = (
        {0: 1, 1: 23, 2: 40, 3: 3},
        {0: 1, 1: 1, 2: 1, 3: 19, 4: 5},
        {0: 30, 1: 3, 2: 3, 3: 1, 4: 33},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1},
        {0: 4, 1: 4, 5: 17},
    )
    sinks = 3 * sequences.draw(1, 1, heads[0])[0, 0] if sunk else None
    for lengths in steps:
        assert sequences.step(lengths, window=window, softcap=softcap, sinks=sinks) < 1e-5


@pytest.mark.parametrize(("window", "in_windows"), [(None, False), (7, False), (None, True), (7, True)])
def test_rows_that_see_each_other_see_the_others_behind_them(monkeypatch, window, in_windows):
    """Within their window, in chunks of all kinds, which may be cut into pieces."""
    monkeypatch.setattr(module, "_PIECE", 9)
    sequences = Sequences(4, 4, 2, seed=3)
    for lengths in ({0: 3, 1: 23, 2: 40}, {0: 19, 1: 3, 2: 1, 3: 1}, {0: 30, 1: 3, 2: 17}):
        assert sequences.step(lengths, mutual=12, in_windows=in_windows, window=window, softcap=None) < 1e-5


def test_spans_are_bounded_and_hold_similar_contexts():
    """On the CPU a span gathers what stays in the cache, and one long context does not make the short ones long."""
    sequences = Sequences(4, 4, 2, seed=2)
    lengths = [1, 2, 3, 300]
    assert sequences.step(dict(enumerate(lengths)), window=None, softcap=None) < 1e-5
    chunks = [sequences._slice(sequence, 1) for sequence in range(len(lengths))]
    limits = module._Limits(gathered=10 * sequences.paged.page_bytes, wasted=2 * sequences.paged.page_bytes)
    step = PagedStep(sequences.paged, Rows.of(chunks, (), 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Limits, "of", lambda device: limits)
        spans = step._spans_of(None, masked=False)
    assert [(span.count, len(span.table)) for span in spans] == [(3, 3), (1, 76)]
    assert step._spans_of(None, masked=False) is spans


def test_registering_twice_changes_nothing():
    """And nothing is registered by an import."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    first = ALL_ATTENTION_FUNCTIONS[PAGED]
    register()
    assert ALL_ATTENTION_FUNCTIONS[PAGED] is first


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"attention_mask": torch.zeros(1)}, "a mask of its own"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "both directions"),
        ({"sinks": torch.zeros(1)}, "attention sinks that it does not pass"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_layer_may_not_ask(asked, told):
    """Each is named."""
    sequences, layer, heard = Sequences(4, 2, 2, seed=1), torch.nn.Module(), []
    layer.layer_idx = 0
    rows = Rows.of([sequences._slice(0, 3)], (), 4)
    call = PagedCall(step=PagedStep(sequences.paged, rows), witness=heard.append)
    usual = {"attention_mask": None, "position_ids": torch.zeros(1), "s_aux": None, "triolet": call}
    given = (layer, *torch.zeros(3, 1, 2, 3, HEAD))
    attend_paged(*given, **usual)
    assert len(heard) == 1
    layer.sinks = asked.get("sinks")
    with pytest.raises(UnsupportedModel, match=told):
        attend_paged(*given, **{**usual, **{name: value for name, value in asked.items() if name != "sinks"}})


def test_pages_of_all_layers_are_zeroed_and_copied_together():
    """Whatever their widths; a layer that reads those of another has none of its own."""
    wide, narrow = LayerKV(heads=2, size=4, value_size=3), LayerKV(heads=1, size=2, value_size=2)
    layers = [wide, narrow, wide, LayerKV(heads=2, size=4, value_size=3, source=2)]
    paged = PagedKV.allocate(layers=layers, pages=3, page_size=2, dtype=torch.float32, device=torch.device("cpu"))
    keys, values = torch.randn(2, 2, 4), torch.randn(2, 2, 3)
    for part in paged.parts():
        part[:-1].fill_(torch.nan)
    paged.enter(
        [Chunk(sequence_id=0, start=0, length=2, page_table=(1,), cross_slot=None, samples=False)],
    )
    paged.write(2, torch.tensor([2, 3]), keys, values)
    paged.write(3, torch.tensor([2, 3]), 0 * keys, 0 * values)
    paged.copy([(1, 0)])
    for layer in (2, 3):
        found = paged.gather(layer, torch.tensor([0, 3]), 1)
        assert all(
            torch.equal(one[0, :, :2], told.transpose(0, 1)) for one, told in zip(found, (keys, values), strict=True)
        )
        assert not any(one[0, :, 2:].any() for one in found)
    assert [(part[0].isnan().any().item(), part[2].isnan().all().item()) for part in list(paged.parts())[:3]] == [
        (False, True)
    ] * 3
    assert [part.shape[-1] for part in paged.parts()] == [14, 4, 14, 0]
