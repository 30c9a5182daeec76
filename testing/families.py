"""Tiny random checkpoints of every family that the engine reads, made in a moment, so that tests need no download.

Two layers, a vocabulary of bytes, and weights so large that the sampled tokens differ: else comparing them with
transformers' would mean little. Sizes and settings are the smallest that have every part of the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .words import BART, BERT, GEMMA, LLAMA, LLAVA, QWEN, QWEN_AUDIO, QWEN_VISION, T5, TILED, Words

_HIDDEN = 48
_LAYERS = 2
_POSITIONS = 512  # of the language models
_TARGETS = 256  # positions of the encoder-decoders
_WINDOW = 16  # positions that a layer with a window sees


def make_checkpoint(family: str, folder: str | Path, *, seed: int = 0) -> Path:
    """Writes a tiny checkpoint with random weights, tokenizer and settings to ``folder``, and returns it.

    Args:
        family: one of `FAMILIES`.
        seed: of the weights; equal seeds give equal weights.

    Raises:
        ValueError: there is no such family.
    """
    if family not in _MAKERS:
        raise ValueError(f"family={family!r}; allowed: {', '.join(_MAKERS)}")
    target = Path(folder)
    _MAKERS[family](target, seed)
    return target


def _llama(folder: Path, seed: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _save_text(folder, seed, LlamaForCausalLM, LlamaConfig, LLAMA)


def _qwen3(folder: Path, seed: int) -> None:
    """Norms of queries and keys, and heads wider than the hidden size divided by their number."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _save_text(folder, seed, Qwen3ForCausalLM, Qwen3Config, QWEN, head_dim=16)


def _gemma2(folder: Path, seed: int) -> None:
    """Soft caps, scaled embeddings, and every second layer with a window."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    changes = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": _WINDOW, "tie_word_embeddings": True}
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
    _save_text(folder, seed, Gemma2ForCausalLM, Gemma2Config, GEMMA, **changes, **caps)


def _gemma3(folder: Path, seed: int) -> None:
    """A window in all layers but the last, and two bases of rotary positions."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    changes = {"head_dim": 16, "query_pre_attn_scalar": 2, "sliding_window": _WINDOW, "tie_word_embeddings": True}
    kinds = ["sliding_attention", "full_attention"]
    _save_text(folder, seed, Gemma3ForCausalLM, Gemma3TextConfig, GEMMA, layer_types=kinds, **changes)


