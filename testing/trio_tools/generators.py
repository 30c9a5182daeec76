"""Async generators that somebody has begun to read and has not closed: their clean-up is done late."""

from __future__ import annotations

import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from attrs import define, field


@define(eq=False)
class OpenGenerators:
    """Watches the async generators that begin within its block. Hooks are of a whole thread, so that generators of all
    tasks come to them: those of tasks that are ``foreign`` are none of its business."""

    foreign: Callable[[trio.lowlevel.Task], bool] = field(default=lambda _: False)
    dropped: list[str] = field(factory=list)  # those that were collected before their end
    _others: set[int] = field(factory=set)  # the ids of generators that foreign tasks have begun
    _begun: list[weakref.ref[AsyncGenerator[Any, Any]]] = field(factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block of a task; trio's own hooks are called as well."""
        trios_begins, trios_is_dropped = sys.get_asyncgen_hooks()  # the pair itself is one that no collector looks into

        def begins(generator: AsyncGenerator[Any, Any]) -> None:
            self._others.discard(id(generator))  # of one that is gone
            if self.foreign(trio.lowlevel.current_task()):
                self._others.add(id(generator))
            else:
                self._begun.append(weakref.ref(generator))
            trios_begins(generator)  # type: ignore[misc]  # trio always has both

        def is_dropped(generator: AsyncGenerator[Any, Any]) -> None:
            if id(generator) not in self._others:
                self.dropped += _name(generator)
            trios_is_dropped(generator)  # type: ignore[misc]

        sys.set_asyncgen_hooks(firstiter=begins, finalizer=is_dropped)
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(trios_begins, trios_is_dropped)

    @property
    def left(self) -> list[str]:
        """Those that nobody reads and nobody has closed, by name, and where each stands."""
        begun: list[Any] = [one() for one in self._begun]
        alive = [generator for generator in begun if generator is not None and not generator.ag_running]
        return self.dropped + [name for generator in alive for name in _name(generator)]


def _name(generator: Any) -> list[str]:
    """The name of an open generator; none of trio's own or of one that has ended."""
    frame = generator.ag_frame
    if frame is None or frame.f_globals.get("__name__", "").split(".")[0] == "trio":
        return []
    file = frame.f_code.co_filename.rsplit("/", 1)[-1]
    return [f"{frame.f_code.co_qualname} at {file}:{frame.f_lineno}"]
