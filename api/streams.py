"""The client's end of a request, `Mailbox`: what the scheduler commits arrives here, up to the request's one end. And
what clients iterate over: `Deltas` of a request, `SegmentStream` of a transcription."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable

import trio

from ..actors.messages import Aborted, Failed, Finished, StreamMessage, Tokens
from ..core.errors import EngineClosed
from ..core.plan import SampledToken
from ..core.request import FinishReason
from .outputs import Output
from .results import Delta, Progress, Segment
from .transcription import Transcription


class Mailbox:
    """One request's messages, unbounded (a request writes at most ``max_tokens`` of them).

    Iterating gives every `SampledToken` and ends when the request has finished; `finish_reason` then tells why.

    Raises:
        EngineError: the request failed, or the engine ended before it did (`EngineClosed`).
    """

    def __init__(self, on_end: Callable[[], object], on_token: Callable[[SampledToken], object] | None = None) -> None:
        """``on_end`` is called in the scheduler's task when the request has ended, read or not, and ``on_token`` there
        for every token, which must not raise."""
        self._send, self._receive = trio.open_memory_channel[StreamMessage](math.inf)
        self._on_end = on_end
        self._on_token = on_token
        self.finish_reason: FinishReason | None = None
        self.ended = False  # the request's last message has been read

    def put(self, message: StreamMessage) -> None:
        """Called by the scheduler. Nothing is lost: the reader either reads it or has said that it does not care."""
        if not isinstance(message, Tokens):
            self._send.send_nowait(message)
            self._on_token = None
            self._on_end()
            return
        for sampled in message.sampled:
            self._send.send_nowait(Tokens((sampled,)))
            if self._on_token is not None:
                self._on_token(sampled)

    def __aiter__(self) -> AsyncIterator[SampledToken]:
        return self

    async def __anext__(self) -> SampledToken:
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
            return message.sampled[0]
        self.ended = True
        match message:
            case Finished(reason, _):
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


class Deltas:
    """Async iterator of `Delta` over one request, whose ``mailbox`` or reader feeds ``output``."""

    def __init__(self, mailbox: Mailbox, output: Output) -> None:
        self._mailbox = mailbox
        self._output = output

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        output = self._output
        if output.over:
            raise StopAsyncIteration
        async for sampled in self._mailbox:
            if not output.eager:
                output.take(sampled)
            if output.ready:
                return output.ready.popleft()
            output.raise_fault()
        if self._mailbox.finish_reason is None:  # its error was raised before
            raise StopAsyncIteration
        output.end(self._mailbox.finish_reason)
        return output.ready.popleft()


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
