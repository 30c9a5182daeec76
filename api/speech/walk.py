"""`Walk`: reads one stretch of audio window by window. The text of each window decides where the next one starts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from attrs import define, evolve, field, frozen

from ...core.speech import Sound, Span, WindowCut
from ..inputs.audio import Samples
from ..inputs.recording import Recording
from ..outputs.results import Segment
from .plan import Plan, speech_within
from .reader import WindowReader, aligned_by_frames, cut_by_frames
from .recipe import Context, History, Recipe
from .windows import Assessment, Attempt, Surroundings, is_echo, without_echo, without_hallucinations
from .words import place_words, segment_ending_by

_LEAST_MOVE = 1.0  # seconds: after a second shorter move in a row, the next window starts at this one's end
_MISSED = 1.0  # seconds: if so much speech has no text, it is read once more


async def sound_of(
    window: Callable[[int, int], Awaitable[Samples]], planned: tuple[int, int] | None, recipe: Recipe
) -> tuple[int, Samples] | None:
    """Returns the start and the samples of a planned window. ``None``: no window was planned, or the audio ends before
    the window or within its first timestamp step.
    """
    if planned is None:
        return None
    start, stop = planned
    samples = await window(start, stop - start)
    return None if len(samples) < min(stop - start, recipe.facts.step_samples) else (start, samples)


@frozen(kw_only=True)
class WindowRead:
    """One window that was read: its segments, and the start of the next window."""

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]  # the tokens of the segments, timestamps included
    seek: int
    closed: bool  # the model says that nobody speaks after the last segment
    language: str | None = None  # the code of the language, if it is known
    misled: bool = False  # by the text before it, the model wrote nothing or stopped early although somebody speaks


@define(eq=False)
class Walk:
    """Reads the windows of ``[seek, limit)`` one after the other.

    A window changes the state only after its last await. So it can be read again if a request fails or is cancelled.

    Args:
        window: returns samples by their start and number; by default from the recording.
        limit: the end of the stretch; infinity: the end of the audio.
        first: the stretch is the first one, so that its first window begins with the prefix.
        name: a part of the ids of its requests.

    Attributes:
        language: the code of the language that the model wrote first; ``None``: it has written none.
    """

    reader: WindowReader
    recording: Recording
    plan: Plan
    window: Callable[[int, int], Awaitable[Samples]] = field()
    seek: int = 0
    limit: float = math.inf
    first: bool = True
    name: str = ""
    language: str | None = field(default=None, init=False)
    _history: History = field(init=False)
    _spoken: int = field(default=0, init=False)  # the end of the last segment
    _windows: int = field(default=0, init=False)
    _short: bool = field(default=False, init=False)  # the last move was short

    @window.default
    def _window(self) -> Callable[[int, int], Awaitable[Samples]]:
        return self.recording.window

    @_history.default
    def _begun(self) -> History:
        return self.recipe.history()

    async def next_window(self) -> tuple[Segment, ...] | None:
        """Reads one window. Returns its segments, an empty tuple for a silent window, or ``None`` after the last
        window."""
        found = await sound_of(self.window, await self.plan.next(self.seek, self.limit), self.recipe)
        if found is None:
            return None
        start, samples = found
        stop = start + len(samples)
        if self.reader.is_mute(samples):
            self._done(start, stop)
            return ()
        sound = await self.reader.sound(samples)
        attempt, read = await self._read_twice(sound, await self.reader.language_of(sound), start, stop)
        if self.recipe.options.timestamps == "word" and read.segments:
            by_model = self.recipe.options.aligner is None
            words = self._with_words(read, attempt, start) if by_model else self._aligned(read, start, samples)
            worded = await words
            within = tuple(segment_ending_by(segment, self.recipe.seconds(stop)) for segment in worded.segments)
            read = self._heard(evolve(worded, segments=within), start, stop)
        self.language = self.language or read.language
        self._remember(attempt.assessment, read)
        if read.segments:
            self._spoken = self.recipe.samples(read.segments[-1].end)
        self._done(start, read.seek)
        return read.segments

    @property
    def recipe(self) -> Recipe:
        """The recipe of the reader."""
        return self.reader.recipe

    async def _read_twice(
        self, sound: Sound, language: str | None, start: int, stop: int
    ) -> tuple[Attempt, WindowRead]:
        """Reads the window [start, stop). If somebody speaks but the model writes nothing, or its text may be an echo,
        the text before the window may have misled the model: the window is read once more without that text, and if
        there was none, or after an echo, without the hotwords and the initial prompt."""
        before = self._history.last(language=language)
        context = Context(name=f"{self.name}{self._windows}", language=language, before=before, first=self.first)
        attempt = await self.reader.read(sound, context)
        read = self._read(attempt, start, stop)
        callers, options = self.recipe.model.decode(self._history.callers), self.recipe.options
        if before and read.segments and is_echo(attempt.assessment, callers, options):
            plain = await self.reader.read(attempt.sound, evolve(context, before=()))
            taken = without_echo(attempt, plain, options)
            return taken, evolve(self._read(taken, start, stop), misled=taken is plain)
        speech = speech_within(self.plan.speech, start, stop)
        if read.segments or not before or speech < self.recipe.samples(_MISSED):
            return attempt, read
        always = self._history.always
        fewer = always if len(before) > len(always) else ()
        attempt = await self.reader.read(attempt.sound, evolve(context, before=fewer))
        return attempt, evolve(self._read(attempt, start, stop), misled=True)

    def _remember(self, assessment: Assessment, read: WindowRead) -> None:
        """Keeps the text for the next window. A silent window does not change the history. If no attempt was good, all
        temperatures were tried, so the text counts as sampled at the last one."""
        options = self.recipe.options
        if read.misled:
            self._history.clear()
        if not assessment.is_silent(options):
            good = assessment.is_good(options)
            temperature = assessment.temperature if good else self.recipe.temperatures[-1]
            self._history.add(read.token_ids, temperature, read.language)

    def _done(self, start: int, seek: int) -> None:
        self._short = seek - start < self.recipe.samples(_LEAST_MOVE)
        self.seek = seek
        self._windows += 1
        self.first = False

    # -- one window --------------------------------------------------------------------------------------------------

    def _read(self, attempt: Attempt, start: int, stop: int) -> WindowRead:
        silent = attempt.assessment.is_silent(self.recipe.options)
        cut = WindowCut(()) if silent else self.recipe.model.cut(attempt.generated.token_ids, attempt.ask)
        if attempt.generated.frames and not silent:
            is_full = stop - start >= self.plan.rules.window
            cut = cut_by_frames(cut, attempt, self.recipe, is_full=is_full)
        language = attempt.ask.language or cut.language
        segments, tokens = self._segments(cut.spans, attempt, start, stop)
        segments = tuple(evolve(segment, language=language or self.language) for segment in segments)
        read = WindowRead(segments=segments, token_ids=tokens, seek=stop, closed=cut.closed, language=language)
        if cut.next_start is not None:
            return evolve(
                read, seek=self._far_enough(start, start + cut.next_start * self.recipe.facts.step_samples, stop)
            )
        missed = self._missed(segments[-1], start, stop) if segments else None
        return read if missed is None else evolve(read, token_ids=(), seek=missed, misled=True)

    def _far_enough(self, start: int, seek: int, stop: int) -> int:
        """Returns ``seek``, or ``stop`` if the next window would not be later than this one, or only a little later for
        the second time.
        """
        least = self.recipe.samples(_LEAST_MOVE) if self._short else 1
        return stop if seek - start < least else min(seek, stop)

    def _missed(self, last: Segment, start: int, stop: int) -> int | None:
        """Returns the end of the last segment if somebody speaks after it and the next window would skip that speech,
        since it would start at this window's end.
        """
        end = self.recipe.samples(last.end)
        speech = speech_within(self.plan.speech, end, stop)
        is_missed = end - start >= self.recipe.samples(_LEAST_MOVE) and speech >= self.recipe.samples(_MISSED)
        return end if is_missed else None

    async def _with_words(self, read: WindowRead, attempt: Attempt, start: int) -> WindowRead:
        """Returns ``read`` with the times of its words."""
        recipe = self.recipe
        tokens = recipe.model.word_tokens(attempt.generated.token_ids, attempt.ask)
        if attempt.generated.frames:
            answer = aligned_by_frames(attempt, recipe)
        else:
            answer = await self.reader.aligned(f"{self.name}{self._windows}.words", tokens, attempt.sound)
        segments = place_words(
            read.segments,
            tokens,
            answer,
            rules=recipe.word_rules(read.language),
            offset=recipe.seconds(start),
            spoken_until=recipe.seconds(self._spoken),
        )
        return evolve(read, segments=segments)

    async def _aligned(self, read: WindowRead, start: int, samples: Samples) -> WindowRead:
        """Returns ``read`` with words of the aligner, which hears the sound of each segment."""
        language, found = read.language or self.language, list[Segment]()
        for segment in read.segments:
            first, last = (self.recipe.samples(time) - start for time in (segment.start, segment.end))
            found.append(await self.reader.with_words(segment, samples[first:last], language))
        return evolve(read, segments=tuple(found))

    def _heard(self, read: WindowRead, start: int, stop: int) -> WindowRead:
        """Returns ``read`` without text that nobody spoke. The next window starts after the last word, unless the model
        has said that nobody speaks there, or an aligner, which hears no more than the segments, has found the word."""
        recipe, seek = self.recipe, read.seek
        ends = [segment.words[-1].end for segment in read.segments if segment.words]
        goes_on = not read.closed and recipe.options.aligner is None
        if goes_on and ends and ends[-1] > recipe.seconds(start):
            seek = self._far_enough(start, recipe.samples(ends[-1]), stop)
        threshold = recipe.options.hallucination_silence_threshold
        if threshold is None:
            return evolve(read, seek=seek)
        around = Surroundings(
            start=recipe.seconds(start),
            stop=recipe.seconds(stop),
            full=recipe.seconds(start + recipe.facts.window_samples),
            audio=self.recording.duration,
            last_speech=recipe.seconds(self._spoken),
            closed=read.closed,
        )
        kept = without_hallucinations(read.segments, around, threshold)
        if kept.seek is not None:
            seek = self._far_enough(start, recipe.samples(kept.seek), stop)
        tokens = read.token_ids
        if len(kept.segments) < len(read.segments):
            tokens = tuple(token for segment in kept.segments for token in segment.token_ids)
        return evolve(read, segments=kept.segments, seek=seek, token_ids=tokens)

    def _segments(
        self, spans: Sequence[Span], attempt: Attempt, start: int, stop: int
    ) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
        """Returns the segments within the window [start, stop), in order, and their tokens. Spans without text or
        duration are left out, and so are spans that begin after the window, in the padding. If all spans begin after
        the window, the first is kept, since its words were said in the window and only its time is wrong.
        """
        recipe, step, spoken = self.recipe, self.recipe.facts.step_samples, max(self._spoken, start)
        found: list[Segment] = []
        tokens: list[int] = []
        spoken_spans = [span for span in spans if recipe.text_of(span).strip()]
        timely = [span for span in spoken_spans if start + span.start * step < stop]
        for span in timely or [evolve(span, start=0, end=None) for span in spoken_spans[:1]]:
            begin = max(start + span.start * step, spoken)
            end = stop if span.end is None else min(start + span.end * step, stop)
            if begin < end:
                found.append(self._segment(span, attempt, begin, end))
                tokens += span.token_ids
                spoken = end
        return tuple(found), tuple(tokens)

    def _segment(self, span: Span, attempt: Attempt, start: int, end: int) -> Segment:
        recipe, assessment = self.recipe, attempt.assessment
        logprobs = attempt.generated.logprobs[span.first :]
        text = [
            (token, logprob)
            for token, logprob in zip(span.token_ids, logprobs, strict=False)
            if recipe.model.is_text(token)
        ]
        return Segment(
            id=0,  # `Transcription.next_window` numbers it
            start=recipe.seconds(start),
            end=recipe.seconds(end),
            text=recipe.text_of(span),
            token_ids=tuple(token for token, _ in text),
            logprobs=tuple(logprob for _, logprob in text),
            avg_logprob=assessment.avg_logprob,
            no_speech_prob=assessment.no_speech_prob,
            compression_ratio=assessment.compression_ratio,
            temperature=assessment.temperature,
            speaker=span.speaker,
        )
