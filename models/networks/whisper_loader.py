"""Loads Whisper's tensors from a checkpoint onto the model's device: in the model's dtype, in int8, or in the native
library's order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from ..checkpoints.whisper import WeightFiles
from ..linear.layers import FloatLinear, Int8Linear, Linear, Plain, memory_of
from ..native.panels import Panels


@frozen(kw_only=True)
class Loader:
    """Loads tensors onto the model's device, in the model's dtype unless they are quantized."""

    weights: WeightFiles
    device: torch.device
    dtype: torch.dtype
    int8: bool  # whether linear layers, embedding and head are quantized
    native: bool  # whether matrices are put in the native library's order
    taken: list[Tensor]

    def take(self, name: str, *shape: int) -> Tensor:
        made = torch.empty(*shape, dtype=self.dtype, device=self.device)
        self.taken.append(made)
        self.weights.get(name, made)
        return made

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        linear = self.blank(outputs, inputs, bias=True)
        self.fill(linear, slice(None), f"{name}.weight")
        assert linear.bias is not None, "a linear layer of Whisper has a bias"
        self.weights.get(f"{name}.bias", linear.bias)
        return self.kept(linear)

    def matrix(self, name: str, outputs: int, inputs: int) -> Plain:
        """Reads a matrix without a bias: the head, or the token embedding. The caller must still pass it to `kept`."""
        linear = self.blank(outputs, inputs, bias=False)
        self.fill(linear, slice(None), name)
        return linear

    def fused(self, name: str, width: int, heads: int) -> Linear:
        """Reads the query, key and value projections of one attention as a single layer."""
        return self.stacked([(name, "q"), (name, "k"), (name, "v")], width, heads)

    def stacked(self, projections: Sequence[tuple[str, str]], width: int, heads: int) -> Linear:
        """Reads several projections as a single layer, one below the other. Each is named by its attention and "q", "k"
        or "v", and is read directly into its rows. So there are never two copies of all projections.
        """
        linear = self.blank(len(projections) * width, width, bias=True)
        assert linear.bias is not None, "it was asked for"
        for index, (name, part) in enumerate(projections):
            rows = slice(index * width, (index + 1) * width)
            scale = (width // heads) ** -0.5 if part == "q" else 1.0
            self.fill(linear, rows, f"{name}.{part}_proj.weight", scale)
            if part == "k":  # Keys have no bias in Whisper.
                linear.bias[rows] = 0.0
            else:
                self.weights.get(f"{name}.{part}_proj.bias", linear.bias[rows], scale=scale)
        return self.kept(linear)

    def blank(self, outputs: int, inputs: int, *, bias: bool) -> Plain:
        """Allocates a linear layer with empty weights."""
        empty = partial(torch.empty, device=self.device)
        added = empty(outputs, dtype=self.dtype) if bias else None
        if self.native or not self.int8:
            return FloatLinear(empty(outputs, inputs, dtype=self.dtype), added)
        weight, scales = empty(outputs, inputs, dtype=torch.int8), empty(outputs, dtype=self.dtype)
        return Int8Linear(weight, scales, added)

    def kept(self, linear: Plain) -> Linear:
        """Returns a layer with loaded weights in the form that the model holds, and records its tensors in
        ``taken``."""
        held: Linear = linear
        if self.native:
            held = Panels.of(linear.weight, linear.bias, dtype=torch.int8 if self.int8 else None)
        self.taken.extend(memory_of(held))
        return held

    def fill(self, linear: Plain, rows: slice, name: str, scale: float = 1.0) -> None:
        """Reads the weight ``name``, times ``scale``, into ``rows`` of the weight of ``linear``."""
        if isinstance(linear, Int8Linear):
            self.weights.quantize(name, linear.weight[rows], linear.scales[rows], scale=scale)
        else:
            self.weights.get(name, linear.weight[rows], scale=scale)
