"""`Watchers`: all who watch the server, and the changes that each has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from attrs import define, field

from ...core.events import Event
from ...core.overview import Change, Overview, RequestLine
from ..problems import Problem, Refusal
from .messages import Message, entry_change, failure_change, request_change

MOST_CHANGES = 4_096  # changes that wait for one watcher
MOST_WATCHERS = 64


@define(eq=False)
class Watcher:
    """The changes that one watcher has not read yet; only the latest ``most`` are kept."""

    most: int = MOST_CHANGES
    _lost: int = field(default=0, init=False)
    _changes: deque[Message] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._changes = deque(maxlen=self.most)

    def put(self, change: Message) -> None:
        """Adds a change; the oldest is lost if there are too many."""
        self._lost += len(self._changes) == self.most
        self._changes.append(change)

    def take(self) -> tuple[int, list[Message]]:
        """Returns the number of changes that were lost since the last call, and the changes that were kept."""
        lost, changes = self._lost, list(self._changes)
        self._lost = 0
        self._changes.clear()
        return lost, changes


@define(eq=False)
class Watchers:
    """The state of all models, by their events, and all who watch it. While nobody watches, an event only changes a few
    numbers."""

    states: dict[str, Overview] = field(factory=dict, init=False)
    _watching: set[Watcher] = field(factory=set, init=False)

    def hear(self, model: str, event: Event) -> None:
        """Adds an event of the engine of ``model`` to its state; see `Observers`."""
        state = self.states.get(model)
        if state is None:
            state = self.states[model] = Overview()
            self._follow()
        failures = state.failures
        state(event)
        if state.failures > failures and self._watching:
            self._put(failure_change(model, state.last_failure, event.time))

    def state_of(self, model: str) -> Overview:
        """Returns the state of a model; an empty one if it was never loaded."""
        return self.states.get(model) or Overview()

    @contextmanager
    def joined(self) -> Iterator[Watcher]:
        """Adds a watcher for the block. The watcher gets all changes from now on.

        Raises:
            Refusal: there are too many watchers already.
        """
        if len(self._watching) >= MOST_WATCHERS:
            raise Refusal(Problem(429, f"{MOST_WATCHERS} pages watch; close one", "overloaded", retry_after=5))
        watcher = Watcher()
        self._watching.add(watcher)
        self._follow()
        try:
            yield watcher
        finally:
            self._watching.discard(watcher)
            self._follow()

    def _follow(self) -> None:
        """Makes the states report changes if somebody watches, and otherwise not."""
        for model, state in self.states.items():
            state.changed = partial(self._changed, model) if self._watching else None

    def _changed(self, model: str, change: Change) -> None:
        if isinstance(change, RequestLine):
            self._put(request_change(model, change))
        else:
            self._put(entry_change(model, change))

    def _put(self, change: Message) -> None:
        for watcher in self._watching:
            watcher.put(change)
