"""`Heap`: keeps Python's collector from stopping a server.

torch and transformers leave some hundred thousand objects, which a full collection looks at, for a tenth of a second
and more; nobody is served meanwhile. So they are set apart when a model is open. What requests and models leave dies by
reference count; a closed model may leave small cycles, which the collector finds again, in its time.
"""

from __future__ import annotations

import gc

from ..core.events import Event, StageReached

_THRESHOLDS = (50_000, 20, 100)  # a server makes hundreds of objects for each token, none of which is garbage for long


class Heap:
    """A listener of `Observers`, for a process that is nothing but a server."""

    def __init__(self) -> None:
        gc.set_threshold(*_THRESHOLDS)

    def heard(self, _: str, event: Event) -> None:
        """Sets the heap apart when a model is open, and no longer when one is closed."""
        if not isinstance(event, StageReached):
            return
        if event.stage == "accepting":
            gc.freeze()
        elif event.stage == "channels closed":
            gc.unfreeze()
