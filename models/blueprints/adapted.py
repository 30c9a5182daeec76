"""The sizes of adapters' slots and buffers, before weights are read, for estimates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import frozen

from ..checkpoints.shapes import joined
from ..native.panels import PANEL

_OTHERS = re.compile(r"\.experts\.|\.(gate|router|router\.layer|shared_expert_gate)\.weight$")
_LAYER = re.compile(r"(.*\.)?(layers|h)\.[0-9]+\.")


@frozen
class AdaptedSizes:
    """The matrices that adapters may change.

    Args:
        slots: the number of adapters that a step may have.
        matrices: the outputs and inputs of the linear layers that each joins.
        mixed: a panel may have outputs of several linear layers, whatever their numbers are.
    """

    slots: int
    rank: int
    matrices: Sequence[Sequence[tuple[int, ...]]]
    mixed: bool

    @classmethod
    def of(
        cls, shapes: Mapping[str, tuple[int, ...]], *, slots: int, rank: int, mixed: bool, turned: bool
    ) -> AdaptedSizes:
        """Returns the sizes for a decoder's tensors. There are no matrices if there are no slots.

        Args:
            turned: weights are [inputs, outputs].
        """
        own = [name for name, shape in shapes.items() if len(shape) == 2 and _LAYER.match(name)]
        names = joined(name for name in own if not _OTHERS.search(name)) if slots else []
        matrices = [[shapes[name][:: -1 if turned else 1] for name in each] for each in names]
        return cls(slots, rank, matrices, mixed)

    @property
    def nbytes(self) -> int:
        """The most bytes of the slots."""
        numbers = 0
        for each in self.matrices:
            mixed = self.mixed or any(outputs % PANEL for outputs, _ in each)
            numbers += _padded(len(each) * self.rank) * each[0][1]
            numbers += _padded(sum(outputs for outputs, _ in each)) * (self.rank * (len(each) if mixed else 1) + 1)
        return 4 * self.slots * numbers

    @property
    def widths(self) -> int:
        """The numbers that a row has in the library's buffers, of which layers share those of one width."""
        low = {_padded(len(each) * self.rank) for each in self.matrices}
        return sum(low) + sum({_padded(sum(outputs for outputs, _ in each)) for each in self.matrices})


def _padded(count: int) -> int:
    return -(-count // PANEL) * PANEL
