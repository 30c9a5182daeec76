"""`Exchange`: one HTTP request and its answer, and every way in which it may end.

The exchange stands between hypercorn and the application, as an ASGI middleware does. One task listens to the client
all the time, another one works. So a client that goes away is noticed at once, whatever the work waits for, and the
work is cancelled; and what a client still sends is read on, for a while, when its request has been refused already:
many clients do not listen before they have sent everything.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack, suppress
from typing import Any

import trio
from attrs import define, field

from ..core.errors import RequestTooLarge
from ..core.timings import Timings
from .problems import Problem, problem_answer
from .settings import ServerSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_LINGER_SECONDS = 10.0
_AHEAD = 16  # parts of a request that wait for the work: to hear that a client has gone, what it sent must be read
_GONE = 499  # nginx's: the client has closed the connection


class Cut(enum.Enum):
    """The reasons for which an exchange ends before its work does."""

    CLIENT_GONE = "the client closed the connection"
    TOO_SLOW = "the client was too slow"
    STOPPING = "the server stopped"


_PROBLEMS = {
    Cut.TOO_SLOW: Problem(408, "the request did not arrive in time; send it faster, or raise the server's limit"),
    Cut.STOPPING: Problem(503, "the server stops, and the time for running requests is over; ask again later"),
}


@define(eq=False)
class Exchange:
    """One request over HTTP.

    Args:
        scope: of ASGI.
        settings: the limits.
        id: the name of the request, which the answer has as ``x-request-id``.
        told: what the access log has of it beside the exchange itself.
        last_words: what a stream ends with where it is cut off; made by whoever began the stream.
        closing: what is closed when the exchange ends.
    """

    scope: MutableMapping[str, Any]
    settings: ServerSettings
    id: str
    _hear: Receive
    _say: Send
    told: dict[str, object] = field(factory=dict)
    last_words: Callable[[Problem], bytes] | None = None
    closing: ExitStack = field(factory=ExitStack, init=False)
    timings: Timings | None = field(default=None, init=False)  # of the engine's request
    status: int | None = field(default=None, init=False)  # None: no answer has begun
    bytes_in: int = field(default=0, init=False)
    bytes_out: int = field(default=0, init=False)
    cut: Cut | None = field(default=None, init=False)
    _work: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _arrived: bool = field(default=False, init=False)  # all of the request
    _nothing_comes: trio.Event = field(factory=trio.Event, init=False)
    _refused: bool = field(default=False, init=False)  # the work reads no more of the request
    _answered: bool = field(default=False, init=False)
    _give: trio.MemorySendChannel[Message] = field(init=False)
    _take: trio.MemoryReceiveChannel[Message] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._give, self._take = trio.open_memory_channel(_AHEAD)

    async def run(self, work: Application, *, unheard: bool = False) -> None:
        """Has ``work`` answer the request. Where the work is cut short, the exchange itself answers, if it can.

        Args:
            unheard: begin the work before anything of the request's body is there: what a refusal needs.
        """
        async with trio.open_nursery() as nursery:
            if unheard:
                nursery.start_soon(self._listen)
            else:
                await nursery.start(self._listen)
            with self._work, self.closing:
                await work(self.scope, self.receive, self.send)
            if self._work.cancelled_caught:
                await self._end_early()
            nursery.cancel_scope.cancel()

    def end(self, why: Cut) -> None:
        """Cancels the work. Whoever ends the exchange first says why."""
        if self.cut is None and not self._answered:
            self.cut = why
            self._work.cancel()

    @property
    def outcome(self) -> int:
        """The status for logs and metrics: a client that has gone did not hear that of the answer."""
        return _GONE if self.status is None or self.cut is Cut.CLIENT_GONE else self.status

    def ended(self, timings: Timings | None, **told: object) -> None:
        """Notes that the engine has done its work; ``told`` goes into the access log."""
        self.timings = timings
        self.told.update(told)

    # -- what the client sends -------------------------------------------------------------------------------------

    async def _listen(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hears the client until it has gone, or is too slow. Has started with the first part of the request, which is
        all of it where there is no body."""
        message = await self._heard()
        task_status.started()
        while message is not None:
            if not self._refused:
                with suppress(trio.BrokenResourceError):  # it is refused just now
                    await self._give.send(message)
            message = await self._heard()
        self._nothing_comes.set()

    async def _heard(self) -> Message | None:
        """Returns the next part of the request; ``None``: there will be none."""
        with trio.move_on_after(math.inf if self._arrived else self.settings.body_seconds) as patience:
            message = await self._hear()
        if patience.cancelled_caught:
            self.end(Cut.TOO_SLOW)
            return None
        if message["type"] != "http.request":
            self.end(Cut.CLIENT_GONE)
            return None
        self.bytes_in += len(message.get("body", b""))
        if not message.get("more_body", False):
            self._arrived = True
            self._nothing_comes.set()
        return message

    async def receive(self) -> Message:
        """Returns the next part of the request, for the work.

        Raises:
            RequestTooLarge: the request has more bytes than the server allows.
        """
        lengths = [value for name, value in self.scope["headers"] if name.lower() == b"content-length"]
        self._check_size(int(lengths[0]) if lengths and lengths[0].isdigit() else 0)
        message = await self._take.receive()
        self._check_size(self.bytes_in)
        return message

    def _check_size(self, size: int) -> None:
        most = self.settings.max_body_bytes
        if size > most:
            raise RequestTooLarge(f"a request of {size:,} bytes or more; allowed: up to {most:,}")

    # -- what the client gets --------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Sends a part of the answer. A part is sent whole or not at all, even if the work is cancelled meanwhile."""
        most = 2 * self.settings.send_seconds + _LINGER_SECONDS  # each wait has its own bound; this one is for bugs
        with trio.CancelScope(shield=True, deadline=trio.current_time() + most):
            if message["type"] == "http.response.start":
                await self._begin(message)
            elif message["type"] == "http.response.body":
                await self._go_on(message)
            else:
                await self._say(message)

    async def _begin(self, message: Message) -> None:
        self.status = message["status"]
        headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        if not self._arrived:
            headers.append((b"connection", b"close"))
            # The work reads no more. What still comes is heard and thrown away: where nobody heard it, hypercorn would
            # wait for room, and never tell that the client has gone.
            self._refused = True
            self._take.close()
        await self._say({**message, "headers": headers})

    async def _go_on(self, message: Message) -> None:
        body = message.get("body", b"")
        self.bytes_out += len(body)
        if message.get("more_body", False):
            await self._say(message)
            return
        if not self._arrived:
            if body:
                await self._say({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
            self._answered = True
            if self.cut is None:  # read on for a while: closing at once would take the answer from who still sends
                with trio.move_on_after(_LINGER_SECONDS):
                    await self._nothing_comes.wait()
        self._answered = True  # hypercorn tells of the end of an answer as it tells of a client who goes
        await self._say({"type": "http.response.body", "body": body, "more_body": False})

    async def _end_early(self) -> None:
        """Tells the client, if somebody is there, why it gets no answer, or no more of it."""
        assert self.cut is not None, "nobody but `end` cancels the work"
        problem = _PROBLEMS.get(self.cut)
        if problem is None:
            return
        if self.status is None:
            answer = problem_answer(problem)
            await answer(self.scope, self.receive, self.send)
        elif self.last_words is not None:
            await self.send({"type": "http.response.body", "body": self.last_words(problem), "more_body": False})
