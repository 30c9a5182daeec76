"""Gemma 4's assistants: small models that propose tokens, each for one model (Google 2026, "gemma-4-E2B-it-assistant").

An assistant has no keys and values. Its layers read those of the model: each those of the last layer of its kind that
has some. It reads the hidden state that the last token was chosen from, and that token's embedding. Then it goes on
from its own hidden state and its own token, at the same position and with the same keys. Some assistants choose among
the tokens of the likeliest centroids alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from ...core.errors import CheckpointError
from .decoders import CausalDecoder, ProgramWriter
from .draft_head import DraftLayers
from .library import Ending, Kind
from .panels import Panels
from .parts import PackedLinear, norm_of, pack_linears
from .program import Program

_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")
_MASKED, _WORDS = "masked_embedding.", "model.embed_tokens.weight"


class Assistant(DraftLayers):
    """An assistant beside its model.

    Args:
        module: the whole model.
        language: the part of ``module`` that decodes text.
        config: the assistant's configuration.
        sources: for each kind of layers, the model's layer whose keys and values the assistant's layers read.
    """

    ordering: Tensor | None

    def __init__(self, module: Any, language: Any, config: Any, sources: Mapping[str, int]) -> None:
        super().__init__(module, language)
        base, text, width = language.base_model, config.get_text_config(), config.backbone_hidden_size
        text.num_kv_shared_layers = 0  # transformers 5.23 makes no layers of which all share keys and values
        self.config, self.sources, self.width, size = text, dict(sources), width, text.hidden_size
        self.layers = nn.ModuleList([type(base.layers[0])(text, index) for index in range(text.num_hidden_layers)])
        for layer in self.layers:
            for name in _KEYS:
                vars(layer.self_attn)["_modules"].pop(name, None)
        self.norm = type(base.norm)(size, eps=text.rms_norm_eps)
        self.from_words, self.from_hidden = (nn.Linear(width, size, bias=False) for _ in range(2))
        self.post_projection = nn.Linear(size, width, bias=False)
        with torch.device("meta"):
            self.head: Any = nn.Linear(size, text.vocab_size, bias=False)
        self.asked = config.centroid_intermediate_top_k
        self.register_buffer("ordering", None)
        if config.use_ordered_embeddings:
            self.centroids = nn.Linear(size, config.num_centroids, bias=False)
            self.ordering = torch.empty(text.vocab_size, dtype=torch.long)

    def get_output_embeddings(self) -> Any:
        """Returns the matrix of logits, which is the assistant's own."""
        return self.head

    def fill(self, stored: Mapping[str, Tensor], folder: Path) -> None:
        """Takes the weights that the checkpoint in ``folder`` has ``stored``, by their names in it.

        Raises:
            CheckpointError: they are not those of such an assistant.
        """
        weights = {name: one for name, one in stored.items() if not name.endswith(tuple(f"{n}.weight" for n in _KEYS))}
        words, joined = (
            weights.pop(_WORDS, None),
            weights.pop("pre_projection.weight", torch.empty(0, 0, dtype=torch.float32)),
        )
        head = weights.pop("lm_head.weight", words)
        halves = torch.split(joined, self.width, 1) if joined.shape[1] == 2 * self.width else ()
        named = {name.removeprefix("model.").removeprefix(_MASKED): one for name, one in weights.items()}
        named |= {f"{name}.weight": half for name, half in zip(("from_words", "from_hidden"), halves, strict=False)}
        named |= {} if head is None else {"head.weight": head}
        if "token_ordering" in named:
            named["ordering"] = named.pop("token_ordering")
        needed, got = ({name: one.shape for name, one in each.items()} for each in (self.state_dict(), named))
        if odd := sorted(name for name in {**needed, **got} if needed.get(name) != got.get(name)):
            raise CheckpointError(
                f"{folder} has other weights than the assistant that its config.json describes: {', '.join(odd[:3])}; "
                "download or save the checkpoint again"
            )
        self.load_state_dict(named, assign=True)
        if self.ordering is not None:
            self.ordering = self.ordering.view(self.centroids.out_features, -1).int()

    @property
    def _decoder(self) -> CausalDecoder:
        """The parts. Beside a sliding window, transformers shows an assistant one key more than the model sees."""
        near = self.config.sliding_window + 1
        return CausalDecoder(
            self, self, [near if kind == "sliding_attention" else None for kind in self.config.layer_types]
        )

    def pack(self, *, int8: bool) -> None:
        super().pack(int8=int8)
        pack_linears(self, ("post_projection",), int8=int8)
        if self.ordering is None:
            pack_linears(self, ("head",), int8=int8)
            return
        pack_linears(self, ("centroids",))  # what chooses stays exact
        each = self.head.weight.detach()[self.ordering.long()]
        panels = Panels.of_each(each, dtype=torch.int8 if int8 else None)
        self.head = PackedLinear(panels, 0, each.shape[1], apart=panels.outputs // len(each))

    def program(self, model: Program, positions: int) -> Program:
        """Writes the program, which reads hidden states of the model and tokens, and chooses tokens. A row stands at
        the position of its hidden state, so it sees all keys that there are.

        Args:
            model: the program of the model.
        """
        recipe = self._decoder.recipe
        assert recipe is not None, "`unknown` gives the reason"
        writer = _AssistantWriter(self._decoder, recipe, positions, model=model)
        writer.written.update(self.sources)
        return writer.write()

    def found(self, choice: int, left: Any) -> tuple[int, Any]:
        """Returns the token that is the ``choice`` among those whose logits are computed, and the hidden state, of what
        the last hidden states have ``left`` of a row."""
        if self.ordering is None:
            return choice, left
        each = self.ordering.shape[1]
        return int(self.ordering[int(left[self.width + choice // each]), choice % each]), left[: self.width]


@define(eq=False)
class _AssistantWriter(ProgramWriter):
    model: Program = field(kw_only=True)

    def enter(self) -> int:
        own: Any = self.decoder.module
        program, embedding = self.program, own.get_input_embeddings()
        given, words, hidden = program.buffer(own.width), program.buffer(own.width), program.buffer(self._size)
        program.look_up(words, embedding.panels(), embedding.scale)
        program.linear(words, hidden, own.from_words.panels(), Ending.STORE)
        program.linear(given, hidden, own.from_hidden.panels(), Ending.ADD)
        return hidden

    def leave(self, hidden: int) -> None:
        own: Any = self.decoder.module
        program, head, asked = self.program, own.head.panels(), own.asked
        program.has_head = program.chooses = True
        end = program.buffer(self._size)
        program.norm(hidden, end, norm_of(own.norm), wanted=True)
        if own.ordering is None:
            left, logits = program.buffer(own.width), program.buffer(head.outputs)
            program.linear(end, left, own.post_projection.panels(), Ending.STORE, wanted=True)
            program.linear(end, logits, head, Ending.STORE, wanted=True)
            return
        count, size = own.ordering.shape
        near, numbers = program.buffer(count), program.buffer(asked)
        left, logits = program.buffer(own.width + asked), program.buffer(asked * size)  # `found` reads the numbers
        program.linear(end, left, own.post_projection.panels(), Ending.STORE, wanted=True)
        program.linear(end, near, own.centroids.panels(), Ending.STORE, wanted=True)
        told: dict[str, Any] = {"apart": False, "together": False, "least": 0.0, "more": 0.0, "added": None}
        program.route(near, numbers, asked, count, **told, numbers=True, wanted=True)
        program.copy(numbers, left, asked, place=own.width, wanted=True)
        experts = {"kind": Kind.EXPERTS, "heads": asked, "kv_heads": count, "size": size}
        program.linear(end, logits, head, Ending.STORE, wanted=True, others=experts)

    @property
    def _size(self) -> int:
        return int(self.decoder.config.hidden_size)

    def _turns(self, layer: Any, index: int) -> dict[str, Any]:  # noqa: ARG002
        """Turns a row as if it were at the next position, where its token is."""
        kind, program = (self.decoder.config.layer_types[index],), self.program
        if kind not in program.tables:
            told = self.model.tables[kind]
            cosines, sines = self.model.turns[told["table"]]
            program.tables[kind] = {**told, "table": len(program.turns)}
            program.turns.append((cosines[1:], sines[1:]))
        return program.tables[kind]
