"""The engine on a real checkpoint: what it says, what it refuses, and that everything comes back."""

from __future__ import annotations

import io
import re
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import jiwer
import numpy as np
import pytest
import trio
from transformers import GenerationConfig, WhisperTokenizer

import triolet.demo
from triolet import (
    CheckpointError,
    Engine,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
    UnsupportedAudio,
    UnsupportedModel,
)
from triolet.api.arguments import TranscribeArguments
from triolet.api.inputs.audio import Samples, load_audio
from triolet.core.model import WhisperTokens
from triolet.models.speech.whisper_speech import special_tokens

CONFIG = EngineConfig(device="cpu", dtype="float32", max_running=8, verify=True)
OTHER_WAYS: tuple[TranscribeArguments, ...] = (
    {"voice_activity": "off"},
    {"beam_size": 1},
    {"parallel": True},
    {"timestamps": "word"},
)
"""Asked by ``make soak`` only: each takes as long as the default."""
WAYS = ({}, *OTHER_WAYS) if hypothesis.settings.get_current_profile_name() == "soak" else ({},)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        yield engine


@pytest.fixture
def sample() -> triolet.demo.Sample:
    return next(sample for sample in triolet.demo.samples() if sample.path.stem == "en-command")


def tokens_of(engine: Engine) -> WhisperTokens:
    return special_tokens(engine.model)


def speech_prompt(engine: Engine) -> list[int]:
    tokens = tokens_of(engine)
    return [tokens.start_id, tokens.language_ids["en"], tokens.task_ids["transcribe"], tokens.no_timestamps_id]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def noise(seconds: float = 1.0) -> Samples:
    return (0.1 * np.random.default_rng(0).standard_normal(int(seconds * 16_000))).astype(np.float32)


@pytest.mark.parametrize("options", WAYS, ids=str)
async def test_every_shipped_recording_is_transcribed_without_an_error(
    engine: Engine, options: TranscribeArguments
) -> None:
    """To the letter, in its language, with times in order. Another CPU may round a near tie otherwise: of one recording
    a few words may differ there."""
    heard, true = {}, {}
    for sample in triolet.demo.samples():
        transcript = await engine.transcribe(sample.path, **options)
        heard[sample.path.name] = (transcript.language if sample.language else None, transcript.text)
        true[sample.path.name] = (sample.language, sample.text)
        assert transcript.duration == pytest.approx(sample.duration, abs=0.1)
        ends = [0.0, *(second for segment in transcript.segments for second in (segment.start, segment.end))]
        assert ends == sorted(ends)
        assert ends[-1] <= transcript.duration
    assert [language for language, _ in heard.values()] == [language for language, _ in true.values()]
    differing = [name for name, told in heard.items() if told != true[name]]
    assert len(differing) <= 1, differing
    assert all(jiwer.wer(true[name][1], heard[name][1]) < 0.08 for name in differing if true[name][1])


async def test_the_demo_checkpoint_does_not_claim_to_read_the_text_before(
    engine: Engine, sample: triolet.demo.Sample
) -> None:
    """It was trained with four sentences at most. transformers finds no token for such text either, and all others."""
    assert tokens_of(engine).previous_id is None
    with pytest.raises(InvalidRequest, match=r"initial_prompt='names', which .* cannot use; leave it out"):
        await engine.transcribe(sample.path, initial_prompt="names")
    folder = triolet.demo.checkpoint()
    tokenizer, config = WhisperTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert "<|startofprev|>" not in tokenizer.get_vocab()
    assert getattr(config, "prev_sot_token_id", None) is None
    assert len(tokenizer) == engine.model.vocabulary_size
    assert tokens_of(engine).no_speech_id == tokenizer.convert_tokens_to_ids("<|nospeech|>")


async def test_translation_gives_english(engine: Engine) -> None:
    sample = next(sample for sample in triolet.demo.samples() if sample.path.stem == "de-command")
    transcript = await engine.transcribe(sample.path, task="translate", language="german")
    assert words(transcript.text) == words(sample.translation)


