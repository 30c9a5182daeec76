"""Linear layers with weights as they are, in int8, or in the native library's order: small holders, without a module of
torch around them. torch computes them here, in one way for each kind of weights."""

from __future__ import annotations

from functools import cache

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from ..native.panels import Panels

_FEW = 16  # rows up to which converting the weights takes longer than the product
_WHOLE = 32  # inputs that torch reads at once of weights alone: of another number it reads past their end


@frozen(eq=False)
class FloatLinear:
    """``inputs @ weight.T + bias``."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Maps [..., inputs] of the weight's dtype to [..., outputs]."""
        return functional.linear(inputs, self.weight, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight: a head that is the token embedding, too."""
        return functional.embedding(indices, self.weight)


@frozen(eq=False)
class Int8Linear:
    """The same, of weights in int8: each output has a scale of its own.

    In float32 inputs are quantized too, however many rows there are: one model has one kind of numbers. In 16 bits, or
    where the CPU does not multiply int8 well, they are not.
    """

    weight: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # [outputs], in the dtype that is computed in
    bias: Tensor | None  # [outputs], likewise

    def __call__(self, inputs: Tensor) -> Tensor:
        """Maps [..., inputs] to [..., outputs], both of the dtype of the scales."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        if self.scales.dtype == torch.float32 and multiplies_int8():
            found = self._of_quantized(flat)
        elif len(flat) <= _FEW and flat.shape[1] % _WHOLE == 0:  # the weights are converted in registers
            found = torch._weight_int8pack_mm(flat, self.weight, self.scales)
            found = found if self.bias is None else found.add_(self.bias)
        else:
            found = self.exactly(flat)
        return found.view(*inputs.shape[:-1], len(self.weight))

    def exactly(self, inputs: Tensor) -> Tensor:
        """The product of the weights as they are held and the inputs as they are, however long it takes."""
        return functional.linear(inputs, self.weight.to(inputs.dtype).mul_(self.scales[:, None]), self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, in the dtype that is computed in."""
        return self.weight[indices].to(self.scales.dtype).mul_(self.scales[indices][..., None])

    def _of_quantized(self, inputs: Tensor) -> Tensor:
        """Multiplies int8 by int8: each row of ``inputs``, float32, by its largest value, so that a row's result does
        not depend on its batch."""
        largest = inputs.abs().amax(-1, keepdim=True)
        # a row of zeros makes NaN here, which the product with its largest value, 0, turns into 0 again
        quantized = (inputs * (127.0 / largest)).nan_to_num_(0.0).round_().to(torch.int8)
        found = torch._int_mm(quantized, self.weight.T) * self.scales
        found.mul_(largest.div_(127.0))
        return found if self.bias is None else found.add_(self.bias)


@cache
def multiplies_int8() -> bool:
    """True if this CPU multiplies int8 fast and exactly. Without VNNI oneDNN adds pairs of products up in 16 bits and
    cuts off what they do not hold, or torch multiplies one by one: on an AMD EPYC without it a window of whisper-base
    takes 17 s instead of 1."""
    largest = torch.full((4, 64), 127, dtype=torch.int8)
    return torch.cpu._is_vnni_supported() and bool((torch._int_mm(largest, largest.T) == 127 * 127 * 64).all())


Plain = FloatLinear | Int8Linear
"""Layers with weights in the order of a checkpoint."""

Linear = Plain | Panels
"""The same, or in the native library's order."""


def memory_of(linear: Linear) -> list[Tensor]:
    """Lists the tensors that a layer holds."""
    if isinstance(linear, Panels):
        held: list[Tensor | None] = [linear.packed, linear.bias]
    elif isinstance(linear, Int8Linear):
        held = [linear.weight, linear.scales, linear.bias]
    else:
        held = [linear.weight, linear.bias]
    return [one for one in held if one is not None]
