"""Tiny checkpoints of models that read speech."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .checkpoints import (
    FAST_CONFORMER,
    HIDDEN,
    LAYERS,
    TARGETS,
    classes,
    random_model,
    save_checkpoint,
    special_ids,
    text_settings,
)
from .tower_families import TOWER_MAKERS
from .words import LLAMA, QWEN

_MELS = 16
_ENCODER = {  # as Whisper's
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_mel_bins": _MELS,
}
_KEYWORDS = "{% elif part['type'] == 'keywords' %}Hotwords: {{ part['keywords'] | join(', ') }}{% else %}"

_MARKED = (
    "{% for part in messages[0]['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}<timestamp><timestamp>"
    "{% else %}MEDIA{% endif %}{% endfor %}"
)


def _moonshine(folder: Path, seed: int) -> None:
    """Writes a checkpoint with an embedding for each 24 ms of audio."""
    layers = {"encoder_num_hidden_layers": LAYERS, "decoder_num_hidden_layers": LAYERS}
    heads = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
    _of_samples("Moonshine", folder, seed, **layers, **heads, tie_word_embeddings=False)


def _of_samples(name: str, folder: Path, seed: int, **settings: Any) -> None:
    """Writes a checkpoint of a Moonshine, whose heads are padded from 12 numbers to 16, and whose feature extractor
    leaves samples as they are."""
    makes, tokenizer = classes(), LLAMA.make()
    config = getattr(makes, f"{name}Config")(
        **settings,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        pad_head_dim_to_multiple_of=8,
        max_position_embeddings=TARGETS,
        vocab_size=len(tokenizer),
        decoder_start_token_id=tokenizer.bos_token_id,
        **special_ids(tokenizer),
    )
    model = random_model(getattr(makes, f"{name}ForConditionalGeneration"), config, seed)
    save_checkpoint(folder, model, tokenizer)
    extractor = makes.Wav2Vec2FeatureExtractor(feature_size=1, do_normalize=False, return_attention_mask=True)
    extractor.save_pretrained(folder)


def _qwen3_asr(model: str, folder: Path, seed: int) -> None:
    """Writes a checkpoint with windows of two seconds in the encoder's attention. As an aligner it knows 64 times, and
    writes two marks after each word of a prompt."""
    makes = classes()
    marks = {"audio_bos_token": "<|audio_start|>", "audio_token": "<|audio_pad|>", "audio_eos_token": "<|audio_end|>"}
    words = QWEN.with_media(*marks.values(), "<asr_text>", "<timestamp>", media="".join(marks.values()))
    tokenizer = words.make()
    if model.endswith("ForTokenClassification"):
        tokenizer.chat_template = _MARKED.replace("MEDIA", "".join(marks.values()))
    for name, mark in marks.items():
        setattr(tokenizer, name, mark)
    tokenizer.init_kwargs.update(marks)
    config = makes.Qwen3ASRConfig(
        text_config={"model_type": "qwen3", "head_dim": 16, **text_settings(tokenizer)},
        audio_config={
            "d_model": 32,
            "encoder_layers": LAYERS,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": _MELS,
            "output_dim": HIDDEN,
            "downsample_hidden_size": 8,
            "n_window_infer": 200,
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        timestamp_token_id=tokenizer.convert_tokens_to_ids("<timestamp>"),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        num_labels=64,
    )
    extractor = makes.Qwen3ASRFeatureExtractor(feature_size=_MELS)
    processor = makes.Qwen3ASRProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    made = random_model(getattr(makes, model), config, seed)
    if not hasattr(made, "lm_head"):  # marks shall differ by their places
        made.get_input_embeddings().weight.data[config.timestamp_token_id] *= 0.02
        for layer in made.get_decoder().layers:
            layer.self_attn.q_norm.weight.data *= 60
    _save(folder, made, processor)


def _windowed(
    name: str, text: str, marks: tuple[str, ...], windows: Mapping[str, int], seconds: int, folder: Path, seed: int
) -> None:
    """Writes a checkpoint that cuts audio into windows of ``seconds``, at most four of them."""
    tokenizer = (LLAMA if text == "llama" else QWEN).with_media(*marks, media="".join(marks)).make()
    mark = marks[len(marks) // 2]
    config = {
        "text_config": {"model_type": text, **text_settings(tokenizer)},
        "audio_config": {**_ENCODER, **windows},
        "audio_token_id": tokenizer.convert_tokens_to_ids(mark),
    }
    extractor = {"feature_size": _MELS, "chunk_length": seconds}
    options = {"audio_token": mark, "max_audio_len": 4 * seconds}
    _placed(folder, seed, name, config, tokenizer, "WhisperFeatureExtractor", extractor, **options)


def _moss(folder: Path, seed: int) -> None:
    """Writes a checkpoint with windows of two seconds, and with the seconds among the placeholders."""
    marks = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
    tokenizer = QWEN.with_media(*marks, media="".join(marks)).make()
    template = tokenizer.chat_template.replace("{% else %}<|audio_start|>", f"{_KEYWORDS}<|audio_start|>")
    tokenizer.chat_template = template
    config = {
        "text_config": {"model_type": "qwen3", "head_dim": 16, **text_settings(tokenizer)},
        "audio_config": {**_ENCODER, "max_source_positions": 100},
        "audio_token_id": tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        "audio_chunk_size": 32_000,
        "tie_word_embeddings": False,
    }
    name, extractor = "MossTranscribeDiarize", {"feature_size": _MELS, "chunk_length": 2}
    _placed(folder, seed, name, config, tokenizer, f"{name}FeatureExtractor", extractor)


def _vibevoice(folder: Path, seed: int) -> None:
    """Writes a checkpoint whose encoder reads 16,000 samples at once, and whose prompt says how long the audio is."""
    marks = ("<|object_ref_start|>", "<|box_start|>", "<|object_ref_end|>")
    tokenizer = QWEN.with_media(*marks, media=f"{''.join(marks)} of <|AUDIO_DURATION|> seconds\n").make()
    begin, token, end = tokenizer.convert_tokens_to_ids(list(marks))
    kind = "vibevoice_acoustic_tokenizer_encoder"
    encoder = {"model_type": kind, "num_filters": 2, "depths": [1] * 7, "hidden_size": 8}
    config = {
        "text_config": {"model_type": "qwen2", **text_settings(tokenizer)},
        "acoustic_tokenizer_encoder_config": encoder,
        "semantic_tokenizer_encoder_config": encoder,
        "audio_token_id": token,
        "audio_bos_token_id": begin,
        "audio_eos_token_id": end,
        "acoustic_tokenizer_chunk_size": 16_000,
    }
    _placed(folder, seed, "VibeVoiceAsr", config, tokenizer, "VibeVoiceAcousticTokenizerFeatureExtractor", {})


def _placed(
    folder: Path,
    seed: int,
    name: str,
    settings: Mapping[str, Any],
    tokenizer: Any,
    extractor: str,
    features: Mapping[str, Any],
    **options: Any,
) -> None:
    """Writes a checkpoint of transformers' classes ``name``, and its processor with ``options``."""
    makes = classes()
    config = getattr(makes, f"{name}Config")(**settings)
    made = random_model(getattr(makes, f"{name}ForConditionalGeneration"), config, seed)
    heard = getattr(makes, extractor)(**features)
    processor = getattr(makes, f"{name}Processor")(heard, tokenizer, chat_template=tokenizer.chat_template, **options)
    _save(folder, made, processor)


