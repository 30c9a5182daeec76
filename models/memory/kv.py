"""The decoder's two memories: paged self-attention KV, and cross-attention KV in slots, each in one tensor.

A step's rows (one per token fed) are ordered by cross-attention slot, so that the rows that read one slot, and the
slots next to each other, are views::

    rows    | 0  1 | 2 | 3 | 4 |          slot 4 has two readers, 5 and 6 have one each
    slots   |  4   | 5 | 6 | 9 |          runs: (4, two rows), (5..6, one row each), (9, one row)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.plan import Chunk


@frozen(kw_only=True, eq=False)
class PageGroup:
    """The chunks of a step that have one length, attended together."""

    rows: Tensor | None  # [count * length] rows of the step; None: all of them, in order
    count: int
    length: int
    table: Tensor  # [count * pages] pages
    mask: Tensor  # [count, 1, length, pages * page_size], 0 or -inf


@frozen(kw_only=True)
class SlotRun:
    """Neighbouring slots of one length with the same number of reading rows each, attended together."""

    start: int  # first row
    slot: int  # first slot
    slots: int
    rows: int  # per slot
    length: int  # positions of each slot


@frozen(kw_only=True, eq=False)
class StepLayout:
    """Where a step's rows lie: computed once, used by every layer."""

    order: tuple[int, ...]  # index in the plan of each chunk, in the order of the rows
    starts: tuple[int, ...]  # first row of each chunk, in the order of the rows
    positions: Tensor  # [rows]
    slot_mapping: Tensor  # [rows], page * page_size + offset
    groups: tuple[PageGroup, ...]
    runs: tuple[SlotRun, ...]


