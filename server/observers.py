"""`Observers`: whoever wants to hear of what happens in the engines of a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import define, field

from ..core.events import Event

Listener = Callable[[str, Event], None]  # called with the model's name; must be quick, and not raise


@define(eq=False)
class Observers:
    """Passes the events of all engines on to ``listeners``."""

    listeners: list[Listener] = field(factory=list)

    def of(self, model: str) -> Callable[[Event], None]:
        """What ``EngineConfig(observer=...)`` of ``model`` is."""
        return partial(self._tell, model)

    def _tell(self, model: str, event: Event) -> None:
        for listener in self.listeners:
            listener(model, event)
