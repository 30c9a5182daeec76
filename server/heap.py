"""`Heap`: settings for the memory of a process that only runs a server.

torch and transformers leave some hundred thousand objects. A full garbage collection looks at all of them, which takes
a tenth of a second or more, and nobody is served meanwhile. So these objects are excluded from collections once a model
is open. Objects of requests and models are freed by their reference counts. A closed model may leave small reference
cycles, which a later collection finds.

glibc gives threads arenas of their own, up to eight for each core. An arena is not given back to the system while any
byte of it is used. Since the threads of a server come and go, the resident size would grow for hours. Memory that a
large body leaves in an arena is given back when its request has ended (`Leavings`).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import trio
from attrs import define, field

from ..api.inputs.threads import run_in_thread
from ..core.events import Event, StageReached

_THRESHOLDS = (50_000, 20, 100)  # a server makes hundreds of objects for each token, and frees them soon
_ARENA_MAX, _ARENAS = -8, 2  # mallopt(3): M_ARENA_MAX
_PAUSE = 1.0  # seconds between two searches for free memory


class Heap:
    """A listener of `Observers`. Make it before the process starts threads."""

    def __init__(self) -> None:
        gc.set_threshold(*_THRESHOLDS)
        if hasattr(library := ctypes.CDLL(None), "mallopt"):
            library.mallopt(_ARENA_MAX, _ARENAS)

    def heard(self, _: str, event: Event) -> None:
        """Excludes the present objects from collections when a model has opened; includes them again when a model has
        closed."""
        if not isinstance(event, StageReached):
            return
        if event.stage == "accepting":
            gc.freeze()
        elif event.stage == "channels closed":
            gc.unfreeze()


def trim() -> None:
    """Gives free memory of the C library back to the system; does nothing if the library is not GNU's."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


@define(eq=False)
class Leavings:
    """Gives memory that large requests leave in the heap back to the system; the C library would keep it for later
    use."""

    _trim: Callable[[], None] = trim
    _some: trio.Event = field(factory=trio.Event, init=False)

    def add(self) -> None:
        """Notes that a large request has ended, or is about to."""
        self._some.set()

    async def give_back(self) -> None:
        """Gives memory back each time a large request has ended. Never returns."""
        while True:
            await self._some.wait()
            self._some = trio.Event()
            await run_in_thread(self._trim)
            await trio.sleep(_PAUSE)
