"""A decoder's layers, compiled by `torch.compile`: transformers' own code, its small operations fused.

Each layer breaks into two graphs, before its attention and after it: our attention cuts a step as its lengths ask for,
which no compiler should follow. All layers share the compiled code, and numbers of rows share it too, but for one row,
which torch treats on its own. The code belongs to the process, as all that torch compiles; no tensor is in it.
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
    """Layers that are compiled when they are first called, and in the modules during a call and at no other time."""

    _layers: list[tuple[nn.Module, Callable[..., Any]]] = field(repr=False)

    @classmethod
    def of(cls, language: nn.Module, count: int) -> CompiledLayers:
        """Takes ``language``'s ``count`` layers. Raises `UnsupportedModel` where it has no list of them."""
        layers = language.get_submodule(find_layers(language, language, count))
        return cls([(layer, torch.compile(layer.forward, dynamic=True)) for layer in layers.children()])

    def crossing(self) -> AbstractContextManager[None]:
        """The compiled layers are called within."""
        return forwards(self._layers)

    def tensors(self) -> tuple[Tensor, ...]:
        """Lists nothing: there are no tensors."""
        return ()

    def release(self) -> None:
        """Forgets the layers."""
        self._layers.clear()
