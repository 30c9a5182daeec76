"""The multimodal families that are known here.

A family covers one ``model_type`` of transformers. The engine runs the language model with its own attention. The
encoder and the projector are transformers' own modules; the native library may compute the layers of the encoder.
"""

from __future__ import annotations

from typing import Any

from .added import KyutaiSpeech, VoxtralRealtime
from .audio import QwenAudio
from .family import Family
from .gemma4 import Gemma4, Gemma4Unified
from .heard import HeardAudio
from .lfm2_vl import Lfm2Vl
from .pictures import GotOcr, GraniteDocling, InternVL, LightOnOcr, LlavaNext, LlavaOnevision, Pixtral
from .towers import FunAsr, GraniteSpeech, Phi4Multimodal, Voxtral
from .vision import Gemma3, Llava, QwenVision, Tiled


def find_family(config: Any) -> Family | None:
    """Returns the family of a transformers configuration; ``None``: the model reads text alone, or no family is known
    for it."""
    known = _families().get(config.model_type)
    return None if known is None else known.of(config)


def family_media() -> dict[str, str]:
    """Every ``model_type`` with a family, and the medium that it reads beside text."""
    return {kind: family.medium for kind, family in _families().items()}


def _families() -> dict[str, Family]:
    return {
        "qwen2_vl": QwenVision("Qwen2VLForConditionalGeneration"),
        "qwen2_5_vl": QwenVision("Qwen2_5_VLForConditionalGeneration"),
        "qwen3_vl": QwenVision("Qwen3VLForConditionalGeneration"),
        "qwen3_vl_moe": QwenVision("Qwen3VLMoeForConditionalGeneration"),
        "qwen3_5": QwenVision("Qwen3_5ForConditionalGeneration"),
        "qwen3_5_moe": QwenVision("Qwen3_5MoeForConditionalGeneration"),
        "paddleocr_vl": QwenVision("PaddleOCRVLForConditionalGeneration"),
        "glm_ocr": QwenVision("GlmOcrForConditionalGeneration"),
        "glm4v": QwenVision("Glm4vForConditionalGeneration"),
        "glm4v_moe": QwenVision("Glm4vMoeForConditionalGeneration"),
        "glm46v": QwenVision("Glm46VForConditionalGeneration"),
        "gemma3": Gemma3(),
        "gemma4": Gemma4(),
        "gemma4_unified": Gemma4Unified(),
        "internvl": InternVL(),
        "lfm2_vl": Lfm2Vl(),
        "mistral3": Pixtral(),
        "got_ocr2": GotOcr(),
        "granite_docling": GraniteDocling(),
        "lighton_ocr": LightOnOcr(),
        "llava": Llava(),
        "llava_next": LlavaNext(),
        "llava_onevision": LlavaOnevision(),
        "idefics3": Tiled("Idefics3ForConditionalGeneration"),
        "smolvlm": Tiled("SmolVLMForConditionalGeneration"),
        "qwen2_audio": QwenAudio(),
        "qwen3_asr": HeardAudio(
            architecture="Qwen3ASRForConditionalGeneration", around_audio=("<|audio_start|>", "<|audio_end|>")
        ),
        "glmasr": HeardAudio(
            architecture="GlmAsrForConditionalGeneration", around_audio=("<|begin_of_audio|>", "<|end_of_audio|>")
        ),
        "audioflamingo3": HeardAudio(architecture="AudioFlamingo3ForConditionalGeneration", windows=True),
        "moss_transcribe_diarize": HeardAudio(
            architecture="MossTranscribeDiarizeForConditionalGeneration",
            around_audio=("<|audio_start|>", "<|audio_end|>"),
            options={"padding_mask": None},  # 128 KB for a second, and not read
            windows=True,
        ),
        "vibevoice_asr": HeardAudio(
            architecture="VibeVoiceAsrForConditionalGeneration",
            around_audio=("<|object_ref_start|>", "<|object_ref_end|>"),
            options={"sample": False},  # equal audio has equal embeddings
            duration="<|AUDIO_DURATION|>",
        ),
        "voxtral": Voxtral(),
        "voxtral_realtime": VoxtralRealtime(),
        "kyutai_speech_to_text": KyutaiSpeech(),
        "granite_speech": GraniteSpeech(architecture="GraniteSpeechForConditionalGeneration"),
        "granite_speech_plus": GraniteSpeech(architecture="GraniteSpeechPlusForConditionalGeneration"),
        "fun_asr_nano": FunAsr(),
        "phi4_multimodal": Phi4Multimodal(),
    }
