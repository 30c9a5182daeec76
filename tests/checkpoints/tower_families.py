"""Tiny checkpoints of the speech models whose processors in transformers need further packages. The settings of these
processors are written without the packages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve

from .checkpoints import HIDDEN, LAYERS, classes, random_model, save_checkpoint, text_settings
from .words import LLAMA, QWEN

_ASKED = (
    "{% elif part['type'] == 'keywords' %}Hotwords: {{ part['keywords'] | join(', ') }}"
    "{% elif part['type'] == 'language' %}[{{ part['language'] }}]{% else %}"
)


def _voxtral(folder: Path, seed: int) -> None:
    """Writes a checkpoint with windows of two seconds, without a chat template."""
    makes = classes()
    words = LLAMA.with_media("[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[TRANSCRIBE]", media="")
    tokenizer = evolve(words, chat=None).make()
    encoder = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 128}
    config = makes.VoxtralConfig(
        text_config={"model_type": "llama", **text_settings(tokenizer), "head_dim": 12},
        audio_config={**encoder, "num_mel_bins": 16, "max_source_positions": 100},
        audio_token_id=tokenizer.convert_tokens_to_ids("[AUDIO]"),
    )
    save_checkpoint(folder, random_model(makes.VoxtralForConditionalGeneration, config, seed), tokenizer)
    makes.WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)


def _voxtral_realtime(folder: Path, seed: int) -> None:
    """Writes a checkpoint whose text is 2 positions behind the audio, with 3 positions of silence before. Its windows
    of attention are shorter than a text."""
    makes, tokenizer = (
        classes(),
        evolve(LLAMA.with_media("[STREAMING_PAD]", "[STREAMING_WORD]", media=""), chat=None).make(),
    )
    encoder = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 64}
    config = makes.VoxtralRealtimeConfig(
        text_config={**text_settings(tokenizer), "head_dim": 12, "sliding_window": 24, "tie_word_embeddings": True},
        audio_config={**encoder, "num_mel_bins": 16, "head_dim": 16, "sliding_window": 20},
        default_num_delay_tokens=2,
    )
    model = random_model(makes.VoxtralRealtimeForConditionalGeneration, config, seed)
    model.model.multi_modal_projector.linear_2.weight.data *= 3  # the audio matters more than the tokens
    save_checkpoint(folder, model, tokenizer)
    makes.VoxtralRealtimeFeatureExtractor(feature_size=16).save_pretrained(folder)
    audio = {"sampling_rate": 16_000, "frame_rate": 12.5, "transcription_delay_ms": 160.0}
    (folder / "tekken.json").write_text(json.dumps({"audio": {**audio, "streaming_n_left_pad_tokens": 3}}))


def _kyutai(folder: Path, seed: int) -> None:
    """Writes a checkpoint with three codebooks, whose text is 2 positions behind the audio, with 3 positions of silence
    before. It hears 2 positions twice, has no end of text, and begins with a token outside of the vocabulary. Its
    windows of attention are shorter than a text."""
    import torch

    makes, tokenizer = classes(), evolve(LLAMA.with_media("<pad>", media=""), chat=None).make()
    tokenizer.pad_token = "<pad>"
    codec = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}
    vectors = {"codebook_size": 256, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16}
    sizes = {"num_filters": 2, "upsample_groups": 32, "intermediate_size": 64, "num_quantizers": 3}
    codes = {"num_codebooks": 3, "codebook_vocab_size": 257, "audio_bos_token_id": 256}
    tokens = {"vocab_size": len(tokenizer) + 1, "bos_token_id": len(tokenizer) + 20, "eos_token_id": None}
    config = makes.KyutaiSpeechToTextConfig(
        **{**text_settings(tokenizer), **tokens, **codes, "ffn_dim": 2 * HIDDEN},
        audio_pad_token_id=len(tokenizer) + 1 + 3 * 257,
        sliding_window=24,
        codec_config={"model_type": "mimi", **codec, **vectors, **sizes, "sliding_window": 10},
    )
    model = random_model(makes.KyutaiSpeechToTextForConditionalGeneration, config, seed)
    draw, quantizer = torch.Generator().manual_seed(seed), model.codec_model.quantizer
    for part in (quantizer.semantic_residual_vector_quantizer, quantizer.acoustic_residual_vector_quantizer):
        for layer in part.layers:
            layer.codebook.embed_sum.normal_(0.0, 4.0, generator=draw)  # so that codes differ
            layer.codebook.cluster_usage.uniform_(0.5, 2.0, generator=draw)
    model.codec_model.generation_config.use_cache = True
    begins = {"bos_token_id": config.bos_token_id, "eos_token_id": None, "audio_window_size": 2}
    save_checkpoint(folder, model, tokenizer, **begins)
    silence = {"audio_silence_prefix_seconds": 0.24, "audio_delay_seconds": 0.16}
    makes.KyutaiSpeechToTextFeatureExtractor(**silence).save_pretrained(folder)


def _granite_speech(name: str, folder: Path, seed: int) -> None:
    """Writes a checkpoint that attends within blocks of 16 rows, and has 3 embeddings for 15 rows. "Plus" reads its
    first rows beside its last ones, and the other has an adapter."""
    makes, tokenizer = classes(), LLAMA.with_media("<|audio|>", media="<|audio|>").make()
    plus = name.endswith("Plus")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "encoder_hidden_size": 32}
    queries = {**sizes, "model_type": "blip_2_qformer", "cross_attention_frequency": 1, "num_hidden_layers": 1}
    blocks = dict[str, Any](context_size=16, max_pos_emb=16, conv_kernel_size=5, output_dim=8, hidden_dim=32)
    if plus:
        blocks["cat_hidden_layers"], queries["encoder_hidden_size"] = [0], 64
    config = getattr(makes, f"{name}Config")(
        text_config={"model_type": "granite", **text_settings(tokenizer), "embedding_multiplier": 2.0},
        encoder_config={**blocks, "num_layers": LAYERS, "num_heads": 2},
        projector_config=queries,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=not plus,
        tie_word_embeddings=False,
    )
    model = random_model(getattr(makes, f"{name}ForConditionalGeneration"), config, seed)
    model.lm_head.weight.data[config.audio_token_id] = 0.0  # it is not written: transformers would read it as token 0
    save_checkpoint(folder, model, tokenizer)
    _settle(folder, "GraniteSpeechFeatureExtractor", n_mels=80)
    if not plus:
        _adapter(folder, seed, "model.language_model", {"self_attn.q_proj": (HIDDEN, HIDDEN)})


def _adapter(folder: Path, seed: int, decoder: str, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Writes an adapter of linear layers, given with outputs and inputs, large enough that the tokens differ."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.{decoder}.layers.{layer}.{name}.lora_{side}.weight": torch.randn(shape, generator=draw)
        for layer in range(LAYERS)
        for name, (outputs, inputs) in sizes.items()
        for side, shape in {"A": (4, inputs), "B": (outputs, 4)}.items()
    }
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "bias": "none", "target_modules": [*sizes]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _fun_asr(folder: Path, seed: int) -> None:
    """Writes a checkpoint for up to 4 seconds of audio, whose encoder has layers of each kind."""
    makes, tokenizer = classes(), QWEN.with_media("<|object_ref_start|>", media="<|object_ref_start|>").make()
    tokenizer.chat_template = tokenizer.chat_template.replace("{% else %}<|object", f"{_ASKED}<|object")
    layers = {"num_hidden_layers": 3, "num_timestamp_prediction_layers": 1, "fsmn_kernel_size": 3}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = makes.FunAsrNanoConfig(
        text_config={"model_type": "qwen3", "head_dim": 16, **text_settings(tokenizer)},
        adaptor_config={**sizes, "hidden_size": HIDDEN, "intermediate_size": HIDDEN // 4, "projector_hidden_size": 64},
        audio_config={**layers, **sizes, "num_mel_bins": 16, "max_position_embeddings": 68},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|object_ref_start|>"),
        tie_word_embeddings=False,
    )
    save_checkpoint(folder, random_model(makes.FunAsrNanoForConditionalGeneration, config, seed), tokenizer)
    _settle(folder, "FunAsrNanoFeatureExtractor", feature_size=16, window="hamming")


def _phi4_multimodal(folder: Path, seed: int) -> None:
    """Writes a checkpoint whose encoder knows distances up to 8 embeddings, with an encoder of images, with positions
    that turn a part of each head, and with an adapter of each layer."""
    makes, tokenizer = classes(), QWEN.with_media("<|audio|>", "<|image|>", media="<|audio|>").make()
    audio, image = tokenizer.convert_tokens_to_ids(["<|audio|>", "<|image|>"])
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    convolution = {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8}
    blocks = {"num_blocks": LAYERS, "input_size": 16, "bias_max_distance": 8, "audio_token_id": audio}
    patches = {"num_hidden_layers": LAYERS, "image_size": 28, "crop_size": 28, "image_token_id": image}
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 4.0, 9.0, 16.0]}
    config = makes.Phi4MultimodalConfig(
        **{**text_settings(tokenizer), "tie_word_embeddings": True},
        audio_config={**blocks, **sizes, **convolution},
        vision_config={**patches, **sizes},
        original_max_position_embeddings=384,
        sliding_window=1024,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.7, **factors},
    )
    model = random_model(makes.Phi4MultimodalForCausalLM, config, seed)
    model.lm_head.weight.data[[audio, image]] = 0.0  # they are not written: transformers would read them as items
    save_checkpoint(folder, model, tokenizer)
    makes.Phi4MultimodalFeatureExtractor(feature_size=16).save_pretrained(folder)
    attention = {"self_attn.qkv_proj": (2 * HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    feed = {"mlp.gate_up_proj": (4 * HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, 2 * HIDDEN)}
    _adapter(folder / "speech-lora", seed, "model", {**attention, **feed})


def _settle(folder: Path, kind: str, **settings: Any) -> None:
    """Writes the settings of a feature extractor that cannot be made without its package."""
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": kind, **settings}))


TOWER_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    "voxtral": _voxtral,
    "voxtral_realtime": _voxtral_realtime,
    "kyutai_speech_to_text": _kyutai,
    "granite_speech": partial(_granite_speech, "GraniteSpeech"),
    "granite_speech_plus": partial(_granite_speech, "GraniteSpeechPlus"),
    "fun_asr_nano": _fun_asr,
    "phi4_multimodal": _phi4_multimodal,
}
"""The families, each with the function that writes its checkpoint to a folder, from a seed."""
