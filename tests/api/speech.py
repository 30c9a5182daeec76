"""What tests of transcriptions share: a model with one token per byte of text, a scripted run in the engine's place, a
recording of an array, and a voice activity that knows where somebody speaks."""

from __future__ import annotations

import math
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
import numpy as np
import trio
from attrs import define, field

from triolet.api.hosts.alternatives import background
from triolet.api.hosts.transcriptions import Detectors, open_transcription
from triolet.api.inputs.audio import Samples
from triolet.api.inputs.timeline import AudioFault
from triolet.api.outputs.results import Segment, Word
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.parallel import ParallelTranscription
from triolet.api.speech.plan import Clips, CutRules, Plan
from triolet.api.speech.reader import RunRequests, WindowReader
from triolet.api.speech.recipe import Recipe
from triolet.api.speech.transcription import Transcription
from triolet.api.speech.windows import Generated
from triolet.core.config import EngineConfig
from triolet.core.model import ModelDescription, WhisperTokens
from triolet.core.request import FinishReason, Request
from triolet.models.speech.whisper_speech import with_whisper

EOS, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS, BEGIN = range(256, 266)
RATE, WINDOW = 16_000, 480_000
STEP = 320  # samples of one timestamp step
LANGUAGES = {"en": EN, "de": DE}
EVERYTHING: Clips = ((0, math.inf),)


