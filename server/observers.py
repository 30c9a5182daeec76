"""`Observers`: passes the events of all engines of a server to listeners."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import define, field

from ..core.events import Event

OnEvent = Callable[[str, Event], None]  # called with the model's name; must be fast and never raise


@define(eq=False)
class Observers:
    """Passes the events of all engines on to ``listeners``."""

    listeners: list[OnEvent] = field(factory=list)

    def of(self, model: str) -> Callable[[Event], None]:
        """Returns the observer for the ``EngineConfig`` of ``model``."""
        return partial(self._tell, model)

    def _tell(self, model: str, event: Event) -> None:
        for listener in self.listeners:
            listener(model, event)
