"""Async generators that somebody has begun to read and has not closed: what they have to clean up is done late."""

from __future__ import annotations

import sys
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define, field


@define(eq=False)
class OpenGenerators:
    """Watches the async generators that begin within its block."""

    dropped: list[str] = field(factory=list)  # those that were collected before their end
    _begun: list[weakref.ref[AsyncGenerator[Any, Any]]] = field(factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block of a task; trio's own hooks are called as well."""
        trios = sys.get_asyncgen_hooks()

        def begins(generator: AsyncGenerator[Any, Any]) -> None:
            self._begun.append(weakref.ref(generator))
            trios.firstiter(generator)  # type: ignore[misc]  # trio always has both

        def is_dropped(generator: AsyncGenerator[Any, Any]) -> None:
            self.dropped += _name(generator)
            trios.finalizer(generator)  # type: ignore[misc]

        sys.set_asyncgen_hooks(firstiter=begins, finalizer=is_dropped)
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*trios)

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
