"""The choice of loaded models under one memory budget: which models are in use, which is loaded next, and which give
way. Pure.

::

    ABSENT -> LOADING -> READY -> UNLOADING -> ABSENT
       ^         |
       +---------+  it failed

A use of a model that is ready begins at once. A use of any other model waits. Every use has a ticket, a number that
counts arrivals. Models are loaded in the order of the first tickets that wait for them. The first model that waits for
room is the head. No later model is loaded before the head.

The head chooses the models that give way to it: idle models first, the least recently used first, and as few as are
needed. If idle models are not enough, it chooses models in use too. The head *claims* all chosen models: a use of such
a model waits for the head if its ticket is later than the head's. So a model that gives way gets no new users, and is
idle sooner or later. The chosen models are unloaded when all of them are idle. Models that are not claimed go on.

The *turn* of a model begins when it is open. All uses that wait for it then begin, up to `MOST_IN_TURN`, even those
that came after the head: otherwise two models that swap would be loaded anew for each use. So a use waits for at most
one turn of each other model.

`triolet.api.residents` ensures that a task uses one model at a time. So users never wait for each other.

From the decision to load a model on, its estimated bytes count against the budget. Once the model is open, the bytes
that it really holds count. When it is gone, none do.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from attrs import define, field, frozen

MOST_IN_TURN = 256
"""The largest number of uses that begin when a model is opened, although a head has claimed it."""


class ModelState(enum.Enum):
    """The states of a model."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"  # absent, and the last load failed


@frozen
class Grant:
    """The wait of the ticket is over. The model of a use is ready, and counts the ticket among its users. The model of
    an order is unloaded."""

    ticket: int


@frozen
class Refuse:
    """The use ends before it began, since its model failed to load or the block is closing."""

    ticket: int


@frozen
class Size:
    """The bytes that the model needs must be determined. `Residency.sized` or `Residency.failed` answers."""

    name: str


@frozen
class Load:
    """The model must be loaded; there is room for it. `Residency.opened` or `Residency.failed` answers."""

    name: str


@frozen
class Unload:
    """The model must be unloaded. `Residency.closed` answers."""

    name: str
    why: str


Decision: TypeAlias = Grant | Refuse | Size | Load | Unload


@define(eq=False)
class Model:
    """The books of one model. Only `Residency` changes them."""

    name: str
    state: ModelState = ModelState.ABSENT  # LOADING also while its bytes are determined: it holds none then
    needs: int | None = None  # bytes; None: not known yet
    held: int = 0  # bytes that count against the budget
    users: set[int] = field(factory=set)  # tickets
    waiting: dict[int, None] = field(factory=dict)  # tickets of uses, in order
    orders: dict[int, None] = field(factory=dict)  # tickets of orders to unload it
    turn: int = -1  # the last ticket that waited when the model was opened: served although a head claims the model
    wanted: bool = False  # whether a use has begun since the model was loaded
    recency: int = 0  # the smallest is the least recently used
    idle_since: float = math.nan  # the time when the model was opened, or its last use ended
    last_use: float | None = None  # the time when the last use ended
    failed_at: float = math.nan
    loads: int = 0

    @property
    def is_absent(self) -> bool:
        """True if the model is not loaded, and no load or unload is under way."""
        return self.state in (ModelState.ABSENT, ModelState.FAILED)

    @property
    def is_idle(self) -> bool:
        """True if the model is ready, and nobody uses it."""
        return self.state is ModelState.READY and not self.users


