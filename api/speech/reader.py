"""`WindowReader`: turns one window of audio into text by requests to the engine.

CTC models, transducers and models that write a token at each step tell when by the frames of their tokens. Their spans
(`cut_by_frames`) end with a sentence or before a pause. If the window was cut where somebody may speak, its last word
may be cut too, so the next window begins before that word.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import trio
from attrs import define, evolve, field

from ...core.errors import InvalidRequest
from ...core.plan import AlignedTokens
from ...core.request import Request
from ...core.speech import Ask, Detection, Sound, Span, WindowCut, WordTokens
from ...core.timings import Timings
from ..inputs.audio import Samples
from ..inputs.prompts import INLINE_HASHED
from ..inputs.threads import run_in_thread
from ..outputs.results import Segment, spans_told
from .recipe import Context, Recipe
from .windows import Assessment, Attempt, Generated, best_attempt, likeliest
from .word_aligner import segment_with_even_words, segment_with_words
from .words import SENTENCE_ENDS, split_words

RunRequests = Callable[[Sequence[Request]], Awaitable[Sequence[Generated]]]  # until all have ended


@define(eq=False)
class WindowReader:
    """Makes the requests of one transcription and judges their answers. Each window is encoded once for all of its
    requests: for its language, every attempt at its text, and the times of its words.

    Args:
        once: a trimmed window is not read again in full, even if its text is not good.
        asked: the time at which the transcription was asked for.

    Attributes:
        language: the code of the language; ``None`` before it is known. With ``multilingual`` it is the first window's.
        language_probabilities: the probability of each language by code; ``None`` if no language was detected.
        reads: the number of windows that were read, with text or without.
    """

    recipe: Recipe
    run: RunRequests
    request_id: str
    once: bool = False
    asked: float = field(factory=trio.current_time)
    language: str | None = field(init=False)
    language_probabilities: Mapping[str, float] | None = field(default=None, init=False)
    _uneven: dict[str, list[Segment]] = field(factory=dict, init=False)  # without aligned words, by the reason
    reads: int = field(default=0, init=False)
    _requests: Iterator[int] = field(factory=itertools.count, init=False)
    _first: Timings | None = field(default=None, init=False)  # of the first request, from `asked` on
    _first_token: float | None = field(default=None, init=False)

    @language.default
    def _named(self) -> str | None:
        return self.recipe.language

    def new_id(self, what: str) -> str:
        """Returns an id that ends in a number of its own. A window whose request was cancelled or failed is requested
        again under a new id, since the engine may still know the earlier one.
        """
        return f"{self.request_id}/{what}/{next(self._requests)}"

    def is_mute(self, samples: Samples) -> bool:
        """True if a window is digital silence, in which nobody speaks, or is shorter than one timestamp step."""
        return len(samples) < self.recipe.facts.step_samples or not samples.any()

    async def sound(self, samples: Samples) -> Sound:
        """Returns a window as the model reads it. It keeps ``samples``: they must not share memory with a longer
        array."""
        return await self._hear(samples, trimmed=self.recipe.options.encoder_context == "trimmed")

    async def _hear(self, samples: Samples, *, trimmed: bool) -> Sound:
        hear = partial(self.recipe.model.hear, samples, trimmed=trimmed)
        return await run_in_thread(hear, short=samples.size <= INLINE_HASHED)

    async def languages(self, sound: Sound) -> dict[str, float]:
        """The probability of each language, by code."""
        (answer,) = await self.ask([self.recipe.detection(self.new_id("language"), sound)], is_text=False)
        return self.recipe.detected(answer)

    def decide(self, probabilities: Mapping[str, float]) -> None:
        """Takes the likeliest language as the language of the audio."""
        self.language_probabilities = probabilities
        self.language = max(probabilities, key=probabilities.__getitem__)

    @property
    def language_probability(self) -> float | None:
        """The probability of the language that was detected; ``None`` if none was detected."""
        found = self.language_probabilities
        return None if found is None or self.language is None else found[self.language]

    @property
    def probes(self) -> bool:
        """True if the language is detected by requests of its own."""
        facts = self.recipe.facts
        return facts.detection is Detection.PROBED and len(facts.languages) > 1

    async def language_of(self, sound: Sound) -> str | None:
        """Returns the language in which to read a window; ``None``: the model finds it while it reads."""
        if not self.probes:
            return self.recipe.language
        if not self.recipe.options.multilingual:
            return self.language
        found = await self.languages(sound)
        return max(found, key=found.__getitem__)

    async def read(self, sound: Sound, context: Context) -> Attempt:
        """Reads the window's text with the temperature fallback. Returns the first good attempt, or the best of all.

        The second temperature is tried if the first fails. If the second fails too, all others are tried together: they
        share the encoding and each step's weights, so together they take little longer than one. If the text of a
        trimmed window is not good, or the window seems silent, the reason may be the silence that was left out. So the
        window is read again in full.
        """
        options, found = self.recipe.options, list[Attempt]()
        self.reads += 1
        if not sound.whole:
            (attempt,) = await self._attempts(sound, context, range(1))
            if self.once or (attempt.assessment.is_good(options) and not attempt.assessment.is_silent(options)):
                return attempt
            sound = await self._hear(sound.samples, trimmed=False)
        every = range(len(self.recipe.temperatures))
        for indices in filter(None, (every[:1], every[1:2], every[2:])):
            for attempt in await self._attempts(sound, context, indices):
                if attempt.assessment.is_good(options):
                    return attempt
                found.append(attempt)
        return best_attempt(found, options)

    async def _attempts(self, sound: Sound, context: Context, indices: range) -> list[Attempt]:
        """Returns the attempts at several temperatures. Their requests run together."""
        ask = self.recipe.ask(context)
        names = [partial(self.new_id, f"{context.name}.{index}") for index in indices]
        requests = [self.recipe.attempt(name, sound, ask, index) for name, index in zip(names, indices, strict=True)]
        answers = iter(await self.ask([request for group in requests for request in group], is_text=True))
        return [
            self._judged(sound, ask, index, list(itertools.islice(answers, len(group))))
            for index, group in zip(indices, requests, strict=True)
        ]

    def _judged(self, sound: Sound, ask: Ask, index: int, sampled: Sequence[Generated]) -> Attempt:
        best = likeliest(sampled, self.recipe.options.length_penalty)
        text, first = self.recipe.model.decode(best.token_ids), self.recipe.facts.first_step
        if first is not None:
            best = evolve(best, frames=frames_of_steps(first, len(best.token_ids)))
        probed = evolve(best, probe=sampled[0].probe)
        return Attempt(best, Assessment.of(probed, text, self.recipe.temperatures[index]), sound, ask)

    async def aligned(self, name: str, tokens: WordTokens, sound: Sound) -> AlignedTokens | None:
        """Returns the times of a window's tokens, or ``None`` if none of them is text."""
        frames = -(-len(sound.samples) // self.recipe.facts.step_samples)
        request = tokens.request(self.new_id(name), sound.item, frames=frames)
        return None if request is None else (await self.ask([request], is_text=False))[0].aligned

    @property
    def warnings(self) -> list[str]:
        """Sentences about words that could not be aligned, one for each reason."""
        told = []
        for reason, segments in self._uneven.items():
            where = spans_told([(one.start, one.end) for one in segments])
            told.append(f"the words of {where} share this time evenly, since they were not aligned: {reason}")
        return told

    async def with_words(self, segment: Segment, samples: Samples, language: str | None) -> Segment:
        """Returns ``segment``, whose sound is ``samples``, with the words that the aligner of the options finds."""
        aligner, rate = self.recipe.options.aligner, self.recipe.description.sampling_rate
        assert aligner is not None, "words are aligned by an aligner"
        try:
            return await segment_with_words(segment, samples, rate, language, aligner)
        except InvalidRequest as error:
            self._uneven.setdefault(str(error), []).append(segment)
            return segment_with_even_words(segment)

    async def ask(self, requests: Sequence[Request], *, is_text: bool) -> Sequence[Generated]:
        """Runs requests together. Records when the first request of all had a place, and when the first text began."""
        waited = trio.current_time() - self.asked
        answers = await self.run(requests)
        timings = None if answers[0].timings is None else answers[0].timings.since(waited)
        if timings is not None:
            self._first = self._first or timings
            if is_text and self._first_token is None:
                self._first_token = timings.first_token
        return answers

    def timings(self) -> Timings:
        """Returns the timings of the transcription. It is called after the last request has ended."""
        first = self._first or Timings(queued=0.0, encoder_wait=0.0, first_token=None, total=0.0)
        return evolve(first, first_token=self._first_token, total=trio.current_time() - self.asked)


# ---- times by frames -------------------------------------------------------------------------------------------------


_PAUSE = 1.0  # seconds without a token
_EDGE = 0.5  # seconds before the end of a window: a word that ends later may go on


def aligned_by_frames(attempt: Attempt, recipe: Recipe) -> AlignedTokens | None:
    """Returns the times of the text tokens, or ``None`` if there are none. A token ends where its frames end, or where
    the next one begins, and none ends later than the window."""
    generated = attempt.generated
    parts = zip(generated.token_ids, generated.frames, generated.logprobs, strict=False)
    kept = [(frames, logprob) for token, frames, logprob in parts if recipe.model.is_text(token)]
    return aligned_frames(kept, _frames(attempt, recipe)) if kept else None


def aligned_frames(tokens: Sequence[tuple[tuple[int, int], float]], last: int) -> AlignedTokens:
    """Returns the times of ``tokens``, each given by its frames and its log-probability. None ends later than frame
    ``last``."""
    frames, logprobs = zip(*tokens, strict=True)
    found, stops = zip(*frames, strict=True)
    starts = [min(start, last - 1) for start in found]
    ends = [min(stop, start) for stop, start in zip(stops, (*starts[1:], last), strict=True)]
    return AlignedTokens(frames=(*starts, ends[-1]), logprobs=logprobs, ends=tuple(ends))


def frames_of_steps(first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Returns the frames of ``count`` tokens, one for each step from ``first`` on. Those before the audio are at its
    beginning."""
    return tuple((max(step, 0), max(step, 0) + 1) for step in range(first, first + count))


def cut_by_frames(cut: WindowCut, attempt: Attempt, recipe: Recipe, *, is_full: bool) -> WindowCut:
    """Returns ``cut`` with spans by frames. They have all text tokens in order, except for a last word that may be cut.

    Args:
        is_full: the window was cut by its length, not at a pause.
    """
    generated, frames, aligned = attempt.generated, _frames(attempt, recipe), aligned_by_frames(attempt, recipe)
    after = -(-len(attempt.sound.samples) // recipe.facts.step_samples)
    cut = evolve(cut, spans=(), next_start=after, closed=True)
    if aligned is None:
        return cut
    texts = [index for index, token in enumerate(generated.token_ids) if recipe.model.is_text(token)]
    words = split_words([generated.token_ids[index] for index in texts], recipe.model.decode, cut.language)
    starts, ends, seconds = aligned.frames, aligned.ends, recipe.seconds(recipe.facts.step_samples)
    if is_full and len(words) > 1 and (frames - ends[-1]) * seconds < _EDGE:
        del texts[-len(words.pop().token_ids) :]
        cut = evolve(cut, next_start=ends[len(texts) - 1])
    firsts, at = list[int](), 0
    for index, word in enumerate(words):
        ended = not index or words[index - 1].text.strip().endswith(SENTENCE_ENDS)
        paused = index > 0 and (starts[at] - ends[at - 1]) * seconds >= _PAUSE
        if not firsts or ((ended or paused) and starts[at] > starts[firsts[-1]]):
            firsts.append(at)
        at += len(word.token_ids)
    spans = [
        Span(
            starts[first],
            max(ends[stop - 1], starts[first] + 1),
            generated.token_ids[texts[first] : texts[stop - 1] + 1],
            texts[first],
        )
        for first, stop in pairwise((*firsts, len(texts)))
    ]
    return evolve(cut, spans=tuple(spans))


def _frames(attempt: Attempt, recipe: Recipe) -> int:
    """Returns the number of whole frames of a window, 1 or more."""
    return max(len(attempt.sound.samples) // recipe.facts.step_samples, 1)
