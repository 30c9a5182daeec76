"""Encoders of texts (BERT and its kin; Devlin et al. 2019), whose modules have the names of transformers, as programs
of the native library.

A layer consists of attention and a feed-forward part, each with a residual sum and a norm. The norm follows the sum in
BERT, RoBERTa, DistilBERT, MPNet (Song et al. 2020), Nomic and GTE. It precedes attention or the feed-forward part in
ModernBERT (Warner et al. 2024), half of whose layers see a window. Positions are embeddings, rotary, or numbers that
are added to scores by distance. In DeBERTa (He et al. 2021) such a number depends on the query or the key, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from .library import ACTIVATIONS, Ending
from .panels import PANEL, Panels
from .parts import is_known, norm_of, pack_linears, pack_words, plain, scale_of, turns_of, unknown_turns
from .program import MULTIPLE, Attention, Places, Program

MODEL_TYPES = frozenset(
    {
        *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet"),
        *("nomic_bert", "gte", "modernbert", "deberta-v2"),
    }
)
"""Model types of configurations whose layers this module knows."""

_FARTHEST = 128  # from this distance on MPNet adds the same number


@frozen(kw_only=True, eq=False)
class _Layer:
    """The parts of one layer, independent of their names in transformers.

    Args:
        matrices: for each packed matrix, a module and the names of its linear layers that the matrix joins. The
            matrices are: queries, keys and values; outputs of attention; the first and the second of the feed-forward
            part.
        norms: the norms of attention and of the feed-forward part. An ``nn.Identity`` is none.
        ahead: true if norms precede attention and the feed-forward part.
        window: the number of positions on each side that a row sees, its own included; 0: all.
        kind: the kind of rotary positions, if there are several.
    """

    matrices: tuple[tuple[Any, tuple[str, ...]], ...]
    norms: tuple[Any, Any]
    gated: bool = False
    ahead: bool = False
    window: int = 0
    kind: tuple[str, ...] = ()

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        return _KINDS[type(layer).__name__](layer)

    @property
    def linears(self) -> list[Any]:
        return [getattr(parent, name) for parent, names in self.matrices for name in names]

    def panels(self) -> list[Panels]:
        """Returns the panels of each matrix. The matrices must be packed."""
        return [getattr(parent, names[0]).panels() for parent, names in self.matrices]


def _of_bert(layer: Any, names: tuple[str, ...] = ("query", "key", "value")) -> _Layer:
    own, out = layer.attention.self, layer.attention.output
    first = (own, names), (out, ("dense",))
    second = (layer.intermediate, ("dense",)), (layer.output, ("dense",))
    return _Layer(matrices=(*first, *second), norms=(out.LayerNorm, layer.output.LayerNorm))


def _of_mpnet(layer: Any) -> _Layer:
    own, out = layer.attention.attn, layer.output
    first, second = (own, ("q", "k", "v")), (layer.intermediate, ("dense",))
    return _Layer(
        matrices=(first, (own, ("o",)), second, (out, ("dense",))), norms=(layer.attention.LayerNorm, out.LayerNorm)
    )


def _of_distilbert(layer: Any) -> _Layer:
    own, feed = layer.attention, layer.ffn
    first = (own, ("q_lin", "k_lin", "v_lin")), (own, ("out_lin",))
    return _Layer(
        matrices=(*first, (feed, ("lin1",)), (feed, ("lin2",))), norms=(layer.sa_layer_norm, layer.output_layer_norm)
    )


def _of_nomic(layer: Any) -> _Layer:
    own, feed = layer.self_attn, layer.mlp
    first = (own, ("q_proj", "k_proj", "v_proj")), (own, ("o_proj",))
    return _Layer(
        matrices=(*first, (feed, ("gate_proj", "up_proj")), (feed, ("down_proj",))),
        norms=(layer.post_attention_layernorm, layer.post_mlp_layernorm),
        gated=True,
    )


def _of_modernbert(layer: Any) -> _Layer:
    own, feed = layer.attn, layer.mlp
    return _Layer(
        matrices=((own, ("Wqkv",)), (own, ("Wo",)), (feed, ("Wi",)), (feed, ("Wo",))),
        norms=(layer.attn_norm, layer.mlp_norm),
        gated=True,
        ahead=True,
        window=own.sliding_window or 0,
        kind=(layer.attention_type,),
    )


_KINDS: dict[str, Callable[[Any], _Layer]] = {
    "BertLayer": _of_bert,
    "RobertaLayer": _of_bert,
    "XLMRobertaLayer": _of_bert,
    "CamembertLayer": _of_bert,
    "ElectraLayer": _of_bert,
    "TransformerBlock": _of_distilbert,
    "MPNetLayer": _of_mpnet,
    "NomicBertLayer": _of_nomic,
    "GteLayer": _of_nomic,
    "ModernBertEncoderLayer": _of_modernbert,
    "DebertaV2Layer": partial(_of_bert, names=("query_proj", "key_proj", "value_proj")),
}


@frozen(eq=False)
class TextEncoder:
    """One of transformers' encoders of texts.

    Args:
        module: the whole model.
    """

    module: Any

    @property
    def base(self) -> Any:
        """The module that has the embeddings and the layers."""
        return self.module.base_model

    @property
    def layers(self) -> list[Any]:
        """The modules of the layers."""
        base = self.base
        holder = getattr(base, "encoder", getattr(base, "transformer", base))
        return list(getattr(holder, "layer", getattr(holder, "layers", ())))

    def unknown(self) -> str | None:
        """Returns the reason why the encoder cannot be a program; ``None``: it can."""
        base, config, names = self.base, self.base.config, {type(layer).__name__ for layer in self.layers}
        if len(names) != 1 or names - _KINDS.keys():
            return f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(_KINDS)}"
        if hasattr(base, "embeddings_project") or getattr(base.embeddings, "embed_proj", None) is not None:
            return "its embeddings are narrower than its layers"
        if getattr(getattr(base, "encoder", None), "conv", None) is not None:
            return "it has a convolution"
        layers = list(map(_Layer.of, self.layers))
        own = layers[0].matrices[0][0]
        if getattr(own, "relative_attention", False):
            buckets = _buckets(own, config.max_position_embeddings)
            if bool((buckets.diff() < 0).any()):  # as if max_relative_positions is below position_buckets / 2
                return "the buckets of its distances are in no order"
        if _activation(config) not in ACTIVATIONS:
            return f"its activation is {_activation(config)}; known: {', '.join(ACTIVATIONS)}"
        if hasattr(base, "rotary_emb") and (others := unknown_turns(config)):
            return others
        if not all(map(is_known, [linear for layer in layers for linear in layer.linears])):
            return "its linear layers are not torch's"
        joined = [[getattr(one, name) for name in names] for layer in layers for one, names in layer.matrices]
        if any(len({hasattr(one, "scales") for one in neighbours}) > 1 for neighbours in joined):
            return "its linear layers are in int8 in part"
        if scale_of(self.module.get_input_embeddings()) is None:
            return f"its embedding is a {type(self.module.get_input_embeddings()).__name__}; known: torch's"
        hidden, inner = config.hidden_size, layers[0].linears[-1].in_features
        if hidden % MULTIPLE or (layers[0].gated and inner % PANEL):
            return f"its widths are {hidden} and {inner}; known: multiples of {MULTIPLE}, and of {PANEL} with gates"
        return None

    def pack(self, *, int8: bool = False) -> None:
        """Replaces the linear layers and the embedding of the encoder by packed matrices, one after the other: at no
        time is more than one matrix held twice. Heads for classes are not replaced."""
        for layer in self.layers:
            for parent, names in _Layer.of(layer).matrices:
                pack_linears(parent, names, int8=int8)
        pack_words(self.module, self.module.get_input_embeddings(), None, int8=int8)

    def program(self, positions: int) -> Program:
        """Writes the program of the encoder, which must be packed. The program ends with the last hidden states.

        Args:
            positions: the largest number of positions of a text.
        """
        program, config, layers = Program(), self.base.config, list(map(_Layer.of, self.layers))
        inputs, out, _, narrow = layers[0].panels()
        hidden, split = program.buffer(config.hidden_size), program.buffer(inputs.outputs)
        attended, inner = program.buffer(out.inputs), program.buffer(narrow.inputs)
        last, distances = program.buffer(config.hidden_size), self._distances()
        self._embed(program, hidden, positions)
        tables = dict[tuple[str, ...], int]()
        for index, layer in enumerate(layers):
            inputs, out, widen, narrow = layer.panels()
            first, second = (None if isinstance(norm, torch.nn.Identity) else norm_of(norm) for norm in layer.norms)
            attention = self._attention(program, tables, layer, positions, distances)
            ending = Ending.GATED if layer.gated else Ending.ACTIVATED
            activation = ACTIVATIONS[_activation(config)]
            program.linear(hidden, split, inputs, Ending.STORE, norm=first if layer.ahead else None)
            program.attend_all(split, attended, attention)
            program.linear(attended, hidden, out, Ending.ADD)
            if first is not None and not layer.ahead:
                program.norm(hidden, hidden, first)
            before = second if layer.ahead else None
            program.linear(hidden, inner, widen, ending, norm=before, activation=activation)
            program.linear(inner, hidden, narrow, Ending.ADD)
            if second is not None and not layer.ahead and index < len(layers) - 1:
                program.norm(hidden, hidden, second)
        final = self.base.final_norm if layers[-1].ahead else layers[-1].norms[1]
        program.norm(hidden, last, norm_of(final), wanted=True)
        return program

    def _embed(self, program: Program, hidden: int, positions: int) -> None:
        """Adds the operations that compute embeddings of tokens as the encoder does."""
        own, words = self.base.embeddings, self.module.get_input_embeddings()
        places, types = (getattr(own, name, None) for name in ("position_embeddings", "token_type_embeddings"))
        added = None
        if places is not None and places.padding_idx is None:
            added = plain(places.weight[:positions])
        elif places is not None:  # positions are counted behind that of the padding token, which may stand in a text
            program.uncounted = places.padding_idx
            added = plain(places.weight[places.padding_idx :][: positions + 1])
        kinds = None if types is None else plain(types.weight)
        program.look_up(hidden, words.panels(), words.scale, added, kinds)
        program.norm(hidden, hidden, norm_of(own.LayerNorm if hasattr(own, "LayerNorm") else own.norm))

    def _distances(self) -> Tensor | None:
        """Returns the numbers that are added to scores by distance, [heads, 2 * farthest + 1]."""
        encoder: Any = getattr(self.base, "encoder", None)
        if not hasattr(encoder, "relative_attention_bias"):
            return None
        buckets = encoder.relative_position_bucket(torch.arange(-_FARTHEST, _FARTHEST + 1))
        return plain(encoder.relative_attention_bias.weight[buckets].T)

    def _places(self, layer: _Layer, positions: int) -> Places | None:
        """Returns what a layer of DeBERTa adds to scores, computed from embeddings of distances."""
        encoder: Any = getattr(self.base, "encoder", None)
        own = layer.matrices[0][0]
        if not getattr(own, "relative_attention", False):
            return None
        span, heads, buckets = own.pos_ebd_size, own.num_attention_heads, _buckets(own, positions)
        every = torch.arange(-span, span + 1)
        embeddings = encoder.get_rel_embedding()[(span - every).clamp(0, 2 * span - 1)]
        made: dict[str, Panels] = {}
        for kind, name in (("c2p", "key_proj"), ("p2c", "query_proj")):
            if kind in own.pos_att_type:
                linear = getattr(own, name if own.share_att_key else f"pos_{name}")
                each = linear(embeddings).detach().unflatten(1, (heads, -1)).transpose(0, 1)
                filled = functional.pad(each, (0, 0, 0, -len(every) % PANEL)).flatten(0, 1)
                made[kind] = Panels.of(filled.contiguous(), dtype=torch.float32)
        return Places(of=(buckets.clamp(-span, span) + span).int(), keys=made.get("c2p"), queries=made.get("p2c"))

    def _attention(
        self,
        program: Program,
        tables: dict[tuple[str, ...], int],
        layer: _Layer,
        positions: int,
        distances: Tensor | None,
    ) -> Attention:
        """Returns the attention of a layer. ``tables`` has the index in `Program.turns` of each kind of rotary
        positions."""
        turned, heads = 0, self.base.config.num_attention_heads
        summands = 1 + len({"c2p", "p2c"} & set(getattr(layer.matrices[0][0], "pos_att_type", ())))
        size = layer.panels()[1].inputs // heads
        if hasattr(self.base, "rotary_emb"):
            if layer.kind not in tables:
                tables[layer.kind] = len(program.turns)
                program.turns.append(turns_of(self.base.rotary_emb, positions, *layer.kind))
            turned = 2 * program.turns[tables[layer.kind]][0].shape[1]
        return Attention.plain(
            heads,
            size,
            (size * summands) ** -0.5,
            turned=turned,
            table=tables.get(layer.kind, 0),
            window=layer.window,
            distances=distances,
            places=self._places(layer, positions),
        )


def _buckets(attention: Any, positions: int) -> Tensor:
    """Returns the buckets of all distances in DeBERTa, from keys far before a row to keys far behind it."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    behind, count = torch.arange(1 - positions, positions), attention.position_buckets
    if count <= 0:
        return behind
    buckets: Tensor = make_log_bucket_position(behind, count, attention.max_relative_positions)
    return buckets.long()


def _activation(config: Any) -> str:
    names = ("hidden_act", "hidden_activation", "activation")
    return str(next(getattr(config, name) for name in names if hasattr(config, name)))
