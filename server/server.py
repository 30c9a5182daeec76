"""`Server`: the state that all requests of one server share."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial

import trio
from attrs import define, field

from ..api.engine import Engine
from ..api.engines import Engines
from ..api.making import free_memory
from ..api.residents import RETRY_SECONDS
from ..core.budget import Account, Budget
from ..core.errors import EngineClosed, ModelTooLarge, TrioletError, UnknownModel
from ..core.events import Event
from .exchange import Cut, Exchange
from .heap import Leavings
from .manners.limits import Flood, WrongKeys
from .manners.paths import known_folders
from .media import Media
from .metrics import Metrics
from .problems import Problem, Refusal, problem_of, report
from .settings import ServerSettings
from .spans import Spans
from .view.watchers import Watchers

_LOOK_BACK = 60.0  # seconds
_MOST_MEMORY = 2 * 2**30  # bytes for requests, unless the operator gives more
_SHARE = 4  # one part in 4 of the free memory
_LARGE = 16  # one part in 16 of the memory for requests, or more
_KEPT = 8  # one part in 8 of the budget of requests, beside it, is for the structures that all models keep
_ROOM_SECONDS = 30.0  # for which a request waits to have its images and audio decoded


@define
class EndingPace:
    """The pace at which requests end, by the requests that ended in the last minute."""

    _ends: deque[float] = field(factory=lambda: deque(maxlen=1_000), init=False)

    def one_ended(self, now: float) -> None:
        """Counts a request that has ended well."""
        self._ends.append(now)

    def seconds_to_wait(self, now: float) -> int:
        """Returns an estimate of the whole seconds until the next request ends, from 1 to 60."""
        recent = [end for end in self._ends if end > now - _LOOK_BACK]
        return min(60, max(1, math.ceil((now - recent[0]) / len(recent)))) if recent else 1


OnEvent = Callable[[str, Event], None]  # called with the model's name; must be fast and never raise


@define(eq=False)
class Observers:
    """Passes the events of all engines of a server on to ``listeners``."""

    listeners: list[OnEvent] = field(factory=list)

    def of(self, model: str) -> Callable[[Event], None]:
        """Returns the observer for the ``EngineConfig`` of ``model``."""
        return partial(self._tell, model)

    def _tell(self, model: str, event: Event) -> None:
        for listener in self.listeners:
            listener(model, event)


@define(eq=False)
class Server:
    """The state that all requests of one server share.

    Args:
        settings: see `ServerSettings`.
        engines: the models.
        observers: pass on the events of the engines.
        aligner: an open engine that finds times of words for models that know none.
    """

    settings: ServerSettings
    engines: Engines
    observers: Observers = field(factory=Observers)
    aligner: Engine | None = None
    exchanges: set[Exchange] = field(factory=set, init=False)  # the server waits for them when it ends
    counted: set[Exchange] = field(factory=set, init=False)  # those that count towards `max_requests`
    watchers: Watchers = field(factory=Watchers, init=False)
    answers: Mapping[str, Counter[str]] = field(init=False)  # the ended requests of clients, by model and outcome
    abilities: Mapping[str, tuple[str, ...] | None] = field(init=False)  # of models that are not loaded, by their files
    sockets: set[Callable[[], None]] = field(factory=set, init=False)  # one function to end each WebSocket
    stopping: bool = field(default=False, init=False)
    stop_called: trio.Event = field(factory=trio.Event, init=False)
    pace: EndingPace = field(factory=EndingPace, init=False)
    wrong_keys: WrongKeys = field(factory=WrongKeys, init=False)
    folders: tuple[str, ...] = field(init=False)  # their paths are hidden from clients
    refusals: Flood = field(factory=Flood, init=False)  # refused requests on which the log says more
    media: Media = field(init=False)
    metrics: Metrics = field(init=False)
    spans: Spans = field(factory=Spans, init=False)
    reading: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1), init=False)  # to parse long bodies
    budget: Budget = field(init=False)  # of the memory for requests
    leavings: Leavings = field(factory=Leavings, init=False)
    started: int = field(factory=lambda: int(time.time()), init=False)
    _nobody: trio.Event = field(factory=trio.Event, init=False)
    _first: trio.Lock = field(factory=trio.Lock, init=False)  # of those who wait for much memory
    _given: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)  # waits

    def __attrs_post_init__(self) -> None:
        free = free_memory()
        usual = _MOST_MEMORY if free is None else min(_MOST_MEMORY, free // _SHARE)
        self.budget = Budget(self.settings.request_memory or usual, self._given.unpark_all)
        self.media = Media(self.settings)
        self.answers = {name: Counter() for name in self.engines.models}
        self.abilities = {name: spec.abilities for name, spec in self.engines.models.items()}
        self.folders = known_folders(
            str(path) for spec in self.engines.models.values() for path in (spec.model, *spec.adapters.values())
        )
        self.metrics = Metrics(self.engines, self.budget, self.sockets)
        self.observers.listeners += (self.metrics.heard, self.watchers.hear)

    def exchange_over(self, exchange: Exchange) -> None:
        """Forgets an exchange that has ended, successfully or not."""
        if exchange not in self.exchanges:
            return
        self.forget(exchange)
        self.one_ended(exchange.told.get("model"), exchange.ending)
        if exchange.scope["method"] == "POST" and exchange.status == 200 and exchange.cut is None:
            self.pace.one_ended(trio.current_time())

    def one_ended(self, model: object, outcome: str) -> None:
        """Counts a request of a client for ``model``, or its alias; one for no model of the server does not count."""
        if model in self.engines.names:
            self.answers[self.engines.name_of(str(model))][outcome] += 1

    def forget(self, exchange: Exchange) -> None:
        """Stops counting an exchange and waiting for it. The exchange has ended, or it only watches and ends by itself
        when `stop` is called."""
        self.exchanges.discard(exchange)
        self.counted.discard(exchange)
        self._look()

    @asynccontextmanager
    async def use(self, model: str, exchange: Exchange | None = None) -> AsyncIterator[Engine]:
        """Opens the engine of ``model`` for the block, and loads the model if necessary. The wait for the model counts
        among the times of ``exchange``.

        Raises:
            UnknownModel: no model of this name is served.
            Refusal: the model cannot be loaded. Only the log says why, since the reason may name files of the server.
        """
        began = trio.current_time()
        async with AsyncExitStack() as stack:
            try:
                engine = await stack.enter_async_context(self.engines.use(model))
            except (UnknownModel, EngineClosed):
                raise
            except ModelTooLarge:
                told = (
                    f"the model {model!r} needs more memory than all models may take; the server's log has the figures"
                )
                raise Refusal(Problem(507, told, "model_too_large", "model")) from None
            except TrioletError:
                told = f"the model {model!r} cannot be loaded; the server's log has the reason"
                raise Refusal(Problem(503, told, "model_not_loaded", "model", math.ceil(RETRY_SECONDS))) from None
            if (structures := engine.model.structures) is not None:
                share = self.budget.capacity // _KEPT // len(self.engines.models)
                structures.capacity = min(structures.capacity, share)
            if exchange is not None:
                exchange.waited = trio.current_time() - began
            yield engine

    async def wait_for_memory(self, account: Account, size: int) -> None:
        """Takes ``size`` bytes for ``account``. Waits for them, but not for ever. Large requests wait behind each
        other, and no small one behind them.

        Raises:
            Overloaded: the bytes are not free in time.
            RequestTooLarge: the account would have more than the whole budget.
        """
        is_large = size > self.budget.capacity // _LARGE
        with trio.move_on_after(_ROOM_SECONDS):
            async with self._first if is_large else nullcontext():
                while not account.fits(size):
                    await self._given.park()
        account.take(size)

    def explain(self, error: Exception, name: str, told: dict[str, object]) -> Problem:
        """Logs ``error`` of the request ``name`` by `report`, and returns the problem that the client gets."""
        problem = problem_of(error, self.folders)
        report(name, told, error, problem, self.refusals, trio.current_time())
        return problem

    @contextmanager
    def socket_open(self, cut_off: Callable[[], None]) -> Iterator[None]:
        """Counts a WebSocket as open during the block. ``cut_off`` ends the WebSocket, and must not wait."""
        self.sockets.add(cut_off)
        try:
            yield
        finally:
            self.sockets.discard(cut_off)
            self._look()

    def stop(self) -> None:
        """Refuses new requests from now on."""
        self.stopping = True
        self.stop_called.set()
        self._look()

    async def all_ended(self) -> None:
        """Returns when the server is stopping and no request or WebSocket is left."""
        await self._nobody.wait()

    def cut_off(self) -> None:
        """Ends the requests that still run and the open WebSockets. Each client gets an error."""
        for exchange in list(self.exchanges):
            exchange.end(Cut.STOPPING)
        for cut_off in list(self.sockets):
            cut_off()

    def _look(self) -> None:
        if self.stopping and not self.exchanges and not self.sockets:
            self._nobody.set()
