"""The decoder's memory of its own tokens: keys and values in pages, all in one tensor; and where a step's rows lie.

A step's rows, one for each token fed, are ordered by cross-attention slot, see `slots`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.plan import Chunk
from .slots import CrossKV, CrossStep, slot_of


@frozen(kw_only=True, eq=False)
class PageGroup:
    """The chunks of a step that have one length, attended together."""

    rows: Tensor | None  # [count * length] rows of the step; None: all of them, in order
    count: int
    length: int
    table: Tensor  # [count * pages] pages
    mask: Tensor  # [count, 1, length, pages * page_size], 0 or -inf


@frozen(kw_only=True, eq=False)
class StepLayout:
    """Where a step's rows lie: computed once, used by every layer."""

    order: tuple[int, ...]  # index in the plan of each chunk, in the order of the rows
    starts: tuple[int, ...]  # first row of each chunk, in the order of the rows
    positions: Tensor  # [rows]
    slot_mapping: Tensor  # [rows], page * page_size + offset
    groups: tuple[PageGroup, ...]
    crossing: CrossStep


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

    def another(
        self, *, pages: int, page_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> PagedKV:
        """A pool of the same layers and heads with pages of its own, on the same or another device, in the same or
        another dtype."""
        layers, _, _, width = self._pool.shape
        return PagedKV.allocate(
            layers=layers,
            pages=pages,
            page_size=page_size,
            heads=self.heads,
            width=width // 2,
            dtype=dtype or self.dtype,
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


def lay_out(
    chunks: Sequence[Chunk], paged: PagedKV, cross: CrossKV, *, dtype: torch.dtype, device: torch.device
) -> StepLayout:
    """The layout of a step with at least one chunk."""
    order = sorted(range(len(chunks)), key=lambda index: slot_of(chunks[index]))
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
        crossing=CrossStep.of(cross, ordered, starts, device),
    )


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
