"""The models that transcribe besides Whisper, by the ``model_type`` of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from ...core.model import ModelDescription
from ...core.speech import SpeechModel
from ..architectures.frame_family import frame_model_types
from .placed import PlacedSpeech, find_manner
from .plain import plain_speech
from .prompted import canary_speech, cohere_speech
from .streamed_speech import PacedSpeech, frame_speech

Make = Callable[[ModelDescription, Any], SpeechModel]
"""Makes the speech model of a description and a checkpoint, which has ``folder``, ``config`` and ``tokenizer``."""


def with_speech(description: ModelDescription, checkpoint: Any, cache_bytes: int) -> ModelDescription:
    """Returns ``description`` with the speech model of ``checkpoint``; unchanged if it does not transcribe.
    ``cache_bytes`` is the size of the encoder cache."""
    make, manner = _models().get(checkpoint.config.model_type), find_manner(checkpoint.config.model_type)
    if manner is not None:
        kind = PacedSpeech if getattr(description.preparer, "start", ()) else PlacedSpeech
        return evolve(description, speech=kind(model=description, manner=manner, cache_bytes=cache_bytes))
    return description if make is None else evolve(description, speech=make(description, checkpoint))


def _models() -> dict[object, Make]:
    return {
        "moonshine": plain_speech,
        "moonshine_streaming": plain_speech,
        "cohere_asr": cohere_speech,
        "canary": canary_speech,
        **dict.fromkeys(frame_model_types(), frame_speech),
    }
