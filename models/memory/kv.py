"""The decoder's memory of its own tokens: keys and values in pages, all in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from ...core.plan import Chunk


@define(eq=False)
class PagedKV:
    """Self-attention keys and values, [layers, pages + 1, page_size, 2 * width], keys before values.

    Garbage cannot reach a result, not even as ``0 * NaN``. A page is zeroed when its first position is written, so a
    page in use holds zeros after its last position. Shorter page tables are padded with the last page of the pool,
    which no sequence owns and which stays zero.
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
        """Allocates the memory. On the CPU the system commits memory only when it is written."""
        pool = torch.empty(layers, pages + 1, page_size, 2 * width, dtype=dtype, device=device)
        pool[:, pages] = 0
        return cls(page_size, pages, heads, pool)

    def another(
        self, *, pages: int, page_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> PagedKV:
        """Returns a new pool for the same layers and heads with ``pages`` pages, on the same or another device, in the
        same or another dtype."""
        layers, _, _, width = self._pool.shape
        pool = self._pool.new_empty(layers, pages + 1, page_size, width, dtype=dtype, device=device)
        pool[:, pages] = 0
        return PagedKV(page_size, pages, self.heads, pool)

    def enter(self, chunks: Sequence[Chunk]) -> None:
        """Zeroes the pages whose first position is written by one of ``chunks``."""
        entered = [
            part.page_table[block]
            for part in chunks
            for block in range(-(-part.start // self.page_size), -(-(part.start + part.length) // self.page_size))
        ]
        if entered:
            self._pool.index_fill_(1, torch.tensor(entered, device=self._pool.device), 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages: for each pair the first page to the second. There is at least one pair, and no page is both
        source and target."""
        sources, targets = torch.tensor(pairs, device=self._pool.device).T
        self._pool.index_copy_(1, targets, self._pool.index_select(1, sources))

    def write(self, layer: int, slot_mapping: Tensor, keys_values: Tensor) -> None:
        """Stores ``keys_values`` [rows, 2 * width] at ``slot_mapping`` [rows]."""
        self._pool[layer].view(-1, self._pool.shape[-1]).index_copy_(0, slot_mapping, keys_values)

    def gather(self, layer: int, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the pages in ``table`` [count * pages], each [count, heads, positions, head_dim].
        Both are views of one copy, since keys and values lie side by side."""
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

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self._pool.device

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the pool, the page of zeros included."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool = torch.empty(0)
