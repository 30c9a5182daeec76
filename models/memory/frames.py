"""The memory of models that read an encoder output frame by frame: a state for each sequence, and slots with encoder
outputs.

A sequence has one page, however many tokens it gets: a state has the same size after each of them.
"""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor


@define(eq=False)
class FrameStates:
    """The states of sequences, one for each page: hidden and cell state of the prediction network's layers, and its
    last output."""

    page_size: int  # positions of a page: those of the longest sequence
    pages: int
    _cells: Tensor = field(repr=False)  # [layers, 2, pages + 1, width], hidden states before cell states
    _predicted: Tensor = field(repr=False)  # [pages + 1, width]

    @classmethod
    def allocate(
        cls, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> FrameStates:
        """Allocates the memory, with one state more than there are pages, as a `PagedKV` has one page more."""
        cells = torch.zeros(layers, 2, pages + 1, width, dtype=dtype, device=device)
        return cls(page_size, pages, cells, torch.zeros(pages + 1, width, dtype=dtype, device=device))

    def begin(self, page: int) -> None:
        """Prepares the page for another sequence."""
        self._cells[:, :, page] = 0
        self._predicted[page] = 0

    def cells(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden and cell states of one layer, each [pages, width]."""
        hidden, cell = self._cells[layer].index_select(1, pages)
        return hidden, cell

    def set_cells(self, layer: int, pages: Tensor, hidden: Tensor, cell: Tensor) -> None:
        """Replaces hidden and cell states of one layer."""
        self._cells[layer].index_copy_(1, pages, torch.stack((hidden, cell)))

    def predicted(self, pages: Tensor) -> Tensor:
        """Returns the last outputs of the prediction network [pages, width]."""
        return self._predicted.index_select(0, pages)

    def set_predicted(self, pages: Tensor, predicted: Tensor) -> None:
        """Replaces the last outputs of the prediction network."""
        self._predicted.index_copy_(0, pages, predicted)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the states."""
        return self._cells, self._predicted

    def release(self) -> None:
        """Forgets the states."""
        self._cells = self._predicted = torch.empty(0)


@define(eq=False)
class FrameSlots:
    """Encoder outputs that sequences read, [slots, frames, width]."""

    slots: int
    _pool: Tensor = field(repr=False)
    _lengths: list[int] = field(repr=False)  # frames in use, for each slot

    @classmethod
    def allocate(cls, *, slots: int, frames: int, width: int, dtype: torch.dtype, device: torch.device) -> FrameSlots:
        """Allocates the memory. On the CPU the system commits memory only when it is written."""
        return cls(slots, torch.empty(slots, frames, width, dtype=dtype, device=device), [0] * slots)

    def write(self, slot: int, output: Tensor) -> None:
        """Replaces the contents of the slot by an encoder output [frames, width]."""
        self._lengths[slot] = len(output)
        self._pool[slot, : len(output)] = output

    def length(self, slot: int) -> int:
        """Returns the number of frames in ``slot``."""
        return self._lengths[slot]

    def read(self, slots: Tensor, frames: Tensor) -> Tensor:
        """Returns one frame for each pair of slot and number, [frames, width]."""
        return self._pool[slots, frames]

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the pool."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool = torch.empty(0)
