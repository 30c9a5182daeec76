"""Which of several models are loaded under one memory budget: who is used, who is loaded next, who gives way. Pure.

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

A task may use one model and want another one. While it waits, what it uses does not become idle: so it must not wait
for that, nor behind somebody who does. Where it uses what somebody waits for, it goes first, and is refused where only
the models of tasks that wait like itself could give way. It may not order a model to be unloaded: an order waits for
users, who may wait for what its own task uses.

A model counts with the bytes that it is thought to need from the decision to load it on, with those that it was found
to hold once it is open, and with none when it is gone.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import TypeAlias

from attrs import define, field, frozen


class ModelState(enum.Enum):
    """Where a model is on its way."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"  # absent, and the last load failed


@frozen
class Grant:
    """What the ticket waits for is so: its model is ready and counts it among its users, or is unloaded as ordered."""

    ticket: int


@frozen
class Refuse:
    """The use is over before it began: its model failed to load, or all is closing; ``stuck``: it would wait for a task
    that waits for it, or for itself. An order is refused where it could get stuck."""

    ticket: int
    stuck: bool = False


@frozen
class Size:
    """Find out how many bytes the model needs. `Residency.sized` or `Residency.failed` answers."""

    name: str


@frozen
class Load:
    """Load the model: there is room. `Residency.opened` or `Residency.failed` answers."""

    name: str


@frozen
class Unload:
    """Unload the model. `Residency.closed` answers."""

    name: str
    why: str


Decision: TypeAlias = Grant | Refuse | Size | Load | Unload


@frozen(kw_only=True)
class ModelFigures:
    """A snapshot of one model. ``idle_since`` is the time when its last use ended; ``None``: it is in use, or was never
    used."""

    state: ModelState
    users: int
    waiting: int
    bytes: int
    loads: int
    idle_since: float | None


@define(eq=False)
class _Model:
    name: str
    state: ModelState = ModelState.ABSENT  # never FAILED, which `failed_at` tells
    needs: int | None = None  # bytes, as far as is known
    held: int = 0  # bytes that count against the budget
    users: set[int] = field(factory=set)
    waiting: dict[int, None] = field(factory=dict)  # tickets of uses, in order
    orders: dict[int, None] = field(factory=dict)  # tickets of orders to unload it
    sizing: bool = False
    wanted: bool = False  # a use has begun since it was loaded
    recency: int = 0  # the smallest is the least recently used
    idle_since: float = math.nan  # the time when it was opened, or when its last use ended
    last_use: float | None = None  # the time when its last use ended
    failed_at: float | None = None
    loads: int = 0

    @property
    def is_idle(self) -> bool:
        return self.state is ModelState.READY and not self.users


@frozen(eq=False)
class _Ticket:
    """A use or an order that has not ended, and the task that it belongs to."""

    model: _Model
    owner: object


@frozen(kw_only=True, eq=False)
class _Head:
    """Who comes first of those that wait for room; no later one is loaded before."""

    ticket: int
    needs: int
    name: str
    model: _Model | None


