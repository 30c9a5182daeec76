"""Decoders of encoder-decoder models, whose modules have the names of transformers, as programs of the native library.

Each layer has self-attention, cross-attention and a feed-forward part, each with a residual sum and a norm. The norm
follows the sum in BART (Lewis et al. 2020); it precedes attention or the feed-forward part in mBART (Liu et al. 2020),
Pegasus (Zhang et al. 2020), T5 (Raffel et al. 2020) and models of speech.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import functional

from .layers import Matrices, joined
from .library import ACTIVATIONS, Ending
from .panels import PANEL
from .parts import norm_of, pack_joined, pack_linears, pack_words, plain, turned, unknown_parts
from .program import MULTIPLE, Attention, Normed, Program

MODEL_TYPES = frozenset(
    {"whisper", "bart", "mbart", "pegasus", "t5", "mt5", "moonshine", "moonshine_streaming", "cohere_asr", "canary"}
)
"""Model types of configurations whose decoder layers this module knows."""


_Paths = tuple[str, str, str, str, str, str, str, str, str, str, str]
"""The names in a layer: its linear layers, as in `_Layer.matrices`, those that read the encoder output, its norms, and
the setting that names its activation."""

_BART: _Paths = (
    *("self_attn.q_proj k_proj v_proj", "self_attn.out_proj", "encoder_attn.q_proj", "encoder_attn.out_proj"),
    *("fc1", "fc2", "encoder_attn.k_proj v_proj"),
    *("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm", "activation_function"),
)
_SPEECH: _Paths = (
    *("self_attn.q_proj k_proj v_proj", "self_attn.o_proj", "encoder_attn.q_proj", "encoder_attn.o_proj"),
    *("mlp.fc1", "mlp.fc2", "encoder_attn.k_proj v_proj"),
    *("input_layernorm", "post_attention_layernorm", "final_layernorm", "hidden_act"),
)
_T5: _Paths = (
    *("layer.0.SelfAttention.q k v", "layer.0.SelfAttention.o"),
    *("layer.1.EncDecAttention.q", "layer.1.EncDecAttention.o"),
    *("layer.2.DenseReluDense.wi wi_0 wi_1", "layer.2.DenseReluDense.wo", "layer.1.EncDecAttention.k v"),
    *("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm", "dense_act_fn"),
)
_KINDS: dict[str, _Paths] = {
    **dict.fromkeys(("WhisperDecoderLayer", "BartDecoderLayer", "MBartDecoderLayer", "PegasusDecoderLayer"), _BART),
    **dict.fromkeys(("T5Block", "MT5Block"), _T5),
    **dict.fromkeys(("MoonshineDecoderLayer", "MoonshineStreamingDecoderLayer"), _SPEECH),
    **dict.fromkeys(("CohereAsrDecoderLayer", "CanaryDecoderLayer"), _SPEECH),
}


@frozen(kw_only=True, eq=False)
class _Layer(Matrices):
    """The parts of one layer, independent of their names in transformers. Its matrices are: queries, keys and values of
    ``own``; outputs of ``own``; queries of ``cross``; outputs of ``cross``; the first and the second of the
    feed-forward part.

    Args:
        own: self-attention.
        cross: cross-attention.
        norms: the norms of self-attention, of cross-attention and of the feed-forward part.
        slots: ``cross`` and the names of its linear layers that read the encoder output: keys and values.
        behind: true if norms follow the sums.
    """

    own: Any
    cross: Any
    norms: list[Any]
    slots: list[tuple[Any, str]]
    activation: str
    ending: Ending
    behind: bool

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        kind = type(layer).__name__
        *paths, activation = _KINDS[kind]
        *matrices, (cross, names) = joined(layer, paths[:7])
        gated = Ending.GATED if len(matrices[4][1]) > 1 else Ending.ACTIVATED
        return cls(
            own=matrices[0][0],
            cross=cross,
            norms=[layer.get_submodule(path) for path in paths[7:]],
            matrices=matrices,
            slots=[(cross, name) for name in names],
            activation=getattr(matrices[0][0].config, activation),
            ending=Ending.GATED_BY if "Moonshine" in kind else gated,
            behind=kind == "BartDecoderLayer",
        )

    @property
    def keys_values(self) -> list[Any]:
        """The linear layers that read the encoder output."""
        return [getattr(*slot) for slot in self.slots]


@frozen(eq=False)
class CrossedDecoder:
    """The decoder of one of transformers' encoder-decoder models.

    Args:
        module: the whole model.
    """

    module: Any

    @property
    def base(self) -> Any:
        """The module that has the layers."""
        return self.module.get_decoder()

    @property
    def head(self) -> Any:
        """The module that computes logits from the last hidden states."""
        return self.module.get_output_embeddings()

    @property
    def layers(self) -> list[Any]:
        """The modules of the layers."""
        base = self.base
        return list(getattr(base, "layers", getattr(base, "block", ())))

    def unknown(self) -> str | None:
        """Returns the reason why the decoder cannot be a program; ``None``: it can."""
        base, names = self.base, {type(layer).__name__ for layer in self.layers}
        if len(names) != 1 or names - _KINDS.keys():
            return f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(_KINDS)}"
        layers = list(map(_Layer.of, self.layers))
        linears = [linear for layer in layers for linear in (*layer.linears, *layer.keys_values)]
        if others := unknown_parts(base, layers[0].activation, [*linears, self.head], base.embed_tokens):
            return others
        hidden, inner = base.config.hidden_size, layers[0].linears[-1].in_features
        if hidden % MULTIPLE or (layers[0].ending is not Ending.ACTIVATED and inner % PANEL):
            return f"its widths are {hidden} and {inner}; known: multiples of {MULTIPLE}, and of {PANEL} with gates"
        return None

    def pack(self, *, int8: bool = False) -> None:
        """Replaces the linear layers and the embedding of the decoder by packed matrices, one after the other: at no
        time is more than one matrix held twice. The linear layers that compute the contents of slots become one
        matrix."""
        places = [place for layer in self.layers for place in _Layer.of(layer).slots]
        pack_joined(places, int8=int8)
        for layer in self.layers:
            self.pack_layer(layer, int8=int8)
        self.pack_words(int8=int8)

    def pack_layer(self, layer: Any, *, int8: bool = False) -> None:
        """Does the part of `pack` that concerns one layer."""
        for parent, names in _Layer.of(layer).matrices:
            pack_linears(parent, names, int8=int8)

    def pack_words(self, *, int8: bool = False) -> None:
        """Does the part of `pack` that concerns the embedding and the head."""
        bias = getattr(self.module, "final_logits_bias", None)
        if bias is None or not bias.any():
            pack_words(self.module, self.base.embed_tokens, self.head, int8=int8)
            return
        self.module.final_logits_bias = torch.zeros(1, 1, dtype=torch.float32)  # the head adds it
        pack_words(self.module, self.base.embed_tokens, self.head, int8=int8, bias=bias[0])

    def keys_values(self, layer: int, output: Tensor) -> tuple[Tensor, Tensor]:
        """Computes a layer's keys and values, [kv_heads, length, size] each, of an encoder output [length, hidden].
        Heads are padded with zeros as the layer's module pads them."""
        parts = _Layer.of(self.layers[layer])
        of_keys, of_values = parts.keys_values
        shape, filled = (len(output), -1, _size(parts.cross)), (0, getattr(parts.cross, "head_dim_padding", 0))
        keys, values = of_keys(output).view(shape).transpose(0, 1), of_values(output).view(shape).transpose(0, 1)
        return functional.pad(keys, filled), functional.pad(values, filled)

    def crossing(self) -> Program:
        """Writes the program that computes the keys and values of a slot in all layers. The decoder must be packed by
        `pack`."""
        program, panels = Program(), _Layer.of(self.layers[0]).keys_values[0].panels()
        program.linear(program.buffer(panels.inputs), program.buffer(panels.outputs), panels, Ending.STORE)
        return program

    def program(self, positions: int, distances: Tensor | None = None, *, apart: bool = False) -> Program:
        """Writes the program of the decoder, which must be packed.

        Args:
            positions: the largest number of positions of a sequence.
            distances: numbers that are added to scores by the distance of query and key, [distances, heads]; the last
                row is for all larger distances, too.
            apart: the queries of cross-attention have a buffer for each layer, `Program.crossing`.
        """
        program, base, layers = Program(), self.base, list(map(_Layer.of, self.layers))
        turns, added = turned(program, base, positions), None if distances is None else plain(distances.T)
        inputs, _, queries, _, _, narrow = layers[0].panels()
        hidden, split = program.buffer(base.config.hidden_size), program.buffer(inputs.outputs)
        attended = program.buffer(queries.outputs)
        count = len(layers) if apart else 1
        crossing = tuple(map(program.buffer, [queries.outputs] * count))  # no closure here, see `core.tracebacks`
        inner, last = program.buffer(narrow.inputs), program.buffer(base.config.hidden_size)
        embed(program, base, hidden, positions)
        for index, layer in enumerate(layers):
            inputs, out, queries, cross_out, widen, narrow = layer.panels()
            own = _attention(index, layer.own, *layer.linears[:2], paired=True, distances=added, **turns)
            cross = _attention(index, layer.cross, layer.linears[4], layer.keys_values[0])
            norms, asked = list(map(norm_of, layer.norms)), crossing[index % count]
            before, behind = ([None] * 3, norms) if layer.behind else (norms, [None] * 3)
            program.linear(hidden, split, inputs, Ending.STORE, norm=before[0])
            program.attend(split, attended, own)
            program.add(attended, hidden, out, behind[0])
            program.linear(hidden, asked, queries, Ending.STORE, norm=before[1])
            program.cross(asked, attended, cross)
            program.add(attended, hidden, cross_out, behind[1])
            activation = ACTIVATIONS[layer.activation]
            program.linear(hidden, inner, widen, layer.ending, norm=before[2], activation=activation)
            program.add(inner, hidden, narrow, behind[2] if index < len(layers) - 1 else None)
        head = self.head.panels()
        program.norm(hidden, last, self._last_norm(layers[-1]), wanted=True)
        program.linear(last, program.buffer(head.outputs), head, Ending.STORE, wanted=True)
        program.has_head = program.chooses = True
        program.crossing = crossing
        return program

    def _last_norm(self, layer: _Layer) -> Normed:
        """Returns the norm of the last hidden states. If the model scales them before the head, the gain includes the
        scale."""
        base, config = self.base, self.module.config
        own = [getattr(base, name) for name in ("layer_norm", "final_layer_norm", "norm") if hasattr(base, name)]
        norm = norm_of(layer.norms[2] if layer.behind else own[0])
        scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0  # in T5
        return evolve(norm, gain=norm.gain * scale)


