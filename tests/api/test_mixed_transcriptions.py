"""Transcriptions that differ in every option, all at once, under preemption and eviction, some cancelled: every other
one is told exactly what it would be told alone.

A tiny random checkpoint on the real executor. ``make soak`` runs `MOST` transcriptions, ``make test`` a part of them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from attrs import define, evolve, field, frozen
from hypothesis import settings

from triolet import Engine, EngineConfig
from triolet.actors.statistics import EngineStatistics
from triolet.api.inputs.audio import Samples
from triolet.api.outputs.results import Segment, Transcript
from triolet.core import events

from ..models.conftest import make_audio, make_model, save_checkpoint
from .scarcity import settled
from .speech import PaperVoice

MOST = 200
COUNT = MOST if settings.get_current_profile_name() == "soak" else 40
RATE = 16_000
PAGE = 2 * 2 * 48 * 4 * 4  # bytes: layers, keys and values, width, bytes, positions
OUTPUT = 100 * 48 * 4  # bytes of an encoder output: positions, width, bytes
ROOMY = EngineConfig(device="cpu", dtype="float32", page_size=4, verify=True)
TIGHT = {
    "max_running": 8,
    "self_kv_bytes": 56 * PAGE,  # one search of three beams at its longest, and a little
    "cross_kv_bytes": 3 * 4 * OUTPUT,  # keys and values of two layers, of three windows
    "encoder_cache_bytes": 3 * OUTPUT,
    "max_step_tokens": 48,
}


@frozen(kw_only=True)
class Case:
    """One caller: what is transcribed and how, after how many of the engine's events it comes, and after how many more
    it leaves."""

    sound: int
    options: dict[str, Any]
    priority: int
    arrives: int
    leaves: int | None


def sounds() -> list[Samples]:
    """Recordings of one to three windows of two seconds, some with a silence in them."""
    found = []
    for number, seconds in enumerate((0.7, 1.3, 1.9, 2.6, 3.3, 5.2)):
        samples = make_audio(number, seconds)
        if number % 2:
            pause = np.zeros(4 * RATE, np.float32)
            middle = len(samples) // 3
            samples = np.concatenate([samples[:middle], pause, samples[middle:]])
        found.append(samples)
    return found


def options(choose: random.Random, index: int) -> dict[str, Any]:
    """Any options that go together."""
    timestamps = choose.choice(["segment", "word", "none"])
    parallel = choose.random() < 0.4
    ladder = choose.choice([(0.0,), (0.0, 0.4), (0.0, 0.3, 0.7), (0.6,)])
    found: dict[str, Any] = {
        "timestamps": timestamps,
        "parallel": parallel,
        "temperature": ladder,
        "seed": index,
        "beam_size": choose.randint(1, 3),
        "patience": choose.choice([None, 1.0, 2.0]),
        "length_penalty": choose.choice([0.0, 1.0, 1.7]),
        "best_of": choose.randint(1, 3),
        "logprob_threshold": choose.choice([None, -1.0, -1.0, 1.0]),
        "compression_ratio_threshold": choose.choice([None, 2.4]),
        "no_speech_threshold": choose.choice([None, 0.6]),
        "initial_prompt": choose.choice([None, None, "names", "a prompt that is longer than half of the positions"]),
        "carry_initial_prompt": choose.random() < 0.3,
        "hotwords": choose.choice([None, None, ["Yo", "Ko"]]),
        "repetition_penalty": choose.choice([1.0, 1.0, 1.2]),
        "no_repeat_ngram_size": choose.choice([0, 0, 3]),
        "max_new_tokens": choose.choice([None, None, 9]),
        "prefix": None if parallel else choose.choice([None, None, "So"]),
        "condition_on_previous_text": choose.random() < 0.7,
        "language": choose.choice([None, "en", "de", "es"]),
        "multilingual": choose.random() < 0.3,
        "language_detection_segments": choose.randint(1, 3),
        "language_detection_threshold": choose.choice([0.4, 0.9]),
        "task": choose.choice(["transcribe", "translate"]),
        "voice_activity": PaperVoice() if parallel or choose.random() < 0.5 else "off",
        "clip_timestamps": choose.choice([(), (), [(0.5, 2.25)], [(0.0, 1.7), (2.5, 30.0)], "0.5"]),
        "suppress_tokens": choose.choice([None, (65, 66), tuple(range(40, 90))]),
        "max_initial_timestamp": choose.choice([None, 0.0, 1.0]),
    }
    if timestamps == "word" and choose.random() < 0.5:
        found["hallucination_silence_threshold"] = 0.5
    return found


def cases() -> list[Case]:
    """The same in every run: the first of `MOST`."""
    choose = random.Random(11)
    return [
        Case(
            sound=choose.randrange(6),
            options=options(choose, index),
            priority=choose.randint(-2, 2),
            arrives=index // 8 * choose.randrange(1, 120),
            leaves=choose.randrange(1, 1_500) if choose.random() < 0.2 else None,
        )
        for index in range(MOST)
    ][:COUNT]


@define(eq=False)
class Pace:
    """An observer that lets callers come and go as the engine gets on, not as the clock does."""

    told: int = 0
    _numbers: Iterator[int] = field(factory=itertools.count, init=False)
    _waiting: list[tuple[int, int, trio.Event]] = field(factory=list, init=False)

    def __call__(self, event: events.Event) -> None:
        self.told += 1
        while self._waiting and self._waiting[0][0] <= self.told:
            self.hurry()

    def hurry(self) -> None:
        """Who waits for the fewest events waits no longer: without requests there are none."""
        if self._waiting:
            heapq.heappop(self._waiting)[2].set()

    async def after(self, count: int) -> None:
        """Waits until the engine has told of ``count`` events from now on."""
        if count == 0:
            return
        come = trio.Event()
        heapq.heappush(self._waiting, (self.told + count, next(self._numbers), come))
        await come.wait()


def parts(segment: Segment) -> tuple[Any, ...]:
    """All of a segment but its measures, which differ in their last digit with the batch."""
    words = [(word.text, word.start, word.end) for word in segment.words or ()]
    return segment.id, segment.start, segment.end, segment.text, segment.token_ids, segment.temperature, words


def content(transcript: Transcript) -> tuple[Any, ...]:
    """All of a transcript but its measures."""
    return (
        [parts(segment) for segment in transcript.segments],
        transcript.language,
        transcript.coverage,
        transcript.duration,
        transcript.warnings,
    )


async def all_at_once(checkpoint: Path, asked: list[Case]) -> tuple[dict[int, Transcript], EngineStatistics]:
    """The transcripts that were not cancelled, by number, and the engine's books when all have ended."""
    pace, heard, found = Pace(), sounds(), dict[int, Transcript]()
    async with Engine(checkpoint, config=evolve(ROOMY, observer=pace, **TIGHT)) as engine:

        async def ask(index: int, case: Case) -> None:
            await pace.after(case.arrives)
            async with trio.open_nursery() as nursery:
                if case.leaves is not None:
                    nursery.start_soon(leave, nursery.cancel_scope, case.leaves)
                found[index] = await engine.transcribe(heard[case.sound], priority=case.priority, **case.options)
                nursery.cancel_scope.cancel()
            pace.hurry()

        async def leave(scope: trio.CancelScope, count: int) -> None:
            await pace.after(count)
            scope.cancel()

        async with trio.open_nursery() as nursery:
            for index, case in enumerate(asked):
                nursery.start_soon(ask, index, case)
        return found, await settled(engine)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("mixed"), make_model(3))


async def test_transcriptions_that_differ_in_every_option_are_each_as_alone(checkpoint: Path) -> None:
    """Under preemption and eviction, with callers that come and leave meanwhile; nothing is held at the end."""
    asked, heard = cases(), sounds()
    found, books = await all_at_once(checkpoint, asked)
    async with Engine(checkpoint, config=evolve(ROOMY, verify=False)) as engine:
        for index, transcript in sorted(found.items()):
            alone = await engine.transcribe(heard[asked[index].sound], **asked[index].options)
            assert content(transcript) == content(alone), f"{asked[index]}"
    assert len(found) < COUNT, "somebody is cancelled"
    assert len(found) > COUNT // 2
    assert sum(len(transcript.segments) for transcript in found.values()) > COUNT, "the model says something"
    assert books.requests.preemptions > 0
    assert books.encoder_cache.evicted > 0
    requests = books.requests
    assert (requests.waiting, requests.running, requests.cross_slots_used) == (0, 0, 0)
    assert requests.pages_free == requests.pages
    assert (books.encoder_cache.held, books.encoder_cache.waiting) == (0, 0)
