"""`WindowReader`: one window of audio to text, through requests to the engine; every walk over audio uses it."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import trio
from attrs import define, evolve, field

from ...core.request import EncoderItem, Request
from ...core.timings import Timings
from ..inputs.audio import Samples
from ..inputs.prompts import audio_item
from .recipe import Context, Recipe
from .voice import is_silent
from .windows import Assessment, Attempt, Generated, best_attempt, likeliest

Run = Callable[[Sequence[Request]], Awaitable[Sequence[Generated]]]  # runs requests together, to the end of all


@define
class Stopwatch:
    """Adds up the timings of one transcription's requests."""

    asked: float | None  # None: the time of the first request
    _queued: float = field(default=0.0, init=False)
    _encoder_wait: float = field(default=0.0, init=False)
    _first_token: float | None = field(default=None, init=False)
    _ended: float | None = field(default=None, init=False)

    def add(self, timings: Timings | None, begun: float, *, is_text: bool) -> None:
        """Adds a request that was made at ``begun``."""
        self.asked = begun if self.asked is None else self.asked
        if timings is None:
            return
        self._queued += timings.queued
        self._encoder_wait += timings.encoder_wait
        if is_text and self._first_token is None and timings.first_token is not None:
            self._first_token = begun - self.asked + timings.first_token

    def end(self, now: float) -> None:
        """The last window is done."""
        if self._ended is None:
            self._ended = now

    def timings(self) -> Timings | None:
        """The sums; ``None`` before the end."""
        if self._ended is None or self.asked is None:
            return None
        return Timings(
            queued=self._queued,
            encoder_wait=self._encoder_wait,
            first_token=self._first_token,
            total=self._ended - self.asked,
        )


@define(eq=False)
class WindowReader:
    """Makes the requests of one transcription and judges their answers. Each window is encoded once, whatever is asked
    of it: its language, every attempt at its text, the times of its words."""

    recipe: Recipe
    run: Run
    request_id: str
    stopwatch: Stopwatch
    once: bool = False  # a trimmed window is not read again, however good its text is
    _requests: Iterator[int] = field(factory=itertools.count, init=False)

    def new_id(self, what: str) -> str:
        """An id that ends in a number of its own. A window whose request was cancelled or failed is requested again,
        under a new id, since the engine may still know the earlier one."""
        return f"{self.request_id}/{what}/{next(self._requests)}"

    def ends_before(self, samples: Samples, planned: int) -> bool:
        """True if the audio ends before anything of a window of ``planned`` samples, of which ``samples`` came."""
        return len(samples) < min(planned, self.recipe.timestamp_step)

    def is_mute(self, samples: Samples) -> bool:
        """True if a window is digital silence, which is nobody's speech, or shorter than one timestamp step."""
        return len(samples) < self.recipe.timestamp_step or is_silent(samples)

    async def item(self, samples: Samples) -> EncoderItem:
        """The item of a window, which must own its samples."""
        trimmed = self.recipe.options.encoder_context == "trimmed"
        return await audio_item(self.recipe.description, samples, trimmed=trimmed)

    async def languages(self, item: EncoderItem) -> dict[str, float]:
        """The probability of each language, by code."""
        (answer,) = await self.ask([self.recipe.detection(self.new_id("language"), item)], is_text=False)
        return self.recipe.detected(answer)

    async def read(self, item: EncoderItem, context: Context) -> Attempt:
        """The window's text, by the temperature fallback: the first good attempt, or the best of all.

        The second temperature is tried when the first has failed, and all others together when the second has failed
        too: they share the encoding and each step's weights, so that together they take little longer than one. Where
        the text of a trimmed window is not good, or it has none, what was left out may be missed: the whole window is
        read instead.
        """
        options, found = self.recipe.options, list[Attempt]()
        if item.embeddings < self.recipe.description.encoder_embeddings:  # trimmed
            (attempt,) = await self._attempts(item, context, range(1))
            if self.once or (attempt.assessment.is_good(options) and not attempt.assessment.is_silent(options)):
                return attempt
            item = await audio_item(self.recipe.description, item.payload)
        for indices in _rounds(len(options.temperature)):
            for attempt in await self._attempts(item, context, indices):
                if attempt.assessment.is_good(options):
                    return attempt
                found.append(attempt)
        return best_attempt(found, options)

    async def _attempts(self, item: EncoderItem, context: Context, indices: range) -> list[Attempt]:
        """The attempts at several temperatures, run together."""
        names = [partial(self.new_id, f"{context.name}.{index}") for index in indices]
        requests = [self.recipe.attempt(name, item, context, index) for name, index in zip(names, indices, strict=True)]
        answers = iter(await self.ask([request for group in requests for request in group], is_text=True))
        return [
            self._judged(item, index, list(itertools.islice(answers, len(group))))
            for index, group in zip(indices, requests, strict=True)
        ]

    def _judged(self, item: EncoderItem, index: int, sampled: Sequence[Generated]) -> Attempt:
        options = self.recipe.options
        best = likeliest(sampled, options.length_penalty)
        text = self.recipe.decode(best.token_ids)
        probed = evolve(best, probe=sampled[0].probe)
        return Attempt(best, Assessment.of(probed, text, options.temperature[index]), item)

    async def ask(self, requests: Sequence[Request], *, is_text: bool) -> Sequence[Generated]:
        """Runs requests together, and measures the first."""
        begun = trio.current_time()
        answers = await self.run(requests)
        self.stopwatch.add(answers[0].timings, begun, is_text=is_text)
        return answers


def _rounds(temperatures: int) -> list[range]:
    """The temperatures that are tried together, in order."""
    cuts = [0, 1, 2, temperatures]
    rounds = [range(start, min(stop, temperatures)) for start, stop in itertools.pairwise(cuts)]
    return [one for one in rounds if one]
