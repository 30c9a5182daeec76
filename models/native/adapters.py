"""Adapters of rows (Hu et al. 2021, "LoRA"): beside a linear layer, two small matrices of the row's adapter.

A step may have rows of several adapters, each of which lies in a slot. Rows of one slot are multiplied together, first
down to the rank, then up to the outputs of the linear layer, which adds them to its own. Rows without an adapter are
computed as in a program without adapters, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import functional

from ...core.errors import InvalidRequest
from .library import Ending, Kind
from .panels import PANEL, Panels
from .program import Normed, Program
from .recurrent import Rooms

Changes = Mapping[str, tuple[Tensor, Tensor, float]]
"""By the name of a linear layer, the matrices down [rank, inputs] and up [outputs, rank], and the factor of both."""


@frozen(eq=False)
class AdaptedMatrix:
    """A packed matrix that adapters may change.

    Args:
        module: its first linear layer.
        parts: the linear layers that it joins: the name of each in the model, and the number of its outputs.
        order: the order of its outputs, as for `packed`.
    """

    module: Any
    parts: tuple[tuple[str, int], ...]
    inputs: int
    order: Tensor | None

    @property
    def outputs(self) -> int:
        """The number of its outputs."""
        return sum(outputs for _, outputs in self.parts)


@define(eq=False)
class _Room:
    """The part of the slots for one matrix. The rank of each part lies side by side; an output is made of its part's.

    Args:
        down: of each slot, [slots * panels, inputs, 32].
        up: of each slot, [slots * panels, width, 32].
        places: int32 [panels], where each panel of ``up`` begins to read what ``down`` makes of a row.
    """

    matrix: AdaptedMatrix
    rank: int
    slots: int
    device: str
    down: Tensor = field(init=False)
    up: Tensor = field(init=False)
    places: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        matrix, rank, count = self.matrix, self.rank, len(self.matrix.parts)
        of_part = torch.repeat_interleave(torch.tensor([outputs for _, outputs in matrix.parts]))
        of_part = of_part if matrix.order is None else of_part[matrix.order]
        panels = functional.pad(of_part[None, None].double(), (0, -len(of_part) % PANEL), "replicate").view(-1, PANEL)
        first, last = panels.amin(1).int(), panels.amax(1).int()
        width = int((last - first + 1).max()) * rank
        self.places = (first * rank).clamp(max=count * rank - width).contiguous()
        zeros = partial(torch.zeros, dtype=torch.float32, device=self.device)
        self.down = zeros(self.slots * -(-count * rank // PANEL), matrix.inputs, PANEL)
        self.up = zeros(self.slots * len(panels), width, PANEL)

    def write(self, slot: int, changes: Changes) -> None:
        """Writes the changes of the parts; zeros where there is none."""
        parts, rank, count = self.matrix.parts, self.rank, len(self.matrix.parts)
        ends = list(accumulate(outputs for _, outputs in parts))
        own = self.down.view(self.slots, -1, self.matrix.inputs, PANEL)[slot]
        down = own.new_zeros(len(own) * PANEL, self.matrix.inputs)
        up = own.new_zeros(ends[-1], count * rank)
        for index, ((name, outputs), end) in enumerate(zip(parts, ends, strict=True)):
            if name in changes:
                own_down, own_up, scale = changes[name]
                columns = slice(index * rank, index * rank + len(own_down))
                down[columns] = own_down
                up[end - outputs : end, columns] = own_up * scale
        own.copy_(down.view(-1, PANEL, self.matrix.inputs).transpose(1, 2))
        up = up if self.matrix.order is None else up[self.matrix.order]
        width, panels = self.up.shape[1], len(self.places)
        split = functional.pad(up, (0, 0, 0, panels * PANEL - len(up))).view(panels, PANEL, -1)
        read = (self.places.long()[:, None] + torch.arange(width))[:, None].expand(panels, PANEL, width)
        self.up.view(self.slots, panels, width, PANEL)[slot].copy_(split.gather(2, read).transpose(1, 2))


@define(eq=False)
class AdapterSlots:
    """The memory of the adapters that a step may have, in slots with room for a ``rank`` each."""

    slots: int
    rank: int
    _rooms: dict[Any, _Room] = field(repr=False)  # by the module of the matrix

    @classmethod
    def allocate(cls, matrices: Sequence[AdaptedMatrix], *, slots: int, rank: int, device: str = "cpu") -> AdapterSlots:
        """Allocates slots for adapters of these matrices; on ``"meta"`` only to know their size."""
        return cls(slots, rank, {matrix.module: _Room(matrix, rank, slots, device) for matrix in matrices})

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of each linear layer that an adapter may change, by its name in the model."""
        each = [room.matrix for room in self._rooms.values()]
        return {name: (outputs, matrix.inputs) for matrix in each for name, outputs in matrix.parts}

    def write(self, program: Program, rooms: Rooms, module: Any, source: int, norm: Normed | None) -> dict[str, Any]:
        """Writes what adapters compute beside a linear layer of the rows in ``source``. Returns the fields by which the
        operation of the layer adds it."""
        room = self._rooms[module]
        panels, each = len(room.places), {"kind": Kind.ADAPT, "heads": 1, "kv_heads": self.slots}
        own = len(room.down) // self.slots * PANEL
        low, deltas = rooms("low", own), rooms("deltas", panels * PANEL)
        down = Panels(len(room.down) * PANEL, room.matrix.inputs, room.down, None)
        up = Panels(len(room.up) * PANEL, room.up.shape[1], room.up, None)
        program.linear(source, low, down, Ending.STORE, norm=norm, others={**each, "size": own})
        placed = {"size": panels * PANEL, "places": room.places.data_ptr(), "distance_count": panels}
        program.linear(low, deltas, up, Ending.STORE, others={**each, **placed})
        return {"delta": 1, "table": deltas}

    def put(self, slot: int, changes: Changes) -> None:
        """Writes the changes of an adapter into a slot. They fit the layers and the rank."""
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        for room in self._rooms.values():
            room.write(slot, changes)

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors."""
        for room in self._rooms.values():
            yield from (room.down, room.up, room.places)
            if room.matrix.order is not None:
                yield room.matrix.order

    def release(self) -> None:
        """Forgets all tensors."""
        self._rooms.clear()


def no_adapters(architecture: str, adapters: int, why_not: str) -> InvalidRequest:
    """Returns the error for settings with ``adapters`` and a model that can have none."""
    return InvalidRequest(
        f"adapters={adapters}, but {architecture} can have no adapters: {why_not}; allowed: adapters=0, or a decoder "
        "that the native library computes on the CPU"
    )