def embed(program: Program, base: Any, hidden: int, positions: int) -> None:
    """Adds the operations that compute embeddings of tokens as ``base`` does, a decoder or an encoder."""
    tokens, counted = base.embed_tokens, torch.arange(positions)
    norm = getattr(base, "layernorm_embedding", getattr(base, "embedding_layernorm", None))
    if hasattr(base, "embed_positions"):
        added = base.embed_positions(None, position_ids=counted).view(positions, -1)
    elif hasattr(base, "embedding_layernorm"):
        added = base.pos_emb(counted)
    else:  # positions enter in attention
        program.look_up(hidden, tokens.panels(), tokens.scale)
        return
    program.look_up(hidden, tokens.panels(), tokens.scale * getattr(base, "embed_scale", 1.0), plain(added))
    if norm is not None:
        program.norm(hidden, hidden, norm_of(norm))


def _attention(index: int, attention: Any, queries: Any, keys: Any, **changes: Any) -> Attention:
    size, scale = _size(attention), float(attention.scaling)
    heads, kv_heads = queries.out_features // size, keys.out_features // size
    return Attention(layer=index, heads=heads, kv_heads=kv_heads, size=size, scale=scale, **changes)


def _size(attention: Any) -> int:
    """Returns the size of a head without padding."""
    return int(getattr(attention, "key_value_proj_dim", None) or attention.head_dim)
