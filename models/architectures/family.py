"""`Family`: how a multimodal checkpoint's images or audio are encoded, and where their embeddings stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.request import Placeholder
from ..checkpoints.loading import load_module
from ..checkpoints.parts import Find
from .prompts import MediaPreparer


@frozen
class Family:
    """One kind of multimodal checkpoint. It has no state."""

    architecture: str  # the class of transformers that loads it
    language: str = "model.language_model"  # the name of the language model, whose attention becomes ours

    def load(self, folder: Path, dtype: torch.dtype, *, without: Find | None = None) -> nn.Module:
        """The model on the CPU, in eval mode: whole, or ``without`` some parts. See `load_module` for its errors."""
        return load_module(self.architecture, folder, dtype, without=without)

    def text(self, module: nn.Module) -> nn.Module:
        """The language model."""
        part: nn.Module = module.get_submodule(self.language)
        return part

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings of each payload, [embeddings, hidden], each in storage of its own."""
        raise NotImplementedError

    def positions(
        self,
        module: nn.Module,  # noqa: ARG002
        token_ids: Sequence[int],  # noqa: ARG002
        placeholders: Sequence[Placeholder],  # noqa: ARG002
    ) -> tuple[Tensor, int] | None:
        """Positions of a prompt in three dimensions, int64 [3, len], and the number that is added to a later token's
        index to give its position in each of them. ``None``: a position is the index."""
        return None

    def preparer(
        self, folder: Path, tokenizer: Any, config: Any, *, identity: str, hidden: int, dtype: torch.dtype
    ) -> MediaPreparer:
        """The preparer that turns prompts into tokens and items of ``hidden`` numbers of ``dtype`` for each embedding;
        ``identity`` names the weights, and goes into content keys.

        Raises:
            UnsupportedModel: a variant that is not read.
        """
        raise NotImplementedError
