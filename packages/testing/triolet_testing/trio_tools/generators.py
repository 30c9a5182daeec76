"""The async generators that a program has begun to read and has not closed. Their clean-up comes late."""

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
    """A watcher of the async generators that begin within its block. Python has one pair of hooks for the whole thread,
    so the generators of all tasks are seen; those of ``foreign`` tasks are ignored."""

    foreign: Callable[[trio.lowlevel.Task], bool] = field(default=lambda _: False)
    dropped: list[str] = field(factory=list)  # the generators that were collected before their end
    _others: set[int] = field(factory=set)  # the ids of generators that foreign tasks have begun
    _begun: list[weakref.ref[AsyncGenerator[Any, Any]]] = field(factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Opens a block within a task. trio's own hooks are called as well."""
        trios_begins, trios_is_dropped = sys.get_asyncgen_hooks()  # unpacked: no collector looks into the pair

        def begins(generator: AsyncGenerator[Any, Any]) -> None:
            self._others.discard(id(generator))  # the id may be that of an earlier generator
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
        """The open generators that no task reads, by name, each with its place in the source."""
        begun: list[Any] = [one() for one in self._begun]
        alive = [generator for generator in begun if generator is not None and not generator.ag_running]
        return self.dropped + [name for generator in alive for name in _name(generator)]


def _name(generator: Any) -> list[str]:
    """Returns a list with the name of an open generator; empty if it has ended or is one of trio's own."""
    frame = generator.ag_frame
    if frame is None or frame.f_globals.get("__name__", "").split(".")[0] == "trio":
        return []
    file = frame.f_code.co_filename.rsplit("/", 1)[-1]
    return [f"{frame.f_code.co_qualname} at {file}:{frame.f_lineno}"]
