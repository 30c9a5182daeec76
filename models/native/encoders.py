"""Encoders of texts (BERT and its kin; Devlin et al. 2019), whose modules have the names of transformers, as programs
of the native library.

A layer consists of attention and a feed-forward part, each with a residual sum and a norm. The norm follows the sum in
BERT, RoBERTa, DistilBERT, MPNet (Song et al. 2020), Nomic and GTE. It precedes attention or the feed-forward part in
ModernBERT (Warner et al. 2024), half of whose layers see a window. Positions are embeddings, rotary, or numbers that
are added to scores by distance. In DeBERTa (He et al. 2021) such a number depends on the query or the key, too. The
encoders of encoder-decoders are of both kinds: the norm follows the sum in BART, and precedes in mBART, Pegasus and T5.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from .crossed_decoder import embed
from .layers import WHISPER, Layer, Paths
from .library import ACTIVATIONS
from .panels import PANEL, Panels
from .parts import norm_of, pack_words, plain, turned, unknown_parts
from .program import MULTIPLE, Attention, Places, Program

MODEL_TYPES = frozenset(
    {
        *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet"),
        *("nomic_bert", "gte", "modernbert", "deberta-v2", "ernie", "eurobert"),
    }
)
"""Model types of configurations whose layers this module knows."""

_FARTHEST = 128  # from this distance on MPNet adds the same number


_BERT = (
    *("attention.output.dense", "intermediate.dense", "output.dense"),
    *("attention.output.LayerNorm", "output.LayerNorm"),
)
_NOMIC: Paths = (
    *("self_attn.q_proj k_proj v_proj", "self_attn.o_proj", "mlp.gate_proj up_proj", "mlp.down_proj"),
    *("post_attention_layernorm", "post_mlp_layernorm"),
)
_EURO: Paths = (*_NOMIC[:4], "input_layernorm", "post_attention_layernorm")
_T5: Paths = (
    *("layer.0.SelfAttention.q k v", "layer.0.SelfAttention.o"),
    *("layer.1.DenseReluDense.wi wi_0 wi_1", "layer.1.DenseReluDense.wo", "layer.0.layer_norm", "layer.1.layer_norm"),
)
CROSSED: dict[str, Paths] = {
    **dict.fromkeys(("BartEncoderLayer", "MBartEncoderLayer", "PegasusEncoderLayer"), WHISPER),
    **dict.fromkeys(("T5Block", "MT5Block"), _T5),
}
"""The layers of encoders in encoder-decoders, by their classes."""

_MODERN = "ModernBertEncoderLayer"
_AHEAD = {_MODERN, "EuroBertDecoderLayer", *CROSSED} - {"BartEncoderLayer"}
"""Layers whose norms precede attention and the feed-forward part."""

_KINDS: dict[str, Paths] = {
    **dict.fromkeys(
        ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer", "ErnieLayer"),
        ("attention.self.query key value", *_BERT),
    ),
    "DebertaV2Layer": ("attention.self.query_proj key_proj value_proj", *_BERT),
    "TransformerBlock": (
        *("attention.q_lin k_lin v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
        *("sa_layer_norm", "output_layer_norm"),
    ),
    "MPNetLayer": (
        *("attention.attn.q k v", "attention.attn.o", "intermediate.dense", "output.dense"),
        *("attention.LayerNorm", "output.LayerNorm"),
    ),
    "NomicBertLayer": _NOMIC,
    "GteLayer": _NOMIC,
    "EuroBertDecoderLayer": _EURO,
    _MODERN: ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo", "attn_norm", "mlp_norm"),
    **CROSSED,
}


def _parts_of(layer: Any) -> Layer:
    name = type(layer).__name__
    return Layer.of(layer, _KINDS[name], ahead=name in _AHEAD)


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
        return list(next((getattr(holder, name) for name in ("layer", "layers", "block") if hasattr(holder, name)), ()))

    def unknown(self) -> str | None:
        """Returns the reason why the encoder cannot be a program; ``None``: it can."""
        base, config, names = self.base, self.base.config, {type(layer).__name__ for layer in self.layers}
        if len(names) != 1 or names - _KINDS.keys():
            return f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(_KINDS)}"
        embeddings = getattr(base, "embeddings", None)
        if hasattr(base, "embeddings_project") or getattr(embeddings, "embed_proj", None) is not None:
            return "its embeddings are narrower than its layers"
        if getattr(getattr(base, "encoder", None), "conv", None) is not None:
            return "it has a convolution"
        layers = list(map(_parts_of, self.layers))
        own = layers[0].matrices[0][0]
        if getattr(own, "relative_attention", False):
            buckets = _buckets(own, config.max_position_embeddings)
            if bool((buckets.diff() < 0).any()):  # as if max_relative_positions is below position_buckets / 2
                return "the buckets of its distances are in no order"
        linears = [linear for layer in layers for linear in layer.linears]
        if others := unknown_parts(base, _activation(config), linears, self.module.get_input_embeddings()):
            return others
        joined = [[getattr(one, name) for name in names] for layer in layers for one, names in layer.matrices]
        if len({getattr(one, "out_features", 0) or len(one.weight) for one in joined[0]}) > 1:
            return "it has fewer heads of keys than of queries"
        if any(len({hasattr(one, "scales") for one in neighbours}) > 1 for neighbours in joined):
            return "its linear layers are in int8 in part"
        hidden, inner = config.hidden_size, layers[0].linears[-1].in_features
        if hidden % MULTIPLE or (layers[0].gated and inner % PANEL):
            return f"its widths are {hidden} and {inner}; known: multiples of {MULTIPLE}, and of {PANEL} with gates"
        return None

    def pack(self, *, int8: bool = False) -> None:
        """Replaces the linear layers and the embedding of the encoder by packed matrices, one after the other: at no
        time is more than one matrix held twice. Heads for classes are not replaced, and no embedding that a decoder has
        packed already."""
        for layer in self.layers:
            _parts_of(layer).pack(int8=int8)
        words = self.module.get_input_embeddings()
        if not hasattr(words, "panels"):
            pack_words(self.module, words, None, int8=int8)

    def program(self, positions: int) -> Program:
        """Writes the program of the encoder, which must be packed. The program ends with the last hidden states.

        Args:
            positions: the largest number of positions of a text.
        """
        program, config, layers = Program(), self.base.config, list(map(_parts_of, self.layers))
        buffers = layers[0].buffers(program)
        last, distances = program.buffer(config.hidden_size), self._distances()
        self._embed(program, buffers[0], positions)
        activation = ACTIVATIONS[_activation(config)]
        for layer in layers:
            attention = self._attention(program, layer, positions, distances)
            layer.write(program, buffers, attention, activation, last=layer is layers[-1])
        ends = (getattr(self.base, name, None) for name in ("final_norm", "layer_norm", "final_layer_norm", "norm"))
        final = next(filter(None, ends)) if layers[-1].ahead else layers[-1].norms[1]
        program.norm(buffers[0], last, norm_of(final), wanted=True)
        return program

    def _embed(self, program: Program, hidden: int, positions: int) -> None:
        """Adds the operations that compute embeddings of tokens as the encoder does."""
        if not hasattr(self.base, "embeddings"):
            embed(program, self.base, hidden, positions)
            return
        own, words = self.base.embeddings, self.module.get_input_embeddings()
        places, types = (getattr(own, name, None) for name in ("position_embeddings", "token_type_embeddings"))
        added = None
        if places is not None and places.padding_idx is None:
            added = plain(places.weight[:positions])
        elif places is not None:  # positions are counted behind that of the padding token, which may stand in a text
            program.uncounted = places.padding_idx
            added = plain(places.weight[places.padding_idx :][: positions + 1])
        kinds, tasks = None if types is None else plain(types.weight), getattr(own, "task_type_embeddings", None)
        if kinds is not None and tasks is not None:  # ERNIE's: each token has task 0
            kinds += plain(tasks.weight[:1])
        program.look_up(hidden, words.panels(), words.scale, added, kinds)
        program.norm(hidden, hidden, norm_of(own.LayerNorm if hasattr(own, "LayerNorm") else own.norm))

    def _distances(self) -> Tensor | None:
        """Returns the numbers that are added to scores by distance, [heads, 2 * farthest + 1]."""
        encoder: Any = getattr(self.base, "encoder", None)
        first = _parts_of(self.layers[0]).matrices[0][0]
        if hasattr(first, "compute_bias"):  # T5's
            most = first.relative_attention_max_distance
            return plain(first.compute_bias(1, 2 * most + 1, past_seen_tokens=most)[0, :, 0])
        if not hasattr(encoder, "relative_attention_bias"):
            return None
        buckets = encoder.relative_position_bucket(torch.arange(-_FARTHEST, _FARTHEST + 1))
        return plain(encoder.relative_attention_bias.weight[buckets].T)

    def _places(self, layer: Layer, positions: int) -> Places | None:
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

    def _attention(self, program: Program, layer: Layer, positions: int, distances: Tensor | None) -> Attention:
        heads = self.base.config.num_attention_heads
        summands = 1 + len({"c2p", "p2c"} & set(getattr(layer.matrices[0][0], "pos_att_type", ())))
        size = layer.panels()[1].inputs // heads
        return Attention.plain(
            heads,
            size,
            1.0 if _KINDS[type(self.layers[0]).__name__] is _T5 else (size * summands) ** -0.5,
            window=layer.window,
            distances=distances,
            places=self._places(layer, positions),
            **turned(program, self.base, positions, *layer.kind),
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
    names = ("hidden_act", "hidden_activation", "activation", "activation_function", "dense_act_fn")
    return str(next(getattr(config, name) for name in names if hasattr(config, name)))
