"""Speech models that read audio in their prompts through `Engine.transcribe`: the text of each window is that of
transformers' `generate` for transformers' own request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import triolet.demo
from triolet import Engine, EngineConfig, InvalidRequest
from triolet.api.inputs.audio import Samples, load_audio
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.windows import Generated
from triolet.core.request import FinishReason, Request

from ..models.media import SPEECH, Checkpoint, sound
from ..models.towers import REQUESTS, TOWERS
from .speech import begin, plain

CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True)
TOKENS = 12
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": TOKENS}


def generated(folder: Path, samples: Samples, **asked: Any) -> tuple[int, ...]:
    """What transformers generates, as the text tokens before the end of text."""
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    module: Any = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    inputs = processor.apply_transcription_request(samples, return_tensors="pt", **asked)
    quiet = {"sample": False} if config.model_type == "vibevoice_asr" else {}
    with torch.inference_mode():
        found = module.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, **quiet)
    tokens = found[0, inputs["input_ids"].shape[1] :].tolist()
    return tuple(token for token in tokens if token not in processor.tokenizer.all_special_ids)


def by_parts(checkpoint: Checkpoint, prompt: str, samples: Samples) -> tuple[int, ...]:
    """What transformers generates of a model whose processor needs further packages."""
    inputs = checkpoint.process(prompt, [samples])
    with torch.inference_mode():
        found = checkpoint.reference.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    tokens = found[0, inputs["input_ids"].shape[1] :].tolist()
    ends = checkpoint.tokenizer.eos_token_id
    tokens = tokens[: tokens.index(ends)] if ends in tokens else tokens
    return tuple(token for token in tokens if token not in checkpoint.tokenizer.added_tokens_decoder)


@pytest.mark.parametrize("name", TOWERS)
async def test_each_request_has_the_tokens_of_generate(name: str, made: Callable[[str], Path]) -> None:
    checkpoint, samples = Checkpoint.open(name, made(name)), sound(60_000, 1)
    async with Engine(made(name), config=CONFIG) as engine:
        for asked, prompt in REQUESTS[name]:
            named = {"initial_prompt" if option == "prompt" else option: value for option, value in asked.items()}
            options = {**GREEDY, "voice_activity": "off", **named}
            transcript = await engine.transcribe(samples, **options)
            tokens = tuple(token for segment in transcript.segments for token in segment.token_ids)
            assert tokens == by_parts(checkpoint, prompt, samples), asked
            assert transcript.duration == 3.75
            async with engine.stream_transcription(samples, **options) as stream:
                assert tuple([token async for segment in stream for token in segment.token_ids]) == tokens
        assert engine.statistics().encoder_cache.encoded == 1, "all requests share the encoding"


@pytest.mark.parametrize("name", SPEECH)
async def test_each_window_has_the_tokens_of_generate(name: str, made: Callable[[str], Path]) -> None:
    async with Engine(made(name), config=CONFIG) as engine:
        rate = engine.model.sampling_rate
        samples = sound(4 * rate, 1)
        options = {**GREEDY, "voice_activity": "off"}
        transcript = await engine.transcribe(samples, **options)
        assert tuple(token for one in transcript.segments for token in one.token_ids) == generated(made(name), samples)
        assert transcript.segments[-1].end == transcript.duration == 4.0
        async with engine.stream_transcription(samples, **options) as stream:
            streamed = [one async for one in stream]
        assert streamed == list(transcript.segments)
        assert engine.statistics().encoder_cache.encoded == 1, "the same window has the same key"


async def test_language_and_hotwords_are_in_the_request(made: Callable[[str], Path]) -> None:
    async with Engine(made("qwen3_asr"), config=CONFIG) as engine:
        samples = sound(32_000, 2)
        transcript = await engine.transcribe(
            samples, language="german", hotwords=["Anna", "Otto"], voice_activity="off", **GREEDY
        )
    (segment,) = transcript.segments
    assert transcript.language == "de"
    assert segment.token_ids == generated(made("qwen3_asr"), samples, language="German", prompt="Anna, Otto")


@pytest.mark.parametrize("name", ["qwen3_asr", "vibevoice_asr"])  # at 16 and at 24 kHz
async def test_speech_is_found_at_the_models_rate_and_read_in_parallel_too(
    name: str, made: Callable[[str], Path]
) -> None:
    path = next(sample.path for sample in triolet.demo.samples() if sample.path.stem == "en-many")
    async with Engine(made(name), config=CONFIG) as engine:
        samples = load_audio(path, sampling_rate=engine.model.sampling_rate)
        options = {**GREEDY, "vad_max_speech_duration_s": 4.0}
        for parallel in (False, True):
            transcript = await engine.transcribe(samples, parallel=parallel, **options)
            times = [time for one in transcript.segments for time in (one.start, one.end)]
            assert len(transcript.segments) > 8
            assert [0.0, *times, transcript.duration] == sorted([0.0, *times, transcript.duration])
            assert {one.kind for one in transcript.coverage} <= {"speech", "silent"}


async def test_a_model_that_writes_turns_says_who_speaks_and_reads_an_unfinished_turn_again(
    made: Callable[[str], Path],
) -> None:
    written = ["[0.50][S01]one[1.00][1.50][S02]two[2.00][2.25][S01]thr", "[0.00][S01]three[1.75]"]
    async with Engine(made("moss_transcribe_diarize"), config=CONFIG) as engine:
        model = engine.model

    async def run(requests: Sequence[Request]) -> Sequence[Generated]:
        ids = model.speech.encode(written.pop(0))
        return [Generated(token_ids=ids, logprobs=(-0.1,) * len(ids), finish_reason=FinishReason.LENGTH)]

    plan = plain(model.speech.facts.window_samples)
    transcript = await begin(sound(64_000), run, TranscribeOptions(seed=1, speakers=True), model, plan).transcript()
    assert transcript.text == "one two three"
    assert transcript.speakers == ("S01", "S02")
    assert [(one.start, one.end, one.speaker) for one in transcript.segments] == [
        (0.5, 1.0, "S01"),
        (1.5, 2.0, "S02"),
        (2.25, 4.0, "S01"),
    ]


@pytest.mark.parametrize("name", ["qwen3_asr", "vibevoice_asr"])
async def test_a_live_session_reads_what_is_fed(name: str, made: Callable[[str], Path]) -> None:
    """Audio at the recording's rate, for models at another one."""
    path = next(sample.path for sample in triolet.demo.samples() if sample.path.stem == "es-command")
    async with Engine(made(name), config=CONFIG) as engine, engine.live(**GREEDY, no_speech_threshold=None) as session:
        await session.feed(load_audio(path))
        await session.finish()
        updates = [update async for update in session]
    assert "".join(update.stable for update in updates).strip()
    assert updates[-1].ends_utterance


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("glmasr", {"language": "en"}, "the model takes no language; leave it out"),
        ("glmasr", {"hotwords": "Anna"}, "hotwords='Anna', which GlmAsr.* cannot use; leave it out"),
        ("audioflamingo3", {"prefix": "so"}, "prefix='so', which AudioFlamingo3.* cannot use"),
        ("qwen3_asr", {"language": "la"}, r"language='la', which the model does not know; allowed: .*\ben, .*\bzh\b"),
        ("qwen3_asr", {"language": "xx"}, r"language='xx', which the model does not know; allowed: .*\ben, "),
        ("qwen3_asr", {"timestamps": "word"}, "has no times of words: it knows no times. Allowed: "),
        ("moss_transcribe_diarize", {"initial_prompt": "a talk"}, "initial_prompt='a talk', which Moss.* cannot use"),
        ("moss_transcribe_diarize", {"speakers": 2}, "speakers is given, but Moss.* itself counts and names speakers"),
        ("vibevoice_asr", {"speakers": True, "known_speakers": {"Ada": b""}}, "known_speakers is given, but VibeVoice"),
        ("qwen3_asr", {"hotwords": "a<|audio_pad|>"}, r"hotwords='a<\|audio_pad\|>' has a special token"),
        ("qwen3_asr", {"hotwords": ["Anna"] * 2_000}, r"hotwords has 11,998 characters .* allowed: up to 10,000 char"),
        ("vibevoice_asr", {"initial_prompt": "x y " * 500}, r"initial_prompt has .* tokens, .* and \d+ tokens"),
        ("vibevoice_asr", {"initial_prompt": "<|im_end|>"}, r"initial_prompt='<\|im_end\|>' has a special token"),
        ("vibevoice_asr", {"timestamps": "word"}, "no times of words: it writes times of turns only. Allowed: "),
        ("vibevoice_asr", {"task": "translate"}, "task='translate', but VibeVoice.* knows only: 'transcribe'"),
        ("voxtral", {"language": "fi"}, "language='fi'.*allowed: .*nl"),
        ("voxtral", {"hotwords": ["Anna"]}, "hotwords"),
        ("voxtral", {"task": "translate"}, "task='translate'"),
        ("granite_speech_plus", {"task": "translate"}, "task='translate'"),
        ("granite_speech", {"language": "en"}, "language='en'"),
        ("phi4_multimodal", {"language": "en"}, "language='en'"),
        ("fun_asr_nano", {"timestamps": "word"}, "timestamps='word'"),
    ],
)
async def test_what_a_model_cannot_use_is_refused_by_name(
    name: str, option: dict[str, Any], told: str, made: Callable[[str], Path]
) -> None:
    """At the call, and before a live session begins."""
    async with Engine(made(name), config=CONFIG) as engine:
        with pytest.raises(InvalidRequest, match=told):
            await engine.transcribe(np.zeros(engine.model.sampling_rate, np.float32), **option)
        if option.keys() & {"hotwords", "initial_prompt", "language"}:
            with pytest.raises(InvalidRequest, match=told):
                await engine.live(**option).__aenter__()