@define(eq=False)
class Residency:
    """Takes facts, and decides what must be done. The code that carries decisions out calls `decide` after every fact,
    and when the `deadline_of` a model has come.

    Args:
        names: the names of the models.
        budget: the bytes that all loaded models may hold together; ``None``: as many as they need.
        idle_seconds: an idle model is unloaded after this time; ``math.inf``: only if room is needed.
        retry_seconds: how long uses are refused after a failed load.
    """

    names: tuple[str, ...]
    budget: int | None
    idle_seconds: float
    retry_seconds: float
    models: dict[str, Model] = field(init=False)
    _tickets: dict[int, Model] = field(factory=dict, init=False)
    _arrivals: Iterator[int] = field(factory=itertools.count, init=False)
    _recencies: Iterator[int] = field(factory=lambda: itertools.count(1), init=False)
    _overdrawn: int | None = field(default=None, init=False)  # a ticket, while models hold more than the budget
    _closing: bool = field(default=False, init=False)
    _decisions: list[Decision] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.models = {name: Model(name) for name in self.names}

    # -- facts of users ----------------------------------------------------------------------------------------------

    def want(self, name: str, *, at_once: bool = False) -> int:
        """Notes that a use of ``name`` arrives, and returns its ticket. ``at_once``: the model is tried again even if
        it has just failed."""
        model = self.models[name]
        if at_once and model.state is ModelState.FAILED:
            model.state = ModelState.ABSENT
        return self._new_ticket(model, model.waiting)

    def order_unload(self, name: str) -> int:
        """Notes an order to unload ``name`` when its earlier uses have ended, and returns the ticket of the order.
        Later uses have the model loaded anew."""
        model = self.models[name]
        return self._new_ticket(model, model.orders)

    def end(self, ticket: int, now: float) -> None:
        """Notes that a use or an order is over: it has ended, it no longer waits, or its answer was received. Unknown
        tickets change nothing: they are those of uses that were refused, or whose engine is gone.
        """
        model = self._tickets.pop(ticket, None)
        if model is None:
            return
        model.waiting.pop(ticket, None)
        model.orders.pop(ticket, None)
        if ticket in model.users:
            model.users.discard(ticket)
            model.idle_since = model.last_use = now
            if not model.users:  # while others use the model, the end of a use must not change which models give way
                model.recency = next(self._recencies)

    def is_granted(self, ticket: int) -> bool:
        """True while the use goes on and its engine is still there."""
        model = self._tickets.get(ticket)
        return model is not None and ticket in model.users

    def close(self) -> None:
        """Notes that the block is closing. No use begins any more."""
        self._closing = True

    # -- facts of models ---------------------------------------------------------------------------------------------

    def sized(self, name: str, needs: int) -> None:
        """Notes that ``name`` will need ``needs`` bytes, no more than the budget."""
        model = self.models[name]
        assert self.budget is None or needs <= self.budget, f"{name} is too large and waits for room"
        model.state, model.needs = ModelState.ABSENT, needs

    def opened(self, name: str, held: int, now: float) -> None:
        """Notes that ``name`` is loaded and holds ``held`` bytes, no more than the budget."""
        model = self.models[name]
        assert model.state is ModelState.LOADING, f"{name} is opened while {model.state}"
        assert self.budget is None or held <= self.budget, f"{name} is too large and stays"
        model.state = ModelState.READY
        model.held = model.needs = held
        model.recency, model.idle_since = next(self._recencies), now
        model.wanted = False
        model.turn = max(itertools.islice(model.waiting, MOST_IN_TURN), default=-1)
        model.loads += 1

    def failed(self, name: str, now: float) -> None:
        """Notes that the bytes of ``name`` could not be determined, or that it could not be loaded. It holds
        nothing."""
        model = self.models[name]
        model.state, model.held, model.needs, model.failed_at = ModelState.FAILED, 0, None, now

    def leaving(self, name: str) -> None:
        """Notes that the engine of ``name`` ends, on order or not. Without an order, its users get the engine's errors,
        and are no longer users.
        """
        model = self.models[name]
        model.state = ModelState.UNLOADING
        for ticket in model.users:
            del self._tickets[ticket]
        model.users.clear()

    def closed(self, name: str) -> None:
        """Notes that ``name`` is unloaded, and has given back all that it held."""
        model = self.models[name]
        assert model.state is ModelState.UNLOADING, f"{name} is closed while {model.state}"
        model.state, model.held = ModelState.ABSENT, 0

    # -- answers -----------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> tuple[Decision, ...]:
        """Returns the decisions that follow from the facts so far. A decision counts as carried out, or as under way,
        from then on."""
        for model in self.models.values():
            self._answer_absent(model, now)
        self._serve()
        for model in self.models.values():
            self._unload_spare(model, now)
        decisions, self._decisions = tuple(self._decisions), []
        return decisions

    def deadline_of(self, model: Model) -> float:
        """Returns the time at which `decide` must be called again if ``model`` is idle until then; ``math.inf``: there
        is no such time."""
        return model.idle_since + self.idle_seconds if model.is_idle and not model.waiting else math.inf

    @property
    def held(self) -> int:
        """The bytes that count against the budget."""
        return _held(self.models.values())

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _new_ticket(self, model: Model, kind: dict[int, None]) -> int:
        ticket = next(self._arrivals)
        self._tickets[ticket], kind[ticket] = model, None
        return ticket

    def _answer_absent(self, model: Model, now: float) -> None:
        """Handles a model that is not loaded: answers orders to unload it, refuses its uses if it has just failed or
        the block is closing, and has it sized if a use needs that.
        """
        is_sizing = model.state is ModelState.LOADING and not self._is_sized(model)
        if model.is_absent or is_sizing:
            self._answer(model.orders, Grant)
        failed = model.state is ModelState.FAILED and now < model.failed_at + self.retry_seconds
        if self._closing or failed:
            self._answer(model.waiting, Refuse)
        if model.is_absent and model.waiting and not self._is_sized(model):
            model.state = ModelState.LOADING
            self._decisions.append(Size(model.name))

    def _answer(self, tickets: dict[int, None], answer: type[Grant | Refuse]) -> None:
        """Answers the tickets and forgets them."""
        for ticket in tickets:
            del self._tickets[ticket]
            self._decisions.append(answer(ticket))
        tickets.clear()

    def _serve(self) -> None:
        """Grants uses and loads models in order. The first model that finds no room, the head, chooses which models
        give way."""
        limits = {model.name: next(iter(model.orders), math.inf) for model in self.models.values()}
        while (head := self._head()) is not None:
            ticket, model = head
            self._grant(limits, ticket)  # earlier uses are granted first
            needs = 0 if model is None else model.needs or 0
            if model is None or needs > self._free:
                break
            model.state, model.held = ModelState.LOADING, needs
            self._decisions.append(Load(model.name))
        else:
            self._grant(limits, math.inf)
            return
        victims = self._victims(needs - self._free - _held(self._in(ModelState.UNLOADING)))
        limits.update((one.name, min(limits[one.name], max(ticket, one.turn + 1))) for one in victims)
        self._grant(limits, math.inf)
        if all(victim.is_idle for victim in victims):
            for victim in victims:
                self._unload(victim, f"{'what was loaded' if model is None else model.name} needs the room")

    def _head(self) -> tuple[int, Model | None] | None:
        """Returns the first ticket among the absent models that wait for room, and its model. If none waits, an
        estimate may have been too low, so that the models hold more than the budget. Returns a ticket and no model
        then.
        """
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
        """True if the bytes that the model needs are known, or need not be known."""
        return self.budget is None or model.needs is not None

    @property
    def _free(self) -> float:
        return math.inf if self.budget is None else self.budget - self.held

    def _victims(self, lacking: float) -> list[Model]:
        """Returns the models that give way for ``lacking`` bytes: idle models first, the least recently used first, and
        no more than needed.
        """
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
        """Begins the uses of ready models whose tickets are below ``before`` and below their model's limit in
        ``limits``.
        """
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
