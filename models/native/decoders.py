"""Decoders of transformers as programs of the native library.

Their layers are: norm, attention, sum, norm, gated feed-forward, sum (Touvron et al. 2023, "LLaMA", section 2.2), with
rotary positions in halves (Su et al. 2021), and perhaps biases, norms of each head, sliding windows, layers without
positions, norms before each sum too, and soft caps (Gemma Team 2024, "Gemma 2", section 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from .library import Ending
from .panels import Panels, stacked
from .program import MULTIPLE, Attention, Normed, Program

_PLAIN = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_JOINED = frozenset({"Phi3DecoderLayer"})  # queries, keys and values are one matrix already, gates and values another
_NORMED = frozenset({"Gemma2DecoderLayer", "Gemma3DecoderLayer"})  # before each sum, too; gains are one less
_LAYERS = _PLAIN | _JOINED | _NORMED | {"SmolLM3DecoderLayer"}
_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3}
_FIXED = frozenset({"default", "linear", "llama3", "yarn"})  # ways to turn that do not depend on a sequence's length


@frozen
class Unknown:
    """Why a model is no program."""

    reason: str


def program_of(module: Any, windows: Sequence[int | None], positions: int) -> Program | Unknown:
    """The program of a causal decoder of transformers with float weights, which are packed: ``module`` may be released.

    Args:
        windows: of each layer; ``None``: it sees all positions.
        positions: the most of a sequence.
    """
    if unknown := _unknown(module, len(windows)):
        return unknown
    return _Writer(module, windows, positions).write()


@define(eq=False)
class _Writer:
    """Writes the program of one module."""

    module: Any
    windows: Sequence[int | None]
    positions: int
    program: Program = field(factory=Program, init=False)
    tables: dict[str, tuple[int, int]] = field(factory=dict, init=False)  # of each kind of layer, with its dimensions

    def write(self) -> Program:
        base, config, program = self.module.base_model, self.module.config, self.program
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, _size(base)
        hidden, split = program.buffer(config.hidden_size), program.buffer((heads + 2 * kv_heads) * size)
        attended, inner = program.buffer(heads * size), program.buffer(config.intermediate_size)
        summand = program.buffer(config.hidden_size)
        for index, layer in enumerate(base.layers):
            attention, feed = layer.self_attn, layer.mlp
            normed = type(layer).__name__ in _NORMED
            before = layer.pre_feedforward_layernorm if normed else layer.post_attention_layernorm
            program.linear(hidden, split, _inputs_of(attention), Ending.STORE, norm=_norm(layer.input_layernorm))
            program.attend(split, attended, self._attention(index, attention, heads, kv_heads, size))
            self._add(attended, hidden, summand, attention.o_proj, layer.post_attention_layernorm if normed else None)
            activation = _ACTIVATIONS[_activation(config)]
            program.linear(hidden, inner, _gated_of(feed), Ending.GATED, norm=_norm(before), activation=activation)
            self._add(inner, hidden, summand, feed.down_proj, layer.post_feedforward_layernorm if normed else None)
        last, cap = program.buffer(config.hidden_size), getattr(config, "final_logit_softcapping", None)
        program.norm(hidden, last, _norm(base.norm), wanted=True)
        head = _stacked((self.module.get_output_embeddings(),))
        ending = Ending.CAPPED if cap else Ending.STORE
        program.linear(last, program.buffer(head.outputs), head, ending, cap=cap or 0.0, wanted=True)
        return program

    def _add(self, source: int, hidden: int, summand: int, linear: Any, norm: Any) -> None:
        """Adds what ``linear`` makes of a buffer to the hidden states, or the norm of it."""
        if norm is None:
            self.program.linear(source, hidden, _stacked((linear,)), Ending.ADD)
            return
        self.program.linear(source, summand, _stacked((linear,)), Ending.STORE)
        self.program.norm(summand, hidden, _norm(norm), add=True)

    def _attention(self, index: int, attention: Any, heads: int, kv_heads: int, size: int) -> Attention:
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        turns = bool(getattr(attention, "use_rope", True))
        table, turned = self._table(getattr(self.module.config, "layer_types", None), index) if turns else (0, 0)
        return Attention(
            layer=index,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            scale=float(attention.scaling),
            turned=turned,
            table=table,
            window=self.windows[index] or 0,
            soft_cap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
            epsilon=0.0 if query_norm is None else _epsilon(query_norm),
            query_gain=None if query_norm is None else _gain(query_norm),
            key_gain=None if key_norm is None else _gain(key_norm),
        )

    def _table(self, kinds: Sequence[str] | None, index: int) -> tuple[int, int]:
        """The number of the table of a layer's turns, and how many dimensions are turned by it."""
        rotary = self.module.base_model.rotary_emb
        several = type(rotary).__name__ == "Gemma3RotaryEmbedding"  # one for each kind of layer
        kind = kinds[index] if several and kinds is not None else ""
        if kind not in self.tables:
            asked = (torch.empty(1), torch.arange(self.positions)[None], *([kind] if several else []))
            cosines, sines = rotary(*asked)
            half = cosines.shape[-1] // 2
            self.program.turns.append((_plain(cosines[0, :, :half]), _plain(sines[0, :, :half])))
            self.tables[kind] = len(self.program.turns) - 1, 2 * half
        return self.tables[kind]


