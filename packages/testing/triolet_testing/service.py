"""The sweep of a program that embeds an engine. The engine's own actors run over a simulated device, which may fail.
The sweep checks the promises that the engine keeps whatever the program does.

`service_subject` makes a `triolet_testing.trio_tools.Subject` of a program that takes a `SimulatedService`.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from attrs import define, evolve, field

from triolet.actors.statistics import EngineStatistics
from triolet.actors.worker import Job
from triolet.api.engine import Engine
from triolet.core import events
from triolet.core.config import EngineConfig
from triolet.core.errors import InvariantViolation

from .faults import DEVICE_FAULTS, FaultKind, Injector
from .judge import judge_statistics
from .run import books_of
from .sim import SimExecutor, SimWorker, sim_engine
from .sim_model import SimModel
from .trio_tools.faults import Fault as AnyFault
from .trio_tools.promises import without
from .trio_tools.trial import Subject, Trial

NO_ORPHAN = "no orphaned request"
ALL_BACK = "everything is given back"
DEVICE = "the device is used well"

ENGINE_PROMISES = {
    NO_ORPHAN: "The device computes what nobody reads: each client that leaves makes all others slower.",
    ALL_BACK: "Memory of the device stays taken: after some of these it is full, until the process ends.",
    DEVICE: "Tokens are wrong, or the process crashes.",
}
"""The promises that are checked of a program that embeds an engine, beside `triolet_testing.trio_tools.PROMISES`."""


class LastingFault(enum.Enum):
    """The faults that last. The engine retries a call that failed once, so only lasting faults reach the callers."""

    ENCODES_FAIL = "each encode raises from then on"
    STEPS_FAIL = "each step raises from then on"

    def __repr__(self) -> str:
        return f"LastingFault.{self.name}"


_LASTING = {LastingFault.ENCODES_FAIL: Job.ENCODE, LastingFault.STEPS_FAIL: Job.STEP}
DEVICE_KINDS = (
    *LastingFault,
    *(kind for kind in DEVICE_FAULTS if kind not in {FaultKind.SLEEP_FAILS, FaultKind.WAKE_FAILS}),
)
"""The faults of the device that a program must survive. Faults of sleep and wake are left out, since only engines that
sleep meet them."""

_FOREIGN = ("triolet ", "sim worker")


@define(eq=False)
class _DeviceInjector(Injector):
    """An injector for the fault of one run, if it is a fault of the device."""

    _calls: int = 0

    def on_device(self, job: Job, argument: Any) -> BaseException | None:
        """Implements `SimExecutor.fault`."""
        fault: AnyFault[Any] | None = self.fault
        if fault is None or _LASTING.get(fault.kind) is not job:
            return super().on_device(job, argument)
        self._calls += 1
        self.met = self._calls >= fault.step
        return RuntimeError(f"injected into {job.value}") if self.met else None


@define(eq=False)
class _Simulated:
    """One engine, its device and its events."""

    executor: SimExecutor
    engine: Engine
    trace: list[events.Event]

    @property
    def orphans(self) -> list[str]:
        """The ids of the requests that have not ended."""
        ended = {event.request_id for event in self.trace if isinstance(event, events.RequestEnded)}
        queued = [event.request_id for event in self.trace if isinstance(event, events.RequestQueued)]
        return [one for one in queued if one not in ended]

    @property
    def books(self) -> EngineStatistics | None:
        """The engine's statistics; ``None``: its block was never entered, or one of its actors has failed."""
        failed = any(isinstance(event, events.ActorFailed) for event in self.trace)
        return None if failed else books_of(self.engine, self.trace)