@define(eq=False)
class Residency:
    """Facts come in; `decide` says what follows. Whoever carries decisions out calls it after every fact, and when
    `next_deadline` has come.

    Args:
        names: of the models.
        budget: bytes that all loaded models have together; ``None``: as many as they need.
        idle_seconds: an idle model is unloaded after this time; ``math.inf``: only for want of room.
        retry_seconds: for so long after a load that failed uses are refused.
    """

    names: tuple[str, ...]
    budget: int | None
    idle_seconds: float
    retry_seconds: float
    _models: dict[str, _Model] = field(init=False)
    _tickets: dict[int, _Ticket] = field(factory=dict, init=False)
    _arrivals: Iterator[int] = field(factory=itertools.count, init=False)
    _recencies: Iterator[int] = field(factory=lambda: itertools.count(1), init=False)
    _overdrawn: int | None = field(default=None, init=False)  # a ticket, while more is held than the budget
    _closing: bool = field(default=False, init=False)
    _decisions: list[Decision] = field(factory=list, init=False)

    @_models.default
    def _all_absent(self) -> dict[str, _Model]:
        return {name: _Model(name) for name in self.names}

    # -- facts of users ----------------------------------------------------------------------------------------------

    def want(self, name: str, owner: Hashable, *, at_once: bool = False) -> int:
        """A use of ``name`` arrives; returns its ticket. ``owner``: the task that waits for it, and for nothing else
        meanwhile, held until the use has ended; ``at_once``: the model is tried again though it has just failed."""
        model = self._models[name]
        if at_once:
            model.failed_at = None
        ticket = self._new_ticket(model, owner)
        model.waiting[ticket] = None
        return ticket

    def order_unload(self, name: str, owner: Hashable) -> int:
        """``owner`` wants ``name`` unloaded when the uses that came before have ended; returns the order's ticket.
        Later uses have it loaded anew. It is refused where ``owner`` uses a model, whichever: the uses that it would
        wait for may wait for this one."""
        model = self._models[name]
        ticket = self._new_ticket(model, owner)
        if owner in self._owners(self._models.values()):
            self._refuse_stuck(ticket)
        else:
            model.orders[ticket] = None
        return ticket

    def end(self, ticket: int, now: float) -> None:
        """A use has ended, or no longer waits; an order is withdrawn, or was heard. Unknown tickets are those of uses
        that were refused, or of an engine that is gone."""
        ended = self._tickets.pop(ticket, None)
        if ended is None:
            return
        model = ended.model
        model.waiting.pop(ticket, None)
        model.orders.pop(ticket, None)
        if ticket in model.users:
            model.users.discard(ticket)
            model.idle_since = model.last_use = now
            if not model.users:  # while there are others, ends must not change who gives way
                model.recency = next(self._recencies)

    def is_granted(self, ticket: int) -> bool:
        """Whether a use is going on: its engine has not gone since."""
        found = self._tickets.get(ticket)
        return found is not None and ticket in found.model.users

    def close(self) -> None:
        """All is to end: no use begins any more."""
        self._closing = True

    # -- facts of models ---------------------------------------------------------------------------------------------

    def sized(self, name: str, needs: int) -> None:
        """``name`` will need so many bytes, no more than the budget."""
        model = self._models[name]
        assert self.budget is None or needs <= self.budget, f"{name} is too large and waits for room"
        model.sizing, model.needs = False, needs

    def opened(self, name: str, held: int, now: float) -> None:
        """``name`` is loaded and holds so many bytes, no more than the budget."""
        model = self._models[name]
        assert model.state is ModelState.LOADING, f"{name} is opened while {model.state}"
        assert self.budget is None or held <= self.budget, f"{name} is too large and stays"
        model.state = ModelState.READY
        model.held = model.needs = held
        model.recency, model.idle_since = next(self._recencies), now
        model.wanted = False
        model.loads += 1

    def failed(self, name: str, now: float) -> None:
        """``name`` could not be sized or loaded; it holds nothing."""
        model = self._models[name]
        model.state, model.sizing, model.held, model.needs = ModelState.ABSENT, False, 0, None
        model.failed_at = now

    def leaving(self, name: str) -> None:
        """The engine of ``name`` ends, asked to or not. If it was not, its users have its errors and are users no
        more."""
        model = self._models[name]
        model.state = ModelState.UNLOADING
        for ticket in model.users:
            del self._tickets[ticket]
        model.users.clear()

    def closed(self, name: str) -> None:
        """``name`` is unloaded, and what it held is given back."""
        model = self._models[name]
        assert model.state is ModelState.UNLOADING, f"{name} is closed while {model.state}"
        model.state, model.held = ModelState.ABSENT, 0

    # -- answers -----------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> tuple[Decision, ...]:
        """What follows from the facts so far. A decision counts as carried out, or as under way."""
        for model in self._models.values():
            self._answer_absent(model, now)
        self._serve()
        for model in self._models.values():
            self._unload_spare(model, now)
        decisions, self._decisions = tuple(self._decisions), []
        return decisions

    def next_deadline(self) -> float:
        """When `decide` must be called again if no fact comes; ``math.inf``: not before."""
        idle = (model for model in self._models.values() if model.is_idle and not model.waiting)
        return min((model.idle_since + self.idle_seconds for model in idle), default=math.inf)

    def figures(self, name: str) -> ModelFigures:
        """A snapshot."""
        model = self._models[name]
        return ModelFigures(
            state=self._told_state(model),
            users=len(model.users),
            waiting=len(model.waiting),
            bytes=model.held,
            loads=model.loads,
            idle_since=None if model.users else model.last_use,
        )

    @property
    def held(self) -> int:
        """Bytes that count against the budget."""
        return _held(self._models.values())

    def _told_state(self, model: _Model) -> ModelState:
        if model.sizing:
            return ModelState.LOADING
        if model.state is ModelState.ABSENT and model.failed_at is not None:
            return ModelState.FAILED
        return model.state

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _new_ticket(self, model: _Model, owner: object) -> int:
        ticket = next(self._arrivals)
        self._tickets[ticket] = _Ticket(model, owner)
        return ticket

    def _owners(self, models: Iterable[_Model]) -> set[object]:
        """The tasks that use one of ``models``."""
        return {self._tickets[ticket].owner for model in models for ticket in model.users}

    def _answer_absent(self, model: _Model, now: float) -> None:
        """Answers orders to unload what is not there, refuses uses of what has just failed, and has a model sized."""
        absent = model.state is ModelState.ABSENT
        failed = model.failed_at is not None and now < model.failed_at + self.retry_seconds
        if absent:
            self._answer(model.orders, Grant)
        if self._closing or (absent and failed):
            self._answer(model.waiting, Refuse)
        if absent and model.waiting and not model.sizing and not self._is_sized(model):
            model.sizing, model.failed_at = True, None
            self._decisions.append(Size(model.name))

    def _answer(self, tickets: dict[int, None], answer: type[Grant | Refuse]) -> None:
        """Answers tickets, which count no more."""
        for ticket in tickets:
            del self._tickets[ticket]
            self._decisions.append(answer(ticket))
        tickets.clear()

    def _serve(self) -> None:
        """Grants and loads in order. The first that finds no room chooses who gives way."""
        while self._served_one():
            pass

    def _served_one(self) -> bool:
        """Grants uses; loads a model or refuses a use, if one is to be. False: nothing more follows."""
        limits = {model.name: next(iter(model.orders), math.inf) for model in self._models.values()}
        head = self._head()
        victims: list[_Model] = []
        if head is not None:
            self._grant(limits, head.ticket)  # uses before it are older
            if self._loaded(head):
                return True
            victims = self._claim(head, limits, spared=set())
        urgent = self._owners([*victims, *(model for model in self._models.values() if model.orders)])
        self._grant_urgent(urgent)
        first = self._head(urgent)
        if first is not None:
            if self._loaded(first):
                return True
            head, victims = first, self._claim(first, limits, spared=self._stuck(limits))
            if _held(victims) < self._lacking(first):
                self._refuse_stuck(first.ticket)
                return True
            self._grant_urgent(self._owners(victims))
        self._grant(limits, math.inf)
        if head is not None and all(victim.is_idle for victim in victims):
            for victim in victims:
                self._unload(victim, f"{head.name} needs the room")
        return False

    def _loaded(self, head: _Head) -> bool:
        """Loads the model, if there is room."""
        if head.model is None or head.needs > self._free:
            return False
        self._load(head.model, head.needs)
        return True

    def _claim(self, head: _Head, limits: dict[str, float], spared: set[object]) -> list[_Model]:
        """Who gives way to ``head``. Later uses of them wait behind it."""
        victims = self._victims(self._lacking(head), spared)
        limits.update((victim.name, min(limits[victim.name], head.ticket)) for victim in victims)
        return victims

    def _lacking(self, head: _Head) -> float:
        """Bytes that others must still give back."""
        return head.needs - self._free - _held(self._in(ModelState.UNLOADING))

    def _stuck(self, limits: Mapping[str, float]) -> set[object]:
        """The tasks that wait for somebody: for room, or behind somebody at a ready model."""
        absent = filter(self._is_sized, self._in(ModelState.ABSENT))
        waiting = [ticket for model in absent for ticket in model.waiting]
        for model in self._in(ModelState.READY):
            waiting += [ticket for ticket in model.waiting if ticket >= limits[model.name]]
        return {self._tickets[ticket].owner for ticket in waiting}

    def _refuse_stuck(self, ticket: int) -> None:
        model = self._tickets.pop(ticket).model
        model.waiting.pop(ticket, None)
        self._decisions.append(Refuse(ticket, stuck=True))

    def _head(self, urgent: set[object] | None = None) -> _Head | None:
        """The first of the absent models that wait for room; with ``urgent`` the first that one of these tasks waits
        for. Where none waits, and models hold more than was thought and more than the budget: these."""
        waiting = [
            (ticket, model)
            for model in filter(self._is_sized, self._in(ModelState.ABSENT))
            for ticket in model.waiting
            if urgent is None or self._tickets[ticket].owner in urgent
        ]
        if waiting:
            ticket, model = min(waiting, key=lambda found: found[0])
            return _Head(ticket=ticket, needs=model.needs or 0, name=model.name, model=model)
        if urgent is not None:
            return None
        if self._free >= 0:
            self._overdrawn = None
            return None
        if self._overdrawn is None:
            self._overdrawn = next(self._arrivals)
        return _Head(ticket=self._overdrawn, needs=0, name="what was loaded", model=None)

    def _is_sized(self, model: _Model) -> bool:
        """Whether it is known what the model needs, or need not be."""
        return self.budget is None or model.needs is not None

    @property
    def _free(self) -> float:
        return math.inf if self.budget is None else self.budget - self.held

    def _victims(self, lacking: float, spared: set[object]) -> list[_Model]:
        """Who gives way for so many bytes: idle ones first, the least recently used first, and none that the others can
        do without; none that tasks in ``spared`` use."""
        if lacking <= 0:
            return []
        there = [*self._in(ModelState.READY), *self._in(ModelState.LOADING)]
        candidates = [model for model in there if not self._owners([model]) & spared]
        candidates.sort(key=lambda model: (model.state is ModelState.LOADING, not model.is_idle, model.recency))
        chosen: list[_Model] = []
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
                self._begin(ticket, model)
                model.recency = next(self._recencies)

    def _grant_urgent(self, urgent: Container[object]) -> None:
        """Begins the uses of ready models by these tasks. That changes nothing about who gives way."""
        for model in self._in(ModelState.READY):
            for ticket in [ticket for ticket in model.waiting if self._tickets[ticket].owner in urgent]:
                self._begin(ticket, model)

    def _begin(self, ticket: int, model: _Model) -> None:
        del model.waiting[ticket]
        model.users.add(ticket)
        model.wanted = True
        self._decisions.append(Grant(ticket))

    def _load(self, model: _Model, needs: int) -> None:
        model.state, model.held, model.failed_at = ModelState.LOADING, needs, None
        self._decisions.append(Load(model.name))

    def _unload_spare(self, model: _Model, now: float) -> None:
        """Unloads a model that has no reason to stay."""
        if model.state is not ModelState.READY:
            return
        if self._closing:
            self._unload(model, "the block ends")
        elif model.users:
            return
        elif model.orders:
            self._unload(model, "as ordered")
        elif not model.waiting and not model.wanted:
            self._unload(model, "nobody waits for it any more")
        elif not model.waiting and now >= model.idle_since + self.idle_seconds:
            self._unload(model, f"idle for {self.idle_seconds:g} s")

    def _unload(self, model: _Model, why: str) -> None:
        model.state = ModelState.UNLOADING
        self._decisions.append(Unload(model.name, why))

    def _in(self, state: ModelState) -> list[_Model]:
        return [model for model in self._models.values() if model.state is state]


def _held(models: Iterable[_Model]) -> int:
    return sum(model.held for model in models)