def _save(folder: Path, model: Any, processor: Any, **generation: Any) -> None:
    save_checkpoint(folder, model, processor.tokenizer, **generation)
    processor.save_pretrained(folder)


def _moonshine_streaming(folder: Path, seed: int) -> None:
    """Writes a checkpoint whose encoder is narrower than its decoder and sees windows of 16 embeddings."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    encoder = {**sizes, "num_hidden_layers": LAYERS, "sliding_windows": [[16, 4], [16, 0]]}
    decoder = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4}
    _of_samples("MoonshineStreaming", folder, seed, encoder_config=encoder, **decoder)


_FAST_CONFORMER = {
    "model_type": "parakeet_encoder",
    **FAST_CONFORMER,
    "max_position_embeddings": 400,
    "layerdrop": 0.0,
    "scale_input": False,
}

_PROMPT = ("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>", "<|en|>", "<|de|>")
_OPTIONS = ("<|pnc|>", "<|nopnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>")


def _cohere_asr(folder: Path, seed: int) -> None:
    """Writes a checkpoint whose encoder is narrower than its decoder, with two of the languages."""
    makes, tokenizer = classes(), LLAMA.with_media(*_PROMPT, *_OPTIONS, "▁", media="").make()
    start = tokenizer.convert_tokens_to_ids("▁")
    config = makes.CohereAsrConfig(
        encoder_config=_FAST_CONFORMER,
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=TARGETS,
        decoder_start_token_id=start,
        **special_ids(tokenizer),
    )
    model = random_model(makes.CohereAsrForConditionalGeneration, config, seed)
    processor = makes.CohereAsrProcessor(makes.CohereAsrFeatureExtractor(feature_size=_MELS), tokenizer)
    _save(folder, model, processor, decoder_start_token_id=start)


def _canary(folder: Path, seed: int) -> None:
    """Writes a checkpoint whose head is the token embedding, and whose chat template writes the prompt."""
    makes, tokenizer = classes(), LLAMA.with_media(*_PROMPT, *_OPTIONS, media="").make()
    languages = "<|{{ part['source_language'] }}|><|{{ part['target_language'] }}|>"
    tokenizer.chat_template = (
        f"{''.join(_PROMPT[:3])}{{% for part in messages[0]['content'] if part['type'] == 'text' %}}{languages}"
        f"{{{{ '<|pnc|>' if part['punctuation'] else '<|nopnc|>' }}}}{{% endfor %}}{''.join(_OPTIONS[2:])}"
    )
    start = tokenizer.convert_tokens_to_ids(_PROMPT[0])
    decoder = {**text_settings(tokenizer), "num_key_value_heads": 4, "head_dim": 12, "max_position_embeddings": TARGETS}
    config = makes.CanaryConfig(
        encoder_config={**_FAST_CONFORMER, "hidden_size": HIDDEN},
        decoder_config=decoder,
        vocab_size=len(tokenizer),
        decoder_start_token_id=start,
        **special_ids(tokenizer),
    )
    model = random_model(makes.CanaryForConditionalGeneration, config, seed)
    extractor = makes.ParakeetFeatureExtractor(feature_size=_MELS)
    processor = makes.CanaryProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    _save(folder, model, processor, decoder_start_token_id=start)


def _nemotron3_diarization(folder: Path, seed: int) -> None:
    """Writes a checkpoint of three speakers with chunks of less than a second, whose cache is full after four. The
    classifier is so strong that speakers come and go."""
    import torch

    makes = classes()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    streaming = {"fifo_length": 12, "speaker_cache_update_period": 8, "speaker_cache_length": 18, "num_speakers": 3}
    config = makes.Nemotron3DiarizationConfig(
        audio_config={**sizes, "num_hidden_layers": LAYERS, "num_mel_bins": _MELS},
        head_config={"hidden_size": 24, "num_speakers": 3, "audio_hidden_size": 32},
        streaming_config=streaming,
        chunk_length=10,
        chunk_right_context=4,
        fifo_length=6,
        speaker_cache_update_period=8,
    )
    model = random_model(makes.Nemotron3DiarizationForAudioFrameClassification, config, seed)
    with torch.no_grad():
        model.classifier.out_proj.weight.mul_(8.0)
    model.save_pretrained(folder)
    extractor = makes.NemotronAsrStreamingFeatureExtractor(feature_size=_MELS)
    makes.Nemotron3DiarizationProcessor(extractor).save_pretrained(folder)


SPEECH_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    "moonshine": _moonshine,
    "moonshine_streaming": _moonshine_streaming,
    "cohere_asr": _cohere_asr,
    "canary": _canary,
    "qwen3_aligner": partial(_qwen3_asr, "Qwen3ASRForTokenClassification"),
    "qwen3_asr": partial(_qwen3_asr, "Qwen3ASRForConditionalGeneration"),
    "glmasr": partial(
        _windowed,
        "GlmAsr",
        "llama",
        ("<|begin_of_audio|>", "<|pad|>", "<|end_of_audio|>"),
        {"max_position_embeddings": 100, "intermediate_size": 128},
        2,
    ),
    "audioflamingo3": partial(_windowed, "AudioFlamingo3", "qwen2", ("<sound>",), {"max_source_positions": 50}, 1),
    "moss_transcribe_diarize": _moss,
    "vibevoice_asr": _vibevoice,
    **TOWER_MAKERS,
    "nemotron3_diarization": _nemotron3_diarization,
}
"""The families, each with the function that writes a checkpoint to a folder, from a seed."""
