"""Speech models that add audio to their tokens: each text is the one that transformers generates for the model's own
prompt, whoever else asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attrs import field, frozen

from triolet import CheckpointError, Completion, Engine, EngineConfig, InvalidRequest
from triolet.api.inputs.audio import Samples
from triolet.testing.families import make_checkpoint

from .scarcity import ask_until_preempted, settled

CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True)
GREEDY: dict[str, Any] = {"temperature": 0.0, "voice_activity": "off"}
STEP, SILENCE, DELAY = 1280, 3, 2  # of the tiny Voxtral Realtime: samples of a position, and positions


@frozen(kw_only=True)
class Case:
    """A tiny checkpoint with what transformers generates of its sounds."""

    name: str
    folder: Path
    rate: int
    special: frozenset[int]
    generated: Callable[[int], tuple[int, ...]] = field(eq=False)

    def heard(self, seed: int) -> tuple[Samples, int]:
        return heard(seed, self.rate), self.rate


def heard(seed: int, rate: int) -> Samples:
    """Up to four seconds of noise that is now loud and now quiet."""
    numbers = np.random.default_rng(seed)
    loud = np.repeat(numbers.uniform(0.0, 2.0, 64) ** 3, rate // 16)
    return (numbers.normal(0.0, 0.1, 4 * rate) * loud)[: 4 * rate - 4321 * seed].astype(np.float32)


@pytest.fixture(scope="module", params=["voxtral_realtime", "kyutai_speech_to_text"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp("added"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)
    make = {"voxtral_realtime": _voxtral, "kyutai_speech_to_text": _kyutai}[request.param]
    return Case(
        name=request.param,
        folder=folder,
        rate=extractor.sampling_rate,
        special=frozenset(token for token, one in tokenizer.added_tokens_decoder.items() if one.special),
        generated=cache(lambda seed: make(folder, tokenizer, extractor, heard(seed, extractor.sampling_rate))),
    )


def _voxtral(folder: Path, tokenizer: Any, extractor: Any, samples: Samples) -> tuple[int, ...]:
    """What transformers generates up to the end of text."""
    module: Any = transformers.VoxtralRealtimeForConditionalGeneration.from_pretrained(folder).eval()
    pads = [tokenizer.convert_tokens_to_ids("[STREAMING_PAD]")] * (SILENCE + DELAY)
    prompt = torch.tensor([[tokenizer.bos_token_id, *pads]])
    padded = np.pad(samples, (SILENCE * STEP, -len(samples) % STEP + (DELAY + 11) * STEP))
    inputs = extractor(padded, sampling_rate=16_000, return_tensors="pt")
    with torch.inference_mode():
        found = module.generate(
            input_ids=prompt, **inputs, num_delay_tokens=DELAY, max_new_tokens=999, do_sample=False
        )  # it cuts off by itself after the audio
    tokens = found[0, prompt.shape[1] :].tolist()
    ends = tokenizer.eos_token_id
    return tuple(tokens[: tokens.index(ends)] if ends in tokens else tokens)


def _kyutai(folder: Path, tokenizer: Any, extractor: Any, samples: Samples) -> tuple[int, ...]:
    """What transformers generates with all settings of the checkpoint."""
    module: Any = transformers.KyutaiSpeechToTextForConditionalGeneration.from_pretrained(folder).eval()
    with torch.inference_mode():
        found = module.generate(**extractor(samples, sampling_rate=24_000, return_tensors="pt"), do_sample=False)
    return tuple(found[0, 1:].tolist())


async def test_each_window_has_the_tokens_of_generate(case: Case) -> None:
    async with Engine(case.folder, config=CONFIG) as engine:
        for seed in (0, 1, 5):
            expected = tuple(token for token in case.generated(seed) if token not in case.special)
            transcript = await engine.transcribe(case.heard(seed), **GREEDY)
            assert tuple(token for one in transcript.segments for token in one.token_ids) == expected
            async with engine.stream_transcription(case.heard(seed), **GREEDY) as stream:
                assert tuple([token async for one in stream for token in one.token_ids]) == expected
            completion = await engine.generate(audio=case.heard(seed), temperature=0.0)
            assert completion.token_ids == case.generated(seed)
        assert engine.statistics().encoder_cache.encoded == 3, "all requests of a sound share its encoding"
    assert len(set(case.generated(1))) > 5, "the audio decides"


async def test_requests_beside_each_other_with_little_room_get_the_tokens_of_generate(case: Case) -> None:
    """Pages for less than two long sequences, steps shorter than prompts, and room for two encodings."""
    page = 2 * 2 * 2 * 12 * 4 * 4
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        verify=True,
        page_size=4,
        self_kv_bytes=34 * page,
        max_positions=128,
        encoder_cache_bytes=2 * 70 * 48 * 4,
        max_step_tokens=5,
        max_running=6,
    )

    async def ask(engine: Engine, seed: int) -> Completion:
        return await engine.generate(audio=case.heard(seed), temperature=0.0, priority=seed % 3)

    asks = [seed % 7 for seed in range(16)]
    async with Engine(case.folder, config=config) as engine:
        await ask_until_preempted(engine, asks, partial(ask, engine), case.generated, at_once=8)
        books = await settled(engine)
    assert books.requests.preemptions, "pages were never short"
    assert books.requests.tokens_cached, "no prefix was shared"
    assert books.encoder_cache.hits, "no encoding was shared"
    assert books.encoder_cache.held == 0
    assert books.requests.pages_free == books.requests.pages


async def test_what_cannot_be_read_in_step_with_audio_is_refused(case: Case) -> None:
    sound, other = (case.heard(0)[0][:1000], case.rate), (np.zeros(case.rate * 121, np.float32), case.rate)
    mark = {"voxtral_realtime": "[STREAMING_PAD]", "kyutai_speech_to_text": "<pad>"}[case.name]
    async with Engine(case.folder, config=CONFIG) as engine:
        for query, told in (
            ({"prompt": mark * 2, "audio": [sound, sound]}, "2 pieces of audio"),
            ({"prompt": mark + "a cat " * 9, "audio": sound}, "allowed: one piece, longer than the prompt"),
            ({"prompt": "a cat"}, "0 pieces of audio"),
            ({"prompt": "a cat", "audio": sound}, "has 0 of"),
            ({"audio": other}, "samples; allowed: 1 to "),
            ({"audio": sound, "max_tokens": 100}, "allowed: up to 1[0-9],"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                await engine.generate(**query)
        for option in ({"prefix": "a cat"}, {"hotwords": "Anna"}, {"language": "en"}, {"timestamps": "word"}):
            with pytest.raises(InvalidRequest, match=next(iter(option))):
                await engine.transcribe(case.heard(0), **option)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (None, "has no tekken.json"),
        ({"frame_rate": 0}, "frame_rate=0"),
        ({"frame_rate": 25}, "positions of 640 samples"),
        ({"transcription_delay_ms": 170}, "a multiple of 80"),
        ({"streaming_n_left_pad_tokens": "many"}, "streaming_n_left_pad_tokens='many'"),
    ],
)
async def test_a_wrong_pace_is_refused_at_open(changes: dict[str, Any] | None, told: str, tmp_path: Path) -> None:
    path = make_checkpoint("voxtral_realtime", tmp_path) / "tekken.json"
    audio = json.loads(path.read_text())["audio"]
    path.unlink()
    if changes is not None:
        path.write_text(json.dumps({"audio": {**audio, **changes}}))
    with pytest.raises(CheckpointError, match=told):
        async with Engine(tmp_path, config=CONFIG):
            pass
