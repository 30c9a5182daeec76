"""The decoder's memory of its own tokens: keys and values in pages, all in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import define, field
from torch import Tensor

from ...core.model import LayerKV
from ...core.plan import Chunk


@define(eq=False)
class PagedKV:
    """Self-attention keys and values: for each layer [pages + 1, page_size, numbers], keys before values. Layers of one
    width lie side by side. A recurrent layer, and one that reads those of another, have none.

    Garbage cannot reach a result, not even as ``0 * NaN``. A page is zeroed when its first position is written, so a
    page in use holds zeros after its last position. Shorter page tables are padded with the last page of the pool,
    which no sequence owns and which stays zero.
    """

    page_size: int
    pages: int
    layers: tuple[LayerKV, ...]
    _pool: Tensor = field(repr=False)
    _groups: tuple[Tensor, ...] = field(init=False, repr=False)  # [layers, pages + 1, page_size, numbers] of each width
    _parts: tuple[Tensor, ...] = field(init=False, repr=False)  # of each layer

    def __attrs_post_init__(self) -> None:
        groups, parts, start = (
            list[Tensor](),
            [self._pool[:0].view(self.pages + 1, self.page_size, 0)] * len(self.layers),
            0,
        )
        for width in dict.fromkeys(layer.numbers for layer in self.layers if layer.numbers):
            own = [index for index, layer in enumerate(self.layers) if layer.numbers == width]
            shape = (len(own), self.pages + 1, self.page_size, width)
            groups.append(self._pool[start : start + shape[0] * shape[1] * shape[2] * width].view(shape))
            start += groups[-1].numel()
            for place, index in enumerate(own):
                parts[index] = groups[-1][place]
        self._groups, self._parts = tuple(groups), tuple(parts)

    @classmethod
    def allocate(
        cls,
        *,
        layers: Sequence[LayerKV],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedKV:
        """Allocates the memory. On the CPU the system commits memory only when it is written."""
        numbers = sum(layer.numbers for layer in layers) * (pages + 1) * page_size
        made = cls(page_size, pages, tuple(layers), torch.empty(numbers, dtype=dtype, device=device))
        for group in made._groups:
            group[:, pages] = 0
        return made

    def another(
        self, *, pages: int, page_size: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> PagedKV:
        """Returns a new pool for the same layers with ``pages`` pages, on the same or another device, in the same or
        another dtype."""
        place = self.device if device is None else device
        kept = self.dtype if dtype is None else dtype
        return PagedKV.allocate(layers=self.layers, pages=pages, page_size=page_size, dtype=kept, device=place)

    def enter(self, chunks: Sequence[Chunk]) -> None:
        """Zeroes the pages whose first position is written by one of ``chunks``."""
        entered = [
            part.page_table[block]
            for part in chunks
            for block in range(-(-part.start // self.page_size), -(-(part.start + part.length) // self.page_size))
        ]
        if not entered:
            return
        chosen = torch.tensor(entered, device=self.device)
        for group in self._groups:
            group.index_fill_(1, chosen, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages: for each pair the first page to the second. There is at least one pair, and no page is both
        source and target."""
        sources, targets = torch.tensor(pairs, device=self.device).T
        for group in self._groups:
            group.index_copy_(1, targets, group.index_select(1, sources))

    def write(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores ``keys`` and ``values`` [rows, heads, numbers] at ``slot_mapping`` [rows]. A layer that reads those of
        another layer stores nothing."""
        if self.layers[layer].source is not None:
            return
        part, written = self._parts[layer], torch.cat([keys.flatten(1), values.flatten(1)], 1)
        part.view(-1, part.shape[-1]).index_copy_(0, slot_mapping, written)

    def gather(self, layer: int, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the pages in ``table`` [count * pages], [count, heads, positions, numbers] each.
        Both are views of one copy, since keys and values lie side by side."""
        told = self.layers[layer]
        part = self._parts[layer if told.source is None else told.source]
        gathered = part.index_select(0, table).view(count, -1, part.shape[-1])
        keys, values = torch.split(gathered, [told.heads * told.size, told.heads * told.value_size], -1)
        return (
            keys.view(*keys.shape[:2], told.heads, told.size).transpose(1, 2),
            values.view(*values.shape[:2], told.heads, told.value_size).transpose(1, 2),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the widest layer."""
        return self.page_size * max(layer.numbers for layer in self.layers) * self._pool.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored KV."""
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self._pool.device

    def parts(self) -> Iterator[Tensor]:
        """Yields the pages of each layer, [pages + 1, page_size, numbers], of no numbers if it has none."""
        return iter(self._parts)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the pool, the pages of zeros included."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool, self._groups, self._parts = torch.empty(0), (), ()
