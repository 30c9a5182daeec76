"""The memory of models that read an encoder output frame by frame: a state for each sequence, and slots with encoder
outputs.

A sequence has one page, however many tokens it gets: a state has the same size after each of them.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from attrs import define, field
from torch import Tensor

MOST_TEXTS = 128  # texts that may go on: those of live sessions, and of utterances that have ended


@define(eq=False)
class FrameStates:
    """The states of sequences, one for each page: hidden and cell states of the prediction network's layers [pages + 1,
    layers, 2, width], and its last output [pages + 1, width]. As in a `PagedKV` there is one more than there are pages.
    Behind them are the states of some texts that may go on, each by its tokens.
    """

    page_size: int  # positions of a page: those of the longest sequence
    pages: int
    cells: Tensor = field(repr=False)
    predicted: Tensor = field(repr=False)
    _texts: OrderedDict[tuple[int, ...], int] = field(init=False, factory=OrderedDict, repr=False)  # places in `cells`

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        texts: int,
    ) -> FrameStates:
        """Allocates the memory. ``texts`` is the most texts that may go on."""
        count = pages + 1 + texts
        cells = torch.zeros(count, layers, 2, width, dtype=dtype, device=device)
        return cls(page_size, pages, cells, torch.zeros(count, width, dtype=dtype, device=device))

    def begin(self, page: int, tokens: tuple[int, ...]) -> bool:
        """Prepares the page for another sequence. Returns true if the state is that after ``tokens``."""
        place = self._texts.get(tokens)
        if place is None:
            self.cells[page] = self.predicted[page] = 0
            return False
        self._texts.move_to_end(tokens, last=False)  # it has gone on, and makes room for others
        self.cells[page], self.predicted[page] = self.cells[place], self.predicted[place]
        return True

    def keep(self, page: int, tokens: tuple[int, ...]) -> None:
        """Keeps the state of a sequence that has read ``tokens``."""
        free = range(self.pages + 1 + len(self._texts), len(self.cells))
        if not free and not self._texts:
            return
        place = self._texts.pop(tokens, None)
        if place is None:
            place = free[0] if free else self._texts.popitem(last=False)[1]
        self.cells[place], self.predicted[place] = self.cells[page], self.predicted[page]
        self._texts[tokens] = place

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the states."""
        return self.cells, self.predicted

    def release(self) -> None:
        """Forgets the states."""
        self._texts.clear()
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
