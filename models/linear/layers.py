"""Linear layers with weights in the checkpoint's dtype or in int8: small objects that hold the weights without a module
of torch. Torch computes them here, in one way for each kind of weights."""

from __future__ import annotations

from functools import cache

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from ..native.panels import Panels

_FEW = 16  # rows up to which converting the weights takes longer than the product
_WHOLE = 32  # inputs that torch reads at once in `_weight_int8pack_mm`: it reads past the end of other numbers


@frozen(eq=False)
class FloatLinear:
    """``inputs @ weight.T + bias``."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Maps [..., inputs] of the weight's dtype to [..., outputs]."""
        return functional.linear(inputs, self.weight, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Returns rows of the weight. A head that is also the token embedding is read this way."""
        return functional.embedding(indices, self.weight)


@frozen(eq=False)
class Int8Linear:
    """A linear layer with weights in int8. Each output has its own scale.

    If the scales are in float32, inputs are quantized, too, for any number of rows. So a row's result does not depend
    on the number of rows. In 16 bits, or if the CPU does not multiply int8 well, inputs are not quantized.
    """

    weight: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # [outputs], in the dtype of the computation
    bias: Tensor | None  # [outputs], in the same dtype

    def __call__(self, inputs: Tensor) -> Tensor:
        """Maps [..., inputs] to [..., outputs], both in the dtype of the scales."""
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
        """Multiplies the unquantized inputs with the weights in the dtype of the inputs. This may be slow."""
        return functional.linear(inputs, self.weight.to(inputs.dtype).mul_(self.scales[:, None]), self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Returns rows of the weight, in the dtype of the scales."""
        return self.weight[indices].to(self.scales.dtype).mul_(self.scales[indices][..., None])

    def _of_quantized(self, inputs: Tensor) -> Tensor:
        """Quantizes ``inputs``, float32, and multiplies int8 by int8. Each row is scaled by its own largest value, so
        that its result does not depend on the other rows."""
        largest = inputs.abs().amax(-1, keepdim=True)
        # The quotient of a row of zeros is NaN, which becomes 0.
        quantized = (inputs * (127.0 / largest)).nan_to_num_(0.0).round_().to(torch.int8)
        found = torch._int_mm(quantized, self.weight.T) * self.scales
        found.mul_(largest.div_(127.0))
        return found if self.bias is None else found.add_(self.bias)


@cache
def multiplies_int8() -> bool:
    """True if this CPU multiplies int8 fast and exactly.

    Without VNNI, oneDNN adds pairs of products in 16 bits, where sums that overflow are clipped, or torch multiplies
    one pair of numbers at a time. On an AMD EPYC without VNNI a window of whisper-base takes 17 s instead of 1 s.
    """
    largest = torch.full((4, 64), 127, dtype=torch.int8)
    return torch.cpu._is_vnni_supported() and bool((torch._int_mm(largest, largest.T) == 127 * 127 * 64).all())


Plain = FloatLinear | Int8Linear
"""Layers with weights in the order of a checkpoint."""

Linear = Plain | Panels
"""Layers with weights in the order of a checkpoint or of the native library."""


def memory_of(linear: Linear) -> list[Tensor]:
    """Returns the tensors that a layer holds."""
    if isinstance(linear, Panels):
        held: list[Tensor | None] = [linear.packed, linear.bias]
    elif isinstance(linear, Int8Linear):
        held = [linear.weight, linear.scales, linear.bias]
    else:
        held = [linear.weight, linear.bias]
    return [one for one in held if one is not None]
