"""`Heap`: the memory of a process that is nothing but a server.

torch and transformers leave some hundred thousand objects, which a full collection looks at, for a tenth of a second
and more; nobody is served meanwhile. So they are set apart when a model is open. What requests and models leave dies by
reference count; a closed model may leave small cycles, which the collector finds again, in its time.

glibc gives threads arenas of their own, eight for each core, which are not given back while any byte of them is used.
Threads of a server come and go, and so the resident size would grow for hours.
"""

from __future__ import annotations

import ctypes
import gc

from ..core.events import Event, StageReached

_THRESHOLDS = (50_000, 20, 100)  # a server makes hundreds of objects for each token, none of which is garbage for long
_ARENA_MAX, _ARENAS = -8, 2  # mallopt(3): M_ARENA_MAX


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
