"""Tiny checkpoints of models that read an encoder output frame by frame: CTC models and transducers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from triolet.models.architectures.frontends import PairedDeltaMel

from .checkpoints import FAST_CONFORMER, LAYERS, classes, random_model
from .words import QWEN

_WIDTH = 24  # of the prediction network
_BLANK = 3.0  # see `_vary`
_SYMBOLS = 3  # the most emissions at one frame
_ENCODER = {**FAST_CONFORMER, "max_position_embeddings": 101}  # windows of 8 s
_STREAMING = {
    "model_type": "nemotron_asr_streaming_encoder",
    **_ENCODER,
    "sliding_window": 8,
    "default_num_lookahead_tokens": 1,
}
_GRANITE = {
    "hidden_size": 32,
    "num_hidden_layers": 2 * LAYERS,  # the first two halve the rows
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_mel_bins": 8,
    "max_position_embeddings": 32,
    "context_size": 8,
}


def _granite(folder: Path, seed: int) -> None:
    """Writes a checkpoint of Granite Speech 5, whose head is also in the middle of its encoder. transformers makes no
    feature extractor without torchaudio."""
    import torch

    makes, base = classes(), QWEN.with_media("<blank>", media="").make()
    size, settings = len(base), {"num_mel_bins": 8, "feature_extractor_type": "GraniteSpeech5FeatureExtractor"}
    encoder = {**_GRANITE, "vocab_size": size}
    config = makes.GraniteSpeech5CTCConfig(
        vocab_size=size, encoder_config=encoder, pad_token_id=size - 1, tie_word_embeddings=False
    )
    model = random_model(makes.GraniteSpeech5ForCTC, config, seed)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    rows = PairedDeltaMel(num_mel_bins=8)(_noise(seed))
    with torch.no_grad():
        _vary(model.ctc_head.bias, model(rows[None]).logits[0], size - 1, 1.5)
    model.save_pretrained(folder)
    base.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _noise(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(64_000).astype(np.float32)


def _vary(bias: Any, scores: Any, blank: int, often: float = _BLANK) -> None:
    """Changes the ``bias`` of ``scores`` [frames, labels] so that labels differ from frame to frame, and many are
    blank: ``often`` is the bias of the blank in standard deviations."""
    bias -= scores.mean(0)
    bias[blank] += often * scores.std(0).mean()


def _frames(name: str, head: str, encoder: Mapping[str, Any], folder: Path, seed: int) -> None:
    """Writes a checkpoint whose frames last 80 ms. Its labels differ from frame to frame, and many are blank."""
    import torch

    makes, base = classes(), QWEN.with_media("<unk>", "<pad>", "<blank>", media="").make()
    tokenizer = makes.ParakeetTokenizer(tokenizer_object=base.backend_tokenizer, pad_token="<pad>", unk_token="<unk>")
    blank, settings = len(tokenizer) - 1, {"vocab_size": len(tokenizer), "encoder_config": dict(encoder)}
    if head == "CTC":
        settings["pad_token_id"] = blank
    else:
        settings |= {"decoder_hidden_size": _WIDTH, "num_decoder_layers": LAYERS, "max_symbols_per_step": _SYMBOLS}
        settings |= {"blank_token_id": blank, "pad_token_id": tokenizer.pad_token_id}
    if name == "Nemotron3_5Asr":
        settings |= {"prompt_intermediate_size": 32}
    config = getattr(makes, f"{name}{'' if name.startswith('Nemotron') else head}Config")(**settings)
    model, processor = random_model(getattr(makes, f"{name}For{head}"), config, seed), _processor(name, head, tokenizer)
    with torch.no_grad():
        inputs = processor([_noise(seed)], sampling_rate=16_000)
        if head == "CTC":
            bias, scores = model.ctc_head.bias, model(**inputs).logits[0]
        else:
            model.decoder.decoder_projector.weight.mul_(3.0)
            bias, heard = model.joint.head.bias, model.get_audio_features(**inputs).pooler_output[0]
            scores = model.joint(heard[:, None], model.decoder(torch.arange(len(tokenizer))[:, None])[None, :, 0])
            scores = scores.flatten(0, 1)
        _vary(bias, scores, blank)
    model.save_pretrained(folder)
    if head != "CTC":
        tokens = {"decoder_start_token_id": blank, "pad_token_id": tokenizer.pad_token_id}
        suppressed = range(len(tokenizer), len(bias))
        makes.GenerationConfig(**tokens, suppress_tokens=list(suppressed)).save_pretrained(folder)
    processor.save_pretrained(folder)


def _processor(name: str, head: str, tokenizer: Any) -> Any:
    makes = classes()
    if name == "Parakeet":
        extractor = makes.ParakeetFeatureExtractor(feature_size=16)
        return makes.ParakeetProcessor(extractor, tokenizer, decoder_type=head.lower())
    extractor = makes.NemotronAsrStreamingFeatureExtractor(feature_size=16)
    return getattr(makes, f"{name}Processor")(extractor, tokenizer, supported_num_lookahead_tokens=[3, 1, 0])


FRAME_MAKERS: Mapping[str, Callable[[Path, int], None]] = {
    "parakeet_ctc": partial(_frames, "Parakeet", "CTC", _ENCODER),
    "parakeet_rnnt": partial(_frames, "Parakeet", "RNNT", _ENCODER),
    "parakeet_tdt": partial(_frames, "Parakeet", "TDT", _ENCODER),
    "nemotron_asr_streaming": partial(_frames, "NemotronAsrStreaming", "RNNT", _STREAMING),
    "granite_speech5": _granite,
    "nemotron3_5_asr": partial(_frames, "Nemotron3_5Asr", "RNNT", _STREAMING),
}
"""The families, each with the function that writes a checkpoint to a folder, from a seed."""
