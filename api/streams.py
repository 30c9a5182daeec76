"""The client's end of a request, `Mailbox`: what the scheduler commits arrives here, up to the request's one end. And
what clients iterate over: `Deltas` of a request, `SegmentStream` of a transcription."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import trio
from attrs import define, field

from ..actors.messages import Aborted, Failed, Finished, StreamMessage, Tokens
from ..core.errors import EngineClosed
from ..core.plan import Drawn
from ..core.request import FinishReason
from .results import Delta, Progress, Segment
from .transcription import Transcription


class Mailbox:
    """One request's messages, unbounded (a request writes at most ``max_tokens`` of them).

    Iterating gives every `Drawn` and ends when the request has finished; `finish_reason` then tells why.

    Raises:
        EngineError: the request failed, or the engine ended before it did (`EngineClosed`).
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        """``on_end`` is called in the scheduler's task when the request has ended, read or not."""
        self._send, self._receive = trio.open_memory_channel[StreamMessage](math.inf)
        self._on_end = on_end
        self.finish_reason: FinishReason | None = None
        self.ended = False  # the request's last message has been read

    def put(self, message: StreamMessage) -> None:
        """Called by the scheduler. Nothing is lost: the reader either reads it or has said that it does not care."""
        self._send.send_nowait(message)
        if not isinstance(message, Tokens):
            self._on_end()

    def __aiter__(self) -> AsyncIterator[Drawn]:
        return self

    async def __anext__(self) -> Drawn:
        if self.ended:
            raise StopAsyncIteration
        try:
            message = await self._receive.receive()
        except trio.Cancelled as cancelled:
            # trio's frames below lead by f_back to a nursery that fails, and so to the group that will hold this very
            # error: a reference cycle, in which our callers' frames and their requests would wait for a collection
            cancelled.__traceback__ = None
            raise
        if isinstance(message, Tokens):
            return message.drawn
        self.ended = True
        match message:
            case Finished(reason):
                self.finish_reason = reason
                raise StopAsyncIteration
            case Failed(error):
                try:
                    raise error
                finally:
                    del message, error  # a frame in its own error's traceback would be a reference cycle
            case Aborted():
                raise EngineClosed(
                    "the request was aborted: its stream was left, or the engine's block ended and the time to drain "
                    "was over, or the engine was asleep then; leave them later, raise "
                    "EngineConfig(drain_seconds=...), or wake the engine before its block ends"
                )


@define(eq=False)
class TextDeltas:
    """Turns tokens into text as they come: bytes of an unfinished character are held back."""

    tokenizer: Any
    special_ids: frozenset[int]
    _token_ids: list[int] = field(factory=list, init=False)
    _text: str = field(default="", init=False)

    def add(self, token_id: int) -> Delta:
        """The text that ``token_id`` completed."""
        if token_id in self.special_ids:
            return Delta(text="", token_ids=(token_id,))
        self._token_ids.append(token_id)
        text = str(self.tokenizer.decode(self._token_ids, skip_special_tokens=True))
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return Delta(text="", token_ids=(token_id,))
        return Delta(text=self._advance(text), token_ids=(token_id,))

    def rest(self) -> str:
        """What is still held back when the request has ended."""
        return self._advance(str(self.tokenizer.decode(self._token_ids, skip_special_tokens=True)))

    def _advance(self, text: str) -> str:
        new, self._text = text[len(self._text) :], text
        return new


class Deltas:
    """Async iterator of `Delta` over one request."""

    def __init__(self, mailbox: Mailbox, texts: TextDeltas, stop_ids: frozenset[int]) -> None:
        self._mailbox = mailbox
        self._texts = texts
        self._stop_ids = stop_ids

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._mailbox.ended:
            raise StopAsyncIteration
        async for drawn in self._mailbox:
            if drawn.token_id is not None and drawn.token_id not in self._stop_ids:
                return self._texts.add(drawn.token_id)
        rest = self._texts.rest()
        if not rest:
            raise StopAsyncIteration
        return Delta(text=rest, token_ids=())


class Segments:
    """Async iterator of `Segment` over one transcription."""

    def __init__(self, transcription: Transcription) -> None:
        self._transcription = transcription
        self._pending: list[Segment] = []

    def progress(self) -> Progress:
        """Where the transcription is."""
        return Progress(
            language=self._transcription.language,
            language_probability=self._transcription.language_probability,
            duration=self._transcription.duration,
            position=self._transcription.position,
        )

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        while not self._pending:
            segments = await self._transcription.next_window()
            if segments is None:
                raise StopAsyncIteration
            self._pending = segments
        return self._pending.pop(0)


class SegmentStream:
    """Async iterator of `Segment`; ``language``, ``language_probability`` and ``duration`` are known from the start."""

    def __init__(self, segments: AsyncIterator[Segment], progress: Callable[[], Progress]) -> None:
        self._segments = segments
        self.progress = progress

    @property
    def language(self) -> str | None:
        """The code of the spoken language."""
        return self.progress().language

    @property
    def language_probability(self) -> float | None:
        """The model's certainty, 0 to 1; ``None`` where the language was given."""
        return self.progress().language_probability

    @property
    def duration(self) -> float:
        """Seconds of the audio."""
        return self.progress().duration

    @property
    def position(self) -> float:
        """Seconds that are done."""
        return self.progress().position

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        return await anext(self._segments)