async def test_a_long_recording_streams_its_segments_as_they_are_ready(engine: Engine) -> None:
    sample = max(triolet.demo.samples(), key=lambda sample: sample.duration)
    assert 30 < sample.duration <= 90, "two windows or more"
    async with engine.stream_transcription(sample.path) as stream:
        assert stream.language == sample.language
        await anext(stream)
        assert stream.position < stream.duration, "the first segments come before the end"


async def _generate(engine: Engine, audio: Samples, **more: Any) -> Any:
    sampling = more.pop("sampling", SamplingParams(max_tokens=5))
    return await engine.generate(prompt_token_ids=[tokens_of(engine).start_id], audio=audio, sampling=sampling, **more)


async def test_a_completion_tells_its_usage_and_why_it_ended(engine: Engine) -> None:
    completion = await _generate(engine, noise(), sampling=SamplingParams(max_tokens=4, ignore_eos=True))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.prompt_tokens == 1
    assert completion.usage.completion_tokens == 4
    assert len(completion.logprobs) == 4
    assert all(value <= 0 for value in completion.logprobs)


# -- bad input: a clear error, and the next request is served ----------------------------------------------------------


def wav(samples: np.ndarray, *, promised: int | None = None) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples * 32_000).astype("<i2").tobytes())
    data = buffer.getvalue()
    return data if promised is None else data[: 44 + 2 * promised]


async def test_audio_that_breaks_off_is_transcribed_up_to_there_and_the_transcript_says_so(
    engine: Engine, sample: triolet.demo.Sample
) -> None:
    whole = load_audio(sample.path)
    kept = len(whole) - 8_000  # half a second of silence ends the recording
    transcript = await engine.transcribe(wav(whole, promised=kept))
    assert transcript.text == sample.text
    (warning,) = transcript.warnings
    sizes = [f"{44 + 2 * count:,}" for count in (len(whole), kept)]
    assert f"cut short: its header promises {sizes[0]} bytes, but it has {sizes[1]}" in warning
    assert f"nothing could be read from {kept / 16_000:.2f} s on" in warning


BAD_REQUESTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt_token_ids": [10**6], "audio": noise()}, InvalidRequest, "1000000"),
    ({"prompt_token_ids": [1] * 448, "audio": noise()}, RequestTooLarge, "448"),
    ({"prompt_token_ids": [1]}, InvalidRequest, "audio"),
    ({"prompt_token_ids": [1], "audio": b""}, UnsupportedAudio, "empty"),
    ({"prompt_token_ids": [1], "audio": noise(31)}, RequestTooLarge, "30 s"),
    ({"prompt_token_ids": [1], "audio": noise(), "max_tokens": 448}, RequestTooLarge, "max_tokens=448.*447"),
]


async def test_bad_requests_are_refused_and_others_go_on(engine: Engine) -> None:
    async with trio.open_nursery() as nursery:
        for number, (arguments, error, says) in enumerate(BAD_REQUESTS):
            nursery.start_soon(_generate, engine, noise(1 + number / 10))
            with pytest.raises(error, match=says):
                await engine.generate(**arguments)
        with pytest.raises(InvalidRequest, match="summarise"):
            await engine.transcribe(noise(), task="summarise")


async def enter(engine: Engine) -> None:
    async with engine:
        raise AssertionError("entered")


@pytest.mark.parametrize(
    ("config", "error", "told"),
    [
        (None, CheckpointError, "{folder}"),
        ('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}', UnsupportedModel, "mamba"),
    ],
)
async def test_a_folder_that_is_no_checkpoint_of_ours_is_refused(
    config: str | None, error: type[Exception], told: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(error, match=re.escape(told.format(folder=tmp_path))):
        await enter(Engine(tmp_path, config=CONFIG))


async def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((triolet.demo.checkpoint() / name).read_bytes())
    with pytest.raises(CheckpointError, match="weights"):
        await enter(Engine(tmp_path, config=CONFIG))
