"""Tiny checkpoints of families that read images: each with the tokens, the processor and the settings of its published
checkpoints."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve

from .checkpoints import HIDDEN, LAYERS, classes, random_model, save_checkpoint, text_settings
from .words import LLAMA, LLAVA, QWEN, TILED, Words

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
_AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}


def _named(words: Words, **tokens: str) -> Words:
    """Returns a tokenizer that also tells ``tokens`` by their names."""
    return evolve(words, named={**words.named, "extra_special_tokens": tokens})


_MISTRAL_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_PAGE_MARKS = ("<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|video_pad|>")
_GLM_MARKS = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|video|>",
)
_INTERN = _named(
    QWEN.with_media("<img>", "</img>", "<IMG_CONTEXT>", "<video>", media="<IMG_CONTEXT>\n"),
    start_image_token="<img>",
    end_image_token="</img>",
    context_image_token="<IMG_CONTEXT>",
    video_token="<video>",
)
_LIGHTON = _named(
    QWEN.with_media("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>", media="<|image_pad|>"),
    image_token="<|image_pad|>",
    image_break_token="<|vision_pad|>",
    image_end_token="<|vision_end|>",
)
_PADDLE = _named(
    LLAMA.with_media(*_PAGE_MARKS, media="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    image_token="<|IMAGE_PLACEHOLDER|>",
)
_LFM_MARKS = ("<|image_start|>", "<|image_end|>", "<image>", "<|img_thumbnail|>")
_LFM = QWEN.with_media(
    *_LFM_MARKS,
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    media="<image>",
)
_ONEVISION = QWEN.with_media("<image>", "<video>", media="<image>\n")
_GLM4V = {"rope_parameters": {**_AXES, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}}
_GLM4V_MOE = {
    **_GLM4V,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_GLM = QWEN.with_media(*_GLM_MARKS, media="<|begin_of_image|><|image|><|end_of_image|>")


def _save(
    folder: Path, seed: int, name: str, config: Any, tokenizer: Any, processor: tuple[str, str], **told: Any
) -> None:
    """Saves a random model, its tokenizer, and an image processor, which is given by its module and its class."""
    save_checkpoint(
        folder, random_model(getattr(classes(), f"{name}ForConditionalGeneration"), config, seed), tokenizer
    )
    module, made = processor
    source = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    getattr(source, f"{made}ImageProcessorPil")(**told).save_pretrained(folder)


def _internvl(folder: Path, seed: int) -> None:
    """Writes a checkpoint that cuts an image into up to 4 tiles and reads the whole image, too: 4 embeddings each."""
    tokenizer = _INTERN.make()
    config = classes().InternVLConfig(
        text_config={"model_type": "qwen2", **text_settings(tokenizer)},
        vision_config={**_SIZES, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    sizes = {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4}
    _save(folder, seed, "InternVL", config, tokenizer, ("got_ocr2", "GotOcr2"), **sizes)


def _mistral3(folder: Path, seed: int) -> None:
    """Writes a checkpoint of Ministral 3, with an embedding for each 16 by 16 pixels."""
    tokenizer = LLAMA.with_media(*_MISTRAL_MARKS, media="[IMG]").make()
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    config = classes().Mistral3Config(
        text_config={
            "model_type": "ministral3",
            **text_settings(tokenizer),
            "head_dim": 12,
            "rope_parameters": {**rope, "llama_4_scaling_beta": 0.1},
        },
        vision_config={"model_type": "pixtral", **_SIZES, "head_dim": 16, "image_size": 64, "patch_size": 8},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    sizes = {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}
    _save(folder, seed, "Mistral3", config, tokenizer, ("pixtral", "Pixtral"), **sizes)


def _lighton(folder: Path, seed: int) -> None:
    tokenizer = _LIGHTON.make()
    config = classes().LightOnOcrConfig(
        text_config={"model_type": "qwen3", **text_settings(tokenizer), "head_dim": 16},
        vision_config={"model_type": "pixtral", **_SIZES, "head_dim": 16, "image_size": 64, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        tie_word_embeddings=False,
    )
    sizes = {"size": {"longest_edge": 64}, "patch_size": {"height": 16, "width": 16}}
    _save(folder, seed, "LightOnOcr", config, tokenizer, ("pixtral", "Pixtral"), **sizes)


def _got_ocr(folder: Path, seed: int) -> None:
    """Writes a checkpoint without a template, with 4 embeddings for each image, whose encoder has a layer with
    windows."""
    tokenizer = evolve(QWEN.with_media("<img>", "</img>", "<imgpad>", media=""), chat=None).make()
    vision = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "mlp_dim": 64}
    config = classes().GotOcr2Config(
        text_config={"model_type": "qwen2", **text_settings(tokenizer)},
        vision_config={
            **vision,
            "image_size": 64,
            "patch_size": 8,
            "output_channels": HIDDEN // 4,
            "window_size": 3,
            "global_attn_indexes": [1],
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
        tie_word_embeddings=False,
    )
    _save(folder, seed, "GotOcr2", config, tokenizer, ("got_ocr2", "GotOcr2"), size={"height": 64, "width": 64})


def _paddle(folder: Path, seed: int) -> None:
    tokenizer = _PADDLE.make()
    begin, end, image, video = map(tokenizer.convert_tokens_to_ids, _PAGE_MARKS)
    config = classes().PaddleOCRVLConfig(
        text_config={**text_settings(tokenizer), "head_dim": 16, "rope_parameters": _AXES},
        vision_config={**_SIZES, "image_size": 32, "patch_size": 8},
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )
    sizes = {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}, "patch_size": 8}
    _save(folder, seed, "PaddleOCRVL", config, tokenizer, ("paddleocr_vl", "PaddleOCRVL"), **sizes)


def _glm(name: str, text: Mapping[str, Any], folder: Path, seed: int) -> None:
    tokenizer = _GLM.make()
    begin, end, image, begins, ends, video = map(tokenizer.convert_tokens_to_ids, _GLM_MARKS)
    config = getattr(classes(), f"{name}Config")(
        text_config={**text_settings(tokenizer), **text},
        vision_config={**_SIZES, "out_hidden_size": HIDDEN, "image_size": 32, "patch_size": 8},
        image_token_id=image,
        image_start_token_id=begin,
        image_end_token_id=end,
        video_token_id=video,
        video_start_token_id=begins,
        video_end_token_id=ends,
    )
    sizes = {"size": {"shortest_edge": 2 * 16 * 16, "longest_edge": 2 * 64 * 64}, "patch_size": 8}
    _save(folder, seed, name, config, tokenizer, ("glm46v", "Glm46V"), **sizes)


def _lfm2_vl(folder: Path, seed: int) -> None:
    """Writes a checkpoint that cuts an image of more than 2,048 pixels into up to 4 tiles with 4 embeddings each, and
    reads the whole image, too. Its decoder has a layer with a convolution."""
    tokenizer = _LFM.make()
    config = classes().Lfm2VlConfig(
        text_config={
            "model_type": "lfm2",
            **text_settings(tokenizer),
            "block_multiple_of": 32,
            "layer_types": ["conv", "full_attention"],
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            **_SIZES,
            "patch_size": 8,
            "num_patches": 16,
            "vision_use_head": False,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=64,
        tie_word_embeddings=False,
    )
    save_checkpoint(folder, random_model(classes().Lfm2VlForConditionalGeneration, config, seed), tokenizer)
    sizes = {"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 1, "max_image_tokens": 4, "max_tiles": 4}
    settings = {**sizes, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Lfm2VlImageProcessorFast"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _granite_docling(folder: Path, seed: int) -> None:
    """Writes a checkpoint that cuts a page into up to 4 tiles with 4 embeddings each, and reads the whole page, too.
    What its encoder adds to the layers of the decoder has no factor, but embeddings have."""
    tokenizer = TILED.make()
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    config = classes().GraniteDoclingConfig(
        text_config={**text_settings(tokenizer), **factors, "attention_multiplier": 0.2},
        vision_config={
            **_SIZES,
            "out_hidden_size": HIDDEN,
            "image_size": 32,
            "patch_size": 8,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    sizes = {"size": {"height": 32, "width": 32}, "max_patches": 4}
    _save(folder, seed, "GraniteDocling", config, tokenizer, ("granite_docling", "GraniteDocling"), **sizes)


def _llava(name: str, text: str, words: Words, vision: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Writes a checkpoint with 16 embeddings for the whole image and for each of up to 4 tiles."""
    tokenizer = words.make()
    image, video = tokenizer.convert_tokens_to_ids("<image>"), tokenizer.convert_tokens_to_ids("<video>")
    sizes = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
    more = {"video_token_index": video, "vision_aspect_ratio": "anyres_max_2"} if name == "LlavaOnevision" else {}
    config = getattr(classes(), f"{name}Config")(
        text_config={"model_type": text, **text_settings(tokenizer)},
        vision_config={**_SIZES, "image_size": 32, "patch_size": 8, **vision},
        image_token_index=image,
        **sizes,
        **more,
    )
    module = name.lower().replace("llava", "llava_")
    square = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    if more:
        square = {"size": {"height": 32, "width": 32}}
    _save(folder, seed, name, config, tokenizer, (module, name), **square, **sizes)


IMAGE_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "llava_next": partial(_llava, "LlavaNext", "llama", LLAVA, {"model_type": "clip_vision_model"}),
    "llava_onevision": partial(_llava, "LlavaOnevision", "qwen2", _ONEVISION, {"vision_use_head": False}),
    "mistral3": _mistral3,
    "lighton_ocr": _lighton,
    "got_ocr2": _got_ocr,
    "paddleocr_vl": _paddle,
    "granite_docling": _granite_docling,
    "glm_ocr": partial(_glm, "GlmOcr", {"head_dim": 16, "rope_parameters": _AXES}),
    "glm4v": partial(_glm, "Glm4v", _GLM4V),
    "glm46v": partial(_glm, "Glm46V", {**_GLM4V, "model_type": "glm4v_text"}),
    "glm4v_moe": partial(_glm, "Glm4vMoe", _GLM4V_MOE),
}
"""The families, each with the function that writes its checkpoint to a folder, from a seed."""