def _unknown(module: Any, layers: int) -> Unknown | None:
    base, config, head = module.base_model, module.config, module.get_output_embeddings()
    own = list(getattr(base, "layers", ()))
    names = {type(layer).__name__ for layer in own}
    if len(own) != layers or len(names) != 1 or names - _LAYERS:
        return Unknown(f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(sorted(_LAYERS))}")
    if _activation(config) not in _ACTIVATIONS:
        return Unknown(f"its activation is {_activation(config)}; known: {', '.join(_ACTIVATIONS)}")
    if others := _ways_to_turn(config) - _FIXED:
        return Unknown(f"its positions are turned by {', '.join(sorted(others))}; known: {', '.join(sorted(_FIXED))}")
    linears = [each for each in base.modules() if isinstance(each, nn.Linear)]
    if {type(each) for each in (*linears, head)} != {nn.Linear}:
        return Unknown("its linear layers are not torch's")
    widths = {config.hidden_size, config.intermediate_size, _size(base)}
    if any(width % MULTIPLE for width in widths) or config.intermediate_size % 32:
        return Unknown(f"its widths are {sorted(widths)}; known: multiples of {MULTIPLE}, the feed-forward's of 32")
    return None


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _ways_to_turn(config: Any) -> set[str]:
    """Each way that a layer's positions are turned."""
    told: Mapping[str, Any] = config.rope_parameters or {}
    each = [one for one in told.values() if isinstance(one, Mapping)] or [told]
    return {str(one.get("rope_type", "default")) for one in each}


def _size(base: Any) -> int:
    return int(base.layers[0].self_attn.head_dim)


def _inputs_of(attention: Any) -> Panels:
    """Queries, keys and values as one matrix."""
    joined = getattr(attention, "qkv_proj", None)
    return _stacked((attention.q_proj, attention.k_proj, attention.v_proj) if joined is None else (joined,))


def _gated_of(feed: Any) -> Panels:
    """Gates, and what they are multiplied with, as one matrix."""
    joined = getattr(feed, "gate_up_proj", None)
    return _stacked((feed.gate_proj, feed.up_proj) if joined is None else (joined,))


def _norm(module: Any) -> Normed:
    return Normed(gain=_gain(module), epsilon=_epsilon(module))


def _epsilon(module: Any) -> float:
    return float(module.eps if hasattr(module, "eps") else module.variance_epsilon)


def _gain(module: Any) -> Tensor:
    gain = _plain(module.weight)
    return gain.add_(1.0) if type(module).__name__ in {"Gemma2RMSNorm", "Gemma3RMSNorm"} else gain


def _stacked(modules: Sequence[Any]) -> Panels:
    biases = [None if each.bias is None else each.bias.detach() for each in modules]
    return stacked([each.weight.detach() for each in modules], biases)


def _plain(tensor: Tensor) -> Tensor:
    """A copy in float32, value by value."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()
