"""The interpreter's switch interval: how long a thread that computes in Python may keep other threads waiting.

Each torch operation releases Python's lock and takes it again, and a step has hundreds of operations. If a thread of
the user computes at the same time, each operation has to wait for the switch interval, 5 ms by default, and the engine
almost stands still. The same holds for voice activity, which uses numpy operations. The native library releases the
lock once for a whole step, but a step may take less than the interval.
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
"""The short interval, in seconds. The table in docs/performance.md shows the effect of shorter and longer intervals."""


@define(eq=False)
class SwitchInterval:
    """Sets the short interval while a device works for any engine and within `shortened` blocks, and restores the
    user's interval afterwards. If the user changes the interval meanwhile, the user's new value stays.

    The lock is needed since several engines share this object, each from its own thread. The garbage collector may call
    `leave` in the middle of any line of this class, when it ends the task of an engine that nobody closed. So the lock
    is reentrant, and each method first notes its own call.
    """

    read: Callable[[], float] = sys.getswitchinterval
    write: Callable[[float], None] = sys.setswitchinterval
    _calls: Counter[Hashable] = field(factory=Counter, init=False)  # calls that have not ended, by engine
    _short: bool = field(default=False, init=False)
    _users: float = field(default=0.0, init=False)
    _ours: float = field(default=0.0, init=False)  # as `read` returned it after our write
    _lock: threading.RLock = field(factory=threading.RLock, init=False)

    def begin(self, engine: Hashable) -> None:
        """Notes that ``engine`` makes another device call, and sets the short interval."""
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
        """Notes that a device call of ``engine`` has ended. Has no effect for calls that began before `leave`."""
        with self._lock:
            if self._calls[engine] > 1:
                self._calls[engine] -= 1
                return
            self.leave(engine)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Keeps the short interval within the block."""
        call = object()
        self.begin(call)
        try:
            yield
        finally:
            self.end(call)

    def leave(self, engine: Hashable) -> None:
        """Notes that ``engine`` no longer waits for any of its calls."""
        with self._lock:
            self._calls.pop(engine, None)
            if self._short and not self._calls:
                self._put_back()

    def _put_back(self) -> None:
        self._short = False
        if self._ours != self._users and self.read() == self._ours:
            self.write(_exactly(self._users))

    def outlive_forks(self) -> None:
        """Makes each process that is forked from now on start with the user's interval, since no engine runs in it. A
        fork waits until no thread is in the middle of a change.
        """
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._end_in_child
        )

    def _end_in_child(self) -> None:
        self._calls.clear()
        if self._short:
            self._put_back()
        self._lock.release()


def _exactly(seconds: float) -> float:
    """Returns the value to write so that `read` returns ``seconds``. Python cuts the value to whole microseconds, and
    turns 50 into 49."""
    return (round(seconds * 1e6) + 0.5) * 1e-6


SWITCH_INTERVAL = SwitchInterval()
"""The interval of this process, which all threads of the interpreter share. The interval is not changed before a device
works, or voice activity is computed."""


@cache
def outlive_forks() -> None:
    """Makes a process that is forked while a device works start with the user's interval. Must be called before the
    interval is changed.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows
        SWITCH_INTERVAL.outlive_forks()


def shortened_by(setting: str) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context manager for code that runs many small operations. It follows `EngineConfig.switch_interval`."""
    if setting != "short":
        return nullcontext
    outlive_forks()
    return SWITCH_INTERVAL.shortened
