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
    """The states of sequences, one for each page: hidden and cell states of the prediction network's layers [layers, 2,
    pages + 1, width], and its last output [pages + 1, width]. As in a `PagedKV` there is one more than there are pages.
    """

    page_size: int  # positions of a page: those of the longest sequence
    pages: int
    cells: Tensor = field(repr=False)
    predicted: Tensor = field(repr=False)

    @classmethod
    def allocate(
        cls, *, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> FrameStates:
        """Allocates the memory."""
        cells = torch.zeros(layers, 2, pages + 1, width, dtype=dtype, device=device)
        return cls(page_size, pages, cells, torch.zeros(pages + 1, width, dtype=dtype, device=device))

    def begin(self, page: int) -> None:
        """Prepares the page for another sequence."""
        self.cells[:, :, page] = 0
        self.predicted[page] = 0

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the states."""
        return self.cells, self.predicted

    def release(self) -> None:
        """Forgets the states."""
        self.cells = self.predicted = torch.empty(0)


@define(eq=False)
class FrameSlots:
    """Encoder outputs that sequences read, [slots, frames, width], and the number of frames in use in each slot."""

    slots: int
    pool: Tensor = field(repr=False)
    lengths: list[int] = field(repr=False)

    @classmethod
    def allocate(cls, *, slots: int, frames: int, width: int, dtype: torch.dtype, device: torch.device) -> FrameSlots:
        """Allocates the memory. On the CPU the system commits memory only when it is written."""
        return cls(slots, torch.empty(slots, frames, width, dtype=dtype, device=device), [0] * slots)

    def write(self, slot: int, output: Tensor) -> None:
        """Replaces the contents of the slot by an encoder output [frames, width]."""
        self.lengths[slot] = len(output)
        self.pool[slot, : len(output)] = output

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the pool."""
        return (self.pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self.pool = torch.empty(0)
