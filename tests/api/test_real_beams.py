"""Beam search on a real Whisper: transformers' hypotheses and scores, recording by recording.

The folder that the variable TRIOLET_REAL names has a checkpoint ``whisper-base`` and recordings ``speech/*.wav``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import GenerationMixin

import triolet
from triolet.api.inputs.audio import load_audio
from triolet.models.speech.whisper_speech import special_tokens

REAL = os.environ.get("TRIOLET_REAL", "")
SEARCHES = (
    {"beam_size": 5, "n": 5},
    {"beam_size": 5, "patience": 1.0, "n": 2},
    {"beam_size": 3, "length_penalty": 0.0},
)

pytestmark = [pytest.mark.real, pytest.mark.skipif(not REAL, reason="TRIOLET_REAL names no folder")]


async def test_hypotheses_on_real_speech_equal_transformers() -> None:
    folder = Path(REAL) / "whisper-base"
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extract = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    config = triolet.EngineConfig(device="cpu", dtype="float32", verify=True)
    recordings = sorted((Path(REAL) / "speech").glob("*.wav"))
    assert recordings
    async with triolet.Engine(folder, config=config) as engine:
        tokens = special_tokens(engine.model)
        prompt = [tokens.start_id, tokens.language_ids["en"], tokens.task_ids["transcribe"], tokens.no_timestamps_id]
        for recording in recordings:
            samples = load_audio(recording, sampling_rate=16_000)
            features = extract(samples, sampling_rate=16_000, return_tensors="pt").input_features
            for ask in SEARCHES:
                sampling = triolet.SamplingParams(max_tokens=100, **ask)
                found = await engine.generate(prompt_token_ids=prompt, audio=samples, sampling=sampling)
                expected, scores = generate(model, engine.model, features, prompt, sampling)
                told = (found, *found.alternatives)
                assert [one.token_ids for one in told] == expected, recording.name
                assert [one.score for one in told] == pytest.approx(scores, abs=1e-4), recording.name


def generate(
    model: Any, description: Any, features: torch.Tensor, prompt: list[int], sampling: triolet.SamplingParams
) -> tuple[list[tuple[int, ...]], list[float]]:
    eos = description.eos_token_ids[0]
    config = transformers.GenerationConfig(
        num_beams=sampling.beam_size,
        num_return_sequences=sampling.n,
        early_stopping=sampling.patience is not None,
        length_penalty=sampling.length_penalty,
        max_length=len(prompt) + sampling.max_tokens,
        eos_token_id=eos,
        pad_token_id=eos,
        decoder_start_token_id=prompt[0],
        suppress_tokens=list(description.suppress_token_ids) or None,
        begin_suppress_tokens=list(description.begin_suppress_token_ids) or None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with torch.no_grad():
        found = GenerationMixin.generate(
            model, inputs=features, decoder_input_ids=torch.tensor([prompt]), generation_config=config
        )
    rows = found.sequences[:, len(prompt) :].tolist()
    return [tuple(token for token in row if token != eos) for row in rows], found.sequences_scores.tolist()
