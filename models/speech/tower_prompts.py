"""The prompts of speech models whose processors in transformers need further packages, as these processors and the
cards of the models write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..architectures.conversations import render
from ..architectures.prompts import MediaPreparer

WritePrompt = Callable[..., str]
"""Writes the prompt of a preparer's model, with one placeholder."""

_VOXTRAL_LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")
_FUN_LANGUAGES = {"en": "英文", "ja": "日文", "zh": "中文"}
_GRANITE_QUESTION = "can you transcribe the speech into a written format?"


def voxtral_prompt(preparer: MediaPreparer, *, language: str = "") -> str:
    """Returns the request for a transcription as mistral_common encodes it."""
    named = f"lang:{language}" if language else ""
    return f"{preparer.tokenizer.bos_token}[INST]{preparer.written}[/INST]{named}[TRANSCRIBE]"


def no_prompt(preparer: MediaPreparer) -> str:  # noqa: ARG001  (see `WritePrompt`)
    """Returns an empty text: the preparer itself begins a text in step with the audio."""
    return ""


def granite_prompt(preparer: MediaPreparer, *, task: str = "", keywords: str = "", between: str = "") -> str:
    """Returns the question of the card of Granite Speech, with ``between`` before it."""
    asked = "translate the speech to English" if task == "translate" else _GRANITE_QUESTION
    listed = f" Keywords: {keywords}" if keywords else ""
    return _asked(preparer, f"{preparer.written}{between}{asked}{listed}")


def phi4_prompt(preparer: MediaPreparer, *, task: str = "") -> str:
    """Returns the question of the card of Phi-4-multimodal."""
    asked = "Translate the audio to English." if task == "translate" else "Transcribe the audio clip into text."
    return _asked(preparer, f"{preparer.written}{asked}")


def fun_asr_prompt(preparer: MediaPreparer, *, prompt: str = "", keywords: str = "", language: str = "") -> str:
    """Returns the request that the processor of Fun-ASR-Nano makes of the checkpoint's chat template."""
    parts = {"text": prompt, "keywords": keywords and [keywords], "language": language}
    given = [{"type": kind, kind: value} for kind, value in parts.items() if value]
    return _asked(preparer, [{"type": "audio"}, *given])


def _asked(preparer: MediaPreparer, content: Any) -> str:
    return render(preparer.tokenizer, [{"role": "user", "content": content}], template=preparer.chat_template)


TOWERS: Mapping[str, Mapping[str, Any]] = {
    "voxtral": {"write": voxtral_prompt, "languages": {code: code for code in _VOXTRAL_LANGUAGES}},
    "voxtral_realtime": {"write": no_prompt, "begins": False},
    "kyutai_speech_to_text": {"write": no_prompt, "begins": False},
    "granite_speech": {"write": granite_prompt, "hotwords": "keywords", "tasks": ("transcribe", "translate")},
    "granite_speech_plus": {"write": partial(granite_prompt, between=" "), "hotwords": "keywords"},
    "phi4_multimodal": {"write": phi4_prompt, "tasks": ("transcribe", "translate")},
    "fun_asr_nano": {"write": fun_asr_prompt, "hotwords": "keywords", "prompt": "prompt", "languages": _FUN_LANGUAGES},
}
"""The arguments of each model's `Manner`, by its ``model_type``."""
