"""The client's end of a request: a `Mailbox` receives the tokens that the scheduler commits, and the request's end.
Clients iterate over its `Deltas`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import NoReturn, Protocol, Self, TypeVar

import trio

from ...actors.messages import Aborted, End, Failed, Finished
from ...actors.process import Process
from ...core.errors import EngineClosed, EngineStateError, Left
from ...core.plan import SampledToken
from ...core.request import FinishReason
from ...core.timings import Timings
from ...core.tracebacks import Untraced
from .results import Delta
from .text import Output

FAIR = 16  # deltas that a reader may take in a row before other tasks get a turn


class Mailbox:
    """One request's messages, unbounded (a request writes at most ``max_tokens`` of them).

    A reader sleeps until messages arrive (`wait`), or until the request has ended (`wait_end`), in order to read the
    whole output at once. Messages that arrive together wake it once. Tokens cost a sleeping task no time.

    Attributes:
        unread: the tokens that nobody has taken yet; none if ``on_token`` takes them.
        ended: true once the request's last message has arrived.
        timings: the times of the request, from the call on; ``None``: the request has not ended, or has failed.
    """

    def __init__(
        self,
        on_end: Callable[[], object],
        on_token: Callable[[SampledToken], object] | None = None,
        waited: float = 0.0,
    ) -> None:
        """Makes an empty mailbox. The scheduler's task calls ``on_end`` when the request has ended, even if its
        messages are not read yet. It calls ``on_token``, which must not raise, for every token. ``waited``: the seconds
        from the caller's call to the submission of the request."""
        self.unread: deque[SampledToken] = deque()
        self.ended = False
        self.timings: Timings | None = None
        self._end: End | None = None  # until it is read
        self._on_end = on_end
        self._on_token = on_token
        self._waited = waited
        self._process = Process()
        self._for_news: list[trio.lowlevel.Task] = []
        self._for_end: list[trio.lowlevel.Task] = []

    # -- the scheduler's side ----------------------------------------------------------------------------------------

    def put(self, sampled: tuple[SampledToken, ...]) -> None:
        """Keeps the tokens for the reader, or hands them to ``on_token``. The scheduler calls it."""
        if self._on_token is None:
            self.unread.extend(sampled)
        else:
            for one in sampled:
                self._on_token(one)
        _wake(self._for_news)

    def end(self, end: End) -> None:
        """Notes the end of the request. The scheduler calls it, once."""
        self.ended = True
        self._end = end
        self._on_token = None
        if not isinstance(end, Failed) and end.timings is not None:
            self.timings = end.timings.since(self._waited)
        self._on_end()
        _wake(self._for_news)
        _wake(self._for_end)

    # -- the reader's side -------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Sleeps until a message arrives or the request has ended. Call it after finding the mailbox empty."""
        await self._rest(self._for_news)

    async def wait_end(self) -> None:
        """Returns when the request has ended."""
        await self._rest(self._for_end)

    async def give_way(self) -> None:
        """Lets other tasks run."""
        await self._rest(None)

    async def _rest(self, sleepers: list[trio.lowlevel.Task] | None) -> None:
        self._process.check()
        with Untraced(trio.Cancelled):
            if self.ended or sleepers is None:
                await trio.lowlevel.checkpoint()
            else:
                await _sleep(sleepers)

    def take_end(self) -> FinishReason:
        """Returns the reason for which the request has ended. Call it once.

        Raises:
            EngineError: the request failed, or the engine ended before the request did (`EngineClosed`).
        """
        end, self._end = self._end, None
        assert end is not None, "a request's end is read twice, or before it came"
        match end:
            case Finished(reason, _):
                return reason
            case Failed(error):
                try:
                    raise error
                finally:
                    del end, error  # a frame in its own error's traceback would be a reference cycle
            case Aborted():
                raise EngineClosed(
                    "the request was aborted, since its stream was left or the engine's block ended; stay in both "
                    "until the request has ended, or give a larger EngineConfig(drain_seconds=...). Wake a sleeping "
                    "engine before its block ends"
                )