class ByteTokenizer:
    """One token per UTF-8 byte; "<|en|>" in a text becomes its token, as in transformers' tokenizers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        before, found, after = text.partition("<|en|>")
        return [*before.encode(), *([EN] if found else []), *after.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token_ids).decode(errors="replace")


SPECIAL = WhisperTokens(
    start_id=START,
    no_timestamps_id=NO_TIMESTAMPS,
    timestamp_begin_id=BEGIN,
    previous_id=PREVIOUS,
    no_speech_id=NO_SPEECH,
    language_ids=LANGUAGES,
    task_ids={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    max_initial_timestamp=50,
)


def describe(**changes: object) -> ModelDescription:
    values: dict[str, object] = {
        "name": "tiny-stub",
        "architecture": "WhisperForConditionalGeneration",
        "device": "cpu",
        "dtype": "float32",
        "vocabulary_size": BEGIN + 1501,
        "max_positions": 448,
        "eos_token_ids": (EOS,),
        "suppress_token_ids": (1, 2),
        "begin_suppress_token_ids": (32, EOS),
        "page_size": 16,
        "pages": 100,
        "cross_slots": 4,
        "encoder_embeddings": 1500,
        "encoder_bytes": 1500 * 64 * 4,
        "sampling_rate": RATE,
        "window_samples": WINDOW,
        "processor_identity": "stub-80",
        "tokenizer": ByteTokenizer(),
        "alignment_fault": None,
    }
    special = changes.pop("whisper", SPECIAL)
    assert isinstance(special, WhisperTokens)
    description = ModelDescription(**{**values, **changes})  # type: ignore[arg-type]
    return attrs.evolve(description, **with_whisper(description, special))


def describe_with(**changes: object) -> ModelDescription:
    """The model with other special tokens."""
    return describe(whisper=attrs.evolve(SPECIAL, **changes))  # type: ignore[arg-type]


MODEL = describe()
ENGLISH_ONLY = describe_with(language_ids={}, task_ids={})
WITHOUT_PREVIOUS = describe_with(previous_id=None, no_speech_id=None)


def options_of(**options: Any) -> TranscribeOptions:
    """English, greedy, unless they say otherwise."""
    return TranscribeOptions(**{"language": "en", "temperature": 0.0, "beam_size": 1, **options})


GREEDY = options_of()
LADDER = options_of(temperature=(0.0, 0.2, 0.4), best_of=1)


# -- what the model writes ---------------------------------------------------------------------------------------------


def at(seconds: float) -> int:
    """The timestamp token of ``seconds``."""
    return BEGIN + round(seconds / 0.02)


def tokens(*parts: float | str) -> tuple[int, ...]:
    """Tokens of texts (str) and timestamps (seconds)."""
    found: list[int] = []
    for part in parts:
        found += part.encode() if isinstance(part, str) else [at(part)]
    return tuple(found)


def answer(
    *parts: float | str, logprob: float = -0.1, no_speech: float = 0.01, reason: FinishReason = FinishReason.STOP
) -> Generated:
    """``logprob`` is that of each token, and so the average."""
    ids = tokens(*parts)
    return Generated(
        token_ids=ids, logprobs=(logprob,) * (len(ids) + 1), finish_reason=reason, probe=(math.log(no_speech),)
    )


def detected(english: float, german: float, silence: float = 0.01) -> Generated:
    """The answer to a request for the language."""
    return Generated(
        token_ids=(EN,),
        logprobs=(-1.0,),
        finish_reason=FinishReason.LENGTH,
        probe=tuple(math.log(p) for p in (english, german, silence)),
    )


def segment(text: str, start: float = 0.0, end: float = 30.0, words: Sequence[Word] | None = None) -> Segment:
    """A segment whose tokens are its bytes."""
    return Segment(
        id=0,
        start=start,
        end=end,
        text=text,
        token_ids=tuple(text.encode()),
        avg_logprob=-0.25,
        no_speech_prob=0.125,
        compression_ratio=1.5,
        temperature=0.0,
        words=None if words is None else tuple(words),
    )


@define(eq=False)
class Script:
    """A `RunRequests` that gives the answers in order, the last for ever, and keeps the requests."""

    answers: Sequence[Generated]
    requests: list[Request] = field(factory=list)
    together: list[int] = field(factory=list)  # how many requests each call ran

    def __init__(self, *answers: Generated) -> None:
        self.__attrs_init__(answers)  # type: ignore[attr-defined]

    async def __call__(self, requests: Sequence[Request]) -> Sequence[Generated]:
        self.together.append(len(requests))
        first = len(self.requests)
        self.requests += requests
        await trio.lowlevel.checkpoint()
        return [self.answers[min(first + index, len(self.answers) - 1)] for index in range(len(requests))]

    def windows(self) -> list[tuple[int, int]]:
        """[start, stop) of the distinct windows that were asked, in order; the samples must be a `ramp`."""
        return list(dict.fromkeys(extent(request.items[0].payload) for request in self.requests))


def extent(payload: Samples) -> tuple[int, int]:
    """Where in a `ramp` the samples lie; some of them may have been silenced."""
    first = int(np.flatnonzero(payload)[0])
    start = round(float(payload[first])) - 1 - first
    return start, start + len(payload)


def ramp(seconds: float) -> Samples:
    """Samples that tell their own position, from 1 (exact in float32 up to 1,048 s)."""
    return np.arange(1, round(seconds * RATE) + 1, dtype=np.float32)


# -- what is heard -----------------------------------------------------------------------------------------------------


@define(eq=False)
class PaperRecording:
    """A `Recording` of an array, which refuses to go back behind what was forgotten."""

    samples: Samples
    length_known: bool = True
    faults: tuple[AudioFault, ...] = ()
    lost: tuple[tuple[float, float], ...] = ()
    read: list[tuple[int, int]] = field(factory=list)  # [start, stop) of each call, within the audio
    given: list[weakref.ref[Samples]] = field(factory=list)  # the samples of each call
    forgotten: int = 0

    @property
    def duration(self) -> float | None:
        return len(self.samples) / RATE if self.length_known else None

    async def window(self, start: int, length: int) -> Samples:
        await trio.lowlevel.checkpoint()
        assert start >= self.forgotten, f"{start} is asked for, but all before {self.forgotten} was to be forgotten"
        found = self.samples[start : start + length].copy()
        self.read.append((start, start + len(found)))
        self.given.append(weakref.ref(found))
        return found

    def forget(self, before: int) -> None:
        self.forgotten = max(self.forgotten, before)


@define(eq=False)
class PaperHearing:
    """A `Hearing` that knows the speech from the start, and tells it as far as it was asked to listen, in blocks."""

    speech: Sequence[tuple[int, int]]
    length: int
    block: int = 512
    heard: int = 0
    skipped: int = 0
    audible: bool = False
    recording: PaperRecording | None = None  # forgets what is skipped
    listens: bool = field(default=False, init=False)

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        return [(start, min(stop, self.heard)) for start, stop in self.speech if start < self.heard]

    @property
    def settled(self) -> int:
        return self.heard

    def skip(self, before: int) -> None:
        self.skipped = max(self.skipped, before)
        if self.recording is not None:
            self.recording.forget(min(before, self.heard))

    @property
    def ended(self) -> bool:
        return self.heard >= self.length

    async def hear(self, until: int) -> None:
        assert not self.ended, "all is known"
        assert until > self.heard, f"listening to {until}, but {self.heard} is known"
        assert not self.listens, "two tasks listen at once"
        self.listens = True
        try:
            await trio.lowlevel.checkpoint()
        finally:
            self.listens = False
        self.heard = min(-(-until // self.block) * self.block, self.length)


# -- transcriptions ----------------------------------------------------------------------------------------------------


def reader_of(run: RunRequests, options: TranscribeOptions = GREEDY, model: ModelDescription = MODEL) -> WindowReader:
    return WindowReader(Recipe(options=options, description=model), run, "r")


def plain(window: int = WINDOW, clips: Clips = EVERYTHING) -> Plan:
    """A plan without voice activity."""
    return Plan(CutRules(window=window, gap=0, padding=0, earliest=0), clips)


def begin(
    samples: Samples,
    run: RunRequests,
    options: TranscribeOptions = GREEDY,
    model: ModelDescription = MODEL,
    plan: Plan | None = None,
) -> Transcription:
    plan = plan or plain(model.window_samples)
    return Transcription(recording_of(samples, plan), plan, reader_of(run, options, model))


def recording_of(samples: Samples, plan: Plan) -> PaperRecording:
    """A recording that forgets what the plan skips."""
    recording = PaperRecording(samples)
    if isinstance(plan.hearing, PaperHearing):
        plan.hearing.recording = recording
    return recording


@asynccontextmanager
async def begin_parallel(
    samples: Samples,
    run: RunRequests,
    options: TranscribeOptions = GREEDY,
    model: ModelDescription = MODEL,
    plan: Plan | None = None,
    *,
    at_once: int = 4,
) -> AsyncIterator[ParallelTranscription]:
    plan = plan or plain(model.window_samples)
    recording, reader = recording_of(samples, plan), reader_of(run, options, model)
    async with background() as start_soon:
        yield ParallelTranscription(recording, plan, reader, at_once=at_once, start_soon=start_soon)


async def read_all(
    samples: Samples,
    run: RunRequests,
    options: TranscribeOptions = GREEDY,
    model: ModelDescription = MODEL,
    plan: Plan | None = None,
    *,
    parallel: bool = False,
    at_once: int = 4,
) -> Transcription:
    """A transcription that was read to its end."""
    if not parallel:
        transcription = begin(samples, run, options, model, plan)
        await transcription.transcript()
        return transcription
    async with begin_parallel(samples, run, options, model, plan, at_once=at_once) as transcription:
        await transcription.transcript()
        return transcription


@define(eq=False)
class PaperVoice:
    """A `VoiceActivity` that hears a voice in every frame that is not exact silence. It counts what it hears."""

    sampling_rate: int = RATE
    frame_samples: int = 512
    heard: int = 0
    listeners: int = 0

    def listen(self) -> PaperListener:
        self.listeners += 1
        return PaperListener(self)


@define(eq=False)
class PaperListener:
    voice: PaperVoice
    rest: Samples = field(factory=lambda: np.zeros(0, np.float32))

    def hear(self, samples: Samples) -> Samples:
        self.voice.heard += len(samples)
        known, size = np.concatenate([self.rest, samples]), self.voice.frame_samples
        whole = len(known) // size * size
        self.rest = known[whole:]
        return np.where(known[:whole].reshape(-1, size).any(axis=1), 0.9, 0.0).astype(np.float32)

    def end(self) -> Samples:
        padding = np.zeros(-len(self.rest) % self.voice.frame_samples, np.float32)
        self.voice.heard -= len(padding)
        return self.hear(padding)


def opened(
    samples: Samples,
    run: RunRequests,
    options: TranscribeOptions,
    *,
    at_once: int = 4,
    detectors: Detectors | None = None,
) -> AbstractAsyncContextManager[Transcription]:
    """A transcription as the engine opens it. Audio is no louder than full scale, so a `ramp` must be made small."""
    return open_transcription(
        samples,
        options,
        MODEL,
        run,
        request_id="r",
        asked=0.0,
        config=EngineConfig(max_running=at_once),
        detectors=detectors or Detectors(PaperVoice()),
    )
