"""The client's end of one request: what the scheduler commits arrives here, up to the request's one end."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import trio
from attrs import define, field

from ..actors.messages import Aborted, Failed, Finished, StreamMessage, Tokens
from ..core.errors import EngineClosed
from ..core.plan import Drawn
from ..core.request import FinishReason
from .results import Delta


class Mailbox:
    """One request's messages, unbounded (a request writes at most ``max_tokens`` of them).

    Iterating gives every `Drawn` and ends when the request has finished; `finish_reason` then tells why.

    Raises:
        EngineError: the request failed, or the engine ended before it did (`EngineClosed`).
    """

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[StreamMessage](math.inf)
        self.finish_reason: FinishReason | None = None
        self.ended = False  # the request's last message has been read

    def put(self, message: StreamMessage) -> None:
        """Called by the scheduler. Nothing is lost: the reader either reads it or has said that it does not care."""
        self._send.send_nowait(message)

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
                    "was over; leave them later, or raise EngineConfig(drain_seconds=...)"
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
