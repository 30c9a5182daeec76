"""Linear layers and embeddings whose matrices are in int8, each row quantized symmetrically by its largest value (Jacob
et al. 2018, "Quantization and training of neural networks for efficient integer-arithmetic-only inference", section
2.1, with a zero point of 0). As modules of torch they replace modules of a loaded model.

torchao is not used: transformers imports it for every model if it is installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_PLAIN = frozenset({nn.Linear, nn.Embedding})  # no subclasses, which may compute something else
_DISTANCES = "relative_attention_bias"  # an embedding of a few numbers, which are added to scores
_ROWS = 1024  # rows that are quantized at a time
_FEW = 16  # rows up to which converting the weights takes longer than the product
_WHOLE = 32  # inputs that torch reads at once in `_weight_int8pack_mm`: it reads past the end of other numbers


class QuantizedLinear(nn.Module):
    """A replacement for an `nn.Linear`, with weights in int8. Each output has its own scale.

    If the scales are in float32, inputs are quantized, too, for any number of rows. So a row's result does not depend
    on the number of rows. In 16 bits, or if the CPU does not multiply int8 well, inputs are not quantized.
    """

    weight: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # [outputs], in the dtype of the computation
    bias: Tensor | None  # [outputs], in the same dtype

    exact = False  # inputs are not quantized, which may be slow; true within `exactly`

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps [..., inputs] to [..., outputs], both in the dtype of the scales."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        if self.exact:
            found = self._of_exact(flat)
        elif self.scales.dtype == torch.float32 and multiplies_int8():
            found = self._of_quantized(flat)
        elif len(flat) <= _FEW and flat.shape[1] % _WHOLE == 0:  # the weights are converted in registers
            found = torch._weight_int8pack_mm(flat, self.weight, self.scales)
            found = found if self.bias is None else found.add_(self.bias)
        else:
            found = self._of_exact(flat)
        return found.view(*inputs.shape[:-1], len(self.weight))

    def _of_exact(self, inputs: Tensor) -> Tensor:
        """Multiplies the unquantized inputs with the weights in the dtype of the inputs."""
        return functional.linear(inputs, self.weight.to(inputs.dtype).mul_(self.scales[:, None]), self.bias)

    def _of_quantized(self, inputs: Tensor) -> Tensor:
        """Quantizes ``inputs``, float32, and multiplies int8 by int8. Each row is scaled by its own largest value, so
        that its result does not depend on the other rows."""
        largest = inputs.abs().amax(-1, keepdim=True)
        # The quotient of a row of zeros is NaN, which becomes 0.
        quantized = (inputs * (127.0 / largest)).nan_to_num_(0.0).round_().to(torch.int8)
        found = torch._int_mm(quantized, self.weight.T) * self.scales
        found.mul_(largest.div_(127.0))
        return found if self.bias is None else found.add_(self.bias)


class QuantizedEmbedding(nn.Module):
    """A replacement for an `nn.Embedding`. A head may share its tensors."""

    weight: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def forward(self, indices: Tensor) -> Tensor:
        return self.weight[indices].to(self.scales.dtype).mul_(self.scales[indices][..., None])


@cache
def multiplies_int8() -> bool:
    """True if this CPU multiplies int8 fast and exactly.

    Without VNNI, oneDNN adds pairs of products in 16 bits, where sums that overflow are clipped, or torch multiplies
    one pair of numbers at a time. On an AMD EPYC without VNNI a window of whisper-base takes 17 s instead of 1 s.
    """
    largest = torch.full((4, 64), 127, dtype=torch.int8)
    return torch.cpu._is_vnni_supported() and bool((torch._int_mm(largest, largest.T) == 127 * 127 * 64).all())


@contextmanager
def exactly(module: nn.Module) -> Iterator[None]:
    """Makes the quantized layers of ``module`` leave their inputs as they are within the block. A row's result does not
    depend on the number of rows then."""
    quantized = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
    for one in quantized:
        one.exact = True
    try:
        yield
    finally:
        for one in quantized:
            del one.exact


def quantize_modules(module: nn.Module, language: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replaces plain linear layers and embeddings by quantized modules: all those in ``language``, the part of
    ``module`` that is the decoder, and the decoder's head.

    Args:
        dtype: the dtype of the computation; ``None``: that of the weights.

    Modules are replaced one after the other: at no time is more than one matrix held twice. A matrix that several
    modules share stays shared. A matrix is not quantized if a module of another kind shares it, such as a token
    embedding that scales its rows.
    """
    head = id(getattr(module, "get_output_embeddings", lambda: None)())
    modules, within = list(module.modules()), {head, *map(id, language.modules())}
    others = {id(tensor) for each in modules if type(each) not in _PLAIN for tensor in each._parameters.values()}
    uses = Counter(id(tensor) for each in modules for tensor in each._parameters.values())
    modules = [each for each in modules if any(True for _ in each.children())]  # a replaced one dies at once
    shared: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}  # keeps each matrix, so that no other gets its id
    for parent in modules:
        for name in [name for name, _ in parent.named_children()]:
            plain: Any = getattr(parent, name)
            if name == _DISTANCES or type(plain) not in _PLAIN or id(plain) not in within or id(plain.weight) in others:
                continue
            known = shared.get(id(plain.weight))
            made = quantize_rows(plain.weight.detach(), dtype) if known is None else known[1]
            if uses[id(plain.weight)] > 1:
                shared[id(plain.weight)] = (plain.weight, made)
            if isinstance(plain, nn.Embedding):
                setattr(parent, name, QuantizedEmbedding(*made))
            else:
                setattr(parent, name, QuantizedLinear(*made, None if plain.bias is None else plain.bias.detach()))


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``weight`` [outputs, inputs] in int8, and the scales [outputs] in ``dtype``. Each output is quantized
    symmetrically, by its largest value. Values are divided by the scale as it is stored, in ``dtype``, and then
    rounded."""
    wide = weight.float()
    scales = (wide.abs().amax(1) / 127.0).clamp_(min=torch.finfo(dtype).tiny).to(dtype)
    return (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def quantize_rows(weight: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a matrix as `quantize` does, some rows at a time; ``None``: the scales have the dtype of ``weight``."""
    dtype = dtype or weight.dtype
    found, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), dtype=dtype)
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        found[rows], scales[rows] = quantize(weight[rows], dtype)
    return found, scales
