"""Modules of torch whose matrices are in int8. They replace modules of a loaded model.

torchao is not used: it quantizes when a model is loaded, not while Whisper's weights are read; and transformers
imports it for every model if it is installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.int8 import quantize
from .layers import Int8Linear

_PLAIN = frozenset({nn.Linear, nn.Embedding})  # no subclasses, which may compute something else
_ROWS = 1024  # rows that are quantized at a time


class QuantizedLinear(nn.Module):
    """A replacement for an `nn.Linear`: `Int8Linear` as a module."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    exact = False  # inputs are not quantized, which may be slow; true within `exactly`

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        linear = Int8Linear(self.weight, self.scales, self.bias)  # made anew, since the tensors may have been moved
        return linear.exactly(inputs) if self.exact else linear(inputs)


class QuantizedEmbedding(nn.Module):
    """A replacement for an `nn.Embedding`. A head may share its tensors."""

    weight: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def forward(self, indices: Tensor) -> Tensor:
        return Int8Linear(self.weight, self.scales, None).rows(indices)


@contextmanager
def exactly(module: nn.Module) -> Iterator[None]:
    """Makes the quantized layers of ``module`` use `Int8Linear.exactly` within the block. A row's result then does not
    depend on the number of rows."""
    quantized = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
    for one in quantized:
        one.exact = True
    try:
        yield
    finally:
        for one in quantized:
            one.exact = False


def quantize_modules(module: nn.Module, language: nn.Module) -> None:
    """Replaces plain linear layers and embeddings by quantized modules: all those in ``language``, the part of
    ``module`` that is the decoder, and the decoder's head.

    Modules are replaced one after the other: at no time is more than one matrix held twice. A matrix that several
    modules share stays shared. A matrix is not quantized if a module of another kind shares it, such as a token
    embedding that scales its rows.
    """
    head = getattr(module, "get_output_embeddings", lambda: None)()
    modules, within = list(module.modules()), {id(each) for each in (*language.modules(), head)}
    others = {id(tensor) for each in modules if type(each) not in _PLAIN for tensor in each._parameters.values()}
    uses = Counter(id(tensor) for each in modules for tensor in each._parameters.values())
    shared: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}  # keeps each matrix, so that no other gets its id
    for parent in modules:
        for name, child in list(parent.named_children()):
            plain: Any = child
            if type(child) not in _PLAIN or id(child) not in within or id(plain.weight) in others:
                continue
            known = shared.get(id(plain.weight))
            made = quantize_rows(plain.weight.detach()) if known is None else known[1]
            if uses[id(plain.weight)] > 1:
                shared[id(plain.weight)] = (plain.weight, made)
            if isinstance(child, nn.Embedding):
                setattr(parent, name, QuantizedEmbedding(*made))
            else:
                setattr(parent, name, QuantizedLinear(*made, None if plain.bias is None else plain.bias.detach()))


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a matrix as `quantize` does, some rows at a time."""
    found, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight), dtype=weight.dtype)
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        found[rows], scales[rows] = quantize(weight[rows], weight.dtype)
    return found, scales
