"""The names of the models that transcribe. Commands refuse others before torch is imported, which takes seconds and
comes after the settings of OpenMP."""

from __future__ import annotations

MODEL_TYPES = frozenset(
    {"audioflamingo3", "canary", "cohere_asr", "fun_asr_nano", "glmasr", "granite_speech", "granite_speech5_ctc"}
    | {"granite_speech_plus", "moonshine", "moonshine_streaming", "moss_transcribe_diarize", "nemotron3_5_asr"}
    | {"nemotron_asr_streaming", "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt", "phi4_multimodal", "qwen3_asr"}
    | {"kyutai_speech_to_text", "vibevoice_asr", "voxtral", "voxtral_realtime", "whisper"}
)
"""The ``model_type`` of transformers of each."""
