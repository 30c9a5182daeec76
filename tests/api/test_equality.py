"""The engine's tokens are transformers' own: the same weights, prompt and suppressed tokens, fp32, greedy.

Twenty-four requests of mixed lengths and arrival times, six where the vocabulary is Whisper's own, go through one
engine together; the reference answers them one by one with the base `GenerationMixin.generate`. ``make soak`` asks all
checkpoints for twenty-four, and one of the size "base".
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from attrs import frozen
from hypothesis import settings

import triolet.demo
from triolet import Engine, EngineConfig, SamplingParams
from triolet.api.inputs.audio import Samples, load_audio
from triolet.core import events
from triolet.core.model import ModelDescription
from triolet.models.speech.whisper_speech import special_tokens

from .random_whisper import random_whisper

SOAK = settings.get_current_profile_name() == "soak"
SIZES = ("tiny", "base", "demo") if SOAK else ("tiny", "demo")


@frozen
class Case:
    audio: Samples
    prompt: tuple[int, ...]
    max_tokens: int
    delay: float


@pytest.fixture(scope="module", params=SIZES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return triolet.demo.checkpoint()
    return random_whisper(tmp_path_factory.mktemp(request.param), request.param, seed=7)


def speech(rng: np.random.Generator, clips: list[Samples], noisy: float) -> Samples:
    """Something to hear: a piece of a recording or, with the chance ``noisy``, noise with a tone."""
    seconds = rng.uniform(0.3, 12)
    clip = clips[rng.integers(len(clips))]
    if rng.random() >= noisy:
        start = rng.integers(max(1, len(clip) - 16_000))
        return clip[start : start + int(seconds * 16_000)].copy()
    time = np.arange(int(seconds * 16_000)) / 16_000
    tone = 0.2 * np.sin(2 * np.pi * rng.uniform(100, 900) * time)
    return (tone + 0.05 * rng.standard_normal(len(time))).astype(np.float32)


def make_cases(model: ModelDescription) -> list[Case]:
    rng, choose = np.random.default_rng(5), random.Random(5)
    tokens = special_tokens(model)
    clips = [load_audio(sample.path) for sample in triolet.demo.samples()[:4]]
    is_demo = model.vocabulary_size < 10_000
    requests = 24 if is_demo or SOAK else 6
    noisy = 0.1 if is_demo else 0.5  # the demo model says nothing to noise
    sounds = [
        speech(rng, clips, noisy) for _ in range(3 + requests // 6)
    ]  # fewer than requests: they share their audio
    cases = []
    for index in range(requests):
        language = choose.choice([tokens.language_ids[code] for code in ("en", "de", "es")])
        task = tokens.task_ids[choose.choice(["transcribe", "translate"])]
        prompt = (tokens.start_id, language, task, tokens.no_timestamps_id)[: choose.choice([3, 4, 4])]
        previous = () if index % 5 or tokens.previous_id is None else (tokens.previous_id, *range(40, 60 + index))
        cases.append(
            Case(choose.choice(sounds), (*previous, *prompt), choose.choice([1, 5, 17, 30, 48]), choose.random() * 0.4)
        )
    return cases


def reference(checkpoint: Path, cases: list[Case]) -> list[tuple[int, ...]]:
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.generation import GenerationMixin

    model: Any = WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    extract = WhisperFeatureExtractor.from_pretrained(checkpoint)
    answers, encoded = [], {}
    for case in cases:
        heard = case.audio.tobytes()
        with torch.inference_mode():
            if heard not in encoded:  # its own encoder, once for each audio: the same numbers, and half the time
                features = extract(case.audio, sampling_rate=16_000, return_tensors="pt").input_features
                encoded[heard] = model.get_encoder()(features)
            output = GenerationMixin.generate(
                model,
                encoder_outputs=encoded[heard],
                decoder_input_ids=torch.tensor([case.prompt]),
                do_sample=False,
                num_beams=1,
                max_new_tokens=case.max_tokens,
                max_length=None,
            )
        tokens = tuple(output[0, len(case.prompt) :].tolist())
        answers.append(tokens[:-1] if tokens[-1] == model.generation_config.eos_token_id else tokens)
    return answers


async def test_mixed_requests_get_exactly_the_tokens_of_transformers(checkpoint: Path) -> None:
    trace: list[events.Event] = []
    answers: dict[int, tuple[int, ...]] = {}
    config = EngineConfig(
        device="cpu", dtype="float32", observer=trace.append, verify=True, encode_batch_embeddings=12_000
    )
    async with Engine(checkpoint, config=config) as engine:
        cases = make_cases(engine.model)

        async def ask(index: int, case: Case) -> None:
            await trio.sleep(case.delay)
            completion = await engine.generate(
                prompt_token_ids=case.prompt, audio=case.audio, sampling=SamplingParams(max_tokens=case.max_tokens)
            )
            answers[index] = completion.token_ids

        async with trio.open_nursery() as nursery:
            for index, case in enumerate(cases):
                nursery.start_soon(ask, index, case)
        statistics = engine.statistics()
    expected = await trio.to_thread.run_sync(reference, checkpoint, cases)
    assert [answers[index] for index in range(len(cases))] == expected
    said = {token for tokens in expected for token in tokens}
    assert len(said) > len(cases), "the reference has something to say"
    assert len(set(expected)) > len(cases) // 2, "and not the same to everybody"
    distinct = len({case.audio.tobytes() for case in cases})
    assert statistics.encoder_cache.encoded == distinct, "each audio is encoded once"
    batches = [len(event.keys) for event in trace if isinstance(event, events.EncodeDispatched)]
    assert max(batches) > 1, "not one by one"
    assert max(event.embeddings for event in trace if isinstance(event, events.EncodeDispatched)) <= 12_000
