"""Workers run the executor's calls, one after another, away from the trio loop.

`ThreadWorker` is the real one. Its thread lives as long as the engine, since device, stream and inference mode belong
to a thread. A simulated one for deterministic tests is ``triolet.testing.SimWorker``.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

import trio
from attrs import define, field

from .messages import JobDone

Call = Callable[[], object]
Deliver = Callable[[JobDone], None]


class Job(enum.Enum):
    """What a call is for."""

    OPEN = "open"
    ENCODE = "encode"
    FREE = "free"
    STEP = "step"
    RESET = "reset"
    CLOSE = "close"


class Worker(Protocol):
    """Runs calls in the order they are submitted and delivers one `JobDone` for each, in that order."""

    def start(self, nursery: trio.Nursery, deliver: Deliver) -> None:
        """Begins to serve; ``deliver`` is called in the trio loop."""

    def submit(self, job: Job, call: Call) -> None:
        """Queues ``call``; never waits."""

    def stop(self) -> None:
        """Ends the worker, whose calls have all been delivered."""

    def abandon(self, last: Call) -> None:
        """Gives up on a call that hangs. Should it ever return, ``last`` is still run and the worker ends."""


@define(eq=False)
class ThreadWorker:
    """One persistent daemon thread: daemon, so that a hung device call cannot keep the process from ending."""

    _calls: queue.SimpleQueue[Call | None] = field(factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self, nursery: trio.Nursery, deliver: Deliver) -> None:  # noqa: ARG002  (a thread needs no nursery)
        """See `Worker.start`."""
        token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, token, deliver), name="triolet-runner", daemon=True
        )
        self._thread.start()

    def submit(self, job: Job, call: Call) -> None:  # noqa: ARG002  (the kind of job matters to simulated workers)
        """See `Worker.submit`."""
        self._calls.put(call)

    def stop(self) -> None:
        """See `Worker.stop`. The thread is idle, so joining it takes microseconds."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join()

    def abandon(self, last: Call) -> None:
        """See `Worker.abandon`."""
        self._calls.put(last)
        self._calls.put(None)


def _serve(calls: queue.SimpleQueue[Call | None], token: trio.lowlevel.TrioToken, deliver: Deliver) -> None:
    """The thread's life. No name here may outlive its call: it would pin device tensors until the next call."""
    while (call := calls.get()) is not None:
        done = run_call(call)
        del call
        with contextlib.suppress(trio.RunFinishedError):  # abandoned, and the loop has ended since: nobody to tell
            token.run_sync_soon(deliver, done)
        del done


def run_call(call: Call) -> JobDone:
    """Runs one call; what it raises comes back without the locals of the frames it came through."""
    try:
        return JobDone(call(), None)
    except BaseException as error:  # noqa: BLE001  (told to the runner, which decides)
        del call  # this frame is in the traceback too, and is still running: nobody else can clear it
        clear_frames(error)
        return JobDone(None, error)


def clear_frames(error: BaseException) -> None:
    """Drops the locals of the frames that the error came through, and of those it was raised from: a failed batch's
    tensors must die now, not when somebody forgets the error, and a frame that names its own error is a cycle. Frames
    that still run keep theirs."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
