"""Diarization by a model that finds speakers frame by frame: `diarize` reads a recording, and makes turns of it.

The model reads a recording part by part, each with a request. So memory holds one part, however long the recording is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from attrs import define, evolve, field, frozen

from ...core.checks import by, flag, number, settle
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ...core.order import read_priority
from ...core.request import Pooling, Request
from ..inputs.audio import AudioSource
from ..inputs.recording import Recording
from ..inputs.threads import run_in_thread
from ..outputs.results import Turn
from .diarizer import Diarization, VoiceTurn
from .spans import SpanRules, SpeechSpans
from .speakers import named_turns

_SECONDS = number(0, 60, "; seconds")


@frozen
class DiarizeQuery:
    """The arguments of one call of `Engine.diarize`, which explains them."""

    audio: AudioSource = field(repr=False)
    mode: str | None
    threshold: float = field(metadata=by(number(0, 1)))
    min_speech: float = field(metadata=by(_SECONDS))
    min_silence: float = field(metadata=by(_SECONDS))
    strict: bool = field(metadata=by(flag()))
    priority: int = field(kw_only=True)
    request_id: str | None = field(kw_only=True)
    wait: bool = field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        settle(self)


@define(eq=False)
class TurnMaker:
    """Makes turns of the probabilities of frames, in order, for each speaker by the rules of `SpeechSpans`."""

    spans: Sequence[SpeechSpans]
    _turns: list[VoiceTurn] = field(init=False, factory=list)

    @classmethod
    def of(cls, query: DiarizeQuery, frame_samples: int, rate: int, speakers: int) -> TurnMaker:
        """Returns a maker of the turns that ``query`` asks for."""
        rules = SpanRules(
            threshold=query.threshold,
            end_threshold=query.threshold,
            min_speech=query.min_speech,
            min_silence=query.min_silence,
            padding=0.0,
        )
        return cls([SpeechSpans(rules, rate, frame_samples) for _ in range(speakers)])

    def hear(self, probabilities: Any) -> None:
        """Adds the next frames, float32 [frames, speakers]."""
        for voice, column in enumerate(probabilities.T.tolist()):
            self._add(voice, self.spans[voice].hear(column))

    def end(self) -> Diarization:
        """Returns all turns, ordered by their starts. Those of different speakers may overlap."""
        for voice, spans in enumerate(self.spans):
            self._add(voice, spans.end(None))
        return Diarization(sorted(self._turns))

    def _add(self, voice: int, found: Sequence[tuple[int, int]]) -> None:
        rate = self.spans[voice].sampling_rate
        self._turns += [VoiceTurn(round(start / rate, 3), round(stop / rate, 3), voice) for start, stop in found]


async def diarize(
    query: DiarizeQuery,
    description: ModelDescription,
    run: Callable[[Request], Awaitable[Sequence[float]]],
    request_id: str,
) -> tuple[Turn, ...]:
    """Implements `Engine.diarize`. ``run`` runs one request, and returns its vector."""
    model, rate = description.diarizer, description.sampling_rate
    if model is None:
        raise InvalidRequest(f"{description.architecture} finds no speakers; allowed: Nemotron 3 Diarization")
    mode = next(iter(model.modes)) if query.mode is None else query.mode
    if mode not in model.modes:
        raise InvalidRequest(f"mode={mode!r}; allowed: {', '.join(map(repr, model.modes))}, or None")
    maker = TurnMaker.of(query, model.frame_samples, rate, model.speakers)
    reading = model.read(mode, maker.hear)
    asked = Request(
        id=request_id, prompt_token_ids=(0,), pooling=Pooling(kind="last"), priority=read_priority(query.priority)
    )
    async with Recording(query.audio, sampling_rate=rate, strict=query.strict) as recording:
        needed = next(reading)
        while needed is not None:
            start, length = needed
            recording.forget(start)
            needed = item = await run_in_thread(partial(reading.send, await recording.window(start, length)))
            if item is not None:
                answer = await run(evolve(asked, id=f"{request_id}.{start}", items=(item,)))
                needed = await run_in_thread(partial(reading.send, answer))
    return named_turns(maker.end(), ())
