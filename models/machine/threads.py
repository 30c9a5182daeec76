"""Torch's number of threads, which is a setting of the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import torch
from attrs import define, field

from .host import choose_threads


def _of_process() -> int:
    """Returns the number that torch gives to a thread that has not computed yet. Each thread keeps its own."""
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()
    except RuntimeError:  # no thread begins any more, as while the interpreter ends; this one's number is the nearest
        return torch.get_num_threads()


def _set(count: int) -> None:
    torch.set_num_threads(count)
    torch.get_num_threads()  # a thread keeps the number that it finds when it first looks, or computes


@define(eq=False)
class TorchThreads:
    """Sets torch's number of threads for all engines of the process: that of the engine that came last. Restores the
    program's own when the last engine has left, in whatever order they leave. If the program sets another number
    meanwhile, that number stays.

    The lock is needed since several engines share this object, each from its own thread.
    """

    read: Callable[[], int] = _of_process
    write: Callable[[int], None] = _set
    _counts: dict[Hashable, int] = field(factory=dict, init=False)  # by engine, in the order in which they came
    _programs: int = field(default=0, init=False)
    _ours: int = field(default=0, init=False)  # as we wrote it last
    _lock: threading.RLock = field(factory=threading.RLock, init=False)

    def enter(self, engine: Hashable, choose: Callable[[int], int]) -> None:
        """Sets the number that ``choose`` makes of the program's own, for the calling thread and all later ones."""
        with self._lock:
            found = self.read()
            if not self._counts or found != self._ours:
                self._programs = found
            self._counts.pop(engine, None)
            self._counts[engine] = self._ours = choose(self._programs)
            self.write(self._ours)

    def leave(self, engine: Hashable) -> None:
        """Sets the number of the engine that came last of those that are left, or else the program's own."""
        with self._lock:
            if self._counts.pop(engine, None) is not None and self.read() == self._ours:
                self._ours = [self._programs, *self._counts.values()][-1]
                self.write(self._ours)

    def _end_in_child(self) -> None:
        if self._counts:
            self._counts.clear()
            self.write(self._programs)
        self._lock.release()


TORCH_THREADS = TorchThreads()
"""The number of threads of this process's torch. It is not changed before an engine opens."""


def hold_in_forks(lock: threading.Condition | threading.RLock, in_child: Callable[[], None]) -> None:
    """Holds ``lock`` in all later forks of the process. ``in_child`` releases it in the child."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=in_child)


@cache
def _outlive_forks() -> None:
    """Makes processes that are forked later start with the program's number, since no engine runs in them."""
    hold_in_forks(TORCH_THREADS._lock, TORCH_THREADS._end_in_child)


def set_threads(asked: int) -> Callable[[], None]:
    """Sets the number of threads to ``asked``, or if that is 0 to what `choose_threads` makes of the program's own.
    Returns a function that restores it."""
    _outlive_forks()
    engine = object()
    TORCH_THREADS.enter(engine, lambda programs: asked or choose_threads(programs))
    return partial(TORCH_THREADS.leave, engine)
