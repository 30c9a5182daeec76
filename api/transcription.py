"""Long audio, window by window: what to ask the model for, and how to read its timestamps.

The decisions (`cut_window`, `Assessment`, `Recipe`) are values in, values out. `Transcription` awaits the engine
between them. The rules are those of Radford et al. 2022, section 4.5, as openai/whisper's ``transcribe.py`` has them::

    audio     |-------- window --------|
    tokens     <0.00> A <5.20><5.20> B <11.00><11.00> C       C is cut off by the window's end
    segments  [0.00 A 5.20][5.20 B 11.00]
    next                                 |-------- window --------|
"""

from __future__ import annotations

import itertools
import math
import secrets
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import trio
from attrs import define, evolve, field, frozen

from ..core.checks import Check, Refused, as_number, instance, integer, number, one_of, settle
from ..core.errors import EngineStateError, InvalidRequest
from ..core.model import ModelDescription, WhisperTokens
from ..core.request import EncoderItem, FinishReason, LogitRules, Probe, Request, SamplingParams, TimestampRules
from ..core.timings import Timings
from .audio import Samples
from .prompts import audio_item
from .results import Segment, Transcript

TASKS = ("transcribe", "translate")
TIMESTAMPS = ("segment", "none")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MIN_PROGRESS = 1.0  # seconds: a next window that starts sooner would cost a whole window's work for next to nothing


@frozen(kw_only=True)
class Generated:
    """What one request gave: ``token_ids`` without the end-of-text token, ``logprobs`` with one value for each of them
    and perhaps one for the end-of-text token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    probe: tuple[float, ...] | None = None  # log-probabilities, as `Request.probe` asked
    timings: Timings | None = None


Run = Callable[[Request], Awaitable[Generated]]  # runs one request to its end


def _read_temperatures(value: Any) -> tuple[float, ...]:
    values = value.tolist() if isinstance(value, np.ndarray) else value
    found = tuple(map(as_number, values if isinstance(values, list | tuple) else [values]))
    if not found or not all(0.0 <= one < math.inf for one in found):
        raise Refused
    return found


_TEXT = instance(str, "a text")
_THRESHOLD = number(-math.inf, math.inf).or_none("off")
_CHECKS = {
    "language": _TEXT.or_none("the model detects it"),
    "task": one_of(*TASKS),
    "prompt": _TEXT.or_none("nothing comes before"),
    "timestamps": one_of(*TIMESTAMPS),
    "compression_ratio_threshold": _THRESHOLD,
    "logprob_threshold": _THRESHOLD,
    "no_speech_threshold": _THRESHOLD,
    "seed": integer(-(2**63), 2**63 - 1).or_none("a fresh one for each transcription"),
}


def _temperatures(value: Any) -> tuple[float, ...]:
    check = Check(_read_temperatures, "one or more numbers, 0 (greedy) or positive")
    return tuple(check.of("temperature", value))


@frozen(kw_only=True)
class TranscribeOptions:
    """How an audio is transcribed.

    Args:
        language: the spoken language: a code ("en"), an English name ("english") or a token ("<|en|>"); ``None``: the
            model detects it in the first window.
        task: ``"transcribe"``, or ``"translate"`` into English.
        prompt: text that comes before the first window, for names and spelling; its last tokens are kept, up to half
            of the model's positions.
        timestamps: ``"segment"``: the model cuts segments and tells their times; ``"none"``: one segment per window.
        temperature: one or several (a list, a tuple, an array), tried in order until a window's text is good enough by
            the two thresholds; 0 is greedy.
        compression_ratio_threshold: text that compresses better repeats itself: next temperature. ``None``: off.
        logprob_threshold: a lower average log-probability is a guess: next temperature. ``None``: off.
        no_speech_threshold: a window whose probability of no speech is higher, and whose text is a guess or empty, is
            silent. ``None``: off.
        seed: of the draws at temperatures above 0; each further temperature takes the next seed. ``None``: a fresh one.

    Raises:
        InvalidRequest: a value that no model allows. What a model does not allow is refused by `Recipe`.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str | None = None
    timestamps: str = "segment"
    temperature: tuple[float, ...] = field(default=TEMPERATURES, converter=_temperatures)
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    seed: int | None = 0

    def __attrs_post_init__(self) -> None:
        if self.timestamps == "word":
            raise InvalidRequest("timestamps='word' is not supported yet; allowed: 'segment', 'none'")
        settle(self, _CHECKS)


