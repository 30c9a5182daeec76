"""A speaker, and a model that understands nobody else: word n is a constant signal of value (n + 1) / 2048, which
survives 16 bits. So a test knows what is said when, and what of it a window holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import trio
from attrs import define, evolve, field, frozen

from triolet.api.inputs.audio import Samples
from triolet.api.speech.windows import Generated
from triolet.core.model import ModelDescription
from triolet.core.plan import AlignedTokens
from triolet.core.request import FinishReason, Request
from triolet.core.speech import SpeechFacts
from triolet.models.speech.whisper_speech import LEAD, WhisperSpeech

from .speech import DE, EN, LANGUAGES, NO_TIMESTAMPS, RATE, SPECIAL, START, STEP
from .speech import describe as described

SCALE = 2048
WORD = 0.4  # seconds
AUDIBLE = 0.6  # a word of which less is heard is misunderstood


@frozen(kw_only=True, slots=False)
class _Other(WhisperSpeech):
    """A model with the tokens of Whisper and other abilities."""

    facts: SpeechFacts = field()


def describe(*, window: float = 30.0, languages: bool = False, **facts: Any) -> ModelDescription:
    """The speaker's model; ``facts`` are those in which it differs from Whisper."""
    whisper = evolve(SPECIAL, language_ids=LANGUAGES if languages else {}, task_ids={}, max_initial_timestamp=None)
    model = described(window_samples=round(window * RATE), whisper=whisper)
    assert model.speech is not None
    other = _Other(model=model, tokens=whisper, facts=evolve(model.speech.facts, **facts))
    return evolve(model, speech=other) if facts else model


def name(number: int) -> str:
    """A word as the model writes it."""
    return f" w{number}"


def speech(*parts: int | float) -> Samples:
    """Words by their numbers (int), and silences of so many seconds (float)."""
    said = [
        np.full(round(WORD * RATE), (part + 1) / SCALE, np.float32)
        if isinstance(part, int)
        else np.zeros(round(part * RATE), np.float32)
        for part in parts
    ]
    return np.concatenate([np.zeros(0, np.float32), *said])


def int16(samples: Samples) -> bytes:
    return (samples * 32768).astype("<i2").tobytes()


@frozen
class Piece:
    """A word in a window: samples ``start`` to ``stop``."""

    text: str
    start: int
    stop: int


def understood(samples: Samples) -> list[Piece]:
    """What the model makes of a window. A word that is cut off is another word."""
    values = np.round(samples * SCALE).astype(int)
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    found = []
    for start, stop in itertools.pairwise(edges):
        if start < stop and values[start] > 0 and stop - start > 0.1 * WORD * RATE:
            is_heard = stop - start >= AUDIBLE * WORD * RATE
            text = name(int(values[start]) - 1) if is_heard else f" x{stop - start}"
            found.append(Piece(text, start, stop))
    return found


@define(eq=False)
class Speaker:
    """The run of requests of a live session: each takes ``seconds``. It keeps the requests.

    Attributes:
        fails: an error that the next request raises.
    """

    seconds: float | Callable[[], float] = 0.2
    language: int = EN
    fails: Exception | None = None
    requests: list[Request] = field(factory=list)

    async def __call__(self, requests: Sequence[Request]) -> list[Generated]:
        self.requests += requests
        await trio.sleep(self.seconds() if callable(self.seconds) else self.seconds)
        if self.fails is not None:
            error, self.fails = self.fails, None
            try:
                raise error
            finally:
                del error  # a frame in its own error's traceback would be a reference cycle
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Generated:
        heard = understood(request.items[0].payload)
        if request.alignment is not None:
            return _generated((), aligned=_aligned(request, heard))
        if request.prompt_token_ids == (START,):
            probe = [0.0 if token == self.language else -9.0 for token in (EN, DE)]
            return _generated((self.language,), probe=(*probe, -9.0))
        begun = bytes(request.prompt_token_ids[request.prompt_token_ids.index(NO_TIMESTAMPS) + 1 :]).decode()
        rest = heard[begun.count(" ") :]
        return _generated(tuple("".join(one.text for one in rest).encode()), probe=(-9.0,))

    @property
    def windows(self) -> list[Samples]:
        return [request.items[0].payload for request in self.requests]


def _generated(
    tokens: tuple[int, ...], probe: tuple[float, ...] | None = None, aligned: AlignedTokens | None = None
) -> Generated:
    return Generated(
        token_ids=tokens,
        logprobs=(-0.1,) * (len(tokens) + 1),
        finish_reason=FinishReason.STOP,
        probe=probe,
        aligned=aligned,
    )


def _aligned(request: Request, heard: list[Piece]) -> AlignedTokens:
    assert request.alignment is not None
    text = bytes(request.prompt_token_ids[request.alignment.start :]).decode()
    words = [f" {word}" for word in text.split()]
    frames: list[int] = []
    for index, word in enumerate(words):
        place = heard[index] if index < len(heard) else heard[-1]
        frames += [max(place.start // STEP - LEAD, 0)] * len(word)
    frames.append(math.ceil(heard[min(len(words), len(heard)) - 1].stop / STEP) - LEAD if heard else 0)
    return AlignedTokens(frames=tuple(frames), logprobs=(-0.1,) * (len(frames) - 1))
