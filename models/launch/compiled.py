"""A decoder's layers, compiled by `torch.compile`. The code is transformers' own, with small operations fused.

Each layer becomes two graphs, one before its attention and one after it. Attention is not compiled, since it cuts a
step by the lengths of its sequences. All layers share the compiled code, for any number of rows; only steps of one row
have code of their own, since torch treats the size 1 separately. The code belongs to the process, like everything that
torch compiles, and holds no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from ..memory.module import forwards
from .pipeline import find_layers


@define(eq=False)
class CompiledLayers:
    """Compiled layers. Each is compiled at its first call. The modules refer to the compiled code only within
    `crossing`."""

    _layers: list[tuple[nn.Module, Callable[..., Any]]] = field(repr=False)

    @classmethod
    def of(cls, language: nn.Module, count: int) -> CompiledLayers:
        """Wraps the ``count`` layers of ``language``. Raises `UnsupportedModel` if ``language`` has no list of them."""
        layers = language.get_submodule(find_layers(language, language, count))
        return cls([(layer, torch.compile(layer.forward, dynamic=True)) for layer in layers.children()])

    def crossing(self) -> AbstractContextManager[None]:
        """Returns a context manager within which the model calls the compiled layers."""
        return forwards(self._layers)

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns nothing, since compiled layers hold no tensors."""
        return ()

    def release(self) -> None:
        """Forgets the layers."""
        self._layers.clear()