# ---- decisions -------------------------------------------------------------------------------------------------------


@frozen
class Span:
    """Text tokens between two timestamps, in timestamp steps from the window's start; ``end`` is ``None`` where the
    text goes on to the end of the window."""

    start: int
    end: int | None
    token_ids: tuple[int, ...]


@frozen
class WindowCut:
    """How one window is read: its spans, and where the next window starts in timestamp steps from this one's start;
    ``None``: where this one ends."""

    spans: tuple[Span, ...]
    next_start: int | None


def cut_window(token_ids: Sequence[int], begin_id: int, *, finished: bool, least: int) -> WindowCut:
    """Reads the timestamps (ids from ``begin_id`` on) in a window's tokens, whatever they are.

    A timestamp after text ends a span. The window is used up where its last text has its end timestamp and nothing
    follows; where a new span was opened, or the text was cut off (``finished`` is false, or no end timestamp), the next
    window starts at the end of the last complete span. Without a complete span, or where that would move on by less
    than ``least`` steps, the window is used up too, and the text that was cut off is its last span.
    """
    spans: list[Span] = []
    opened: int | None = None
    text: list[int] = []
    for token in token_ids:
        if token < begin_id:
            text.append(token)
        elif text:
            spans.append(Span(opened or 0, token - begin_id, tuple(text)))
            opened, text = None, []
        else:
            opened = token - begin_id
    reached = spans[-1].end or 0 if spans else 0
    cut_off = not finished or bool(text) or opened is not None
    if cut_off and reached >= least:
        return WindowCut(tuple(spans), reached)
    if text:
        spans.append(Span(reached if opened is None else opened, None, tuple(text)))
    return WindowCut(tuple(spans), None)


def compression_ratio(text: str) -> float:
    """UTF-8 bytes over zlib-compressed bytes: repetitions make it large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@frozen(kw_only=True)
class Assessment:
    """One window's text at one temperature, and how good it is."""

    text: str
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float

    @classmethod
    def of(cls, generated: Generated, text: str, temperature: float) -> Assessment:
        """Rates ``generated``. The average counts the end-of-text token, as Radford et al.'s code does."""
        return cls(
            text=text,
            avg_logprob=sum(generated.logprobs) / (len(generated.token_ids) + 1),
            no_speech_prob=math.exp(generated.probe[0]) if generated.probe else 0.0,
            compression_ratio=compression_ratio(text),
            temperature=temperature,
        )

    def is_guess(self, options: TranscribeOptions) -> bool:
        """The tokens were improbable."""
        limit = options.logprob_threshold
        return limit is not None and not self.avg_logprob >= limit

    def is_silent(self, options: TranscribeOptions) -> bool:
        """Nobody speaks in the window: the model says so, and has nothing convincing to write."""
        limit = options.no_speech_threshold
        if limit is None or self.no_speech_prob <= limit:
            return False
        return options.logprob_threshold is None or self.is_guess(options) or not self.text.strip()

    def is_good(self, options: TranscribeOptions) -> bool:
        """No other temperature is needed."""
        limit = options.compression_ratio_threshold
        repeats = limit is not None and self.compression_ratio > limit
        return self.is_silent(options) or not (repeats or self.is_guess(options))


