"""Embeddings of tokens that enter each layer behind its feed-forward part, and factors of layers (Gemma 4): one table
has the numbers of all layers for a token. To them is added what a matrix makes of the token's embedding.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from .library import Ending
from .parts import epsilon_of, norm_of, pack_linears, pack_words, plain, scale_of
from .program import Program

_NAMES = ("per_layer_input_gate", "per_layer_projection")


def other_names(layer: Any) -> tuple[str, ...]:
    """Returns the names of a layer's linear layers for such embeddings."""
    return _NAMES if getattr(layer, "hidden_size_per_layer_input", None) else ()


def unknown_by_layer(base: Any, layer: Any) -> str | None:
    """Returns the reason why the library cannot compute what ``base`` and its layers have of this; ``None``: it can."""
    if getattr(layer, "enable_moe_block", False):
        return "its layers have experts beside their feed-forward parts"
    if other_names(layer) and scale_of(base.embed_tokens_per_layer) is None:
        return "its embeddings that enter layers are not transformers'"
    return None


def pack_by_layer(module: Any, base: Any, *, int8: bool) -> None:
    """Packs the table and the matrix before all layers, if ``base`` has them."""
    if getattr(base, "hidden_size_per_layer_input", None):
        pack_words(module, base.embed_tokens_per_layer, None, int8=int8)
        pack_linears(base, ("per_layer_model_projection",), int8=int8)


@frozen(eq=False)
class LayerEmbeddings:
    """A writer of the operations. All layers share its buffers.

    Args:
        size: the numbers that enter a layer; 0: none do.
        found: the buffer with the numbers of all layers.
        gate: a buffer of ``size``.
    """

    program: Program
    size: int
    found: int
    gate: int

    @classmethod
    def write(cls, program: Program, base: Any, hidden: int) -> LayerEmbeddings:
        """Writes what comes before all layers. The buffer ``hidden`` has the embeddings of tokens."""
        size = getattr(base, "hidden_size_per_layer_input", None) or 0
        if not size:
            return cls(program, 0, 0, 0)
        table, norm = base.embed_tokens_per_layer, base.per_layer_projection_norm
        layers, scale = table.panels().inputs // size, float(base.per_layer_input_scale)
        made = cls(program, size, program.buffer(layers * size), program.buffer(size))
        looked_up = program.buffer(layers * size)
        matrix, factor = base.per_layer_model_projection.panels(), float(base.per_layer_model_projection_scale)
        program.linear(hidden, made.found, matrix, Ending.STORE, scale=factor)
        program.normalize_heads(made.found, layers, plain(norm.weight), epsilon_of(norm), scale)
        program.look_up(looked_up, table.panels(), table.scale * scale)
        program.copy(looked_up, made.found, layers * size, ending=Ending.ADD)
        return made

    def write_layer(self, index: int, layer: Any, hidden: int, summand: int, activation: int) -> None:
        """Writes what comes behind the feed-forward part of a ``layer``."""
        program = self.program
        if self.size:
            gate, projection = (getattr(layer, name).panels() for name in _NAMES)
            program.linear(hidden, self.gate, gate, Ending.ACTIVATED, activation=activation)
            program.copy(self.found, self.gate, self.size, first=index * self.size, ending=Ending.GATED)
            program.linear(self.gate, summand, projection, Ending.STORE)
            program.norm(summand, hidden, norm_of(layer.post_per_layer_input_norm), add=True)
        factor = float(getattr(layer, "layer_scalar", 1.0))
        if factor != 1.0:
            program.copy(hidden, hidden, program.widths[hidden], scale=factor)
