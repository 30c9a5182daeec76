"""Decoders of transformers as programs of the native library.

A family of decoders is a `Recipe`: which parts a layer has, and where its norms stand (Touvron et al. 2023, "LLaMA",
section 2.2, and its kin). Rotary positions (Su et al. 2021) turn dimensions in halves or in pairs. A model may add
biases, norms of heads, sliding windows, layers without positions, soft caps (Gemma Team 2024, "Gemma 2", section 2),
gates of attention's outputs, recurrent parts, and factors of embeddings, sums and logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from .adapters import AdaptedMatrix, AdapterSlots
from .by_layer import LayerEmbeddings, pack_by_layer, unknown_by_layer
from .decoder_layers import DecoderLayer, found
from .experts import QUICK, ExpertsWriter, PackedExperts, answers_of, are_known, left_in, sizes_of
from .latent import LatentWriter, unknown_latent
from .library import ACTIVATIONS, Ending
from .panels import PANEL, Panels
from .parts import (
    epsilon_of,
    gain_of,
    is_layer_norm,
    norm_of,
    pack_linears,
    pack_words,
    plain,
    turned,
    unknown_parts,
    width_of,
)
from .program import MULTIPLE, Attention, Normed, Program
from .recipes import FAMILIES, RECIPES, Recipe
from .recurrences import Gate
from .recurrent import Rooms

_ADAPTED = frozenset({"read", "out", "widen", "narrow", "enter", "leave"})  # matrices, by `DecoderLayer.matrices`

MODEL_TYPES = frozenset(FAMILIES)
"""Model types of configurations whose models have such layers."""


@frozen(eq=False)
class CausalDecoder:
    """The parts of a causal decoder of transformers.

    Args:
        module: the whole model.
        language: the part of ``module`` that is the decoder; equal to ``module`` if the model reads text alone.
        windows: for each layer, the number of positions that a row attends to; ``None``: all.
        deeper: the number of layers to whose outputs items add something, see `Family.deeper`.
    """

    module: Any
    language: Any
    windows: Sequence[int | None]
    deeper: int = 0

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
    def recipe(self) -> Recipe | None:
        """The recipe of the model, which is that of its layers. If these are of two classes, their recipes agree on
        what is no part of a layer. ``None``: they are unknown."""
        kinds = self._kinds()
        known = [recipe for kind, recipe in RECIPES.items() if kind in kinds]
        return known[0] if known and len(known) == len(kinds) else None

    def _kinds(self) -> set[str]:
        """Returns the classes of the layers."""
        paths = {recipe.layers for recipe in RECIPES.values()}
        return {type(layer).__name__ for path in paths for layer in found(self.base, path) or ()}

    @property
    def layers(self) -> Iterator[DecoderLayer]:
        """The layers, whose recipe is known."""
        recipe, heads = self.recipe, getattr(self.config, "num_attention_heads", 0)
        assert recipe is not None, "`unknown` gives the reason"
        modules = attrgetter(recipe.layers)(self.base)
        return (DecoderLayer(module, RECIPES[type(module).__name__], heads) for module in modules)

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all layers, one layer after the other, and the head."""
        head = self.head
        own = [linear for layer in self.layers for group in layer.groups.values() for linear in group]
        return own + ([] if head is None else [head])

    @property
    def activation(self) -> str:
        """The activation of the feed-forward parts. LFM2 has no setting for it."""
        assert self.recipe is not None, "`unknown` gives the reason"
        return str(getattr(self.config, self.recipe.activation, "silu"))

    def unknown(self) -> str | None:
        """Returns the reason why the decoder cannot be a program; ``None``: it can."""
        base, config, recipe, names = self.base, self.config, self.recipe, self._kinds()
        if recipe is None or len(self.windows) != len(list(self.layers)):
            return f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(sorted(RECIPES))}"
        layers = list(self.layers)
        gates = [layer.gate for layer in layers if layer.gate is not None]
        experts = [layer.experts for layer in layers if layer.experts is not None]
        parts = self.activation, (*self.linears, *gates), self.module.get_input_embeddings()
        if others := unknown_parts(base, *parts):
            return others
        if not all(map(are_known, experts)):
            return "its linear layers are not torch's"
        if any(getattr(one, "limit", None) is not None and getattr(one, "alpha", QUICK) != QUICK for one in experts):
            return f"its gates have another swiglu_alpha than {QUICK}"
        routers = [layer.router for layer in layers if layer.experts is not None]
        if any(left_in(router) < router.top_k for router in routers):
            return "its experts are chosen from groups that have fewer"
        if others := unknown_by_layer(base, layers[0].module):
            return others
        if recipe.latent and (others := unknown_latent(layers[0].attention)):
            return others
        if getattr(config, "clip_qkv", None) is not None:
            return "its queries, keys and values are clipped"
        if any(
            len({hasattr(one, "scales") for one in group}) > 1 for layer in layers for group in layer.groups.values()
        ):
            return "its linear layers are in int8 in part"
        if any(norm is not None and is_layer_norm(norm) for layer in layers for norm in layer.head_norms):
            return "its heads have layer norms"
        last = found(base, recipe.last_norm)
        if any(getattr(norm, "weight", None) is None for norm in (last, *filter(None, layers[0].norms))):
            return "its norms have no weights, or there is none behind the layers"
        hidden = config.hidden_size
        if hidden % MULTIPLE or getattr(config, "word_embed_proj_dim", hidden) != hidden:
            return f"its width is {hidden}; known: multiples of {MULTIPLE}, which embeddings have, too"
        widths = [sizes_of(one)[1] for one in experts]
        widths += [width_of(layer.groups["narrow"][0]) for layer in layers if layer.dense is not None]
        if recipe.gated and (odd := [width for width in widths if width % PANEL]):
            return f"its feed-forward part has a width of {odd[0]}; known: multiples of {PANEL}"
        return next(filter(None, map(_unknown_mixer, layers)), None)

    def pack(self, *, int8: bool = False, answering: bool = False) -> list[Tensor]:
        """Replaces the linear layers and the embedding of the decoder by packed matrices, one after the other: at no
        time is more than one matrix held twice. Returns what `answers` would return before: those of transformers' own
        experts.

        Args:
            int8: quantize the matrices.
            answering: compute the answers; otherwise none are returned.
        """
        pack_words(self.module, self.module.get_input_embeddings(), self.head, int8=int8)  # the largest
        pack_by_layer(self.module, self.base, int8=int8)
        return self.pack_layers(int8=int8, answering=answering)

    def pack_layers(self, *, int8: bool = False, answering: bool = False) -> list[Tensor]:
        """Packs the layers alone, as `pack` does."""
        answers = list[Tensor]()
        for layer in self.layers:
            for kind, (parent, names) in layer.matrices.items():
                pack_linears(parent, names, int8=int8, order=layer.order(kind))
            if layer.experts is not None:  # what chooses or weighs experts stays exact
                answers += answers_of(layer.experts, self.base.dtype) if answering else ()
                layer.feed.experts = PackedExperts(layer.experts, int8=int8)
                panels = Panels.of(layer.router.weight.detach(), getattr(layer.router, "bias", None))
                layer.router.register_buffer("packed", panels.packed)
                layer.router.register_buffer("packed_bias", panels.bias)
            if layer.gate is not None:
                pack_linears(layer.feed, ("shared_expert_gate",))
        return answers

    def answers(self) -> list[Tensor]:
        """Returns what each expert of each layer computes of a row of its own."""
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        return [answer for one in experts for answer in answers_of(one, self.base.dtype)]

    def program(self, positions: int, adapters: AdapterSlots | None = None) -> Program:
        """Writes the program of the decoder, which must be packed. Without a head the program ends with the last hidden
        states.

        Args:
            positions: the largest number of positions of a sequence.
            adapters: of rows; ``None``: rows have none.
        """
        recipe = self.recipe
        assert recipe is not None, "`unknown` gives the reason"
        return ProgramWriter(self, recipe, positions, adapters).write()

    def adapted(self) -> list[AdaptedMatrix]:
        """Returns the matrices that adapters may change. They must be packed."""
        names = {id(module): name for name, module in self.module.named_modules()}
        found = list[AdaptedMatrix]()
        for layer in self.layers:
            for kind in _ADAPTED - ({"read"} if layer.recipe.latent else set()):
                if linears := layer.groups.get(kind):
                    parts = tuple((names[id(linear)], linear.out_features) for linear in linears)
                    places = [linear.places for linear in linears if linear.places is not None]
                    order = torch.cat(places).argsort() if places else None
                    found.append(AdaptedMatrix(linears[0], parts, linears[0].in_features, order))
        return found


