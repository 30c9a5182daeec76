"""Decoders of transformers as programs of the native library.

A family of decoders is a `Recipe`: which parts a layer has, and where its norms stand (Touvron et al. 2023, "LLaMA",
section 2.2, and its kin). Rotary positions (Su et al. 2021) turn dimensions in halves or in pairs. A model may add
biases, norms of heads, sliding windows, layers without positions, soft caps (Gemma Team 2024, "Gemma 2", section 2),
and factors of embeddings, sums and logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from .library import ACTIVATIONS, Ending
from .panels import PANEL, Panels
from .parts import (
    PackedExperts,
    answers_of,
    are_known,
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

MODEL_TYPES = frozenset(FAMILIES)
"""Model types of configurations whose models have such layers."""


@frozen(eq=False)
class _Layer:
    """The parts of one layer, as its recipe names them."""

    module: Any
    recipe: Recipe

    @property
    def attention(self) -> Any:
        return getattr(self.module, self.recipe.attention)

    @property
    def feed(self) -> Any:
        return getattr(self.module, self.recipe.feed) if self.recipe.feed else self.module

    @property
    def experts(self) -> Any:
        """The experts of the feed-forward part; ``None``: it has none."""
        return getattr(self.feed, "experts", None)

    @property
    def router(self) -> Any:
        """The module that chooses experts."""
        return getattr(self.feed, self.recipe.router)

    @property
    def gate(self) -> Any:
        """The linear layer that says how much of the shared expert's outputs is added; ``None``: all of them."""
        return getattr(self.feed, "shared_expert_gate", None)

    @property
    def dense(self) -> Any:
        """The module that computes all rows: the feed-forward part, or the shared expert; ``None``: there is none."""
        return self.feed if self.experts is None else _found(self.module, self.recipe.shared, None)

    @property
    def matrices(self) -> tuple[tuple[Any, tuple[str, ...]], ...]:
        """The packed matrices: for each, a module and the names of its linear layers that the matrix joins."""
        recipe, attention, dense = self.recipe, self.attention, self.dense
        found = ((attention, recipe.read), (attention, (recipe.out,)))
        return found if dense is None else (*found, (dense, recipe.widen), (dense, (recipe.narrow,)))

    @property
    def groups(self) -> list[list[Any]]:
        """The linear layers of each matrix."""
        return [[getattr(parent, name) for name in names] for parent, names in self.matrices]

    def panels(self) -> list[Panels]:
        """Returns the panels of each matrix. The matrices must be packed."""
        return [group[0].panels() for group in self.groups]

    @property
    def norms(self) -> list[Any]:
        """The norms before attention, before its sum, before the feed-forward part and before its sum; ``None``: there
        is none."""
        return [getattr(self.module, name) if name else None for name in self.recipe.norms]

    @property
    def head_norms(self) -> list[Any]:
        """The norms of queries and keys; ``None``: there are none."""
        return [getattr(self.attention, name, None) for name in self.recipe.head_norms]

    @property
    def is_parallel(self) -> bool:
        return bool(getattr(self.module, "use_parallel_residual", self.recipe.parallel))


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
    def recipe(self) -> Recipe | None:
        """The recipe of the layers; ``None``: they are unknown."""
        kinds = self._kinds()
        found = [recipe for kind, recipe in RECIPES.items() if kind in kinds]
        return found[0] if len(found) == 1 else None

    def _kinds(self) -> set[str]:
        """Returns the classes of the layers."""
        paths = {recipe.layers for recipe in RECIPES.values()}
        return {type(layer).__name__ for path in paths for layer in _found(self.base, path, ())}

    @property
    def layers(self) -> Iterator[_Layer]:
        """The layers, whose recipe is known."""
        recipe = self.recipe
        assert recipe is not None, "`unknown` gives the reason"
        return (_Layer(module, recipe) for module in attrgetter(recipe.layers)(self.base))

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all layers, one layer after the other, and the head."""
        head = self.head
        own = [linear for layer in self.layers for group in layer.groups for linear in group]
        return own + ([] if head is None else [head])

    def unknown(self) -> str | None:
        """Returns the reason why the decoder cannot be a program; ``None``: it can."""
        base, config, recipe, names = self.base, self.config, self.recipe, self._kinds()
        if recipe is None or len(names) != 1 or len(self.windows) != len(list(self.layers)):
            return f"its layers are {', '.join(sorted(names)) or 'none'}; known: {', '.join(sorted(RECIPES))}"
        gates = [layer.gate for layer in self.layers if layer.gate is not None]
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        parts = getattr(config, recipe.activation), (*self.linears, *gates), self.module.get_input_embeddings()
        if others := unknown_parts(base, *parts):
            return others
        if not all(map(are_known, experts)):
            return "its linear layers are not torch's"
        if getattr(config, "n_group", None) not in {None, 1}:
            return "its experts are chosen by groups"
        if getattr(config, "clip_qkv", None) is not None:
            return "its queries, keys and values are clipped"
        if any(len({hasattr(one, "scales") for one in group}) > 1 for layer in self.layers for group in layer.groups):
            return "its linear layers are in int8 in part"
        if any(norm is not None and is_layer_norm(norm) for layer in self.layers for norm in layer.head_norms):
            return "its heads have layer norms"
        last = _found(base, recipe.last_norm, None)
        if any(getattr(norm, "weight", None) is None for norm in (last, *filter(None, next(self.layers).norms))):
            return "its norms have no weights, or there is none behind the layers"
        hidden = config.hidden_size
        if hidden % MULTIPLE or getattr(config, "word_embed_proj_dim", hidden) != hidden:
            return f"its width is {hidden}; known: multiples of {MULTIPLE}, which embeddings have, too"
        widths = [one.intermediate_dim for one in experts]
        widths += [width_of(group[0]) for layer in self.layers for group in layer.groups[3:]]
        if recipe.gated and (odd := [width for width in widths if width % PANEL]):
            return f"its feed-forward part has a width of {odd[0]}; known: multiples of {PANEL}"
        return None

    def pack(self, *, int8: bool = False, answering: bool = False) -> list[Tensor]:
        """Replaces the linear layers and the embedding of the decoder by packed matrices, one after the other: at no
        time is more than one matrix held twice. Returns what `answers` would return before: those of transformers' own
        experts.

        Args:
            int8: quantize the matrices.
            answering: compute the answers; otherwise none are returned.
        """
        answers = list[Tensor]()
        pack_words(self.module, self.module.get_input_embeddings(), self.head, int8=int8)  # the largest
        for layer in self.layers:
            for index, (parent, names) in enumerate(layer.matrices):
                heads = self.config.num_attention_heads if index == 0 and layer.recipe.in_heads else 0
                pack_linears(parent, names, int8=int8, heads=heads)
            if layer.experts is not None:  # what chooses or weighs experts stays exact
                answers += answers_of(layer.experts, self.base.dtype) if answering else ()
                layer.feed.experts = PackedExperts(layer.experts, int8=int8)
                layer.router.register_buffer("packed", Panels.of(layer.router.weight.detach()).packed)
            if layer.gate is not None:
                pack_linears(layer.feed, ("shared_expert_gate",))
        return answers

    def answers(self) -> list[Tensor]:
        """Returns what each expert of each layer computes of a row of its own."""
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        return [answer for one in experts for answer in answers_of(one, self.base.dtype)]

    def program(self, positions: int) -> Program:
        """Writes the program of the decoder, which must be packed. Without a head the program ends with the last hidden
        states.

        Args:
            positions: the largest number of positions of a sequence.
        """
        recipe = self.recipe
        assert recipe is not None, "`unknown` gives the reason"
        return _ProgramWriter(self, recipe, positions).write()


@define(eq=False)
class _ProgramWriter:
    """A writer of the program of one decoder.

    Hidden states are kept without the factor of the embeddings, by which no norm of them is changed but for its
    epsilon. So embeddings need no operation of their own, wherever they come from."""

    decoder: CausalDecoder
    recipe: Recipe
    positions: int
    program: Program = field(factory=Program, init=False)
    room: tuple[int, ...] = field(default=(), init=False)  # buffers of experts, see `_experts`

    def write(self) -> Program:
        base, config, program, recipe = self.decoder.base, self.decoder.config, self.program, self.recipe
        layers = list(self.decoder.layers)
        inputs, out, *_ = layers[0].panels()
        hidden, split = program.buffer(config.hidden_size), program.buffer(inputs.outputs)
        widths = [narrow.inputs for layer in layers for narrow in layer.panels()[3:]]
        attended, inner = program.buffer(out.inputs), program.buffer(max(widths, default=1))
        summand = program.buffer(config.hidden_size)
        embedding = self.decoder.module.get_input_embeddings()
        program.look_up(hidden, embedding.panels(), embedding.scale, self._places())
        activation = ACTIVATIONS[getattr(config, recipe.activation)]
        ending = Ending.GATED if recipe.gated else Ending.ACTIVATED
        for index, layer in enumerate(layers):
            inputs, out, *dense = layer.panels()
            first, behind, second, last = layer.norms
            told: dict[str, Any] = {"norm": self._norm(second), "activation": activation}
            program.linear(hidden, split, inputs, Ending.STORE, norm=self._norm(first))
            if layer.is_parallel:
                program.linear(hidden, inner, dense[0], ending, **told)
            program.attend(split, attended, self._attention(index, layer))
            self._add(attended, hidden, summand, out, behind)
            if dense and not layer.is_parallel:
                program.linear(hidden, inner, dense[0], ending, **told)
            opened = None if layer.experts is None else self._experts(layer, hidden, told)
            if dense:
                self._add(inner, hidden, summand, dense[1], last, opened)
        end, head = program.buffer(config.hidden_size), self.decoder.head
        final = self._norm(attrgetter(recipe.last_norm)(base))
        assert final is not None, "a decoder ends with a norm"
        program.norm(hidden, end, final, wanted=True)
        if head is not None:
            cap = config.final_logit_softcapping if recipe.caps else None  # others ignore what a file may say
            scale = self._setting(recipe.logits_by) / self._setting(recipe.logits_over)
            panels, program.has_head, program.chooses = head.panels(), True, True
            logits = program.buffer(panels.outputs)
            kind = Ending.CAPPED if cap else Ending.STORE
            program.linear(end, logits, panels, kind, cap=cap or 0.0, scale=scale, wanted=True)
        return program

    def _experts(self, layer: _Layer, hidden: int, told: dict[str, Any]) -> int | None:
        """Adds the outputs of a layer's experts to the hidden states. Returns the buffer of the shared expert's gate;
        ``None``: it has none."""
        program, router, experts, size = self.program, layer.router, layer.experts, self.decoder.config.hidden_size
        count, asked, width = router.num_experts, router.top_k, experts.intermediate_dim
        if not self.room:
            self.room = tuple(map(program.buffer, (count, asked, asked * width, asked * size, 1)))
        logits, chances, inners, outputs, opened = self.room
        added = _found(router, self.recipe.correction, _found(layer.feed, self.recipe.correction, None))
        program.linear(hidden, logits, Panels(count, size, router.packed, None), Ending.STORE, norm=told["norm"])
        program.route(
            logits,
            chances,
            asked,
            count,
            apart=self.recipe.apart,
            together=getattr(router, "norm_topk_prob", True),
            least=getattr(router, "norm_min", 0.0),
            added=None if added is None else plain(added.flatten()),
        )
        each = {"heads": asked, "kv_heads": count, "size": width}
        program.linear(hidden, inners, experts.gate_up_proj.panels(), Ending.GATED, **told, experts=each)
        each = {**each, "size": size, "distance_count": width}
        program.linear(inners, outputs, experts.down_proj.panels(), Ending.STORE, experts=each)
        if layer.gate is not None:
            gated = {**told, "activation": ACTIVATIONS["sigmoid"]}
            program.linear(hidden, opened, layer.gate.panels(), Ending.ACTIVATED, **gated)
        scale = self._scale * getattr(router, "routed_scaling_factor", 1.0)
        program.mix(outputs, hidden, chances, asked=asked, size=size, scale=scale)
        return None if layer.gate is None else opened

    @property
    def _scale(self) -> float:
        """The factor of what is added to the hidden states."""
        return self._setting(self.recipe.residuals_by) / self._setting(self.recipe.embeddings_by)

    def _setting(self, name: str) -> float:
        """Returns a factor of the configuration; 1 if there is no ``name``."""
        return float(getattr(self.decoder.config, name)) if name else 1.0

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

    def _add(
        self, source: int, hidden: int, summand: int, panels: Panels, norm: Any, opened: int | None = None
    ) -> None:
        """Adds the outputs of a linear layer for the buffer ``source`` to the hidden states, normalized if there is a
        ``norm``, or times the number in the buffer ``opened``."""
        if norm is None and opened is None:
            self.program.linear(source, hidden, panels, Ending.ADD, scale=self._scale)
            return
        self.program.linear(source, summand, panels, Ending.STORE)
        if opened is None:
            last = norm_of(norm)
            self.program.norm(summand, hidden, evolve(last, gain=last.gain * self._scale), add=True)
        else:
            self.program.mix(summand, hidden, opened, asked=1, size=self.program.widths[hidden], scale=self._scale)

    def _attention(self, index: int, layer: _Layer) -> Attention:
        recipe, attention, config = self.recipe, layer.attention, self.decoder.config
        inputs, out, *_ = layer.panels()
        size, query_norm, key_norm = out.inputs // config.num_attention_heads, *layer.head_norms
        kinds = getattr(config, "layer_types", None) if recipe.by_kind else None
        kind, turns = () if kinds is None else (kinds[index],), dict[str, Any]()
        if recipe.is_turned(attention):
            turns = turned(self.program, self.decoder.base, self.positions, *kind, repeated=recipe.repeated)
        query_gain = None if query_norm is None else gain_of(query_norm)
        return Attention(
            layer=index,
            heads=config.num_attention_heads,
            kv_heads=(inputs.outputs - out.inputs) // (2 * size),
            size=size,
            scale=float(attention.scaling),
            paired=recipe.paired,
            window=self.decoder.windows[index] or 0,
            soft_cap=float(attention.attn_logit_softcapping or 0.0) if recipe.caps_scores else 0.0,
            epsilon=0.0 if query_norm is None else epsilon_of(query_norm),
            query_gain=query_gain,
            key_gain=None if key_norm is None else gain_of(key_norm),
            together=query_gain is not None and len(query_gain) != size,
            factors=self._factors() if recipe.by_position else None,
            **turns,
        )

    def _factors(self) -> Tensor:
        """Returns the numbers by which queries are multiplied, float32 [positions]."""
        told = self.decoder.config.rope_parameters
        far = torch.floor(torch.arange(self.positions) / told["original_max_position_embeddings"])
        return plain(1 + told["llama_4_scaling_beta"] * torch.log(1 + far))


def _found(module: Any, path: str, default: Any) -> Any:
    """Returns what ``path`` names in ``module``; ``default`` if there is nothing."""
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return default
    return module
