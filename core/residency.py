"""The choice of loaded models under one memory budget: who is used, who is loaded next, who gives way. Pure.

::

    ABSENT -> LOADING -> READY -> UNLOADING -> ABSENT
       ^         |
       +---------+  it failed

A use of a model that is ready begins at once. A use of another one waits. Every use has a ticket, a number that counts
arrivals. Waiting models are loaded in the order of their first tickets, and none before an earlier one that waits for
room (the head).

The head chooses the models that give way to it: idle ones first, the least recently used first, and as few as are
needed. Where idle ones are not enough it chooses models in use, too, and *claims* all of them: a use with a later
ticket than the head's waits behind the head. So a model that gives way takes no new users, and is idle at some time.
It is unloaded when all that give way are idle. Models that nobody claims go on.

A task uses one model at a time: `triolet.api.residents` sees to that. So users never wait for each other.

From the decision to load it, a model counts with the bytes that it is thought to need; once it is open, with those that
it was found to hold; when it is gone, with none.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from attrs import define, field, frozen


class ModelState(enum.Enum):
    """The states of a model between being absent and being ready."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"  # absent, and the last load failed


@frozen
class Grant:
    """The ticket's wait is over: its model is ready and counts it among its users, or is unloaded as ordered."""

    ticket: int


@frozen
class Refuse:
    """The use is over before it began: its model failed to load, or all is closing."""

    ticket: int


@frozen
class Size:
    """The model's bytes must be found out. `Residency.sized` or `Residency.failed` answers."""

    name: str


@frozen
class Load:
    """The model must be loaded: there is room. `Residency.opened` or `Residency.failed` answers."""

    name: str


@frozen
class Unload:
    """The model must be unloaded. `Residency.closed` answers."""

    name: str
    why: str


Decision: TypeAlias = Grant | Refuse | Size | Load | Unload


@define(eq=False)
class Model:
    """The books of one model, which others only read."""

    name: str
    state: ModelState = ModelState.ABSENT  # LOADING also while its bytes are found out: it holds none then
    needs: int | None = None  # bytes, as far as is known
    held: int = 0  # bytes that count against the budget
    users: set[int] = field(factory=set)  # tickets
    waiting: dict[int, None] = field(factory=dict)  # tickets of uses, in order
    orders: dict[int, None] = field(factory=dict)  # tickets of orders to unload it
    wanted: bool = False  # a use has begun since it was loaded
    recency: int = 0  # the smallest is the least recently used
    idle_since: float = math.nan  # the time when it was opened, or when its last use ended
    last_use: float | None = None  # the time when its last use ended
    failed_at: float = math.nan
    loads: int = 0

    @property
    def is_absent(self) -> bool:
        """True if it is not there, and nothing is under way."""
        return self.state in (ModelState.ABSENT, ModelState.FAILED)

    @property
    def is_idle(self) -> bool:
        """True if it is ready, and nobody uses it."""
        return self.state is ModelState.READY and not self.users


