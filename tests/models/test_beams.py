"""Beam search: hypotheses and scores are those of transformers' own ``generate``, however requests are batched."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from triolet.core.request import EncoderItem, LogitRules, Request, SamplingParams
from triolet.models.executor import TorchExecutor

from .searches import Pump, search

SEARCHES = (
    {"beam_size": 2},
    {"beam_size": 5, "n": 5},
    {"beam_size": 3, "length_penalty": 0.0, "n": 3},
    {"beam_size": 4, "length_penalty": 2.5, "n": 2},
    {"beam_size": 4, "length_penalty": -1.0, "n": 4},
    {"beam_size": 5, "patience": 1.0, "n": 5},
    {"beam_size": 8, "patience": 1.0, "length_penalty": 0.5, "min_tokens": 4},
    {"beam_size": 3, "repetition_penalty": 1.3, "n": 3},
    {"beam_size": 3, "stop_token_ids": (70, 90), "n": 3},
    {"beam_size": 4, "logit_bias": {80: 2.0, 81: -1.0}, "n": 4},
)


@pytest.fixture
def pump(config):
    """``pump(folder, config_changes, **limits)``; closed after the test."""
    opened = []

    def start(folder, settings=None, **limits):
        opened.append(TorchExecutor(folder, config(**(settings or {}))))
        return Pump.of(opened[-1], **limits)

    yield start
    for executor in opened:
        executor.close()


# -- Whisper -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper(reference):
    model = copy.deepcopy(reference)
    model.generation_config = GenerationConfig()
    return model


def heard(name, key, audio, prompt, *, rules=None, max_tokens=24, **sampling):
    item = EncoderItem(key=key, payload=audio, embeddings=100, size=100)
    return Request(
        id=name,
        prompt_token_ids=tuple(prompt),
        items=(item,),
        sampling=SamplingParams(**sampling),
        rules=rules or LogitRules(),
        max_tokens=max_tokens,
    )


@pytest.fixture
def expect(whisper, features, ids):
    """``expect(request)``: what transformers finds."""

    def find(request):
        timestamps = request.rules.timestamps
        processors = []
        if timestamps is not None:
            generation = GenerationConfig(
                no_timestamps_token_id=timestamps.no_timestamps_id,
                eos_token_id=ids.eos,
                max_initial_timestamp_index=timestamps.max_initial,
            )
            processors = [WhisperTimeStampLogitsProcessor(generation, begin_index=len(request.prompt_token_ids))]
        return search(
            whisper,
            request.prompt_token_ids,
            request,
            eos=ids.eos,
            processors=processors,
            inputs=features(request.items[0].payload),
            decoder_input_ids=torch.tensor([request.prompt_token_ids]),
        )

    return find


def check(answer, expected, request):
    assert answer.error is None
    found = answer.hypotheses[: request.sampling.n]
    assert [one.token_ids for one in found] == expected.token_ids
    assert [one.score for one in found] == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.parametrize("sampling", SEARCHES, ids=str)
def test_hypotheses_of_whisper_equal_transformers(pump, checkpoint, audio, ids, expect, sampling):
    """Behind prompts that end within a page, at its end, and of one token."""
    base = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    prompts = [base, (ids.start,), (ids.previous, *range(60, 79), *base)]
    rules = LogitRules(suppress=(1, 2, 3, 250), begin_suppress=(32, ids.eos))
    requests = [
        heard(f"r{index}", f"clip{index}", audio(index, 1.5), prompt, rules=rules, **sampling)
        for index, prompt in enumerate(prompts)
    ]
    answers = pump(checkpoint).run(*requests)
    for request, answer in zip(requests, answers, strict=True):
        check(answer, expect(request), request)
