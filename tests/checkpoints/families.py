"""Tiny random checkpoints of every family that the engine reads. They are made in a moment, so that tests need no
download.

Each has two layers and a vocabulary of bytes. The weights are so large that the sampled tokens differ. Otherwise a
comparison with transformers' tokens would show little. Sizes and settings are the smallest that have every part of the
real model.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoints import HIDDEN, LAYERS, TARGETS, classes, random_model, save_checkpoint, special_ids, text_settings
from .frame_families import FRAME_MAKERS
from .gemma4 import make_gemma4, make_gemma4_unified
from .image_families import IMAGE_MAKERS
from .speech_families import SPEECH_MAKERS
from .words import (
    BART,
    BERT,
    GEMMA,
    GEMMA_MARKS,
    GEMMA_VISION,
    LLAMA,
    LLAVA,
    QWEN,
    QWEN_AUDIO,
    QWEN_VISION,
    T5,
    TILED,
    Words,
)

_WINDOW = 16  # positions that a layer with a window sees


def make_checkpoint(family: str, folder: str | Path, *, seed: int = 0) -> Path:
    """Writes a tiny checkpoint with random weights, tokenizer and settings to ``folder``, and returns it.

    Args:
        family: one of `FAMILIES`.
        seed: the seed of the weights; equal seeds give equal weights.

    Raises:
        ValueError: there is no such family.
    """
    if family not in _MAKERS:
        raise ValueError(f"family={family!r}; allowed: {', '.join(_MAKERS)}")
    return Path(shutil.copytree(_made(family, seed), folder, dirs_exist_ok=True))


@functools.cache
def _made(family: str, seed: int) -> Path:
    """A process makes each once, since many tests want the same."""
    folder = Path(tempfile.mkdtemp(prefix="triolet-"))
    atexit.register(shutil.rmtree, folder)
    _MAKERS[family](folder, seed)
    return folder


_NAMES = ("negative", "neutral", "positive")
_LABELS = {"id2label": dict(enumerate(_NAMES)), "label2id": {name: index for index, name in enumerate(_NAMES)}}
_GEMMA_SIZES = {"head_dim": 16, "sliding_window": _WINDOW, "tie_word_embeddings": True}

_TEXT: Mapping[str, tuple[str, str, Words, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, {}),
    "smollm2": ("LlamaForCausalLM", "LlamaConfig", LLAMA, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", QWEN, {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GEMMA,
        {
            **_GEMMA_SIZES,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GEMMA,
        {**_GEMMA_SIZES, "query_pre_attn_scalar": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4": (  # the last two layers read the keys and values of the first two
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GEMMA,
        {
            **_GEMMA_SIZES,
            "num_hidden_layers": 2 * LAYERS,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 300,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        LLAMA,
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": _WINDOW,
            "swiglu_limit": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        LLAMA,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA, {"sliding_window": _WINDOW}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        LLAMA,
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        LLAMA,
        {"logit_scale": 0.5, "sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", QWEN, {"num_key_value_heads": 4}),  # its heads, which have no setting
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        LLAMA,
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32, "tie_word_embeddings": False},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        QWEN,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 20,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        QWEN,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 20,
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        LLAMA,
        {"num_heads": 6, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 8},
    ),
    "bert": ("BertModel", "BertConfig", BERT, {}),
    "bert_classifier": ("BertForSequenceClassification", "BertConfig", BERT, _LABELS),
    "bert_reranker": ("BertForSequenceClassification", "BertConfig", BERT, {"num_labels": 1}),
    "llama_classifier": ("LlamaForSequenceClassification", "LlamaConfig", LLAMA, _LABELS),
}
"""The families of text only, each with the classes of its model and configuration in transformers, its tokenizer, and
its settings."""


def _text(family: str, folder: Path, seed: int) -> None:
    model, make_config, words, changes = _TEXT[family]
    makes, tokenizer = classes(), words.make()
    config = getattr(makes, make_config)(**{**text_settings(tokenizer), **changes})
    save_checkpoint(folder, random_model(getattr(makes, model), config, seed), tokenizer)


def _qwen_vision(name: str, vision: Mapping[str, Any], folder: Path, seed: int, **text: Any) -> None:
    """Writes a checkpoint for images of at least 16 pixels a side. Each layer of the encoder sees the whole image,
    except that the first layer of Qwen2.5-VL sees windows.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = QWEN_VISION.make()
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
    text = {**text_settings(tokenizer), "rope_parameters": rope, **text}
    written = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{place}_token_id": tokenizer.convert_tokens_to_ids(f"<|{word}|>") for place, word in written.items()}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={"depth": 2, "num_heads": 2, "patch_size": 8, **vision},
        **ids,
    )
    save_checkpoint(
        folder, random_model(getattr(transformers, f"{name}ForConditionalGeneration"), config, seed), tokenizer
    )
    make: Any = Qwen2VLImageProcessorPil
    make(size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}, patch_size=8).save_pretrained(folder)


