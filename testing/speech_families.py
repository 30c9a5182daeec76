"""Tiny checkpoints of models that read speech."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .checkpoints import HIDDEN, LAYERS, TARGETS, random_model, save_checkpoint, special_ids
from .words import LLAMA


def _moonshine(folder: Path, seed: int) -> None:
    """Writes a checkpoint with an embedding for each 24 ms of audio, and with heads that are padded from 12 numbers to
    16."""
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor

    tokenizer = LLAMA.make()
    make_config: Any = MoonshineConfig  # the annotations are stricter than the code
    config = make_config(
        encoder_num_hidden_layers=LAYERS,
        encoder_num_attention_heads=4,
        decoder_num_hidden_layers=LAYERS,
        decoder_num_attention_heads=4,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        pad_head_dim_to_multiple_of=8,
        max_position_embeddings=TARGETS,
        vocab_size=len(tokenizer),
        decoder_start_token_id=tokenizer.bos_token_id,
        **special_ids(tokenizer),
        tie_word_embeddings=False,
    )
    save_checkpoint(folder, random_model(MoonshineForConditionalGeneration, config, seed), tokenizer)
    make: Any = Wav2Vec2FeatureExtractor
    make(feature_size=1, do_normalize=False, return_attention_mask=True).save_pretrained(folder)


SPEECH_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    "moonshine": _moonshine,
}
"""The families, each with the function that writes a checkpoint to a folder, from a seed."""