@define(eq=False)
class SimulatedService:
    """One run of a program that embeds engines, as the program sees it."""

    trial: Trial
    model: SimModel
    config: EngineConfig
    injector: Injector
    engines: list[_Simulated] = field(factory=list)
    _clients: int = 0
    _left: bool = False  # a client has left since the last time without clients

    def make_engine(self, **settings: Any) -> Engine:
        """Returns a new simulated engine, which the program opens and closes. ``settings`` are arguments of
        `triolet.EngineConfig`."""
        trace: list[events.Event] = []
        config = evolve(self.config, **settings)

        def observe(event: events.Event) -> None:
            trace.append(event)
            if config.observer is not None:
                config.observer(event)

        executor = SimExecutor(self.model, fault=self.injector.on_device)
        worker = SimWorker(hangs=self.injector.hangs)
        engine = sim_engine(executor, config=evolve(config, observer=observe), worker=worker)
        self.engines.append(_Simulated(executor, engine, trace))
        return engine

    @asynccontextmanager
    async def client(self, *, grace: float = 0.0) -> AsyncIterator[trio.CancelScope]:
        """Runs the block as one client of the service, which may leave at any time. If a client was cancelled, all
        requests must end within ``grace`` seconds of virtual time after the last client has left."""
        self._clients += 1
        try:
            async with self.trial.part() as scope:
                yield scope
            self._left = self._left or scope.cancelled_caught
        finally:
            self._clients -= 1
        if self._left and not self._clients:
            if grace:
                await trio.sleep(grace)
            await self._look_for_orphans("its client has left")

    async def _look_for_orphans(self, why: str) -> None:
        """Waits until no task can go on, and notes the requests that nobody can wait for. If clients have come
        meanwhile, they repeat the check when they leave.
        """
        await trio.testing.wait_all_tasks_blocked()
        if self._clients:
            return
        self._left = False
        orphans = [request for one in self.engines for request in one.orphans]
        if orphans:
            self.breaks(NO_ORPHAN, f"request {', '.join(orphans)} goes on, though {why}")

    def look_at_the_end(self) -> None:
        """Notes what the engines have not given back."""
        for one in self.engines:
            if one.executor.misuses:
                self.breaks(DEVICE, one.executor.misuses[0])
            if one.executor.is_open:
                self.breaks(ALL_BACK, "an engine was opened and not closed: its device is still taken")
                continue
            for what in _not_given_back(one):
                self.breaks(ALL_BACK, what)

    def breaks(self, promise: str, what: str) -> None:
        """Implements `Trial.breaks`."""
        self.trial.breaks(promise, what, ENGINE_PROMISES[promise])


def _not_given_back(one: _Simulated) -> Iterator[str]:
    """Yields what a closed engine has not given back."""
    if one.engine.inside.pending:
        yield f"{one.engine.inside.pending} places of the queue did not come back"
    if (books := one.books) is None:
        return
    if one.executor.left:
        yield f"encoder outputs are left on the device: {', '.join(sorted(one.executor.left))}"
    try:
        judge_statistics(books)
    except AssertionError as error:
        yield str(error)


def service_subject(
    program: Callable[[SimulatedService], Awaitable[object]],
    *,
    model: SimModel | None = None,
    config: EngineConfig | None = None,
    opens: bool = True,
    device: Sequence[FaultKind | LastingFault] = DEVICE_KINDS,
    passes: tuple[type[BaseException], ...] = (),
) -> Subject:
    """Returns a subject for `triolet_testing.trio_tools.sweep_program`: a program that embeds an engine.

    The program decides how to handle a fault of the device. So after such a fault any error but an `InvariantViolation`
    may leave the program, a failed assertion included.

    Args:
        program: called anew for every run, with its `SimulatedService`.
        model: the model that the device simulates; by default an encoder-decoder with audio.
        config: the engine's settings; its events are always verified.
        opens: whether an engine is open around the program, the first of `SimulatedService.engines`.
        device: the kinds of fault of the device. Each is tried at every call that may meet it.
        passes: see `triolet_testing.trio_tools.Subject`.
    """
    settings = evolve(config or EngineConfig(), verify=True)

    @asynccontextmanager
    async def around(trial: Trial) -> AsyncIterator[SimulatedService]:
        service = SimulatedService(trial, model or SimModel(), settings, _DeviceInjector(trial.case.fault))
        try:
            if opens:
                async with service.make_engine():
                    yield service
                    await service._look_for_orphans("the program has ended")
            else:
                yield service
        finally:
            trial.disturber.met = trial.disturber.met or service.injector.met
            service.look_at_the_end()

    def faults(first: Trial) -> Iterable[AnyFault[Any]]:
        calls = [job for one in first.given.engines for job in one.executor.calls]
        for kind in device:
            jobs = {_LASTING[kind]} if isinstance(kind, LastingFault) else DEVICE_FAULTS[kind][0]
            name = f"calls of {', '.join(sorted(job.value for job in jobs))}"
            count = sum(job in jobs for job in calls)
            yield from (AnyFault(kind, name, number) for number in range(1, count + 1))

    return Subject(
        program=lambda trial: program(trial.given),
        around=around,
        foreign=lambda name: name.startswith(_FOREIGN),
        accepts=_accepts,
        passes=passes,
        more_faults=faults,
    )


def _accepts(error: BaseException, fault: AnyFault[Any]) -> bool:
    if not isinstance(fault.kind, FaultKind | LastingFault):
        return False
    return isinstance(error, Exception) and without(error, InvariantViolation) is error
