"""Multimodal families: how a checkpoint's images or audio are encoded, and where their embeddings stand.

A family knows one ``model_type`` of transformers. The engine runs the language model with attention of its own; what
the family leaves as it is, the encoder and the projector, is transformers' own module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...core.errors import UnsupportedModel
from ...core.model import Preparer
from ...core.request import Placeholder
from ..checkpoints.parts import Find
from .audio import QwenAudio
from .vision import Llava, QwenVision, Tiled

_MEDIA = ("vision_config", "audio_config", "video_config", "encoder_config")


class Family(Protocol):
    """One kind of multimodal checkpoint. It has no state."""

    def load(self, folder: Path, dtype: torch.dtype, *, without: Find | None = None) -> nn.Module:
        """The model on the CPU, in eval mode: whole, or ``without`` some parts.

        Raises:
            CheckpointError: weights are missing, left over or damaged.
            UnsupportedModel: a variant that is not read.
        """

    def text(self, module: nn.Module) -> nn.Module:
        """The language model: the part whose attention becomes ours."""

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The embeddings of each payload, [embeddings, hidden], each in storage of its own."""

    def positions(
        self, module: nn.Module, token_ids: Sequence[int], placeholders: Sequence[Placeholder]
    ) -> tuple[Tensor, int] | None:
        """Positions of a prompt in three dimensions, int64 [3, len], and what is added to a later token's index to give
        its position in each of them; ``None``: a position is the index."""

    def preparer(
        self, folder: Path, tokenizer: Any, config: Any, *, identity: str, hidden: int, dtype: torch.dtype
    ) -> Preparer:
        """What turns prompts into tokens and items of ``hidden`` numbers of ``dtype`` for each embedding; ``identity``
        names the weights, and goes into content keys."""


def find_family(config: Any) -> Family | None:
    """The family of a transformers configuration; ``None``: it reads text alone.

    Raises:
        UnsupportedModel: it reads images, audio or video as well, in a way that is not known here.
    """
    families = _families()
    if config.model_type in families:
        return families[config.model_type]
    media = [name for name in _MEDIA if getattr(config, name, None) is not None]
    if media:
        raise UnsupportedModel(
            f"a checkpoint of model_type {config.model_type!r} with {', '.join(media)}; "
            f"allowed: text alone, or {', '.join(families)}"
        )
    return None


def _families() -> dict[str, Family]:
    return {
        "qwen2_vl": QwenVision("Qwen2VLForConditionalGeneration"),
        "qwen2_5_vl": QwenVision("Qwen2_5_VLForConditionalGeneration"),
        "llava": Llava(),
        "idefics3": Tiled("Idefics3ForConditionalGeneration"),
        "smolvlm": Tiled("SmolVLMForConditionalGeneration"),
        "qwen2_audio": QwenAudio(),
    }
