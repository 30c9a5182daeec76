"""Decoders of encoder-decoders of transformers as programs of the native library.

Their layers attend to their own tokens, attend to an encoder output, and feed forward, each with a sum and a norm:
behind the sum in BART (Lewis et al. 2020), before what is summed in mBART (Liu et al. 2020) and Pegasus (Zhang et al.
2020).
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from .library import ACTIVATIONS, Ending
from .panels import Panels
from .parts import is_known, norm_of, pack_linears, pack_words, scale_of
from .program import MULTIPLE, Attention, Program

_BEHIND = frozenset({"BartDecoderLayer"})  # norms stand behind the sums
_LAYERS = _BEHIND | {"MBartDecoderLayer", "PegasusDecoderLayer"}
MODEL_TYPES = frozenset({"bart", "mbart", "pegasus"})
"""Of the configurations whose decoders have such layers."""


@frozen(kw_only=True, eq=False)
class _Layer:
    """The parts of one layer, whatever they are called.

    Args:
        own: attention to its own tokens.
        cross: attention to the encoder output.
        norms: of both, and of the feed-forward part.
        matrices: for each that is read, a module and the names of its linear layers that are one: queries, keys and
            values; what follows attention; queries of ``cross``; what follows it; both of the feed-forward part.
        keys_values: the linear layers of ``cross`` that read the encoder output.
    """

    own: Any
    cross: Any
    norms: tuple[Any, Any, Any]
    matrices: tuple[tuple[Any, tuple[str, ...]], ...]
    keys_values: tuple[Any, Any]

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        own, cross = layer.self_attn, layer.encoder_attn
        return cls(
            own=own,
            cross=cross,
            norms=(layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm),
            matrices=(
                (own, ("q_proj", "k_proj", "v_proj")),
                (own, ("out_proj",)),
                (cross, ("q_proj",)),
                (cross, ("out_proj",)),
                (layer, ("fc1",)),
                (layer, ("fc2",)),
            ),
            keys_values=(cross.k_proj, cross.v_proj),
        )

    @property
    def linears(self) -> list[Any]:
        return [getattr(parent, name) for parent, names in self.matrices for name in names]

    def panels(self) -> list[Panels]:
        """Of each matrix, once they are packed."""
        return [getattr(parent, names[0]).panels() for parent, names in self.matrices]


@frozen(eq=False)
class CrossedDecoder:
    """The decoder of an encoder-decoder of transformers.

    Args:
        module: the whole model.
    """

    module: Any

    @property
    def base(self) -> Any:
        """What has the layers."""
        return self.module.get_decoder()

    @property
    def head(self) -> Any:
        """What makes logits of the last hidden states."""
        return self.module.get_output_embeddings()

    def unknown(self) -> str | None:
        """Why it is no program; ``None``: it is one."""
        base = self.base
        own = list(getattr(base, "layers", ()))
        names = {type(layer).__name__ for layer in own}
        if len(names) != 1 or names - _LAYERS:
            return f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(sorted(_LAYERS))}"
        if base.config.activation_function not in ACTIVATIONS:
            return f"its activation is {base.config.activation_function}; known: {', '.join(ACTIVATIONS)}"
        linears = [linear for layer in map(_Layer.of, own) for linear in layer.linears]
        if not all(map(is_known, [*linears, self.head])):
            return "its linear layers are not torch's"
        if scale_of(base.embed_tokens) is None:
            return f"its embedding is a {type(base.embed_tokens).__name__}; known: torch's"
        if base.config.hidden_size % MULTIPLE:
            return f"its width is {base.config.hidden_size}; known: multiples of {MULTIPLE}"
        return None

    def pack(self) -> None:
        """Puts packed matrices in the places of its linear layers and its embedding, one after the other: at no time
        is more than one matrix held twice. Those that write slots stay."""
        for layer in map(_Layer.of, self.base.layers):
            for parent, names in layer.matrices:
                pack_linears(parent, names)
        module = self.module
        bias = module.final_logits_bias if module.final_logits_bias.any() else None
        if bias is not None:
            module.final_logits_bias = torch.zeros(1, 1)  # the head adds it
        pack_words(module, self.base.embed_tokens, self.head, bias=None if bias is None else bias[0])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The decoder's inputs [rows, hidden] of tokens at positions [rows], as it makes them itself."""
        base = self.base
        words = base.embed_tokens(tokens) * getattr(base, "embed_scale", 1.0)
        hidden: Tensor = words + base.embed_positions(None, position_ids=positions).view_as(words)
        norm = getattr(base, "layernorm_embedding", None)
        return hidden if norm is None else norm(hidden)

    def keys_values(self, layer: int, output: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer makes of an encoder output [length, hidden]: keys and values [kv_heads, length, size]."""
        parts = _Layer.of(self.base.layers[layer])
        of_keys, of_values = parts.keys_values
        shape = (len(output), -1, _size(parts.cross))
        return of_keys(output).view(shape).transpose(0, 1), of_values(output).view(shape).transpose(0, 1)

    def program(self) -> Program:
        """The program of a decoder that is packed."""
        program, base = Program(), self.base
        layers = list(map(_Layer.of, base.layers))
        behind = type(base.layers[0]).__name__ in _BEHIND
        activation = ACTIVATIONS[base.config.activation_function]
        all_inputs, _, queries, _, widen, _ = layers[0].panels()
        hidden, split = program.buffer(base.config.hidden_size), program.buffer(all_inputs.outputs)
        asked, attended = program.buffer(queries.outputs), program.buffer(queries.outputs)
        inner = program.buffer(widen.outputs)
        for index, layer in enumerate(layers):
            norms = list(map(norm_of, layer.norms))
            before = [None] * len(norms) if behind else norms
            inputs, out, queries, cross_out, widen, narrow = layer.panels()
            own, cross = _attention(index, layer.own), _attention(index, layer.cross)
            program.linear(hidden, split, inputs, Ending.STORE, norm=before[0])
            program.attend(split, attended, own)
            program.linear(attended, hidden, out, Ending.ADD)
            if behind:
                program.norm(hidden, hidden, norms[0])
            program.linear(hidden, asked, queries, Ending.STORE, norm=before[1])
            program.cross(asked, attended, cross)
            program.linear(attended, hidden, cross_out, Ending.ADD)
            if behind:
                program.norm(hidden, hidden, norms[1])
            program.linear(hidden, inner, widen, Ending.ACTIVATED, norm=before[2], activation=activation)
            program.linear(inner, hidden, narrow, Ending.ADD)
            if behind and index < len(layers) - 1:
                program.norm(hidden, hidden, norms[2])
        last, head = program.buffer(base.config.hidden_size), self.head.panels()
        program.norm(hidden, last, norm_of(layers[-1].norms[2] if behind else base.layer_norm), wanted=True)
        program.linear(last, program.buffer(head.outputs), head, Ending.STORE, wanted=True)
        program.has_head = True
        return program


def _attention(index: int, attention: Any) -> Attention:
    heads, size = attention.num_heads, _size(attention)
    return Attention(layer=index, heads=heads, kv_heads=heads, size=size, scale=float(attention.scaling), turned=0)


def _size(attention: Any) -> int:
    return int(attention.head_dim)
