"""Linear layers with weights as they are, in int8, or in the native library's order: small holders, without a module of
torch around them."""

from __future__ import annotations

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import functional

from ..native.panels import Panels
from .kernels import FLOAT, INT8, WHOLE, multiplies_int8

_FEW = 16  # rows up to which converting the weights takes longer than the product


@frozen
class Shape:
    """What kernels are chosen by."""

    kind: str  # "int8 in float32", "panels", or the dtype of the weights: "float32"
    outputs: int
    inputs: int

    @property
    def in_int8(self) -> bool:
        """Whether the weights are."""
        return self.kind.startswith("int8")

    def __str__(self) -> str:
        return f"{self.kind} {self.outputs}x{self.inputs}"


@define(eq=False)
class Kernels:
    """The kernels by which a model's layers are computed: for each shape, from how many rows on. A shape that is not
    among them is computed by the first of its layers' candidates, and many rows by what is for many.

    ``int8_inputs``: inputs are quantized too, of all layers and however many rows there are: one model has one kind of
    numbers. That costs a decoder of text more than its weights in int8 do (SmolLM2-135M: perplexity 43 instead of 41,
    where the weights alone change nothing).
    """

    chosen: dict[Shape, tuple[tuple[int, str], ...]] = field(factory=dict)
    int8_inputs: bool = False
    exact: bool = False  # layers in int8 compute what their weights say, however long it takes: in a trial

    def find(self, shape: Shape, rows: int) -> str | None:
        """The kernel's name for so many rows; ``None``: nothing was chosen."""
        if self.exact:
            return "dequantized" if shape.in_int8 else None
        found = None
        for least, name in self.chosen.get(shape, ()):
            if found is not None and rows < least:
                break
            found = name
        return found


def kernels_in(dtype: torch.dtype) -> Kernels:
    """The kernels of a model that computes in ``dtype``. For few rows of bfloat16 there is a kernel that leaves the
    inputs as they are; for float32 there is none that is fast."""
    return Kernels(int8_inputs=dtype == torch.float32)


@frozen(eq=False)
class FloatLinear:
    """``inputs @ weight.T + bias``."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]
    kernels: Kernels
    shape: Shape = field(init=False)

    @shape.default
    def _shape(self) -> Shape:
        outputs, inputs = self.weight.shape
        return Shape(str(self.weight.dtype).removeprefix("torch."), outputs, inputs)

    def __call__(self, inputs: Tensor) -> Tensor:
        """[..., inputs] of the weight's dtype to [..., outputs]."""
        name = self.kernels.find(self.shape, inputs.numel() // inputs.shape[-1])
        if name is None:
            return functional.linear(inputs, self.weight, self.bias)
        return _flat(inputs, self.shape.outputs, self.compute(name, inputs.reshape(-1, inputs.shape[-1])))

    @property
    def candidates(self) -> tuple[str, ...]:
        """The kernels that can compute it; the first is taken where none is chosen."""
        return tuple(FLOAT)

    @property
    def for_many(self) -> str:
        """The kernel for more rows than were timed."""
        return "stock"

    def compute(self, name: str, inputs: Tensor) -> Tensor:
        """By one kernel: [rows, inputs] to [rows, outputs]."""
        return FLOAT[name](inputs, self.weight, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight: a head that is the token embedding, too."""
        return functional.embedding(indices, self.weight)


@frozen(eq=False)
class Int8Linear:
    """The same, of weights in int8: each output has a scale of its own."""

    weight: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # [outputs], in the dtype that is computed in
    bias: Tensor | None  # [outputs], likewise
    kernels: Kernels
    shape: Shape = field(init=False)

    @shape.default
    def _shape(self) -> Shape:
        outputs, inputs = self.weight.shape
        return Shape(f"int8 in {str(self.scales.dtype).removeprefix('torch.')}", outputs, inputs)

    def __call__(self, inputs: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], both of the dtype of the scales."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        name = self.kernels.find(self.shape, len(flat))
        if name is None:
            name = self.candidates[0] if len(flat) <= _FEW else self.for_many
        return _flat(inputs, self.shape.outputs, self.compute(name, flat))

    @property
    def candidates(self) -> tuple[str, ...]:
        """The kernels that can compute it; the first is taken where none is chosen."""
        if self.kernels.int8_inputs and multiplies_int8():
            return ("int8",)
        return ("weight_only", "dequantized") if self.shape.inputs % WHOLE == 0 else ("dequantized",)

    @property
    def for_many(self) -> str:
        """The kernel for more rows than were timed."""
        return self.candidates[-1]

    def compute(self, name: str, inputs: Tensor) -> Tensor:
        """By one kernel: [rows, inputs] to [rows, outputs]."""
        return INT8[name](inputs, self.weight, self.scales, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, in the dtype that is computed in."""
        return self.weight[indices].to(self.scales.dtype).mul_(self.scales[indices][..., None])


@frozen(eq=False)
class PanelLinear:
    """The same, of weights in the native library's order, which is what computes it where it can: the network's steps.
    Here the weights are unpacked, float32, and the inputs are never quantized."""

    panels: Panels
    shape: Shape = field(init=False)

    @shape.default
    def _shape(self) -> Shape:
        return Shape("panels", self.panels.outputs, self.panels.inputs)

    def __call__(self, inputs: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs], both float32."""
        outputs, bias = self.panels.outputs, self.panels.bias
        return functional.linear(inputs, self.panels.part(0, outputs), None if bias is None else bias[:outputs])

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, float32."""
        return self.panels.rows(indices)


Timed = FloatLinear | Int8Linear
"""Layers with more than one kernel, see `choice`."""

Linear = Timed | PanelLinear


def memory_of(linear: Linear) -> list[Tensor]:
    """All that a layer holds."""
    if isinstance(linear, PanelLinear):
        held: list[Tensor | None] = [linear.panels.packed, linear.panels.bias]
    elif isinstance(linear, Int8Linear):
        held = [linear.weight, linear.scales, linear.bias]
    else:
        held = [linear.weight, linear.bias]
    return [one for one in held if one is not None]


def _flat(inputs: Tensor, outputs: int, found: Tensor) -> Tensor:
    return found if inputs.dim() == 2 else found.view(*inputs.shape[:-1], outputs)
