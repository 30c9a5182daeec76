"""The work of a model: the weights that it computes with and reads, as the files of its checkpoint tell."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Self

from attrs import frozen

from ..models.checkpoints.files import find_weights, read_config
from ..models.checkpoints.weights import open_weights
from .machine import Machine

_BYTES = {"float32": 2, "bfloat16": 2, "int8": 1}
"""The least bytes that a weight takes. A weight that is computed in float32 takes 2, since `Panels` may hold it in 16
bits."""
_ASIDE = ("embed", "pooler", "head", "cls.")  # in the names of matrices that are not multiplied with each token


@frozen(kw_only=True)
class Work:
    """The work of a model: of one window in its encoder, and of one step in its decoder.

    A step of one token multiplies every matrix of the decoder once, so it reads each matrix; no step of a single
    sequence is faster than this reading. Keys and values are left out, since each request brings its own.
    """

    window_flops: float  # for the products of a whole window's rows with weights; 0: the model has no encoder
    attention_flops: float  # for the products of a window's rows with each other
    step_weights: int
    row_weights: int  # of the matrices with which each token of a text is multiplied, embeddings and heads left out

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
        embedding = max(matrices.values()) if untied else 0  # a step reads only a row of this matrix
        return cls(
            window_flops=2.0 * rows * (encoder + cross),
            attention_flops=attention,
            step_weights=every - encoder - cross - embedding,
            row_weights=sum(n for name, n in matrices.items() if not any(part in name for part in _ASIDE)),
        )

    def limit(
        self, machine: Machine, numbers: str, *, windows: float, share: float, steps: int, rows: int = 0
    ) -> float:
        """Returns the least seconds that ``windows`` windows, ``steps`` steps and ``rows`` tokens of texts without
        steps take on ``machine``. Each window is a ``share`` of a whole one."""
        flops = windows * (share * self.window_flops + share**2 * self.attention_flops) + 2.0 * rows * self.row_weights
        computed = flops / (machine.gigaflops[numbers] * 1e9)
        return computed + steps * self.step_weights * _BYTES[numbers] / (machine.gigabytes * 1e9)