@define(eq=False)
class PagedKV:
    """Self-attention keys and values, [layers, pages + 1, page_size, 2 * width], keys before values.

    Garbage cannot reach a result, not even as ``0 * NaN``: a page is zeroed when its first position is written, so a
    page in use holds zeros behind its last position; and shorter page tables are filled up with the last page, which
    no sequence owns and which stays zero.
    """

    page_size: int
    pages: int
    heads: int
    _pool: Tensor = field(repr=False)

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        pages: int,
        page_size: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedKV:
        """Takes the memory; on the CPU the system commits it only when it is written."""
        pool = torch.empty(layers, pages + 1, page_size, 2 * width, dtype=dtype, device=device)
        pool[:, pages] = 0
        return cls(page_size, pages, heads, pool)

    def another(self, *, pages: int, page_size: int, device: torch.device | None = None) -> PagedKV:
        """A pool of the same layers, heads and dtype, on the same or another device, with pages of its own."""
        layers, _, _, width = self._pool.shape
        return PagedKV.allocate(
            layers=layers,
            pages=pages,
            page_size=page_size,
            heads=self.heads,
            width=width // 2,
            dtype=self.dtype,
            device=device or self._pool.device,
        )

    def enter(self, chunks: Sequence[Chunk]) -> None:
        """Zeroes the pages whose first position these chunks write."""
        entered = [
            part.page_table[block]
            for part in chunks
            for block in range(-(-part.start // self.page_size), -(-(part.start + part.length) // self.page_size))
        ]
        if entered:
            self._pool.index_fill_(1, torch.tensor(entered, device=self._pool.device), 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, each pair from one to another. No page is both."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self._pool.device).T
            self._pool.index_copy_(1, targets, self._pool.index_select(1, sources))

    def write(self, layer: int, slot_mapping: Tensor, keys_values: Tensor) -> None:
        """Stores ``keys_values`` [rows, 2 * width] at ``slot_mapping`` [rows]."""
        self._pool[layer].view(-1, self._pool.shape[-1]).index_copy_(0, slot_mapping, keys_values)

    def gather(self, layer: int, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [count, heads, positions, head_dim], of the pages ``table`` [count * pages]: views of
        one copy, since they lie side by side."""
        gathered = self._pool[layer].index_select(0, table)  # [count * pages, page_size, 2 * width]
        keys, values = gathered.view(count, -1, 2, self.heads, gathered.shape[-1] // (2 * self.heads)).permute(
            2, 0, 3, 1, 4
        )
        return keys, values

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.page_size * self._pool.shape[-1] * self._pool.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored KV."""
        return self._pool.dtype

    def attend(self, layer: int, queries: Tensor, groups: tuple[PageGroup, ...]) -> Tensor:
        """Causal attention of scaled ``queries`` [rows, width] over their own sequences; [rows, width]."""
        if len(groups) == 1 and groups[0].rows is None:
            return self._attend_group(layer, queries, groups[0])
        attended = torch.empty_like(queries)
        for group in groups:
            assert group.rows is not None, "a group among several knows its rows"
            attended[group.rows] = self._attend_group(layer, queries[group.rows], group)
        return attended

    def _attend_group(self, layer: int, queries: Tensor, group: PageGroup) -> Tensor:
        split = queries.view(group.count, group.length, self.heads, -1).transpose(1, 2)
        keys, values = self.gather(layer, group.table, group.count)
        attended = scaled_dot_product_attention(split, keys, values, attn_mask=group.mask, scale=1.0)
        return attended.transpose(1, 2).reshape(queries.shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """The pool, the page of zeros included."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool = torch.empty(0)


@define(eq=False)
class CrossKV:
    """Cross-attention keys and values, [layers, 2, slots, heads, embeddings, head_dim]: written once per slot, read in
    place by every sequence on the same audio. What is behind the end of a shorter encoder output is never read."""

    slots: int
    _pool: Tensor = field(repr=False)
    _lengths: list[int] = field(repr=False)  # positions in use of each slot

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        slots: int,
        heads: int,
        embeddings: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> CrossKV:
        """Takes the memory; on the CPU the system commits it only when it is written."""
        pool = torch.empty(layers, 2, slots, heads, embeddings, width // heads, dtype=dtype, device=device)
        return cls(slots, pool, [0] * slots)

    def write(self, slot: int, keys_values: Tensor) -> None:
        """Stores the projections of one encoder output, [length, layers * 2 * width], in ``slot``."""
        layers, _, _, heads, _, size = self._pool.shape
        length = len(keys_values)
        split = keys_values.view(length, layers, 2, heads, size)
        self._pool[:, :, slot, :, :length] = split.permute(1, 2, 3, 0, 4)
        self._lengths[slot] = length

    def length(self, slot: int) -> int:
        """Positions of the encoder output in ``slot``."""
        return self._lengths[slot]

    def keys(self, layer: int, slot: int) -> Tensor:
        """The keys in ``slot``, [heads, length, head_dim]."""
        return self._pool[layer, 0, slot, :, : self._lengths[slot]]

    def attend(self, layer: int, queries: Tensor, runs: tuple[SlotRun, ...]) -> Tensor:
        """Attention of scaled ``queries`` [rows, width], ordered by slot, over their slots; [rows, width]."""
        if len(runs) == 1:
            return self._attend_run(layer, queries, runs[0])
        return torch.cat(list(map(partial(self._attend_run, layer, queries), runs)))

    def _attend_run(self, layer: int, queries: Tensor, run: SlotRun) -> Tensor:
        slots = slice(run.slot, run.slot + run.slots)
        keys, values = self._pool[layer, :, slots, :, : run.length]  # [slots, heads, length, head_dim]
        part = queries[run.start : run.start + run.slots * run.rows]
        split = part.view(run.slots, run.rows, keys.shape[1], -1).transpose(1, 2)
        return _attend_whole(split, keys, values).transpose(1, 2).reshape(part.shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """The pool."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool = torch.empty(0)


def _attend_whole(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention without a mask. For one query row on the CPU, two products are faster than the fused kernel (2.0
    against 2.8 ms a layer for 16 windows of `tiny` on two cores): the row is far too short for its pages."""
    if queries.shape[-2] == 1 and queries.device.type == "cpu" and queries.dtype == torch.float32:
        return torch.matmul(torch.matmul(queries, keys.transpose(-1, -2)).softmax(-1), values)
    return scaled_dot_product_attention(queries, keys, values, scale=1.0)


def lay_out(
    chunks: Sequence[Chunk], paged: PagedKV, cross: CrossKV, *, dtype: torch.dtype, device: torch.device
) -> StepLayout:
    """The layout of a step with at least one chunk."""
    order = sorted(range(len(chunks)), key=lambda index: _slot(chunks[index]))
    ordered = [chunks[index] for index in order]
    starts, row = [], 0
    for part in ordered:
        starts.append(row)
        row += part.length
    positions = [position for part in ordered for position in range(part.start, part.start + part.length)]
    mapping = [
        part.page_table[position // paged.page_size] * paged.page_size + position % paged.page_size
        for part in ordered
        for position in range(part.start, part.start + part.length)
    ]
    indices = torch.tensor([positions, mapping]).to(device)
    return StepLayout(
        order=tuple(order),
        starts=tuple(starts),
        positions=indices[0],
        slot_mapping=indices[1],
        groups=_page_groups(ordered, starts, paged, dtype, device),
        runs=tuple(_slot_runs(ordered, cross)),
    )


def _slot(part: Chunk) -> int:
    assert part.cross_slot is not None, f"sequence {part.sequence_id} of an encoder-decoder model has no cross slot"
    return part.cross_slot


def _page_groups(
    chunks: list[Chunk], starts: list[int], paged: PagedKV, dtype: torch.dtype, device: torch.device
) -> tuple[PageGroup, ...]:
    """Chunks of one length share a group; a group is as wide as its longest page table in use."""
    by_length: dict[int, list[int]] = {}
    for index, part in enumerate(chunks):
        by_length.setdefault(part.length, []).append(index)
    groups = []
    for length, members in by_length.items():
        parts = [chunks[index] for index in members]
        rows = [starts[index] + offset for index in members for offset in range(length)]
        groups.append(
            PageGroup(
                rows=None if len(by_length) == 1 else torch.tensor(rows, device=device),
                count=len(parts),
                length=length,
                table=_table(parts, paged).to(device),
                mask=_causal_mask(parts, paged.page_size, dtype, device),
            )
        )
    return tuple(groups)


def _page_count(part: Chunk, page_size: int) -> int:
    return -(-(part.start + part.length) // page_size)


def _table(parts: list[Chunk], paged: PagedKV) -> Tensor:
    widest = max(_page_count(part, paged.page_size) for part in parts)
    table: list[int] = []
    for part in parts:
        used = part.page_table[: _page_count(part, paged.page_size)]
        table += (*used, *[paged.pages] * (widest - len(used)))  # the page of zeros
    return torch.tensor(table)


def _causal_mask(parts: list[Chunk], page_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    widest = max(_page_count(part, page_size) for part in parts)
    starts = torch.tensor([part.start for part in parts], device=device)
    queries = starts[:, None] + torch.arange(parts[0].length, device=device)  # [count, length]
    hidden = torch.arange(widest * page_size, device=device) > queries[:, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]


def _slot_runs(chunks: list[Chunk], cross: CrossKV) -> list[SlotRun]:
    """Merges the slots next to each other that have one length and equally many rows. ``chunks`` are ordered by
    slot."""
    runs: list[SlotRun] = []
    start = 0
    for slot, members in groupby(chunks, key=_slot):
        rows, length = sum(part.length for part in members), cross.length(slot)
        last = runs[-1] if runs else None
        if last is not None and (last.slot + last.slots, last.rows, last.length) == (slot, rows, length):
            runs[-1] = evolve(last, slots=last.slots + 1)
        else:
            runs.append(SlotRun(start=start, slot=slot, slots=1, rows=rows, length=length))
        start += rows
    return runs
