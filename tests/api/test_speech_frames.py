"""Transcriptions by CTC models and transducers: the text is that of `generate`, and its times are those of its
frames."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import triolet
from triolet import demo
from triolet.api.inputs.audio import load_audio
from triolet.api.speech.reader import aligned_by_frames, cut_by_frames
from triolet.api.speech.windows import Generated
from triolet.core.request import FinishReason
from triolet.core.speech import WindowCut

from .test_frames import CLASSES, Reference, config

RATE, FRAME = 16_000, 0.08
Made = Callable[[str], Reference]


def noise(seconds: float) -> Any:
    return (np.random.default_rng(5).standard_normal(round(seconds * RATE)) * 0.3).astype(np.float32)


def tokens_of(transcript: triolet.Transcript) -> tuple[int, ...]:
    return tuple(token for segment in transcript.segments for token in segment.token_ids)


@pytest.mark.parametrize("name", CLASSES)
async def test_a_window_has_the_tokens_of_generate_at_their_frames(name: str, frame_references: Made) -> None:
    reference = frame_references(name)
    special = {*reference.processor.tokenizer.all_special_ids}
    expected = [(token, frame) for token, frame in reference.emitted(5) if token not in special]
    async with triolet.Engine(reference.folder, config=config()) as engine:
        found = await engine.transcribe(reference.sound(5), voice_activity="off", timestamps="word")
        plain = await engine.transcribe(reference.sound(5), voice_activity="off")
    assert tokens_of(found) == tokens_of(plain) == tuple(token for token, _ in expected)
    assert found.text == plain.text == "".join(one.text for one in found.segments).strip()
    frames, at = [frame for _, frame in expected], 0
    for segment in found.segments:
        assert segment.words is not None
        assert segment.start == segment.words[0].start == pytest.approx(frames[at] * FRAME, abs=0.001)
        assert segment.end == segment.words[-1].end
        at += len(segment.token_ids)
    times = [time for segment in found.segments for word in segment.words or () for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[-1] <= found.duration


@pytest.mark.parametrize("timestamps", ["segment", "word"])
async def test_long_audio_is_read_in_windows_and_no_word_is_cut(timestamps: str, frame_references: Made) -> None:
    """A word at the end of a window is read again as the first one of the next window."""
    async with triolet.Engine(frame_references("parakeet_rnnt").folder, config=config()) as engine:
        found = await engine.transcribe(noise(19.3), voice_activity="off", timestamps=timestamps)
        encoded = engine.statistics().encoder_cache.encoded
    assert encoded >= 3
    assert len(found.segments) > 2
    assert all(left.end <= right.start for left, right in pairwise(found.segments))
    assert 16.0 < found.segments[-1].end <= found.duration


async def test_a_language_is_what_the_model_is_given(frame_references: Made) -> None:
    async with triolet.Engine(frame_references("nemotron3_5_asr").folder, config=config()) as engine:
        texts = {}
        for language in ("de", "german", "de-DE", "th", "en", "en-US", "en-GB"):
            found = await engine.transcribe(noise(3.0), voice_activity="off", language=language)
            texts[language] = found.text
        assert texts["de"] == texts["german"] == texts["de-DE"] != texts["en"] == texts["en-US"]
        assert engine.statistics().encoder_cache.encoded == 4, "German, Thai, English, and that of Great Britain"
        with pytest.raises(triolet.InvalidRequest, match="which the model does not know; allowed: af, af-za"):
            await engine.transcribe(noise(1.0), language="tlh")


@pytest.mark.parametrize("name", ["parakeet_tdt", "parakeet_ctc"])
async def test_a_live_session_reads_all_that_was_said(name: str, frame_references: Made) -> None:
    sample = next(one for one in demo.samples() if one.path.stem == "en-command")
    async with triolet.Engine(frame_references(name).folder, config=config()) as engine, engine.live() as session:
        await session.feed(load_audio(sample.path))
        await session.finish()
        updates = [update async for update in session]
    assert updates[-1].ends_utterance
    assert "".join(update.stable for update in updates).strip()


async def test_what_frames_cannot_do_is_refused_by_name(frame_references: Made) -> None:
    async with triolet.Engine(frame_references("parakeet_tdt").folder, config=config()) as engine:
        for options, told in (
            ({"temperature": 0.5}, "temperature=0.5, which ParakeetForTDT cannot use; allowed: 0.0$"),
            ({"beam_size": 3}, "beam_size=3, which"),
            ({"prefix": "a"}, "prefix='a', which"),
            ({"hotwords": "Anna"}, "hotwords='Anna', which"),
            ({"suppress_tokens": (3,)}, "suppress_tokens="),
            ({"task": "translate"}, "knows only: 'transcribe'"),
            ({"language": "de"}, "the model takes no language; leave it out"),
        ):
            with pytest.raises(triolet.InvalidRequest, match=told):
                await engine.transcribe(noise(1.0), **options)


# -- spans by frames -------------------------------------------------------------------------------------------------

TEXTS = (" a", " b.", "c", ".", " d", "")  # the last one is special


@given(
    st.lists(st.tuples(st.integers(0, len(TEXTS) - 1), st.integers(0, 20), st.integers(0, 3)), max_size=30),
    st.integers(1, 400),
    st.booleans(),
)
def test_spans_have_all_tokens_in_order_and_rise(emitted: list[tuple[int, int, int]], length: int, is_full: bool):
    frames, at = [], 0
    for _, gap, lasts in emitted:
        at += gap
        frames.append((at, at + lasts))
    tokens = tuple(token for token, _, _ in emitted)
    recipe: Any = SimpleNamespace(
        model=SimpleNamespace(
            is_text=lambda token: TEXTS[token] != "", decode=lambda ids: "".join(TEXTS[i] for i in ids)
        ),
        facts=SimpleNamespace(step_samples=8),
        seconds=lambda samples: samples / 100,
    )
    generated = Generated(
        token_ids=tokens, logprobs=(-0.1,) * len(tokens), finish_reason=FinishReason.STOP, frames=tuple(frames)
    )
    attempt: Any = SimpleNamespace(generated=generated, sound=SimpleNamespace(samples=range(length)))
    cut = cut_by_frames(WindowCut(()), attempt, recipe, is_full=is_full)
    kept = [token for span in cut.spans for token in span.token_ids if TEXTS[token]]
    texts = [token for token in tokens if TEXTS[token]]
    assert kept == texts[: len(kept)]
    assert kept == texts or (is_full and kept)
    assert all(tokens[span.first : span.first + len(span.token_ids)] == span.token_ids for span in cut.spans)
    assert all(left.start < right.start for left, right in pairwise(cut.spans))
    assert all(span.start < span.end and 8 * span.start <= length for span in cut.spans)
    aligned = aligned_by_frames(attempt, recipe)
    if aligned is not None:
        assert list(aligned.frames) == sorted(aligned.frames)
        assert all(start <= end for start, end in zip(aligned.frames, aligned.ends, strict=False))
        assert aligned.frames[-1] <= max(length // 8, 1)