@define(eq=False)
class Residency:
    """Takes facts, and decides what follows. Whoever carries decisions out calls `decide` after every fact, and when
    `next_deadline` has come.

    Args:
        names: the models' names.
        budget: bytes that all loaded models have together; ``None``: as many as they need.
        idle_seconds: an idle model is unloaded after this time; ``math.inf``: only for want of room.
        retry_seconds: for so long after a load that failed uses are refused.
    """

    names: tuple[str, ...]
    budget: int | None
    idle_seconds: float
    retry_seconds: float
    models: dict[str, Model] = field(init=False)
    _tickets: dict[int, Model] = field(factory=dict, init=False)
    _arrivals: Iterator[int] = field(factory=itertools.count, init=False)
    _recencies: Iterator[int] = field(factory=lambda: itertools.count(1), init=False)
    _overdrawn: int | None = field(default=None, init=False)  # a ticket, while more is held than the budget
    _closing: bool = field(default=False, init=False)
    _decisions: list[Decision] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.models = {name: Model(name) for name in self.names}

    # -- facts of users ----------------------------------------------------------------------------------------------

    def want(self, name: str, *, at_once: bool = False) -> int:
        """A use of ``name`` arrives; returns its ticket. ``at_once``: the model is tried again though it has just
        failed."""
        model = self.models[name]
        if at_once and model.state is ModelState.FAILED:
            model.state = ModelState.ABSENT
        return self._new_ticket(model, model.waiting)

    def order_unload(self, name: str) -> int:
        """Somebody wants ``name`` unloaded when the uses that came before have ended; returns the order's ticket. Later
        uses have it loaded anew."""
        model = self.models[name]
        return self._new_ticket(model, model.orders)

    def end(self, ticket: int, now: float) -> None:
        """A use has ended, or no longer waits; an order is withdrawn, or was heard. Unknown tickets are those of uses
        that were refused, or of an engine that is gone."""
        model = self._tickets.pop(ticket, None)
        if model is None:
            return
        model.waiting.pop(ticket, None)
        model.orders.pop(ticket, None)
        if ticket in model.users:
            model.users.discard(ticket)
            model.idle_since = model.last_use = now
            if not model.users:  # while there are others, ends must not change who gives way
                model.recency = next(self._recencies)

    def is_granted(self, ticket: int) -> bool:
        """True while a use goes on: its engine has not gone since."""
        model = self._tickets.get(ticket)
        return model is not None and ticket in model.users

    def close(self) -> None:
        """All is to end: no use begins any more."""
        self._closing = True

    # -- facts of models ---------------------------------------------------------------------------------------------

    def sized(self, name: str, needs: int) -> None:
        """``name`` will need so many bytes, no more than the budget."""
        model = self.models[name]
        assert self.budget is None or needs <= self.budget, f"{name} is too large and waits for room"
        model.state, model.needs = ModelState.ABSENT, needs

    def opened(self, name: str, held: int, now: float) -> None:
        """``name`` is loaded and holds so many bytes, no more than the budget."""
        model = self.models[name]
        assert model.state is ModelState.LOADING, f"{name} is opened while {model.state}"
        assert self.budget is None or held <= self.budget, f"{name} is too large and stays"
        model.state = ModelState.READY
        model.held = model.needs = held
        model.recency, model.idle_since = next(self._recencies), now
        model.wanted = False
        model.loads += 1

    def failed(self, name: str, now: float) -> None:
        """``name`` could not be sized or loaded; it holds nothing."""
        model = self.models[name]
        model.state, model.held, model.needs, model.failed_at = ModelState.FAILED, 0, None, now

    def leaving(self, name: str) -> None:
        """The engine of ``name`` ends, asked to or not. If it was not, its users have its errors and are users no
        more."""
        model = self.models[name]
        model.state = ModelState.UNLOADING
        for ticket in model.users:
            del self._tickets[ticket]
        model.users.clear()

    def closed(self, name: str) -> None:
        """``name`` is unloaded, and what it held is given back."""
        model = self.models[name]
        assert model.state is ModelState.UNLOADING, f"{name} is closed while {model.state}"
        model.state, model.held = ModelState.ABSENT, 0

    # -- answers -----------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> tuple[Decision, ...]:
        """Returns what follows from the facts so far. A decision counts as carried out, or as under way."""
        for model in self.models.values():
            self._answer_absent(model, now)
        self._serve()
        for model in self.models.values():
            self._unload_spare(model, now)
        decisions, self._decisions = tuple(self._decisions), []
        return decisions

    def next_deadline(self) -> float:
        """The time at which `decide` must be called again if no fact comes; ``math.inf``: not before."""
        idle = (model for model in self.models.values() if model.is_idle and not model.waiting)
        return min((model.idle_since + self.idle_seconds for model in idle), default=math.inf)

    @property
    def held(self) -> int:
        """Bytes that count against the budget."""
        return _held(self.models.values())

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _new_ticket(self, model: Model, kind: dict[int, None]) -> int:
        ticket = next(self._arrivals)
        self._tickets[ticket], kind[ticket] = model, None
        return ticket

    def _answer_absent(self, model: Model, now: float) -> None:
        """Answers orders to unload what is not there, refuses uses of what has just failed, and has a model sized."""
        if model.is_absent:
            self._answer(model.orders, Grant)
        failed = model.state is ModelState.FAILED and now < model.failed_at + self.retry_seconds
        if self._closing or failed:
            self._answer(model.waiting, Refuse)
        if model.is_absent and model.waiting and not self._is_sized(model):
            model.state = ModelState.LOADING
            self._decisions.append(Size(model.name))

    def _answer(self, tickets: dict[int, None], answer: type[Grant | Refuse]) -> None:
        """Answers tickets, which count no more."""
        for ticket in tickets:
            del self._tickets[ticket]
            self._decisions.append(answer(ticket))
        tickets.clear()

    def _serve(self) -> None:
        """Grants and loads in order. The first that finds no room, the head, chooses who gives way."""
        limits = {model.name: next(iter(model.orders), math.inf) for model in self.models.values()}
        while (head := self._head()) is not None:
            ticket, model = head
            self._grant(limits, ticket)  # uses before it are older
            needs = 0 if model is None else model.needs or 0
            if model is None or needs > self._free:
                break
            model.state, model.held = ModelState.LOADING, needs
            self._decisions.append(Load(model.name))
        else:
            self._grant(limits, math.inf)
            return
        victims = self._victims(needs - self._free - _held(self._in(ModelState.UNLOADING)))
        limits.update((victim.name, min(limits[victim.name], ticket)) for victim in victims)
        self._grant(limits, math.inf)
        if all(victim.is_idle for victim in victims):
            for victim in victims:
                self._unload(victim, f"{'what was loaded' if model is None else model.name} needs the room")

    def _head(self) -> tuple[int, Model | None] | None:
        """The first ticket, and its model, of the absent models that wait for room. Where none waits, and models hold
        more than was thought and more than the budget, these have a ticket, and no model."""
        absent = [model for model in self.models.values() if model.is_absent and self._is_sized(model)]
        waiting = [(ticket, model) for model in absent for ticket in model.waiting]
        if waiting:
            return min(waiting, key=lambda one: one[0])
        if self._free >= 0:
            self._overdrawn = None
            return None
        if self._overdrawn is None:
            self._overdrawn = next(self._arrivals)
        return self._overdrawn, None

    def _is_sized(self, model: Model) -> bool:
        """True if the model's needs are known, or need not be."""
        return self.budget is None or model.needs is not None

    @property
    def _free(self) -> float:
        return math.inf if self.budget is None else self.budget - self.held

    def _victims(self, lacking: float) -> list[Model]:
        """The models that give way for so many bytes: idle ones first, the least recently used first, and none that the
        others can do without."""
        if lacking <= 0:
            return []
        candidates = [*self._in(ModelState.READY), *self._in(ModelState.LOADING)]
        candidates.sort(key=lambda model: (model.state is ModelState.LOADING, not model.is_idle, model.recency))
        chosen: list[Model] = []
        for candidate in candidates:
            if _held(chosen) < lacking:
                chosen.append(candidate)
        for candidate in reversed(list(chosen)):
            if _held(chosen) - candidate.held >= lacking:
                chosen.remove(candidate)
        return chosen

    def _grant(self, limits: Mapping[str, float], before: float) -> None:
        """Begins the uses of ready models that came before their model's limit and before ``before``."""
        for model in self._in(ModelState.READY):
            until = min(limits[model.name], before)
            for ticket in [ticket for ticket in model.waiting if ticket < until]:
                del model.waiting[ticket]
                model.users.add(ticket)
                model.wanted, model.recency = True, next(self._recencies)
                self._decisions.append(Grant(ticket))

    def _unload_spare(self, model: Model, now: float) -> None:
        """Unloads a model that has no reason to stay."""
        if self._closing and model.state is ModelState.READY:
            self._unload(model, "the block ends")
        elif not model.is_idle:
            return
        elif model.orders:
            self._unload(model, "as ordered")
        elif not model.waiting and not model.wanted:
            self._unload(model, "nobody waits for it any more")
        elif not model.waiting and now >= model.idle_since + self.idle_seconds:
            self._unload(model, f"idle for {self.idle_seconds:g} s")

    def _unload(self, model: Model, why: str) -> None:
        model.state = ModelState.UNLOADING
        self._decisions.append(Unload(model.name, why))

    def _in(self, state: ModelState) -> list[Model]:
        return [model for model in self.models.values() if model.state is state]


def _held(models: Iterable[Model]) -> int:
    return sum(model.held for model in models)
