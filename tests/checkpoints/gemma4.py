"""Tiny checkpoints of Gemma 4 with images, with an encoder and without one. Both could hear, too. An image has up to 70
embeddings, the fewest that transformers allows. Behind a layer of each type is one that has keys and values of its
own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from .checkpoints import LAYERS, classes, random_model, save_checkpoint, text_settings
from .words import GEMMA

_MARKS = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
_WORDS = evolve(
    GEMMA.with_media(*_MARKS.values(), media="<|image|>"), named={**GEMMA.named, "extra_special_tokens": _MARKS}
)
_LAYERS = {"num_hidden_layers": 5, "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2]}
_CUT = {"patch_size": 4, "pooling_kernel_size": 2}


def _config(made: Any, text: Mapping[str, Any], **parts: Any) -> tuple[Any, Any]:
    """Returns a configuration of the class ``made``, and its tokenizer."""
    tokenizer = _WORDS.make()
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _MARKS.items()}
    named = {"eoa_token_index" if name == "eoa_token" else f"{name}_id": token for name, token in ids.items()}
    own = {**text_settings(tokenizer), **text, **_LAYERS, "use_bidirectional_attention": "vision"}
    return made(text_config=own, **parts, **named), tokenizer


def make_gemma4(folder: Path, seed: int, *, text: Mapping[str, Any]) -> None:
    """Writes a checkpoint with an encoder of images, and one of audio."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    vision = {
        **small,
        **_CUT,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "position_embedding_size": 300,
        "use_clipped_linears": True,
        "standardize": True,
    }
    audio = {**small, "subsampling_conv_channels": [8, 4], "output_proj_dims": 32}
    config, tokenizer = _config(classes().Gemma4Config, text, vision_config=vision, audio_config=audio)
    model = random_model(classes().Gemma4ForConditionalGeneration, config, seed)
    tower = model.model.vision_tower
    tower.std_bias.add_(0.5)
    tower.std_scale.mul_(0.3)
    for layer in tower.encoder.layers:
        layer.mlp.up_proj.output_max.fill_(0.5)
    save_checkpoint(folder, model, tokenizer)
    made: Any = importlib.import_module("transformers.models.gemma4.image_processing_pil_gemma4")
    made.Gemma4ImageProcessorPil(**_CUT, max_soft_tokens=70).save_pretrained(folder)


def make_gemma4_unified(folder: Path, seed: int, *, text: Mapping[str, Any]) -> None:
    """Writes a checkpoint without encoders, whose layers get no embeddings of their own. A window has room for an
    image."""
    vision = {**_CUT, "mm_embed_dim": 32, "mm_posemb_size": 80, "output_proj_dims": 32}
    text = {name: value for name, value in text.items() if "per_layer_input" not in name}
    text |= {"sliding_window": 72}
    made = classes().Gemma4UnifiedConfig
    config, tokenizer = _config(made, text, vision_config=vision, audio_config={"audio_embed_dim": 16})
    save_checkpoint(folder, random_model(classes().Gemma4UnifiedForConditionalGeneration, config, seed), tokenizer)
    settings = {"image_processor_type": "Gemma4UnifiedImageProcessor", **_CUT, "max_soft_tokens": 70}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
