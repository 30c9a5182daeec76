"""The multimodal families that are known here.

A family knows one ``model_type`` of transformers. The engine runs the language model with attention of its own; what
the family leaves as it is, the encoder and the projector, is transformers' own module.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import UnsupportedModel
from .audio import QwenAudio
from .family import Family
from .vision import Llava, QwenVision, Tiled

_MEDIA = ("vision_config", "audio_config", "video_config", "encoder_config")


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