def language_probabilities(language_ids: Mapping[str, int], logprobs: Sequence[float]) -> dict[str, float]:
    """Probabilities among the languages alone, by code, from their log-probabilities in the same order."""
    highest = max(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    total = sum(weights)
    return {code: weight / total for code, weight in zip(language_ids, weights, strict=True)}


# ---- options meet a model --------------------------------------------------------------------------------------------


def resolve_language(language: str | None, tokens: WhisperTokens) -> str | None:
    """The language's code, ``None`` where it is to be detected; English-only models always give "en".

    Raises:
        InvalidRequest: a language that the model does not know.
    """
    known = tokens.language_ids or {"en": -1}
    if language is None:
        return None if tokens.language_ids else "en"
    name = language.strip().lower()
    name = name.removeprefix("<|").removesuffix("|>")
    code = name if name in known else _language_names().get(name, name)
    if code in known:
        return code
    if not tokens.language_ids:
        raise InvalidRequest(
            f"language={language!r}, but the model knows English only; allowed: None, 'en'. Use a multilingual model"
        )
    raise InvalidRequest(
        f"language={language!r}; allowed: None (detect), an English name, or one of {', '.join(sorted(known))}"
    )


def _language_names() -> Mapping[str, str]:
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    names: Mapping[str, str] = TO_LANGUAGE_CODE
    return names


@frozen(kw_only=True)
class Recipe:
    """Options resolved against one model: makes the requests and reads their tokens.

    Raises:
        InvalidRequest: the model is not a speech model, or does not know the language, the task or prompts.
    """

    options: TranscribeOptions
    description: ModelDescription
    tokens: WhisperTokens = field(init=False)
    language: str | None = field(init=False)  # None: to be detected
    special: frozenset[int] = field(init=False)
    previous: tuple[int, ...] = field(init=False)  # <|startofprev|> and the prompt's tokens

    @tokens.default
    def _tokens(self) -> WhisperTokens:
        return whisper_tokens(self.description)

    @language.default
    def _language(self) -> str | None:
        tasks = self.tokens.task_ids or ("transcribe",)
        if self.options.task not in tasks:
            raise InvalidRequest(
                f"task={self.options.task!r}, but {self.description.name} knows only: {', '.join(map(repr, tasks))}"
            )
        return resolve_language(self.options.language, self.tokens)

    @special.default
    def _special(self) -> frozenset[int]:
        """What is no text below the timestamps: every vocabulary of Whisper ends its text with <|endoftext|>, goes on
        with <|startoftranscript|> and has only special tokens, <|startoflm|> too, from there to <|0.00|>."""
        tokens = self.tokens
        named = {tokens.no_timestamps_id, tokens.previous_id, tokens.no_speech_id}
        ids = named | {*tokens.language_ids.values(), *tokens.task_ids.values(), *self.description.eos_token_ids}
        layout = range(tokens.start_id, tokens.timestamp_begin_id)
        return frozenset(token for token in ids if token is not None).union([tokens.start_id], layout)

    @previous.default
    def _previous(self) -> tuple[int, ...]:
        prompt = (self.options.prompt or "").strip()
        if not prompt:
            return ()
        if self.tokens.previous_id is None:
            raise InvalidRequest(
                f"prompt={prompt!r}, but {self.description.name} has no <|startofprev|> token; allowed: None"
            )
        encoded = tuple(self.description.tokenizer.encode(f" {prompt}", add_special_tokens=False))
        if any(not self.is_text(token) for token in encoded):
            raise InvalidRequest(f"prompt={prompt!r} holds a special token (<|...|>); allowed: plain text")
        kept = max(self.description.max_positions // 2 - 1, 0)
        last = encoded[max(len(encoded) - kept, 0) :]
        return (self.tokens.previous_id, *last) if last else ()

    @property
    def timestamp_step(self) -> int:
        """Samples of one timestamp step."""
        return round(self.tokens.seconds_per_timestamp * self.description.sampling_rate)

    @property
    def with_timestamps(self) -> bool:
        """The model writes timestamps."""
        return self.options.timestamps == "segment"

    def is_text(self, token: int) -> bool:
        """Not a timestamp and not a special token."""
        return token < self.tokens.timestamp_begin_id and token not in self.special

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without timestamps and special tokens."""
        kept = [token for token in token_ids if self.is_text(token)]
        return str(self.description.tokenizer.decode(kept, skip_special_tokens=True))

    def detection(self, request_id: str, item: EncoderItem) -> Request:
        """Asks for the language: one token after <|startoftranscript|>, and the probability of each language."""
        languages = tuple(self.tokens.language_ids.values())
        silence = () if self.tokens.no_speech_id is None else (self.tokens.no_speech_id,)
        return Request(
            id=request_id,
            prompt_token_ids=(self.tokens.start_id,),
            items=(item,),
            sampling=SamplingParams(max_tokens=1),
            rules=LogitRules(allowed=languages),
            probe=Probe(position=0, token_ids=languages + silence),
            max_tokens=1,
        )

    def detected(self, generated: Generated) -> tuple[str, float]:
        """The likeliest language and its probability among all."""
        assert generated.probe is not None, "the answer to a request with a probe has no probe"
        languages = self.tokens.language_ids
        found = language_probabilities(languages, generated.probe[: len(languages)])
        best = max(found, key=found.__getitem__)
        return best, found[best]

    def request(self, request_id: str, item: EncoderItem, language: str, attempt: int, *, first: bool) -> Request:
        """Asks for a window's text at the temperature of ``attempt``; the probe tells the probability of no speech."""
        prompt = (*(self.previous if first else ()), *self._start(language))
        most = self.description.max_positions - len(prompt)
        silence = self.tokens.no_speech_id
        assert self.options.seed is not None, "a fresh seed is chosen when the transcription is made"
        start = prompt.index(self.tokens.start_id)
        return Request(
            id=request_id,
            prompt_token_ids=prompt,
            items=(item,),
            sampling=SamplingParams(
                max_tokens=most, temperature=self.options.temperature[attempt], seed=self.options.seed + attempt
            ),
            rules=self._rules(),
            probe=None if silence is None else Probe(position=start, token_ids=(silence,)),
            max_tokens=most,
        )

    def _start(self, language: str) -> tuple[int, ...]:
        tokens = self.tokens
        ids = [tokens.start_id]
        if tokens.language_ids:
            ids.append(tokens.language_ids[language])
        if tokens.task_ids:
            ids.append(tokens.task_ids[self.options.task])
        if not self.with_timestamps:
            ids.append(tokens.no_timestamps_id)
        return tuple(ids)

    def _rules(self) -> LogitRules:
        tokens = self.tokens
        timestamps = TimestampRules(
            begin_id=tokens.timestamp_begin_id,
            no_timestamps_id=tokens.no_timestamps_id,
            max_initial=tokens.max_initial_timestamp,
        )
        return LogitRules(
            suppress=self.description.suppress_token_ids,
            begin_suppress=self.description.begin_suppress_token_ids,
            timestamps=timestamps if self.with_timestamps else None,
        )

    def cut(self, generated: Generated) -> WindowCut:
        """The spans of a window and where the next one starts."""
        if self.with_timestamps:
            finished = generated.finish_reason is FinishReason.STOP
            least = math.ceil(MIN_PROGRESS / self.tokens.seconds_per_timestamp)
            begin_id = self.tokens.timestamp_begin_id
            return cut_window(generated.token_ids, begin_id, finished=finished, least=least)
        return WindowCut((Span(0, None, generated.token_ids),), None)


# ---- the walk over the audio -----------------------------------------------------------------------------------------


def whisper_tokens(description: ModelDescription) -> WhisperTokens:
    """The special tokens of a model that transcribes.

    Raises:
        InvalidRequest: it does not.
    """
    if description.whisper is None:
        raise InvalidRequest(
            f"{description.name} ({description.architecture}) cannot transcribe; allowed: Whisper models. "
            "engine.generate asks models that read audio among their tokens"
        )
    return description.whisper


@define
class _Stopwatch:
    """Adds up what the requests of one transcription took, see `Timings`."""

    asked: float | None  # None: when its first request is
    _queued: float = field(default=0.0, init=False)
    _encoder_wait: float = field(default=0.0, init=False)
    _first_token: float | None = field(default=None, init=False)
    _ended: float | None = field(default=None, init=False)

    def add(self, timings: Timings | None, begun: float, *, is_text: bool) -> None:
        """A request that was asked for at ``begun``."""
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
        """The whole, when it has ended."""
        if self._ended is None or self.asked is None:
            return None
        return Timings(
            queued=self._queued,
            encoder_wait=self._encoder_wait,
            first_token=self._first_token,
            total=self._ended - self.asked,
        )


class Transcription:
    """One audio on its way to text: call `next_window` until it gives ``None``, or `transcript` for all of it.

    Holds no nursery and no cancel scope, so it may be stopped after any window and driven from an async generator. A
    window (at most ``description.window_samples``) starts where the one before ends or, where that cut off a sentence,
    where its last whole segment ends. So every sample lies in a window, but for less than one timestamp step (20 ms) at
    the very end. Where a request fails, nothing has moved and `next_window` may be called again.

    Attributes:
        language: the code of the spoken language; ``None`` before `start` has detected it.
        language_probability: the model's certainty, 0 to 1; ``None`` where nothing was detected.
        duration: of the audio, in seconds.
        position: seconds from the beginning that are done.
        timings: how long it took, from ``asked`` (trio time; its first request, by default) on; ``None`` until the last
            window is done.

    Raises:
        InvalidRequest: options that the model does not allow, no samples.
        EngineStateError: `start` or `next_window` was called while one of them still runs.
    """

    def __init__(
        self,
        samples: Samples,
        options: TranscribeOptions,
        description: ModelDescription,
        run: Run,
        *,
        request_id: str,
        asked: float | None = None,
    ) -> None:
        if not len(samples):
            raise InvalidRequest("audio without samples; allowed: 0.02 s of audio or more")
        self._recipe = Recipe(options=_with_seed(options), description=description)
        self._samples = samples
        self._run = run
        self._request_id = request_id
        self._seek = 0  # samples: where the next window starts
        self._spoken = 0  # samples: where the last segment ends
        self._windows = 0
        self._segments = 0
        self._requests = itertools.count()
        self._busy = False
        self._stopwatch = _Stopwatch(asked)
        self.language = self._recipe.language
        self.language_probability: float | None = None

    @property
    def duration(self) -> float:
        """Seconds of the audio."""
        return self._seconds(len(self._samples))

    @property
    def position(self) -> float:
        """Seconds from the beginning that are done."""
        return self._seconds(self._seek)

    @property
    def timings(self) -> Timings | None:
        """See above."""
        return self._stopwatch.timings()

    async def start(self) -> None:
        """Detects the language where it is not known yet; `next_window` does so by itself."""
        with self._alone("start"):
            if self.language is None:
                await self._detect(await self._item(self._window()))

    async def next_window(self) -> list[Segment] | None:
        """Transcribes one window: its segments, none where it is silent; ``None`` after the last window."""
        with self._alone("next_window"):
            if self._seek >= len(self._samples):
                return None
            window = self._window()
            item = await self._item(window)
            language = self.language or await self._detect(item)
            generated, assessment = await self._read(item, language)
            silent = assessment.is_silent(self._recipe.options)
            cut = WindowCut((), None) if silent else self._recipe.cut(generated)
            segments = self._segments_of(cut.spans, assessment, self._seek + len(window))
            self._move_on(cut.next_start, len(window))
            return segments

    async def transcript(self) -> Transcript:
        """Transcribes what is left of the audio."""
        segments: list[Segment] = []
        while (found := await self.next_window()) is not None:
            segments += found
        return Transcript.of(
            segments,
            language=self.language,
            language_probability=self.language_probability,
            duration=self.duration,
            timings=self.timings,
        )

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Windows follow one another: a second call while one runs would read the same window twice."""
        if self._busy:
            raise EngineStateError(
                f"{what} of transcription {self._request_id!r} was called while an earlier call of it still runs; "
                "allowed: one call at a time. Await it first, or open a transcription for each task"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _new_id(self, what: str) -> str:
        """Ends in a number of its own: a window that is asked again, its earlier request having been cancelled or
        failed, must not meet that one's name, which the engine may still know."""
        return f"{self._request_id}/{what}/{next(self._requests)}"

    def _window(self) -> Samples:
        return self._samples[self._seek : self._seek + self._recipe.description.window_samples]

    def _seconds(self, samples: int) -> float:
        return samples / self._recipe.description.sampling_rate

    async def _item(self, window: Samples) -> EncoderItem:
        """``window`` to encode: its own copy, so that it does not keep the whole audio alive."""
        return await audio_item(self._recipe.description, np.array(window, np.float32))

    async def _ask(self, request: Request, *, is_text: bool) -> Generated:
        begun = trio.current_time()
        generated = await self._run(request)
        self._stopwatch.add(generated.timings, begun, is_text=is_text)
        return generated

    async def _detect(self, item: EncoderItem) -> str:
        answer = await self._ask(self._recipe.detection(self._new_id("language"), item), is_text=False)
        self.language, self.language_probability = self._recipe.detected(answer)
        return self.language

    async def _read(self, item: EncoderItem, language: str) -> tuple[Generated, Assessment]:
        """Tries one temperature after the other until the text is good; the last one's is taken as it is."""
        options, first = self._recipe.options, self._windows == 0
        for attempt, temperature in enumerate(options.temperature):
            name = self._new_id(f"{self._windows}.{attempt}")
            request = self._recipe.request(name, item, language, attempt, first=first)
            generated = await self._ask(request, is_text=True)
            assessment = Assessment.of(generated, self._recipe.decode(generated.token_ids), temperature)
            if assessment.is_good(options):
                break
        return generated, assessment

    def _segments_of(self, spans: Sequence[Span], assessment: Assessment, window_end: int) -> list[Segment]:
        """Segments within the window and the audio, in order. Spans without text or time are left out, and so are those
        that begin after the audio's end, where the model hears only padding; but where there is no other, the first of
        these is kept: its words were said in the window, and only the time is wrong."""
        segments, late = [], []
        for span in spans:
            text = self._recipe.decode(span.token_ids)
            start = self._seek + span.start * self._recipe.timestamp_step
            if not text.strip():
                continue
            if start >= window_end:
                late.append((text, span))
            elif found := self._segment(start, self._end(span, window_end), text, span, assessment):
                segments.append(found)
        if late and not segments and (found := self._segment(self._seek, window_end, *late[0], assessment)):
            segments.append(found)
        return segments

    def _end(self, span: Span, window_end: int) -> int:
        """Samples from the beginning of the audio to the end of ``span``."""
        if span.end is None:
            return window_end
        return min(self._seek + span.end * self._recipe.timestamp_step, window_end)

    def _segment(self, start: int, end: int, text: str, span: Span, assessment: Assessment) -> Segment | None:
        """The segment of ``span``, which begins where the one before ends or later; ``None`` where that is no time."""
        start = max(start, self._spoken)
        if start >= end:
            return None
        segment = Segment(
            id=self._segments,
            start=self._seconds(start),
            end=self._seconds(end),
            text=text,
            token_ids=tuple(token for token in span.token_ids if self._recipe.is_text(token)),
            avg_logprob=assessment.avg_logprob,
            no_speech_prob=assessment.no_speech_prob,
            compression_ratio=assessment.compression_ratio,
            temperature=assessment.temperature,
        )
        self._segments += 1
        self._spoken = end
        return segment

    def _move_on(self, next_start: int | None, window_samples: int) -> None:
        step = self._recipe.timestamp_step
        moved = window_samples if next_start is None else min(next_start * step, window_samples)
        self._windows += 1
        self._seek += moved
        if len(self._samples) - self._seek < step:
            self._seek = len(self._samples)
            self._stopwatch.end(trio.current_time())


def _with_seed(options: TranscribeOptions) -> TranscribeOptions:
    return options if options.seed is not None else evolve(options, seed=secrets.randbits(62))
