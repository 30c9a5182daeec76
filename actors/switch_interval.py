"""The interpreter's switch interval: how long a thread that computes in Python may keep the others waiting.

Each of torch's operations gives Python's lock back and takes it again, and a step has hundreds of them. Beside a thread
of the user's that computes, each would wait for the interval, 5 ms by default, and the engine all but stand still. So
would voice activity, by numpy's operations.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

from attrs import define, field

SHORT = 100e-6
"""Seconds. What shorter and longer ones do to the engine and to the thread: the table in docs/performance.md."""


@define(eq=False)
class SwitchInterval:
    """Short while a device works for anybody, and in blocks that ask for it; else the user's. Where the user changes it
    meanwhile, theirs stays.

    Several engines share it, from threads of their own: hence the lock. A task of an engine that nobody closed may be
    collected, and leave, in the middle of any line here: hence a lock that its own thread can take again, and each
    method first notes what it was called for.
    """

    read: Callable[[], float] = sys.getswitchinterval
    write: Callable[[float], None] = sys.setswitchinterval
    _calls: Counter[Hashable] = field(factory=Counter, init=False)  # that have not ended, of each engine
    _short: bool = field(default=False, init=False)
    _users: float = field(default=0.0, init=False)
    _ours: float = field(default=0.0, init=False)  # as it was read after it was written
    _lock: threading.RLock = field(factory=threading.RLock, init=False)

    def begin(self, engine: Hashable) -> None:
        """``engine`` gives its device another call."""
        with self._lock:
            self._calls[engine] += 1
            if self._short:
                return
            self._short = True
            self._users = self._ours = self.read()
            if self._users > SHORT:
                self.write(_exactly(SHORT))
                self._ours = self.read()

    def end(self, engine: Hashable) -> None:
        """A call has ended. What an engine that has left had begun does not count."""
        with self._lock:
            if self._calls[engine] > 1:
                self._calls[engine] -= 1
                return
            self.leave(engine)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Short within the block."""
        call = object()
        self.begin(call)
        try:
            yield
        finally:
            self.end(call)

    def leave(self, engine: Hashable) -> None:
        """``engine`` waits for its calls no more."""
        with self._lock:
            self._calls.pop(engine, None)
            if self._short and not self._calls:
                self._put_back()

    def _put_back(self) -> None:
        self._short = False
        if self._ours != self._users and self.read() == self._ours:
            self.write(_exactly(self._users))

    def outlive_forks(self) -> None:
        """Has each process that is forked from now on begin with the user's interval: it has none of the engines. No
        thread is in the middle of a change then."""
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._end_in_child
        )

    def _end_in_child(self) -> None:
        self._calls.clear()
        if self._short:
            self._put_back()
        self._lock.release()


def _exactly(seconds: float) -> float:
    """Returns the value to write, so that ``seconds`` are read: Python cuts to whole microseconds, and makes 49 of
    50."""
    return (round(seconds * 1e6) + 0.5) * 1e-6


SWITCH_INTERVAL = SwitchInterval()
"""The interval of this process: the interpreter has one for all its threads. It is not touched before a device works,
or somebody listens."""


@cache
def outlive_forks() -> None:
    """A process forked while a device works gets the user's interval. Call it before the interval is touched."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        SWITCH_INTERVAL.outlive_forks()


def shortened_by(setting: str) -> Callable[[], AbstractContextManager[None]]:
    """Returns the block for many small operations, as `EngineConfig.switch_interval` says."""
    if setting != "short":
        return nullcontext
    outlive_forks()
    return SWITCH_INTERVAL.shortened
