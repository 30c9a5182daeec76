"""`Exchange`: one HTTP request and its answer, and every way in which it may end.

The exchange stands between hypercorn and the application, as an ASGI middleware does. One task listens to the client
all the time, another one works. So the exchange notices at once if the client goes away, whatever the work waits for,
and cancels the work. If a request is refused before all of it has come, the rest is still read for a while, since many
clients read no answer before they have sent everything.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack, suppress
from typing import Any

import trio
from attrs import define, field

from ..core.budget import Account, unlimited
from ..core.errors import RequestTooLarge, TrioletError
from ..core.timings import Timings
from .problems import Problem, problem_answer, problem_of
from .settings import ServerSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_LINGER_SECONDS = 10.0
_AHEAD = 16  # parts that may wait for the work: a client's end is noticed only after all that it sent is read
_SMALL = 2**16  # bytes of an answer that needs no room
_BAD = 400  # this status, and higher ones, report a failure
GONE = 499  # nginx's status: the client has closed the connection


class Cut(enum.Enum):
    """The reasons for which an exchange ends before its work does."""

    CLIENT_GONE = "the client closed the connection"
    TOO_SLOW = "the client was too slow"
    STOPPING = "the server stopped"
    NO_ROOM = "the server had no memory for the request"


_PROBLEMS = {
    Cut.TOO_SLOW: Problem(408, "the request did not arrive in time; send it faster, or raise the server's limit"),
    Cut.STOPPING: Problem(503, "the server is stopping, and the time for running requests is over; try again later"),
}


@define(eq=False)
class Exchange:
    """One request over HTTP.

    Args:
        scope: the scope of ASGI.
        settings: the settings of the server, with its limits.
        id: the name of the request, sent with the answer as ``x-request-id``.
        account: the memory that the request takes; closed by whoever has opened it.
        told: further members of the request's line in the access log.
        last_words: makes the last event of a stream that is cut off; set by the code that began the stream.
        closing: closes resources when the exchange ends.
    """

    scope: MutableMapping[str, Any]
    settings: ServerSettings
    id: str
    _hear: Receive
    _say: Send
    account: Account = field(factory=unlimited)
    told: dict[str, object] = field(factory=dict)
    last_words: Callable[[Problem], bytes] | None = None
    closing: ExitStack = field(factory=ExitStack, init=False)
    waited: float = field(default=0.0, init=False)  # seconds, for the model
    timings: Timings | None = field(default=None, init=False)  # of the engine's request, and the wait for the model
    status: int | None = field(default=None, init=False)  # None: the answer has not begun
    bytes_in: int = field(default=0, init=False)
    bytes_out: int = field(default=0, init=False)
    cut: Cut | None = field(default=None, init=False)
    _problem: Problem | None = field(default=None, init=False)  # the reason of `NO_ROOM`
    _work: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _arrived: bool = field(default=False, init=False)  # all of the request has come
    _nothing_comes: trio.Event = field(factory=trio.Event, init=False)
    _refused: bool = field(default=False, init=False)  # the work reads no more of the request
    _answered: bool = field(default=False, init=False)
    _give: trio.MemorySendChannel[Message] = field(init=False)
    _take: trio.MemoryReceiveChannel[Message] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._give, self._take = trio.open_memory_channel(_AHEAD)

    async def run(self, work: Application, *, unheard: bool = False) -> None:
        """Lets ``work`` answer the request. If the work is cut short, the exchange itself answers, if it still can.

        Args:
            unheard: begin the work before the first part of the request has come, for a refusal that needs no body.
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
        """Cancels the work. Only the first call counts: its ``why`` is the reason."""
        if self.cut is None and not self._answered:
            self.cut = why
            self._work.cancel()

    @property
    def outcome(self) -> int:
        """The status for logs and metrics: 499 if the client has gone before the end of the answer."""
        return GONE if self.status is None or self.cut is Cut.CLIENT_GONE else self.status

    @property
    def ending(self) -> str:
        """The outcome in a word of the engine: ``finished``, ``failed``, or ``aborted`` if the client has gone."""
        if self.outcome == GONE:
            return "aborted"
        return "failed" if self.outcome >= _BAD or self.cut is not None or "error" in self.told else "finished"

    def ended(self, timings: Timings | None, **told: object) -> None:
        """Notes that the engine has finished; ``told`` goes into the access log."""
        self.timings = None if timings is None else timings.since(self.waited)
        self.told.update(told)

    # -- what the client sends -------------------------------------------------------------------------------------

    async def _listen(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reads from the client until it has gone or is too slow. Counts as started after the first part of the
        request. A request without a body has no further part.
        """
        message = await self._heard()
        task_status.started()
        while message is not None:
            if not self._refused:
                with suppress(trio.BrokenResourceError):  # the request is being refused
                    await self._give.send(message)
            message = await self._heard()
        self._nothing_comes.set()

    async def _heard(self) -> Message | None:
        """Reads the next part of the request; ``None``: no more parts will come."""
        with trio.move_on_after(math.inf if self._arrived else self.settings.body_seconds) as patience:
            message = await self._hear()
        if patience.cancelled_caught:
            self.end(Cut.TOO_SLOW)
            return None
        if message["type"] != "http.request":
            self.end(Cut.CLIENT_GONE)
            return None
        self.bytes_in += len(message.get("body", b""))
        if not self._refused and self.cut is None:
            self._make_room(len(message.get("body", b"")))
        if not message.get("more_body", False):
            self._arrived = True
            self._nothing_comes.set()
        return message

    def _make_room(self, size: int) -> None:
        """Takes memory for a part of the request, which is held until the exchange ends. Ends the work if there is
        none."""
        try:
            self.account.take(size)
        except TrioletError as error:
            self._problem = problem_of(error)
            self.end(Cut.NO_ROOM)

    async def receive(self) -> Message:
        """Returns the next part of the request, for the work.

        Raises:
            RequestTooLarge: the request has, or announces, more bytes than the server allows.
        """
        lengths = [value for name, value in self.scope["headers"] if name.lower() == b"content-length"]
        self._check_size(int(lengths[0]) if lengths and lengths[0].isdigit() else 0)
        message = await self._take.receive()
        self._check_size(self.bytes_in)
        return message

    def _check_size(self, size: int) -> None:
        most = self.settings.max_body_bytes
        if size > most:
            raise RequestTooLarge(f"the request has {size:,} bytes or more; allowed: up to {most:,}")

    # -- what the client gets --------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Sends a part of the answer, whole or not at all, even if the work is cancelled meanwhile."""
        most = 2 * self.settings.send_seconds + _LINGER_SECONDS  # each wait has a bound of its own: this is for bugs
        with trio.CancelScope(shield=True, deadline=trio.current_time() + most):
            if message["type"] == "http.response.start":
                await self._begin(message)
            elif message["type"] == "http.response.body":
                await self._go_on(message)
            else:
                await self._say(message)

    async def _begin(self, message: Message) -> None:
        if not self._arrived:  # nobody needs what has come of the request
            self.account.give(self.account.held)
        size = next((int(value) for name, value in message.get("headers", ()) if name == b"content-length"), 0)
        self.account.take(size if size > _SMALL else 0)  # until the client has read it
        self.status = message["status"]
        headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        if not self._arrived:
            headers.append((b"connection", b"close"))
            # The work reads no more. Further parts of the request are read and dropped: otherwise hypercorn would wait
            # for room, and never report that the client has gone.
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
            if self.cut is None:  # read on for a while: an early close loses the answer while the client sends
                with trio.move_on_after(_LINGER_SECONDS):
                    await self._nothing_comes.wait()
        self._answered = True  # hypercorn reports the end of an answer like a lost client
        await self._say({"type": "http.response.body", "body": body, "more_body": False})

    async def _end_early(self) -> None:
        """Tells the client, if it is still there, why it gets no answer, or no more of the answer."""
        assert self.cut is not None, "nobody but `end` cancels the work"
        problem = self._problem or _PROBLEMS.get(self.cut)
        if problem is None:
            return
        if self.status is None:
            answer = problem_answer(problem)
            await answer(self.scope, self.receive, self.send)
        elif self.last_words is not None:
            await self.send({"type": "http.response.body", "body": self.last_words(problem), "more_body": False})