def _mistral(folder: Path, seed: int) -> None:
    """A window in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    _save_text(folder, seed, MistralForCausalLM, MistralConfig, LLAMA, sliding_window=_WINDOW)


def _bert(folder: Path, seed: int) -> None:
    from transformers import BertConfig, BertModel

    _save_text(folder, seed, BertModel, BertConfig, BERT)


def _bert_classifier(folder: Path, seed: int) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    _save_text(folder, seed, BertForSequenceClassification, BertConfig, BERT, **_labels())


def _bert_reranker(folder: Path, seed: int) -> None:
    """One label: how well the second of two texts answers the first."""
    from transformers import BertConfig, BertForSequenceClassification

    _save_text(folder, seed, BertForSequenceClassification, BertConfig, BERT, num_labels=1)


def _llama_classifier(folder: Path, seed: int) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    _save_text(folder, seed, LlamaForSequenceClassification, LlamaConfig, LLAMA, **_labels())


def _labels() -> dict[str, Any]:
    names = ("negative", "neutral", "positive")
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def _qwen2_5_vl(folder: Path, seed: int) -> None:
    """Images of 16 pixels a side and more; one layer of the encoder sees windows, the other the whole image."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = QWEN_VISION.make()
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
    config = Qwen2_5_VLConfig(
        text_config={**_text_settings(tokenizer), "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "out_hidden_size": _HIDDEN,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    _save(folder, _random(Qwen2_5_VLForConditionalGeneration, config, seed), tokenizer)
    _qwen_images().save_pretrained(folder)


def _qwen2_vl(folder: Path, seed: int) -> None:
    """Makes the like of Qwen2.5-VL, with an older encoder: all its layers see the whole image."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = QWEN_VISION.make()
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
    config = Qwen2VLConfig(
        text_config={**_text_settings(tokenizer), "rope_parameters": rope},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": _HIDDEN, "num_heads": 2, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    _save(folder, _random(Qwen2VLForConditionalGeneration, config, seed), tokenizer)
    _qwen_images().save_pretrained(folder)


def _qwen_images() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make: Any = Qwen2VLImageProcessorPil
    return make(size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}, patch_size=8)


def _llava(folder: Path, seed: int) -> None:
    """CLIP and Llama; 16 embeddings for each image."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = LLAVA.make()
    config = LlavaConfig(
        text_config={"model_type": "llama", **_text_settings(tokenizer)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 32,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    _save(folder, _random(LlavaForConditionalGeneration, config, seed), tokenizer)
    make: Any = CLIPImageProcessorPil
    make(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)


def _idefics3(folder: Path, seed: int) -> None:
    """Tiles of 32 pixels a side, up to 2 by 2 and the whole image; 4 embeddings each."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    _save_tiled(folder, seed, Idefics3ForConditionalGeneration, Idefics3Config, Idefics3ImageProcessorPil)


def _smolvlm(folder: Path, seed: int) -> None:
    """Makes the like of Idefics3."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    _save_tiled(folder, seed, SmolVLMForConditionalGeneration, SmolVLMConfig, SmolVLMImageProcessorPil)


def _save_tiled(folder: Path, seed: int, model: Any, make_config: Any, make_processor: Any) -> None:
    tokenizer = TILED.make()
    config = make_config(
        text_config={"model_type": "llama", **_text_settings(tokenizer)},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    _save(folder, _random(model, config, seed), tokenizer)
    make_processor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}).save_pretrained(folder)


def _qwen2_audio(folder: Path, seed: int) -> None:
    """A window of one second: 25 embeddings."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    tokenizer = QWEN_AUDIO.make()
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **_text_settings(tokenizer)},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": _LAYERS,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 50,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    _save(folder, _random(Qwen2AudioForConditionalGeneration, config, seed), tokenizer)
    make: Any = WhisperFeatureExtractor
    make(feature_size=16, chunk_length=1).save_pretrained(folder)


def _moonshine(folder: Path, seed: int) -> None:
    """An embedding for each 24 ms of audio; heads filled up from 12 numbers to 16."""
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor

    tokenizer = LLAMA.make()
    make_config: Any = MoonshineConfig  # typed more strictly than it is called
    config = make_config(
        **_sizes("encoder_num_hidden_layers", "encoder_num_attention_heads"),
        **_sizes("decoder_num_hidden_layers", "decoder_num_attention_heads"),
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        pad_head_dim_to_multiple_of=8,
        max_position_embeddings=_TARGETS,
        vocab_size=len(tokenizer),
        decoder_start_token_id=tokenizer.bos_token_id,
        **_special(tokenizer),
        tie_word_embeddings=False,
    )
    _save(folder, _random(MoonshineForConditionalGeneration, config, seed), tokenizer)
    make: Any = Wav2Vec2FeatureExtractor
    make(feature_size=1, do_normalize=False, return_attention_mask=True).save_pretrained(folder)


def _bart(folder: Path, seed: int) -> None:
    """Fewer layers in the decoder than in the encoder; an end that is forced, no three tokens in a row twice."""
    from transformers import BartConfig, BartForConditionalGeneration

    tokenizer = BART.make()
    make_config: Any = BartConfig  # typed more strictly than it is called
    config = make_config(
        **_sizes("encoder_layers", "encoder_attention_heads", layers=_LAYERS + 1),
        **_sizes("decoder_layers", "decoder_attention_heads"),
        d_model=_HIDDEN,
        encoder_ffn_dim=2 * _HIDDEN,
        decoder_ffn_dim=2 * _HIDDEN,
        max_position_embeddings=_TARGETS,
        vocab_size=len(tokenizer),
        scale_embedding=True,
        decoder_start_token_id=tokenizer.eos_token_id,
        **_special(tokenizer),
        tie_word_embeddings=False,
    )
    forced = {"forced_bos_token_id": tokenizer.bos_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    _save(
        folder,
        _random(BartForConditionalGeneration, config, seed),
        tokenizer,
        decoder_start_token_id=tokenizer.eos_token_id,
        no_repeat_ngram_size=3,
        min_length=5,
        **forced,
    )


def _t5(folder: Path, seed: int) -> None:
    """Scores that change with the distance, the same from 12 positions on; gated layers, as in T5 1.1."""
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = T5.make()
    make_config: Any = T5Config  # typed more strictly than it is called
    config = make_config(
        d_model=_HIDDEN,
        d_kv=16,
        d_ff=2 * _HIDDEN,
        num_layers=_LAYERS,
        num_decoder_layers=_LAYERS,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        n_positions=_TARGETS,
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = _random(T5ForConditionalGeneration, config, seed)
    _save(folder, model, tokenizer, decoder_start_token_id=tokenizer.pad_token_id)


def _sizes(layer_name: str, head_name: str, *, layers: int = _LAYERS) -> dict[str, int]:
    return {layer_name: layers, head_name: 4}


def _special(tokenizer: Any) -> dict[str, int]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _save_text(folder: Path, seed: int, model: Any, config: Any, words: Words, **changes: Any) -> None:
    """Saves a model of text only, and its tokenizer."""
    tokenizer = words.make()
    settings = config(**{**_text_settings(tokenizer), **changes})
    _save(folder, _random(model, settings, seed), tokenizer)


def _text_settings(tokenizer: Any) -> dict[str, Any]:
    """The settings that the configurations of all decoders share."""
    return {
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": _POSITIONS,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }


def _random(model: Any, config: Any, seed: int) -> Any:
    """A model with weights sampled from ``seed``; the caller's random state stays as it is."""
    import torch

    before = torch.get_rng_state()
    torch.manual_seed(seed)
    made = model(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, _spread(weight))
            else:  # norms around their initial values, biases around zero
                weight.add_(torch.randn_like(weight) * 0.1)
        if getattr(made.config, "tie_word_embeddings", False):  # else the last token would always be the likeliest
            made.get_input_embeddings().weight.mul_(0.1)
            decoder = made.get_decoder()
            (decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm).weight.add_(10.0)
    torch.set_rng_state(before)
    return made


def _spread(weight: Any) -> float:
    """The standard deviation that makes a layer's output about as large as its input, or somewhat larger: then every
    layer has an effect, and none drowns the others."""
    return float(1.5 / weight[0].numel() ** 0.5)


def _save(folder: Path, model: Any, tokenizer: Any, **generation: Any) -> None:
    """Saves ``model`` with its ``tokenizer``; ``generation`` are further settings of generation_config.json."""
    from transformers import GenerationConfig

    make: Any = GenerationConfig  # untyped there
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}
    if model.can_generate():
        model.generation_config = make(**{**ids, **generation})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "bert": _bert,
    "bert_classifier": _bert_classifier,
    "bert_reranker": _bert_reranker,
    "llama_classifier": _llama_classifier,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "qwen2_audio": _qwen2_audio,
    "moonshine": _moonshine,
    "bart": _bart,
    "t5": _t5,
}

FAMILIES = tuple(_MAKERS)
"""The families that `make_checkpoint` makes."""
