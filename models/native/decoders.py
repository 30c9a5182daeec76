"""Decoders of transformers as programs of the native library.

A layer consists of norm, attention, sum, norm, gated feed-forward part, sum (Touvron et al. 2023, "LLaMA", section
2.2), with rotary positions in halves (Su et al. 2021). A model may add biases, norms of each head, sliding windows,
layers without positions, norms before each sum, and soft caps (Gemma Team 2024, "Gemma 2", section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field, frozen

from .library import ACTIVATIONS, Ending
from .panels import PANEL, Panels
from .parts import epsilon_of, gain_of, is_known, norm_of, pack_linears, pack_words, scale_of, turns_of, unknown_turns
from .program import MULTIPLE, Attention, Program

_PLAIN = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_JOINED = frozenset({"Phi3DecoderLayer"})  # queries, keys and values are one matrix already, gates and values another
_NORMED = frozenset({"Gemma2DecoderLayer", "Gemma3DecoderLayer"})  # with norms before each sum; stored gains are 1 less
_LAYERS = _PLAIN | _JOINED | _NORMED | {"SmolLM3DecoderLayer"}
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gemma3_text", "smollm3"})
"""Model types of configurations whose models have such layers."""


@frozen(eq=False)
class CausalDecoder:
    """The parts of a causal decoder of transformers.

    Args:
        module: the whole model.
        language: the part of ``module`` that is the decoder; equal to ``module`` if the model reads text alone.
        windows: for each layer, the number of positions that a row attends to; ``None``: all.
    """

    module: Any
    language: Any
    windows: Sequence[int | None]

    @property
    def base(self) -> Any:
        """The module that has the layers."""
        return self.language.base_model

    @property
    def config(self) -> Any:
        """The decoder's configuration."""
        return self.base.config

    @property
    def head(self) -> Any:
        """The module that computes logits from the last hidden states; ``None``: the model has none."""
        return getattr(self.module, "get_output_embeddings", lambda: None)()

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all layers, one layer after the other, and the head."""
        head = self.head
        own = [each for each in self.base.layers.modules() if type(each).__name__.endswith("Linear")]
        return own + ([] if head is None else [head])

    def unknown(self) -> str | None:
        """Returns the reason why the decoder cannot be a program; ``None``: it can."""
        base, config = self.base, self.config
        own = list(getattr(base, "layers", ()))
        names = {type(layer).__name__ for layer in own}
        if len(own) != len(self.windows) or len(names) != 1 or names - _LAYERS:
            return f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(sorted(_LAYERS))}"
        if _activation(base) not in ACTIVATIONS:
            return f"its activation is {_activation(base)}; known: {', '.join(ACTIVATIONS)}"
        if others := unknown_turns(config):
            return others
        if not all(map(is_known, self.linears)):
            return "its linear layers are not torch's"
        if any(len({hasattr(one, "scales") for one in group}) > 1 for layer in own for group in _neighbours(layer)):
            return "its linear layers are in int8 in part"
        if scale_of(self.module.get_input_embeddings()) is None:
            return f"its embedding is a {type(self.module.get_input_embeddings()).__name__}; known: torch's"
        widths = config.hidden_size, config.intermediate_size
        if widths[0] % MULTIPLE or widths[1] % PANEL:
            return f"its widths are {widths[0]} and {widths[1]}; known: multiples of {MULTIPLE} and {PANEL}"
        return None

    def pack(self, *, int8: bool = False) -> None:
        """Replaces the linear layers and the embedding of the decoder by packed matrices, one after the other: at no
        time is more than one matrix held twice.

        Args:
            int8: quantize the matrices.
        """
        for layer in self.base.layers:
            attention, feed = layer.self_attn, layer.mlp
            for parent, names in (
                (attention, _read_by(attention)),
                (attention, ("o_proj",)),
                (feed, _gates_of(feed)),
                (feed, ("down_proj",)),
            ):
                pack_linears(parent, names, int8=int8)
        pack_words(self.module, self.module.get_input_embeddings(), self.head, int8=int8)

    def program(self, positions: int) -> Program:
        """Writes the program of the decoder, which must be packed. Without a head the program ends with the last hidden
        states.

        Args:
            positions: the largest number of positions of a sequence.
        """
        return _ProgramWriter(self, positions).write()


@define(eq=False)
class _ProgramWriter:
    """A writer of the program of one decoder."""

    decoder: CausalDecoder
    positions: int
    program: Program = field(factory=Program, init=False)
    tables: dict[str, tuple[int, int]] = field(factory=dict, init=False)  # see `_table`, by kind of layer

    def write(self) -> Program:
        base, config, program = self.decoder.base, self.decoder.config, self.program
        heads, kv_heads, size = (
            config.num_attention_heads,
            config.num_key_value_heads,
            int(base.layers[0].self_attn.head_dim),
        )
        hidden, split = program.buffer(config.hidden_size), program.buffer((heads + 2 * kv_heads) * size)
        attended, inner = program.buffer(heads * size), program.buffer(config.intermediate_size)
        summand = program.buffer(config.hidden_size)
        embedding = self.decoder.module.get_input_embeddings()
        program.look_up(hidden, embedding.panels(), embedding.scale)
        for index, layer in enumerate(base.layers):
            attention, feed = layer.self_attn, layer.mlp
            normed = type(layer).__name__ in _NORMED
            inputs = _first_of(attention, _read_by(attention))
            before = layer.pre_feedforward_layernorm if normed else layer.post_attention_layernorm
            program.linear(hidden, split, inputs, Ending.STORE, norm=norm_of(layer.input_layernorm))
            program.attend(split, attended, self._attention(index, attention, heads, kv_heads, size))
            self._add(attended, hidden, summand, attention.o_proj, layer.post_attention_layernorm if normed else None)
            activation = ACTIVATIONS[_activation(base)]
            gates = _first_of(feed, _gates_of(feed))
            program.linear(hidden, inner, gates, Ending.GATED, norm=norm_of(before), activation=activation)
            self._add(inner, hidden, summand, feed.down_proj, layer.post_feedforward_layernorm if normed else None)
        last, head = program.buffer(config.hidden_size), self.decoder.head
        program.norm(hidden, last, norm_of(base.norm), wanted=True)
        if head is not None:
            caps = type(base.layers[0]).__name__ in _NORMED  # others ignore what a file may say
            cap = self.decoder.config.final_logit_softcapping if caps else None
            ending = Ending.CAPPED if cap else Ending.STORE
            panels, program.has_head, program.chooses = head.panels(), True, True
            program.linear(last, program.buffer(panels.outputs), panels, ending, cap=cap or 0.0, wanted=True)
        return program

    def _add(self, source: int, hidden: int, summand: int, linear: Any, norm: Any) -> None:
        """Adds the outputs of ``linear`` for the buffer ``source`` to the hidden states, normalized if there is a
        ``norm``."""
        if norm is None:
            self.program.linear(source, hidden, linear.panels(), Ending.ADD)
            return
        self.program.linear(source, summand, linear.panels(), Ending.STORE)
        self.program.norm(summand, hidden, norm_of(norm), add=True)

    def _attention(self, index: int, attention: Any, heads: int, kv_heads: int, size: int) -> Attention:
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        turns, caps = bool(getattr(attention, "use_rope", True)), type(attention).__name__ == "Gemma2Attention"
        table, turned = self._table(getattr(self.decoder.config, "layer_types", None), index) if turns else (0, 0)
        return Attention(
            layer=index,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            scale=float(attention.scaling),
            turned=turned,
            table=table,
            window=self.decoder.windows[index] or 0,
            soft_cap=float(attention.attn_logit_softcapping or 0.0) if caps else 0.0,
            epsilon=0.0 if query_norm is None else epsilon_of(query_norm),
            query_gain=None if query_norm is None else gain_of(query_norm),
            key_gain=None if key_norm is None else gain_of(key_norm),
        )

    def _table(self, kinds: Sequence[str] | None, index: int) -> tuple[int, int]:
        """Returns the index of a layer's cosines and sines in `Program.turns`, and the number of dimensions of a head
        that they turn."""
        rotary = self.decoder.base.rotary_emb
        several = type(rotary).__name__ == "Gemma3RotaryEmbedding"  # one for each kind of layer
        kind = kinds[index] if several and kinds is not None else ""
        if kind not in self.tables:
            self.program.turns.append(turns_of(rotary, self.positions, *([kind] if several else [])))
            half = self.program.turns[-1][0].shape[1]
            self.tables[kind] = len(self.program.turns) - 1, 2 * half
        return self.tables[kind]


def _read_by(attention: Any) -> tuple[str, ...]:
    return ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")


def _gates_of(feed: Any) -> tuple[str, ...]:
    return ("gate_up_proj",) if hasattr(feed, "gate_up_proj") else ("gate_proj", "up_proj")


def _neighbours(layer: Any) -> tuple[list[Any], list[Any]]:
    """Returns two groups of linear layers; each group becomes one matrix."""
    attention, feed = layer.self_attn, layer.mlp
    return [getattr(attention, name) for name in _read_by(attention)], [getattr(feed, name) for name in _gates_of(feed)]


def _activation(base: Any) -> str:
    config = base.config
    return str(config.hidden_activation if type(base.layers[0]).__name__ in _NORMED else config.hidden_act)


def _first_of(parent: Any, names: Sequence[str]) -> Panels:
    """Returns the matrix that the linear layers ``names`` of ``parent`` share."""
    panels: Panels = getattr(parent, names[0]).panels()
    return panels