@trio.lowlevel.enable_ki_protection
async def _sleep(sleepers: list[trio.lowlevel.Task]) -> None:
    """Sleeps until `_wake`. It is a function of its own, so that its names are not in the traceback of a
    cancellation."""
    task = trio.lowlevel.current_task()
    sleepers.append(task)
    await trio.lowlevel.wait_task_rescheduled(partial(_withdraw, sleepers, task))


@trio.lowlevel.enable_ki_protection  # trio calls it: a ^C here would be an internal error
def _withdraw(sleepers: list[trio.lowlevel.Task], task: trio.lowlevel.Task, _: object) -> trio.lowlevel.Abort:
    sleepers.remove(task)
    return trio.lowlevel.Abort.SUCCEEDED


def _wake(sleepers: list[trio.lowlevel.Task]) -> None:
    while sleepers:
        trio.lowlevel.reschedule(sleepers.pop())


class DeltaStream(Protocol):
    """The async iterator of `Delta` that ``async with engine.stream(...) as deltas`` returns."""

    @property
    def timings(self) -> Timings | None:
        """The time that each stage of the request took; ``None``: the request has not ended, or has failed."""

    def __aiter__(self) -> Self:
        """Returns the stream itself."""

    async def __anext__(self) -> Delta:
        """Returns the next delta."""


class Deltas:
    """The `DeltaStream` of one request. Either the request's ``mailbox`` or the reader feeds ``output``."""

    def __init__(self, mailbox: Mailbox, output: Output) -> None:
        self._mailbox = mailbox
        self._output = output
        self._in_a_row = 0  # deltas since other tasks last had a turn

    @property
    def timings(self) -> Timings | None:
        """The time that each stage of the request took, as in `DeltaStream`."""
        return self._mailbox.timings

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = self.next_ready()
        while delta is None:
            if self._output.over:
                raise StopAsyncIteration
            if self._in_a_row >= FAIR:
                await self._mailbox.give_way()
            else:
                await self._mailbox.wait()
            self._in_a_row = 0
            delta = self.next_ready()
        return delta

    def next_ready(self) -> Delta | None:
        """The next delta; ``None`` if there is none yet, or if other tasks must get a turn first. The last delta is
        held back until the request has ended, so that `timings` are set by then. A stop string ends the request at
        once.
        """
        output = self._output
        if self._in_a_row >= FAIR or not (output.ready or self._fill()):
            return None
        if output.ended and len(output.ready) == 1 and not self._mailbox.ended:
            return None
        self._in_a_row += 1
        return output.ready.popleft()

    def _fill(self) -> bool:
        """Feeds the output until it has a delta. Returns false if there is none at present."""
        output, mailbox = self._output, self._mailbox
        while not output.ready:
            if output.fault is not None:
                output.raise_fault()
            if output.ended:
                return False
            if mailbox.unread:
                output.take(mailbox.unread.popleft())
            elif mailbox.ended:
                output.ended = True  # even if `take_end` raises
                output.end(mailbox.take_end())
            else:
                return False
        return True


Opened_co = TypeVar("Opened_co", covariant=True)


class StreamBlock(AbstractAsyncContextManager[Opened_co]):
    """The block of a stream. An attempt to read a stream outside its block raises an error that says how to open it."""

    def __init__(self, block: AbstractAsyncContextManager[Opened_co], method: str) -> None:
        self._block = block
        self._method = method

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Opened_co:
        return await self._block.__aenter__()

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(self, *end: *Left) -> bool | None:
        return await self._block.__aexit__(*end)

    def __aiter__(self) -> NoReturn:
        raise self._unopened()

    def __await__(self) -> NoReturn:
        raise self._unopened()

    def _unopened(self) -> EngineStateError:
        return unopened(self._method, "async ")


def unopened(method: str, prefix: str) -> EngineStateError:
    """The error for a caller that reads a stream without its block. The text shows how to open it, with ``prefix``
    before ``with`` and ``for``.
    """
    return EngineStateError(
        f"engine.{method}(...) was read before it was opened; allowed: {prefix}with engine.{method}(...) as parts: "
        f"{prefix}for part in parts: ... (leaving the block early aborts the request)"
    )