@define(eq=False)
class ProgramWriter:
    """A writer of the program of one decoder.

    Hidden states are kept without the factor of the embeddings, by which no norm of them is changed but for its
    epsilon. So embeddings need no operation of their own, wherever they come from."""

    decoder: CausalDecoder
    recipe: Recipe
    positions: int
    adapters: AdapterSlots | None = None
    program: Program = field(factory=Program, init=False)
    rooms: Rooms = field(init=False)
    written: dict[str, int] = field(factory=dict, init=False)  # the last layer of each kind that has keys and values

    @rooms.default
    def _shared(self) -> Rooms:
        return Rooms(self.program)

    @cached_property
    def attentions(self) -> dict[int, Attention]:
        """The attention of each layer that has one."""
        layers = enumerate(self.decoder.layers)
        return {index: self._attention(index, layer) for index, layer in layers if layer.attention is not None}

    @cached_property
    def _attended(self) -> tuple[int, int]:
        """The buffers of queries, keys, values and what else is made with them, and of what is attended. They have
        room for those of each layer."""
        layers = [
            (layer, each) for index, layer in enumerate(self.decoder.layers) if (each := self.attentions.get(index))
        ]
        own = [0 if layer.recipe.latent else layer.panels()["read"].outputs for layer, _ in layers]
        split = max(*own, *(each.width for _, each in layers))
        return self.rooms("split", split), self.rooms(
            "attended", max(layer.panels()["out"].inputs for layer, _ in layers)
        )

    @property
    def latent(self) -> LatentWriter:
        """The writer of latent attention."""
        return LatentWriter(self.program, self.rooms)

    @property
    def experts(self) -> ExpertsWriter:
        """The writer of experts."""
        return ExpertsWriter(self.program, self.rooms)

    def write(self) -> Program:
        base, config, program = self.decoder.base, self.decoder.config, self.program
        layers = list(self.decoder.layers)
        program.kept = max((each.kept for layer in layers if (each := layer.recurrent) is not None), default=0)
        hidden = self.enter()
        entering = LayerEmbeddings.write(program, base, hidden)
        for index, layer in enumerate(layers):
            first, behind, second, last = layer.norms
            fed: dict[str, Any] = {"norm": self._norm(second), "activation": ACTIVATIONS[self.decoder.activation]}
            inner = self._widen(layer, hidden, fed) if layer.is_parallel else None
            for made, kind, scale in self._mixed(index, layer, hidden, self._norm(first)):
                self._add(made, hidden, layer, kind, behind, scale=scale)
            inner = self._widen(layer, hidden, fed) if inner is None else inner
            opened = None if layer.experts is None else self.experts.write(layer, hidden, fed, self._scale)
            if inner is not None:
                scale = float(getattr(layer.dense, "down_multiplier", 1.0))
                self._add(inner, hidden, layer, "narrow", last, opened, scale=scale)
            if index < self.decoder.deeper:
                program.add_given(hidden, 1 / self._setting(self.recipe.embeddings_by))
            entering.write_layer(
                index, layer.module, hidden, self.rooms("summand", config.hidden_size), fed["activation"]
            )
        self.leave(hidden)
        return program

    def leave(self, hidden: int) -> None:
        """Writes what comes behind the layers."""
        base, config, program, recipe = self.decoder.base, self.decoder.config, self.program, self.recipe
        end, head = program.buffer(config.hidden_size), self.decoder.head
        final = self._norm(attrgetter(recipe.last_norm)(base))
        assert final is not None, "a decoder ends with a norm"
        program.norm(hidden, end, final, wanted=True)
        if head is not None:
            cap = config.final_logit_softcapping if recipe.caps else None  # others ignore what a file may say
            scale = self._setting(recipe.logits_by) / self._setting(recipe.logits_over)
            panels, program.has_head, program.chooses = self.choices(head.panels()), True, True
            logits = program.buffer(panels.outputs)
            ending = Ending.CAPPED if cap else Ending.STORE
            program.linear(end, logits, panels, ending, cap=cap or 0.0, scale=scale, wanted=True)

    def enter(self) -> int:
        """Writes what comes before the layers. Returns the buffer of hidden states."""
        hidden, embedding = (
            self.program.buffer(self.decoder.config.hidden_size),
            self.decoder.module.get_input_embeddings(),
        )
        self.program.look_up(hidden, embedding.panels(), embedding.scale, self._places())
        return hidden

    def choices(self, panels: Panels) -> Panels:
        """Returns the part of the head's matrix that logits are computed with."""
        return panels

    def _mixed(self, index: int, layer: DecoderLayer, hidden: int, norm: Normed | None) -> list[tuple[int, str, float]]:
        """Computes attention and the recurrent part of a layer, of the same hidden states. Returns for each its buffer,
        the matrix that reads the buffer, and the factor of what comes out."""
        program, panels, recurrent, made = self.program, layer.panels(), layer.recurrent, list[tuple[int, str, float]]()
        if layer.attention is not None:
            read, attention = panels["read"], self.attentions[index]
            split, attended = self._attended
            if layer.recipe.latent:
                self.latent.write(layer.attention, hidden, split, norm)
            else:
                scale = float(getattr(layer.module, "attention_in_multiplier", 1.0))
                self._linear(hidden, split, layer, "read", Ending.STORE, norm=norm, scale=scale)
            if not layer.recipe.latent and read.outputs < attention.width:  # values are what keys were made of
                first, own = attention.heads * attention.size, attention.kv_heads * attention.size
                program.copy(split, split, own, first=first, place=first + own)
            program.attend(split, attended, attention)
            self._open(layer, split, attended, attention)
            made.append((attended, "out", float(getattr(layer.module, "attn_out_multiplier", 1.0))))
        if recurrent is not None:
            enter = panels["enter"]
            entered = self.rooms("entered", recurrent.room(enter.outputs))
            self._linear(hidden, entered, layer, "enter", Ending.STORE, norm=norm)
            found = recurrent.write(program, self.rooms, entered)
            made.append((found, "leave", float(getattr(layer.module, "ssm_out_multiplier", 1.0))))
        return made

    def _open(self, layer: DecoderLayer, split: int, attended: int, attention: Attention) -> None:
        """Multiplies what is attended with its gates, if it has some: they are behind queries, keys and values."""
        first = attention.width
        if layer.recipe.latent or layer.panels()["read"].outputs <= first:
            return
        told: dict[str, Any] = {"activation": ACTIVATIONS["sigmoid"], "whole": not layer.recipe.opens_numbers}
        gate = Gate(heads=attention.heads, size=attention.size, first=first, **told)
        self.program.gate(attended, attended, split, gate)

    def _widen(self, layer: DecoderLayer, hidden: int, told: Mapping[str, Any]) -> int | None:
        """Computes the first half of a dense feed-forward part; returns its buffer. ``None``: there is none."""
        if layer.dense is None:
            return None
        panels, ending = layer.panels(), Ending.GATED if layer.recipe.gated else Ending.ACTIVATED
        inner, by = self.rooms("inner", panels["narrow"].inputs), float(getattr(layer.dense, "gate_multiplier", 1.0))
        self._linear(hidden, inner, layer, "widen", ending, gates_by=by, **told)
        return inner

    @property
    def _scale(self) -> float:
        """The factor of what is added to the hidden states."""
        return self._setting(self.recipe.residuals_by) / self._setting(self.recipe.embeddings_by)

    def _setting(self, name: str) -> float:
        """Returns a factor of the configuration, or of all layers; 1 if there is no ``name``."""
        if not name:
            return 1.0
        config = self.decoder.config
        return float(getattr(config if hasattr(config, name) else next(self.decoder.layers).module, name))

    def _places(self) -> Tensor | None:
        """Returns the embeddings of positions, float32 [positions, hidden]; ``None``: the model has none."""
        if not self.recipe.positions:
            return None
        module = attrgetter(self.recipe.positions)(self.decoder.base)
        own = plain(module.weight[getattr(module, "offset", 0) :][: self.positions])
        return functional.pad(own, (0, 0, 0, self.positions - len(own)))  # comparisons may have more

    def _norm(self, module: Any) -> Normed | None:
        """Returns a norm of hidden states; ``None``: there is none."""
        if module is None:
            return None
        norm = norm_of(module)
        return evolve(norm, epsilon=norm.epsilon / self._setting(self.recipe.embeddings_by) ** 2)

    def _linear(self, source: int, to: int, layer: DecoderLayer, kind: str, ending: int, **told: Any) -> None:
        """Computes a linear layer of all rows, and before it what adapters add to its outputs."""
        adapters, module = self.adapters, layer.groups[kind][0]
        if adapters is not None and kind in _ADAPTED:
            told["others"] = adapters.write(self.program, self.rooms, module, source, told.get("norm"))
        self.program.linear(source, to, module.panels(), ending, **told)

    def _add(
        self,
        source: int,
        hidden: int,
        layer: DecoderLayer,
        kind: str,
        norm: Any,
        opened: int | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """Adds the outputs of a linear layer for the buffer ``source`` to the hidden states, normalized if there is a
        ``norm``, or times the number in the buffer ``opened``."""
        scale *= self._scale
        if norm is None and opened is None:
            self._linear(source, hidden, layer, kind, Ending.ADD, scale=scale)
            return
        width = self.program.widths[hidden]
        summand = self.rooms("summand", width)
        self._linear(source, summand, layer, kind, Ending.STORE)
        if opened is None:
            last = norm_of(norm)
            self.program.norm(summand, hidden, evolve(last, gain=last.gain * scale), add=True)
        else:
            self.program.mix(summand, hidden, opened, asked=1, size=width, scale=scale)

    def _attention(self, index: int, layer: DecoderLayer) -> Attention:
        recipe, attention, config = layer.recipe, layer.attention, self.decoder.config
        out, heads, query_norm, key_norm = layer.panels()["out"], layer.heads, *layer.head_norms
        size, keys = out.inputs // heads, layer.groups["read"][1:2]
        joined = (layer.panels()["read"].outputs - out.inputs) // 2  # queries, keys and values are one layer
        kv_heads, value_size = (keys[0].out_features if keys else joined) // size, size
        paired, turned_from, pages = recipe.paired, 0, index
        kind, reads = str(getattr(attention, "layer_type", "")), recipe.shares and not keys
        if recipe.shares:
            kv_heads = heads // attention.num_key_value_groups
            self.written[kind] = pages = self.written[kind] if reads else index
        if recipe.latent:
            size, kv_heads, turned_from = attention.qk_head_dim, heads, attention.qk_nope_head_dim
            paired = bool(getattr(config, "rope_interleave", paired))
        query_gain = None if query_norm is None else gain_of(query_norm)
        return Attention(
            layer=pages,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            value_size=value_size,
            turned_from=turned_from,
            scale=float(attention.scaling) * float(getattr(attention, "key_multiplier", 1.0)),
            paired=paired,
            value_gain=torch.ones(value_size, dtype=torch.float32) if hasattr(attention, "v_norm") else None,
            reads=reads,
            sinks=None if getattr(attention, "sinks", None) is None else plain(attention.sinks),
            window=self.decoder.windows[index] or 0,
            soft_cap=float(attention.attn_logit_softcapping or 0.0) if recipe.caps_scores else 0.0,
            epsilon=0.0 if query_norm is None else epsilon_of(query_norm),
            query_gain=query_gain,
            key_gain=None if key_norm is None else gain_of(key_norm),
            together=query_gain is not None and len(query_gain) != size,
            factors=self._factors() if recipe.by_position else None,
            **self._turns(layer, index),
        )

    def _turns(self, layer: DecoderLayer, index: int) -> dict[str, Any]:
        """Returns the arguments of `Attention` for rotary positions."""
        recipe, config, base = layer.recipe, self.decoder.config, self.decoder.base
        if not recipe.is_turned(layer.attention):
            return {}
        if recipe.by_theta:
            theta = config.layer_rope_theta[index]
            own = [one for one in base.rotary_embs if one.config.rope_parameters["rope_theta"] == theta]
            return turned(self.program, base, self.positions, str(theta), rotary=own[0]) if own else {}
        kinds = getattr(config, "layer_types", None) if recipe.by_kind else None
        kind = () if kinds is None else (kinds[index],)
        return turned(self.program, base, self.positions, *kind, repeated=recipe.repeated, once=recipe.once)

    def _factors(self) -> Tensor:
        """Returns the numbers by which queries are multiplied, float32 [positions]."""
        told = self.decoder.config.rope_parameters
        far = torch.floor(torch.arange(self.positions) / told["original_max_position_embeddings"])
        return plain(1 + told["llama_4_scaling_beta"] * torch.log(1 + far))


def _unknown_mixer(layer: DecoderLayer) -> str | None:
    """Returns the reason why the attention or the recurrent part of a layer is unknown; ``None``: it is known."""
    if layer.attention is None and layer.recurrent is None and layer.dense is None and layer.experts is None:
        return f"a part of its layers is unknown: {', '.join(type(one).__name__ for one in layer.module.children())}"
    biased = layer.attention is not None and any(one.bias is not None for one in layer.groups["read"])
    if biased and getattr(layer.module, "attention_in_multiplier", 1.0) != 1.0:
        return "its attention has both biases and a factor"
    return None if layer.recurrent is None else layer.recurrent.unknown()
