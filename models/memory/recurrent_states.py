"""The memory of recurrent layers: a state for each sequence, and kept ones, all in one tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import define, field
from torch import Tensor

_ALIGNED = 16  # numbers: a state begins with a line of the cache


@define(eq=False)
class RecurrentStates:
    """States of all recurrent layers together, float32 [states, numbers]. See `triolet.core.recurrent`."""

    states: int
    numbers: int
    _pool: Tensor = field(repr=False)

    @classmethod
    def allocate(cls, *, states: int, numbers: int) -> RecurrentStates:
        """Allocates the memory. The system commits memory only when it is written."""
        return cls(states, numbers, torch.empty(states, -(-numbers // _ALIGNED) * _ALIGNED, dtype=torch.float32))

    @staticmethod
    def bytes_of(numbers: int) -> int:
        """Returns the bytes of one state."""
        return -(-numbers // _ALIGNED) * _ALIGNED * torch.float32.itemsize

    def another(self, states: int) -> RecurrentStates:
        """Returns a new pool with ``states`` states of the same size."""
        return self.allocate(states=states, numbers=self.numbers)

    def of(self, state: int) -> Tensor:
        """Returns the numbers of a state, a view."""
        return self._pool[state, : self.numbers]

    def begin(self, state: int) -> None:
        """Makes a state that of a sequence that has read nothing."""
        self._pool[state] = 0

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies states: for each pair the first to the second."""
        for source, target in pairs:
            self._pool[target] = self._pool[source]

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the pool."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool = torch.empty(0)
