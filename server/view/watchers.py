"""`Watchers`: everybody who watches the server, and what they have not been told yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field

from ...core.events import Event
from ...core.overview import CacheEntry, Change, Overview, RequestLine
from ..problems import Problem, Refusal
from . import told
from .told import Told

MOST_CHANGES = 4_096  # that wait for one watcher
MOST_WATCHERS = 64


@define(eq=False)
class Watcher:
    """What one watcher is to be told next: the latest ``most`` changes."""

    most: int = MOST_CHANGES
    _lost: int = field(default=0, init=False)
    _changes: deque[Told] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._changes = deque(maxlen=self.most)

    def put(self, change: Told) -> None:
        """One more change; the oldest is lost where there are too many."""
        self._lost += len(self._changes) == self.most
        self._changes.append(change)

    def take(self) -> tuple[int, list[Told]]:
        """How many changes were lost since the last time, and the others."""
        lost, changes = self._lost, list(self._changes)
        self._lost = 0
        self._changes.clear()
        return lost, changes


@define(eq=False)
class Watchers:
    """The state of all models by their events, and whoever watches it. An event changes a few numbers while nobody
    does."""

    states: dict[str, Overview] = field(factory=dict, init=False)
    _watching: set[Watcher] = field(factory=set, init=False)

    def hear(self, model: str, event: Event) -> None:
        """Takes an event of the engine of ``model``; see `Observers`."""
        state = self.states.get(model)
        if state is None:
            state = self.states[model] = Overview()
            self._follow(model, state)
        failures = state.failures
        state(event)
        if state.failures > failures and self._watching:
            self._put(told.failure_told(model, state.last_failure, event.time))

    def state_of(self, model: str) -> Overview:
        """What is known of a model; nothing where it was never loaded."""
        return self.states.get(model) or Overview()

    @contextmanager
    def joined(self) -> Iterator[Watcher]:
        """One more watcher, for the block. It is told what changes from now on.

        Raises:
            Refusal: too many watch already.
        """
        if len(self._watching) >= MOST_WATCHERS:
            raise Refusal(Problem(429, f"{MOST_WATCHERS} watch already; close a page", "overloaded", retry_after=5))
        watcher = Watcher()
        self._watching.add(watcher)
        self._follow_all()
        try:
            yield watcher
        finally:
            self._watching.discard(watcher)
            self._follow_all()

    def _follow_all(self) -> None:
        for model, state in self.states.items():
            self._follow(model, state)

    def _follow(self, model: str, state: Overview) -> None:
        """The state tells of changes while there is somebody to hear of them."""

        def changed(change: Change) -> None:
            self._put(_told(model, change))

        state.changed = changed if self._watching else None

    def _put(self, change: Told) -> None:
        for watcher in self._watching:
            watcher.put(change)


def _told(model: str, change: RequestLine | CacheEntry) -> Told:
    return told.request_told(model, change) if isinstance(change, RequestLine) else told.entry_told(model, change)
