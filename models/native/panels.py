"""`Panels`: a matrix in the order in which the native library reads it. Its numbers are in int8, in 16 bits if these
hold every value exactly, or in float32. A weight in bfloat16 is multiplied in bfloat16. A weight in float32 is
multiplied in float32, even if 16 bits hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import pointer
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

from ..memory.allocator import roomy_empty
from .library import MatrixData
from .packings import Section, pack_blocks, section_data, unpack_rows

PANEL = 32  # outputs that lie side by side
GROUP = 32  # inputs that share a scale in int8
BATCH = 48  # rows that are attended together if each row attends to all rows
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
_PAIRS = 4  # the format of a matrix in bfloat16 whose inputs become bfloat16, too
_INT8_16 = 5  # the format of a matrix in int8 whose scales are in float16
_PACKED = 6  # the format of a matrix of quantized blocks
_VALUES = GROUP * PANEL  # bytes behind a group's scales
_LEAST, _MOST = 2.0**-17, 65_504.0  # scales that float16 holds nearly, each with an error of less than a hundredth
_PART = 1024  # outputs that are converted or compared at a time


@frozen(eq=False)
class Panels:
    """A matrix [outputs, inputs] in panels of 32 outputs. The last panel is padded with zeros.

    Args:
        packed: the values, [panels, inputs, 32]. In int8: bytes [panels, groups, 64 + 1024]. Each group of 32 inputs
            has its float16 scales [32], then its values [8, 32, 4]. Four inputs of an output lie side by side. If
            float16 does not hold every scale of a checkpoint exactly, or those of a matrix that is quantized here
            nearly: bytes [panels, groups, 128 + 1024] with float32 scales. In pairs: bfloat16 [panels, pairs, 32, 2],
            two inputs of an output side by side. The library then rounds the inputs to bfloat16, too.
        bias: float32 [panels * 32]; ``None``: there is no bias.
        sections: what ``packed``, then bytes [all], has of quantized blocks; empty: it has none.
        planes: of 8 bits in which the library quantizes the inputs of quantized weights: 1, or 2, which hold 16 bits.
        order: int32 [inputs], the input that is each input of the sections; ``None``: the same one.
    """

    outputs: int
    inputs: int
    packed: Tensor
    bias: Tensor | None
    sections: tuple[Section, ...] = ()
    planes: int = 1
    order: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of panels."""
        return sum(section.panels for section in self.sections) if self.sections else len(self.packed)

    def first(self, outputs: int) -> Panels:
        """Returns the first ``outputs`` outputs, a multiple of 32, or all if there are not so many."""
        if self.outputs <= outputs:
            return self
        bias, panels = None if self.bias is None else self.bias[:outputs], outputs // PANEL
        if not self.sections:
            return evolve(self, outputs=outputs, packed=self.packed[:panels], bias=bias)
        section, *others = self.sections
        assert not others or section.panels >= panels, "the matrix of logits has one section"
        return evolve(self, outputs=outputs, sections=(evolve(section, panels=panels),), bias=bias)

    @classmethod
    def of_blocks(
        cls, weights: Sequence[Tensor], bias: Tensor | None = None, order: Tensor | None = None, *, planes: int
    ) -> Panels | None:
        """Packs matrices of quantized blocks as one, as `pack_blocks` does; ``None``: it cannot."""
        inputs: list[Any] = [getattr(weight, "input_order", None) for weight in weights]
        alike = all(one is None or torch.equal(one, inputs[0]) for one in inputs) and len({*map(type, inputs)}) == 1
        made = pack_blocks(weights, order) if alike else None
        if made is None:
            return None
        panels = cls(sum(map(len, weights)), weights[0].shape[1], made[0], None, made[1], planes, inputs[0])
        return panels if bias is None else evolve(panels, bias=filled(bias, panels.count))

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        sixteen: bool | None = None,
    ) -> Panels:
        """Packs ``weight`` [outputs, inputs] and ``bias`` [outputs].

        Args:
            dtype: the dtype of the panels, perhaps ``torch.int8``; by default one of 16 bits if it holds every value,
                and pairs if the weight is in bfloat16.
            sixteen: whether the scales of int8 are in float16; by default if it holds them nearly.
        """
        if dtype == torch.int8:
            sixteen = _has_even_scales(weight) if sixteen is None else sixteen
            return cls.of_int8(*quantized(weight, sixteen=sixteen), bias, sixteen=sixteen)
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL)
        side = 2 if dtype is None and weight.dtype == torch.bfloat16 else 1  # inputs of an output side by side
        places = -(-inputs // side)
        packed = roomy_empty((panels, places, PANEL, side), dtype or narrowest(weight))
        for start in range(0, outputs, _PART):
            part = _rows(weight, start)
            lack = (0, -inputs % side, 0, -len(part) % PANEL)
            own = (functional.pad(part, lack) if any(lack) else part).view(-1, PANEL, places, side)
            packed[start // PANEL :][: len(own)] = own.transpose(1, 2)
        packed = packed if side > 1 else packed[..., 0]
        return cls(outputs, inputs, packed, None if bias is None else filled(bias, panels))

    @classmethod
    def of_each(cls, weights: Tensor, *, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Panels:
        """Packs matrices [matrices, outputs, inputs] one after the other, each into panels of its own, and perhaps a
        ``bias`` [matrices, outputs]."""
        if weights.dtype != torch.bfloat16:  # whose matrices are in pairs
            dtypes = {dtype} if dtype else {narrowest(_part(weights, index)) for index in range(len(weights))}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        each = range(len(weights))  # one is read at a time
        sixteen = dtype == torch.int8 and all(_has_even_scales(_part(weights, index)) for index in each)
        first = cls.of(_part(weights, 0), dtype=dtype, sixteen=sixteen).packed
        packed = roomy_empty((len(weights), *first.shape), first.dtype)
        for index in each:
            packed[index] = cls.of(_part(weights, index), dtype=dtype, sixteen=sixteen).packed
        if bias is not None:
            bias = functional.pad(bias.detach().float(), (0, len(first) * PANEL - bias.shape[1])).flatten().contiguous()
        return cls(len(weights) * len(first) * PANEL, weights.shape[2], packed.flatten(0, 1), bias)

    @classmethod
    def of_int8(
        cls, values: Tensor, scales: Tensor, bias: Tensor | None = None, *, sixteen: bool | None = None
    ) -> Panels:
        """Packs int8 ``values`` [outputs, inputs] with ``scales`` [outputs, groups], or [outputs, 1] for all groups.

        Args:
            sixteen: whether the scales are held in float16; by default if it holds each exactly.
        """
        outputs, inputs = values.shape
        panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
        sixteen = torch.equal(scales.half().float(), scales.float()) if sixteen is None else sixteen
        of_scales = PANEL * (2 if sixteen else 4)
        made = cls(
            outputs,
            inputs,
            roomy_empty((panels, groups, of_scales + _VALUES), torch.uint8),
            None if bias is None else filled(bias, panels),
        )
        rest = panels * PANEL - outputs
        own = functional.pad(values, (0, groups * GROUP - inputs, 0, rest)).view(panels, PANEL, groups, GROUP // 4, 4)
        made._values.copy_(own.permute(0, 2, 3, 1, 4))
        each = functional.pad(scales.float().expand(outputs, groups), (0, 0, 0, rest))
        made._scales.copy_(each.view(panels, PANEL, groups).transpose(1, 2))
        return made

    @property
    def is_quantized(self) -> bool:
        """True if the matrix is quantized. The library then quantizes the inputs, too, in groups."""
        return self.packed.dtype == torch.uint8

    @property
    def in_int8(self) -> bool:
        """True if the library makes the inputs int8."""
        return self.is_quantized and self.planes == 1

    @property
    def _scales(self) -> Tensor:
        """The scales, [panels, groups, 32]."""
        scales = self.packed[..., :-_VALUES]
        return scales.view(torch.float16 if scales.shape[-1] == 2 * PANEL else torch.float32)

    @property
    def _values(self) -> Tensor:
        """The values, [panels, groups, 8, 32, 4]."""
        return self.packed[..., -_VALUES:].view(torch.int8).view(*self.packed.shape[:2], GROUP // 4, PANEL, 4)

    def rows(self, places: Tensor) -> Tensor:
        """Returns the weights of the outputs ``places``, float32 [places, inputs], as an embedding does."""
        if self.sections:
            rows = unpack_rows(self.packed, self.sections, self.inputs, places)
            return rows if self.order is None else rows[:, self.order.argsort()]
        panels, outputs = places // PANEL, places % PANEL
        if not self.is_quantized:
            return self.packed[panels, :, outputs].flatten(1)[:, : self.inputs].float()
        values = self._values[panels, :, :, outputs].flatten(2)  # [places, groups, 32]
        return (values * self._scales[panels, :, outputs].float()[..., None]).flatten(1)[:, : self.inputs].contiguous()

    def part(self, start: int, stop: int) -> Tensor:
        """Returns the weights of outputs ``start .. stop - 1``, float32 [stop - start, inputs]. They are equal to the
        weights before packing, apart from the rounding to int8."""
        if self.sections:
            return self.rows(torch.arange(start, stop))
        first = start // PANEL
        own = slice(first, -(-stop // PANEL))
        if self.is_quantized:
            values = self._values[own].permute(0, 3, 1, 2, 4).flatten(3)  # [panels, 32, groups, 32]
            weights = values * self._scales[own].transpose(1, 2)[..., None].float()
        else:
            weights = self.packed[own].float().transpose(1, 2)  # [panels, 32, inputs], or [panels, 32, pairs, 2]
        return weights.reshape(-1, weights[0, 0].numel())[start - first * PANEL : stop - first * PANEL, : self.inputs]

    def data(self) -> Any:
        """Returns a pointer for the library, which is valid as long as the tensors are."""
        bias = None if self.bias is None else self.bias.data_ptr()
        if self.sections:
            own = section_data(self.packed, self.sections, self.inputs)
            order = None if self.order is None else self.order.data_ptr()
            told = (_PACKED, self.inputs, self.outputs, self.count, None, bias, own, order, len(own), self.planes)
            return pointer(MatrixData(*told))
        form = FORMATS[self.packed.dtype] if self.packed.dim() == 3 else _PAIRS
        if self.is_quantized and self._scales.dtype == torch.float16:
            form = _INT8_16
        return pointer(MatrixData(form, self.inputs, self.outputs, len(self.packed), self.packed.data_ptr(), bias))


def filled(bias: Tensor, panels: int) -> Tensor:
    """Pads a bias with zeros to the outputs of ``panels`` panels, in float32."""
    return functional.pad(bias.detach().float(), (0, panels * PANEL - len(bias))).contiguous()


def quantized(weight: Tensor, *, sixteen: bool | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a matrix as `in_groups` does, some rows at a time.

    Args:
        sixteen: as for `in_groups`; by default if float16 holds all scales nearly.
    """
    sixteen = _has_even_scales(weight) if sixteen is None else sixteen
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP)
    values, scales = torch.empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs, groups, dtype=torch.float32)
    for start in range(0, outputs, _PART):
        part = slice(start, start + _PART)
        values[part], scales[part] = in_groups(_rows(weight, start), sixteen=sixteen)
    return values, scales


def in_groups(part: Tensor, *, sixteen: bool = False) -> tuple[Tensor, Tensor]:
    """Quantizes ``part`` [rows, inputs] as the library quantizes inputs. Returns the int8 values and the scales
    [rows, groups].

    Args:
        sixteen: scales are rounded up to numbers of float16.
    """
    rows, inputs = part.shape
    grouped, largest = _largest(part)
    if sixteen:
        nearest = (largest / 127.0).half()
        above = (nearest.view(torch.int16) + 1).view(torch.float16)
        largest = torch.where(127.0 * nearest.float() < largest, above, nearest).float() * 127.0
    inverse = torch.where(largest > 1e-30, 127.0 / largest, 0.0)  # the inverse of a smaller number may be infinite
    values = (grouped * inverse).round_().to(torch.int8).view(rows, -1)[:, :inputs]
    return values, (largest / 127.0)[..., 0]


def _rows(weight: Tensor, start: int) -> Tensor:
    """Returns the rows that are converted together with row ``start``. Tensors that are read late read them alone."""
    read: Any = getattr(weight, "read_rows", None)
    return weight[start : start + _PART] if read is None else read(start, start + _PART)


def _part(weights: Tensor, index: int) -> Tensor:
    """Returns a matrix of several, as `_rows` returns rows."""
    read: Any = getattr(weights, "read_part", None)
    return weights[index] if read is None else read(index)


def _largest(part: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the groups of ``part``, float32 [rows, groups, 32], and the largest size of a number in each."""
    grouped = functional.pad(part.float(), (0, -part.shape[1] % GROUP)).view(len(part), -1, GROUP)
    return grouped, grouped.abs().amax(-1, keepdim=True)


def _has_even_scales(weight: Tensor) -> bool:
    """True if float16 holds the scales of a matrix in int8 nearly: none is too small or too large for it."""
    for start in range(0, len(weight), _PART):
        scales = _largest(_rows(weight, start))[1] / 127.0
        if not bool(((scales == 0.0) | ((scales >= _LEAST) & (scales < _MOST))).all()):
            return False
    return True


def narrowest(weight: Tensor) -> torch.dtype:
    """Returns the smallest floating-point dtype that holds every value of ``weight`` exactly."""
    if weight.dtype in {torch.float16, torch.bfloat16}:
        return weight.dtype
    for dtype in (torch.bfloat16, torch.float16):
        parts = (_rows(weight, start) for start in range(0, len(weight), _PART))
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in parts):
            return dtype
    return torch.float32
