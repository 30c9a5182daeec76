"""The work of a model: the weights that are computed with and read, by the files of its checkpoint alone."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Self

from attrs import frozen

from ..models.checkpoints.files import find_weights, read_config
from ..models.checkpoints.stored import open_weights
from .machine import Machine

_BYTES = {"float32": 2, "bfloat16": 2, "int8": 1}
"""Bytes that a weight takes at least: `Panels` may hold in 16 bits a weight that is computed in float32."""


@frozen(kw_only=True)
class Work:
    """The work of a model: of one window in its encoder, and of one step in its decoder.

    A step of one token multiplies every matrix of the decoder once, so it reads each of them: no step of a sequence
    alone is faster than that. Keys and values are left out, since each request brings its own.
    """

    window_flops: float  # of the products of a whole window's rows with weights; 0: there is no encoder
    attention_flops: float  # of the products of its rows with each other
    step_weights: int

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Reads the work of a checkpoint from the shapes of its weights."""
        config, shapes = read_config(folder), dict[str, tuple[int, ...]]()
        for path in find_weights(folder):
            shapes.update((name.removeprefix("model."), one.shape) for name, one in open_weights(path).items())
        matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) == 2 and "positions" not in name}
        encoder = sum(count for name, count in matrices.items() if name.startswith("encoder."))
        cross = sum(n for name, n in matrices.items() if ".encoder_attn.k" in name or ".encoder_attn.v" in name)
        rows = int(config.get("max_source_positions", 0)) if encoder else 0
        attention = 4.0 * rows**2 * int(config.get("d_model", 0)) * int(config.get("encoder_layers", 0))
        every = sum(matrices.values())
        untied = "lm_head.weight" in shapes or "proj_out.weight" in shapes
        embedding = max(matrices.values()) if untied else 0  # of which a step reads a row
        return cls(
            window_flops=2.0 * rows * (encoder + cross),
            attention_flops=attention,
            step_weights=every - encoder - cross - embedding,
        )

    def limit(self, machine: Machine, numbers: str, *, windows: float, share: float, steps: int) -> float:
        """Returns the seconds that ``windows`` windows, each a ``share`` of a whole one, and ``steps`` steps take at
        least on ``machine``."""
        flops = windows * (share * self.window_flops + share**2 * self.attention_flops)
        computed = flops / (machine.gigaflops[numbers] * 1e9)
        return computed + steps * self.step_weights * _BYTES[numbers] / (machine.gigabytes * 1e9)
