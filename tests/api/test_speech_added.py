"""Speech models that add audio to their tokens: each text is the one that transformers generates for the model's own
prompt, whoever else asks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve, field, frozen

from triolet import CheckpointError, Completion, Engine, EngineConfig, InvalidRequest
from triolet.api.inputs.audio import Samples

from ..checkpoints.families import make_checkpoint
from .added import NAMES, SCARCE, Reference
from .scarcity import ask_until_preempted, settled

CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True)
GREEDY: dict[str, Any] = {"temperature": 0.0, "voice_activity": "off"}


@frozen(kw_only=True)
class Case:
    """Sounds for a tiny checkpoint, and what transformers generates of them."""

    reference: Reference
    special: frozenset[int]
    generated: Callable[[int], tuple[int, ...]] = field(eq=False)

    @property
    def folder(self) -> Path:
        return self.reference.folder

    def heard(self, seed: int) -> tuple[Samples, int]:
        return heard(seed, self.reference.rate), self.reference.rate


def heard(seed: int, rate: int) -> Samples:
    """Up to three seconds of noise that is now loud and now quiet."""
    numbers = np.random.default_rng(seed)
    loud = np.repeat(numbers.uniform(0.0, 2.0, 48) ** 3, rate // 16)
    return (numbers.normal(0.0, 0.1, 3 * rate) * loud)[: 3 * rate - 4321 * seed].astype(np.float32)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, made: Callable[[str], Path]) -> Case:
    reference = Reference.of(request.param, made(request.param))
    tokens = reference.tokenizer.added_tokens_decoder
    return Case(
        reference=reference,
        special=frozenset(token for token, one in tokens.items() if one.special),
        generated=lambda seed: reference.tokens(heard(seed, reference.rate)),
    )


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


async def test_a_word_begins_at_the_position_of_its_first_token(case: Case) -> None:
    reference, (samples, rate) = case.reference, case.heard(1)
    places = [max(index - reference.lead, 0) for index, one in enumerate(case.generated(1)) if one not in case.special]
    async with Engine(case.folder, config=CONFIG) as engine:
        transcript = await engine.transcribe((samples, rate), timestamps="word", **GREEDY)
    words, at = [word for segment in transcript.segments for word in segment.words], 0
    assert transcript.word_times == "frames"
    for word in words:
        assert word.start * rate / reference.step == pytest.approx(min(places[at], len(samples) // reference.step - 1))
        at += len(word.token_ids)
    assert at == len(places) > len(words) > 1


async def test_requests_beside_each_other_with_little_room_get_the_tokens_of_generate(case: Case) -> None:
    """Pages for less than two long sequences, steps shorter than prompts, and room for two encodings."""

    async def ask(engine: Engine, seed: int) -> Completion:
        return await engine.generate(audio=case.heard(seed), temperature=0.0, priority=seed % 3)

    asks = sorted([*range(4)] * 3, key=lambda seed: -(seed % 3))
    async with Engine(case.folder, config=evolve(SCARCE, max_running=6)) as engine:
        await ask_until_preempted(engine, asks, partial(ask, engine), case.generated, at_once=4)
        books = await settled(engine)
    assert books.requests.preemptions, "pages were never short"
    assert books.requests.tokens_cached, "no prefix was shared"
    assert books.encoder_cache.hits, "no encoding was shared"
    assert books.encoder_cache.held == 0
    assert books.requests.pages_free == books.requests.pages


async def test_an_opening_writes_no_warning(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    async with Engine(case.folder, config=CONFIG):
        pass
    assert "[transformers]" not in capfd.readouterr().err


async def test_what_cannot_be_read_in_step_with_audio_is_refused(case: Case) -> None:
    rate = case.reference.rate
    sound, other = (heard(0, rate)[:1000], rate), (np.zeros(rate * 121, np.float32), rate)
    mark = "[STREAMING_PAD]" if case.reference.name == "voxtral_realtime" else "<pad>"
    async with Engine(case.folder, config=CONFIG) as engine:
        for query, told in (
            ({"prompt": mark * 2, "audio": [sound, sound]}, "2 pieces of audio"),
            ({"prompt": mark + "a cat " * 9, "audio": sound}, "allowed: one piece that has more positions"),
            ({"prompt": "a cat"}, "0 pieces of audio"),
            ({"prompt": "a cat", "audio": sound}, "has 0 of"),
            ({"audio": other}, "samples; allowed: 1 to "),
            ({"audio": sound, "max_tokens": 100}, "allowed: up to 1[0-9],"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                await engine.generate(**query)
        for option in ({"prefix": "a cat"}, {"hotwords": "Anna"}, {"language": "en"}):
            with pytest.raises(InvalidRequest, match=next(iter(option))):
                await engine.transcribe(case.heard(0), **option)


@pytest.mark.parametrize(
    ("file", "name", "wrong", "told"),
    [
        ("generation_config.json", "bos_token_id", "5000", "bos_token_id=5000; allowed: 3, and up to 1041"),
        ("generation_config.json", "audio_window_size", "1.5", "audio_window_size=1.5; allowed: a whole number"),
        ("config.json", "num_quantizers", "2", "has 2 codebooks .*; allowed: 3"),
    ],
)
async def test_codes_and_tokens_that_do_not_fit_are_refused_at_open(
    file: str, name: str, wrong: str, told: str, tmp_path: Path
) -> None:
    path = make_checkpoint("kyutai_speech_to_text", tmp_path) / file
    path.write_text(re.sub(rf'("{name}": )\d+', rf"\g<1>{wrong}", path.read_text()))
    with pytest.raises(CheckpointError, match=told):
        async with Engine(tmp_path, config=CONFIG):
            pass


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
