"""A draft head: one more layer, which proposes the token behind the next one from the hidden states behind the last
layer (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2; Qwen3.5 has one).

The head reads, at each position, the normalized hidden state of the position and the embedding of the token behind it.
It shares the model's embeddings and the matrix of logits, of which it uses the first rows alone: byte-pair vocabularies
begin with their frequent tokens, and the whole matrix is a third of a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from .decoders import CausalDecoder, ProgramWriter
from .library import Ending
from .panels import Panels
from .parts import norm_of, pack_linears
from .program import Program

FREQUENT = 32_768
"""The most tokens that a head chooses from, a multiple of `PANEL`."""


class DraftLayers(nn.Module):
    """Layers that propose tokens beside those of a model, whose embeddings and positions they share. The weights are
    missing at first.

    Args:
        module: the whole model.
        language: the part of ``module`` that decodes text.
    """

    def __init__(self, module: Any, language: Any) -> None:
        super().__init__()
        self._shared = (module, language.base_model.rotary_emb)  # a tuple hides others' modules from torch

    @property
    def base_model(self) -> Any:
        """The module that has the layers."""
        return self

    @property
    def rotary_emb(self) -> Any:
        """The rotary positions, which are the model's."""
        return self._shared[1]

    def get_input_embeddings(self) -> Any:
        """Returns the model's token embedding."""
        return self._shared[0].get_input_embeddings()

    @property
    def _decoder(self) -> CausalDecoder:
        """The layers as a decoder."""
        raise NotImplementedError

    def unknown(self) -> str | None:
        """Returns the reason why the library cannot compute the layers; ``None``: it can."""
        return self._decoder.unknown()

    def pack(self, *, int8: bool) -> None:
        """Packs the layers' matrices, and those before them."""
        self._decoder.pack_layers(int8=int8)
        for name in ("from_words", "from_hidden"):
            pack_linears(self, (name,), int8=int8)


class DraftHead(DraftLayers):
    """The draft head of a model whose decoder is ``language``.

    Args:
        module: the whole model.
        layer: the number of the decoder's layer that the head's layer is like, which attends to all positions.
    """

    def __init__(self, module: Any, language: Any, layer: int) -> None:
        super().__init__(module, language)
        base = language.base_model
        self.config, width, norm = base.config, base.config.hidden_size, type(base.norm)
        self.layers = nn.ModuleList([type(base.layers[layer])(base.config, layer)])
        self.norm, self.enorm, self.hnorm = (norm(width, eps=self.config.rms_norm_eps) for _ in range(3))
        self.from_words, self.from_hidden = (nn.Linear(width, width, bias=False) for _ in range(2))

    def get_output_embeddings(self) -> Any:
        """Returns the model's matrix of logits."""
        return self._shared[0].get_output_embeddings()

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the head's hidden states [rows, width] of one sequence, computed by transformers' layer. The library
        computes the same.

        Args:
            hidden: the normalized hidden states behind the model's last layer [rows, width].
            tokens: the token behind each position [rows].
            positions: [rows].
        """
        words, places = self.enorm(self.get_input_embeddings()(tokens)), positions[None]
        joined = self.from_words(words) + self.from_hidden(self.hnorm(hidden))
        masked = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=joined.dtype).triu(1)[None, None]
        turned = self.rotary_emb(joined[None], places)
        states = self.layers[0](joined[None], position_embeddings=turned, attention_mask=masked, position_ids=places)
        normed: Tensor = self.norm(states[0] if isinstance(states, tuple) else states)[0]
        return normed

    @property
    def _decoder(self) -> CausalDecoder:
        return CausalDecoder(self, self, (None,))

    def program(self, positions: int) -> Program:
        """Writes the program, which reads hidden states and tokens, and chooses tokens. The model must be packed."""
        decoder = self._decoder
        recipe = decoder.recipe
        assert recipe is not None, "`unknown` gives the reason"
        return _DraftWriter(decoder, recipe, positions).write()


def make_draft_head(module: Any, language: Any, stored: Mapping[str, Tensor]) -> DraftHead | str:
    """Returns the draft head with the weights that a checkpoint has ``stored``, or the reason why they are no head that
    is known."""
    weights, dtype = dict(stored), language.base_model.dtype
    kinds = list(getattr(language.base_model.config, "layer_types", None) or ())
    if "full_attention" not in kinds:
        return "no layer of the model attends to all positions"
    if any(not name.startswith("layers.0.") for name in weights if name.startswith("layers.")):
        return "it has several layers; known: one"
    head = DraftHead(module, language, kinds.index("full_attention")).to(dtype)
    fused, width = weights.pop("fc.weight", None), language.base_model.config.hidden_size
    if fused is not None and fused.shape == (width, 2 * width):
        weights |= {"from_words.weight": fused[:, :width], "from_hidden.weight": fused[:, width:]}
    names = {"pre_fc_norm_embedding.weight": "enorm.weight", "pre_fc_norm_hidden.weight": "hnorm.weight"}
    named = {names.get(name, name): weight for name, weight in weights.items()}
    expected = {name: weight.shape for name, weight in head.state_dict().items()}
    if {name: weight.shape for name, weight in named.items()} != expected:
        odd = sorted(expected.keys() ^ named.keys()) or ["shapes"]
        return f"it has other weights than a layer of the model: {', '.join(odd[:3])}"
    head.load_state_dict(named)
    return head.eval()


@define(eq=False)
class _DraftWriter(ProgramWriter):
    def enter(self) -> int:
        head: Any = self.decoder.module
        program, embedding, width = self.program, head.get_input_embeddings(), head.config.hidden_size
        given, words, hidden = (program.buffer(width) for _ in range(3))
        program.look_up(words, embedding.panels(), embedding.scale)
        program.linear(words, hidden, head.from_words.panels(), Ending.STORE, norm=norm_of(head.enorm))
        program.linear(given, hidden, head.from_hidden.panels(), Ending.ADD, norm=norm_of(head.hnorm))
        return hidden

    def choices(self, panels: Panels) -> Panels:
        return panels.first(FREQUENT)
