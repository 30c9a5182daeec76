"""`Client`: what is told to the client of a live session."""

from __future__ import annotations

import json
import math
import secrets
from typing import Any

import trio
from attrs import define, field
from starlette.websockets import WebSocket

from ..problems import Problem, problem_of, report
from .live_backlog import TooMuch

_MOST_UNREAD = 1 << 20  # characters


@define(eq=False)
class Client:
    """One task sends (`write`). So who reads what the client says need not wait until the client reads, too."""

    socket: WebSocket
    name: str
    _unread: int = field(default=0, init=False)
    _room: trio.Event = field(factory=trio.Event, init=False)
    _end: tuple[int, str] | None = field(default=None, init=False)
    _give: trio.MemorySendChannel[str] = field(init=False)
    _take: trio.MemoryReceiveChannel[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._give, self._take = trio.open_memory_channel(math.inf)

    async def tell(self, kind: str, **members: Any) -> None:
        """Tells an event. Waits for a client that reads slowly."""
        await trio.lowlevel.checkpoint()
        while self._unread > _MOST_UNREAD:
            await self._room.wait()
        self._put(kind, members)

    def answer(self, kind: str, **members: Any) -> None:
        """Tells an event at once.

        Raises:
            TooMuch: the client does not read.
        """
        if self._unread > _MOST_UNREAD:
            raise TooMuch(f"more than {_MOST_UNREAD:,} characters are not read yet; read what the server tells")
        self._put(kind, members)

    def end(self, code: int, reason: str, last_words: Problem | None = None) -> None:
        """Has `write` close the connection behind what was told. Who ends it first says why."""
        if self._end is not None:
            return
        if last_words is not None:
            self._put("error", {"error": {**last_words.as_object()["error"], "event_id": None}})
        self._end = code, reason
        self._give.close()

    def explained(self, error: Exception) -> dict[str, Any]:
        """``error`` in OpenAI's shape: of several that came together the first. The log is told where it is ours."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        problem = problem_of(error, self.socket.app.state.server.folders)
        refusals = self.socket.app.state.server.refusals
        report(self.name, {}, error, problem, refusals, trio.current_time())
        told: dict[str, Any] = problem.as_object()["error"]
        return told

    async def write(self) -> None:
        """Sends what is told, until `end`; then closes."""
        async for text in self._take:
            await self.socket.send({"type": "websocket.send", "text": text})
            self._unread -= len(text)
            self._room.set()
            self._room = trio.Event()
        assert self._end is not None, "nobody but `end` closes the channel"
        await self.socket.close(*self._end)

    def _put(self, kind: str, members: dict[str, Any]) -> None:
        if self._end is not None:
            return
        event = {"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **members}
        text = json.dumps(event, separators=(",", ":"), ensure_ascii=False)
        self._unread += len(text)
        self._give.send_nowait(text)
