"""`Heap`: the memory of a process that is nothing but a server.

torch and transformers leave some hundred thousand objects, which a full collection looks at, for a tenth of a second
and more; nobody is served meanwhile. So they are set apart when a model is open. What requests and models leave dies by
reference count; a closed model may leave small cycles, which the collector finds again, in its time.

glibc gives threads arenas of their own, eight for each core, which are not given back while any byte of them is used.
Threads of a server come and go, and so the resident size would grow for hours. What a large body leaves there is given
back when its request has ended (`Leavings`).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import trio
from attrs import define, field

from ..api.inputs.threads import run_in_thread
from ..core.events import Event, StageReached

_THRESHOLDS = (50_000, 20, 100)  # a server makes hundreds of objects for each token, none of which is garbage for long
_ARENA_MAX, _ARENAS = -8, 2  # mallopt(3): M_ARENA_MAX
_PAUSE = 1.0  # seconds between two looks through all that is free


class Heap:
    """A listener of `Observers`. It is made before the threads are."""

    def __init__(self) -> None:
        gc.set_threshold(*_THRESHOLDS)
        if hasattr(library := ctypes.CDLL(None), "mallopt"):
            library.mallopt(_ARENA_MAX, _ARENAS)

    def heard(self, _: str, event: Event) -> None:
        """Sets the heap apart when a model is open, and no longer when one is closed."""
        if not isinstance(event, StageReached):
            return
        if event.stage == "accepting":
            gc.freeze()
        elif event.stage == "channels closed":
            gc.unfreeze()


def trim() -> None:
    """Gives free memory of the C library back to the system; does nothing where the library is not GNU's."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


@define(eq=False)
class Leavings:
    """Gives back to the system what large requests leave in the heap: the C library would keep it for later use."""

    _trim: Callable[[], None] = trim
    _some: trio.Event = field(factory=trio.Event, init=False)

    def add(self) -> None:
        """Notes that a large request has ended, or is about to."""
        self._some.set()

    async def give_back(self) -> None:
        """Gives memory back each time that a large request has ended. Never returns."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            await run_in_thread(self._trim)
            await trio.sleep(_PAUSE)
