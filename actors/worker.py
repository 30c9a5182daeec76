"""Workers run the executor's calls, one after another, away from the trio loop.

`ThreadWorker` is the real worker. Its thread lives as long as the engine, since device, stream and inference mode
belong to a thread. ``triolet_testing.SimWorker`` is a simulated worker for deterministic tests.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import trio
from attrs import define, field, frozen

from ..core import tracebacks
from .switch_interval import SWITCH_INTERVAL, SwitchInterval, outlive_forks


class Job(enum.Enum):
    """The purpose of a call."""

    OPEN = "open"
    ENCODE = "encode"
    FREE = "free"
    STEP = "step"
    RESET = "reset"
    SLEEP = "sleep"
    WAKE = "wake"
    ADAPTER = "adapter"
    CLOSE = "close"


@frozen
class Ended:
    """The end of a call: the value that the call returned, or the error that it raised. The frames of the error have
    lost their locals."""

    job: Job
    value: object
    error: BaseException | None


Call = Callable[..., object]
Deliver = Callable[[Ended], None]


class Worker(Protocol):
    """Runs calls in the order of their submission, and delivers one `Ended` for each call in that order. A call that
    has begun cannot be cancelled."""

    @property
    def switch_interval(self) -> SwitchInterval:
        """The interval that the runner shortens for each call. It is that of this process if the worker runs calls in a
        thread of this process.
        """

    def start(self, nursery: trio.Nursery, deliver: Deliver) -> None:
        """Begins to serve. The worker calls ``deliver`` in the trio loop."""

    def submit(self, job: Job, call: Call, *args: Any) -> None:
        """Queues ``call(*args)``. Never waits."""

    def stop(self) -> None:
        """Ends the worker. All its calls must have been delivered."""

    def abandon(self, last: Call) -> None:
        """Gives up on a call that hangs. If that call ever returns, the worker runs ``last`` and ends."""


@define(eq=False)
class ThreadWorker:
    """One persistent thread that runs the calls. The thread is a daemon, so that a device call that hangs cannot keep
    the process from ending."""

    _calls: queue.SimpleQueue[tuple[Any, ...] | None] = field(factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    switch_interval: SwitchInterval = field(default=SWITCH_INTERVAL, init=False)

    def start(self, nursery: trio.Nursery, deliver: Deliver) -> None:  # noqa: ARG002  (a thread needs no nursery)
        """Starts the thread."""
        outlive_forks()
        token = trio.lowlevel.current_trio_token()
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, token, deliver), name="triolet-runner", daemon=True
        )
        self._thread.start()

    def submit(self, job: Job, call: Call, *args: Any) -> None:
        """Queues the call for the thread."""
        self._calls.put((job, call, *args))

    def stop(self) -> None:
        """Ends the thread and joins it. The thread is idle, so joining it takes microseconds."""
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join()

    def abandon(self, last: Call) -> None:
        """Leaves the thread to the call that hangs. If that call ever returns, the thread runs ``last`` and ends."""
        self._calls.put((Job.CLOSE, last))
        self._calls.put(None)


def _serve(calls: queue.SimpleQueue[tuple[Any, ...] | None], token: trio.lowlevel.TrioToken, deliver: Deliver) -> None:
    """Runs the thread. No local name may outlive its call: the name would keep device tensors alive until the next
    call."""
    while (submitted := calls.get()) is not None:
        ended = run_call(*submitted)
        del submitted
        with contextlib.suppress(trio.RunFinishedError):  # the worker was abandoned, and the loop has ended since
            token.run_sync_soon(deliver, ended)
        del ended


def run_call(job: Job, call: Call, *args: Any) -> Ended:
    """Runs one call. An error is returned without the locals of the frames that it passed through."""
    try:
        return Ended(job, call(*args), None)
    except BaseException as error:  # noqa: BLE001  (handed to the runner, which decides)
        del call, args  # this frame is in the traceback too, and `clear_frames` cannot clear a running frame
        tracebacks.clear_frames(error)
        return Ended(job, None, error)