_WINDOWED = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "window_size": 32,
    "fullatt_block_indexes": [1],
    "out_hidden_size": HIDDEN,
}
_DEEP = {  # what the first and the third layer make goes to the first two layers of the decoder
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": HIDDEN,
    "depth": 3,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
_INTERLEAVED = {
    "rope_parameters": {"rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "head_dim": 16,
}
_PLAIN_VISION = {name: value for name, value in _DEEP.items() if name != "deepstack_visual_indexes"}
_RECURRENT = {  # a layer with the gated delta rule, and one with attention
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {**_INTERLEAVED["rope_parameters"], "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def _llava(folder: Path, seed: int) -> None:
    """Writes a checkpoint of CLIP and Llama, with 16 embeddings for each image."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = LLAVA.make()
    config = LlavaConfig(
        text_config={"model_type": "llama", **text_settings(tokenizer)},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    save_checkpoint(folder, random_model(LlavaForConditionalGeneration, config, seed), tokenizer)
    make: Any = CLIPImageProcessorPil
    make(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)


def _gemma3_vision(folder: Path, seed: int) -> None:
    """Writes a checkpoint with 9 embeddings for each image, more than a window has room for beside them."""
    makes, tokenizer = classes(), GEMMA_VISION.make()
    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA_MARKS.items()}
    config = makes.Gemma3Config(
        text_config={**text_settings(tokenizer), **_TEXT["gemma3"][3], "sliding_window": 12},
        vision_config={"model_type": "siglip_vision_model", **_TOWER, "image_size": 48, "vision_use_head": False},
        mm_tokens_per_image=9,
        **ids,
    )
    save_checkpoint(folder, random_model(makes.Gemma3ForConditionalGeneration, config, seed), tokenizer)
    make: Any = importlib.import_module(
        "transformers.models.gemma3.image_processing_pil_gemma3"
    ).Gemma3ImageProcessorPil
    make(size={"height": 48, "width": 48}).save_pretrained(folder)


def _tiled(name: str, folder: Path, seed: int) -> None:
    """Writes a checkpoint that cuts an image into tiles of 32 pixels a side, up to 2 by 2, and also reads the whole
    image. Each tile has 4 embeddings."""
    import transformers

    family = name.lower()
    processors = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    tokenizer = TILED.make()
    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": "llama", **text_settings(tokenizer)},
        vision_config=_TOWER,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_checkpoint(
        folder, random_model(getattr(transformers, f"{name}ForConditionalGeneration"), config, seed), tokenizer
    )
    make = getattr(processors, f"{name}ImageProcessorPil")
    make(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}).save_pretrained(folder)


def _qwen2_audio(folder: Path, seed: int) -> None:
    """Writes a checkpoint for windows of one second, with 25 embeddings each."""
    makes, tokenizer = classes(), QWEN_AUDIO.make()
    config = makes.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text_settings(tokenizer)},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": LAYERS,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 50,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    save_checkpoint(folder, random_model(makes.Qwen2AudioForConditionalGeneration, config, seed), tokenizer)
    makes.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)


def _bart(folder: Path, seed: int) -> None:
    """Writes a checkpoint with fewer layers in the decoder than in the encoder. Its last token is forced, and no three
    tokens in a row may occur twice."""
    makes, tokenizer = classes(), BART.make()
    config = makes.BartConfig(
        encoder_layers=LAYERS + 1,
        encoder_attention_heads=4,
        decoder_layers=LAYERS,
        decoder_attention_heads=4,
        d_model=HIDDEN,
        encoder_ffn_dim=2 * HIDDEN,
        decoder_ffn_dim=2 * HIDDEN,
        max_position_embeddings=TARGETS,
        vocab_size=len(tokenizer),
        scale_embedding=True,
        decoder_start_token_id=tokenizer.eos_token_id,
        **special_ids(tokenizer),
        tie_word_embeddings=False,
    )
    forced = {"forced_bos_token_id": tokenizer.bos_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    save_checkpoint(
        folder,
        random_model(makes.BartForConditionalGeneration, config, seed),
        tokenizer,
        decoder_start_token_id=tokenizer.eos_token_id,
        no_repeat_ngram_size=3,
        min_length=5,
        **forced,
    )


def _t5(folder: Path, seed: int) -> None:
    """Writes a checkpoint whose attention scores depend on the distance, up to 12 positions. Its layers are gated, as
    in T5 1.1."""
    makes, tokenizer = classes(), T5.make()
    config = makes.T5Config(
        d_model=HIDDEN,
        d_kv=16,
        d_ff=2 * HIDDEN,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        n_positions=TARGETS,
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = random_model(makes.T5ForConditionalGeneration, config, seed)
    save_checkpoint(folder, model, tokenizer, decoder_start_token_id=tokenizer.pad_token_id)


_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    **{family: partial(_text, family) for family in _TEXT},
    "qwen2_vl": partial(_qwen_vision, "Qwen2VL", {"embed_dim": 32, "hidden_size": HIDDEN}),
    "qwen2_5_vl": partial(_qwen_vision, "Qwen2_5_VL", _WINDOWED),
    "qwen3_vl": partial(_qwen_vision, "Qwen3VL", _DEEP, **_INTERLEAVED),
    "qwen3_vl_moe": partial(_qwen_vision, "Qwen3VLMoe", _DEEP, **_INTERLEAVED, **_EXPERTS),
    "qwen3_5": partial(_qwen_vision, "Qwen3_5", _PLAIN_VISION, **_RECURRENT),
    "gemma3_vision": _gemma3_vision,
    "gemma4_vision": partial(make_gemma4, text=_TEXT["gemma4"][3]),
    "gemma4_unified": partial(make_gemma4_unified, text=_TEXT["gemma4"][3]),
    "llava": _llava,
    "idefics3": partial(_tiled, "Idefics3"),
    "smolvlm": partial(_tiled, "SmolVLM"),
    "qwen2_audio": _qwen2_audio,
    **IMAGE_MAKERS,
    **SPEECH_MAKERS,
    **FRAME_MAKERS,
    "bart": _bart,
    "t5": _t5,
}

FAMILIES = tuple(_MAKERS)
"""The families that `make_checkpoint` makes."""
