"""Deterministic simulation: the real supervisor and actors over a simulated device, on virtual time, in one thread.

::

    outcome = simulate(SCENARIOS["abort storm"], Uniform(seed=7), Fault(FaultKind.CANCEL, "triolet runner", 12))

`simulate` raises where any promise of the engine is broken: an `InvariantViolation` of the trace, a client that gets a
wrong token or no end, a page or a byte that does not come back, an exception that should not leave the block, a
`Deadlock`. The same arguments give the same run, step by step.
"""

from __future__ import annotations

import enum
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import trio
from attrs import define, evolve, field, frozen

from ..actors.supervisor import EngineStatistics
from ..actors.worker import Job
from ..api.engine import Engine
from ..api.streams import Deltas, DeltaStream
from ..core import events
from ..core.config import EngineConfig
from ..core.errors import (
    DeviceLost,
    EncodeFailed,
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineStateError,
    EngineTeardownError,
    InvariantViolation,
    RunnerCrashed,
    TrioletError,
)
from ..core.model import Kind
from ..core.request import LogitRules, Request
from ..core.statistics import PlannerStatistics
from ..core.trace import TEARDOWN, TraceChecker
from .clients import FOREVER, SCENARIOS, Client, Scenario, audio, prepared, true_tokens, true_vector
from .schedule import Schedule, Uniform, run_scheduled
from .sim import SimExecutor, SimWorker, sim_engine
from .trio_hooks import leaves_a_nursery, throw_into

PATIENCE = 60.0
"""Virtual seconds after which a scenario's body leaves the block, whatever its clients still wait for."""


class FaultKind(enum.Enum):
    """What goes wrong."""

    CANCEL = "the surroundings are cancelled"
    CANCEL_RELEASE_FAILS = "the surroundings are cancelled, and a release raises"
    INTERRUPT = "^C"
    CRASH = "the actor raises"
    CLIENT_RAISES = "a client raises"
    OBSERVER_FAILS = "the observer raises"
    STALL = "a client stops reading"
    OPEN_FAILS = "the load raises"
    RELEASE_FAILS = "a release raises"
    ENCODE_FAILS = "an encode batch raises"
    STEP_FAILS = "a step raises"
    FREE_FAILS = "a free raises, and the runner starts anew"
    OUT_OF_MEMORY = "a call of the device runs out of memory"
    DEVICE_LOST = "a call of the device finds it lost"
    SLEEP_FAILS = "a sleep finds no room for the weights"
    WAKE_FAILS = "a wake runs out of memory"
    STEP_HANGS = "a step never returns"

    def __repr__(self) -> str:
        return f"FaultKind.{self.name}"


class Injected(Exception):
    """Raised where a fault has something raise."""


_ACTORS = {  # and the names of the channels that lead to them; a runner that crashes reads no more
    "triolet scheduler": "_to_scheduler",
    "triolet encoder cache": "_to_encoder_cache",
    "triolet runner": None,
    "triolet step lane": None,
    "triolet encode lane": None,
}


@frozen
class Fault:
    """``kind`` happens just before ``task`` takes its ``step``-th step, counted from 1; a crash of a task that is
    leaving a nursery then, at its next step. A kind of `OCCASIONS` happens on the ``step``-th of those instead;
    ``task`` is their name."""

    kind: FaultKind
    task: str
    step: int


@frozen(kw_only=True)
class Outcome:
    """What one simulated run came to."""

    scenario: str
    met: bool  # whether the fault happened to anything
    steps: Mapping[str, int]  # how many steps each task took
    ends: tuple[str, ...]  # of each client: "finished", "left", "cancelled", "not started" or an error's class
    error: BaseException | None  # what left the engine's block
    trace: tuple[events.Event, ...]
    seconds: float  # of virtual time
    requests: PlannerStatistics | None  # the planner's books at the end; ``None`` where it never began


def role(task: trio.lowlevel.Task) -> str:
    """A task's name without the module and the class it comes from; trio's own begin with ``<``."""
    return task.name if task.name.startswith("<") else task.name.rsplit(".", 1)[-1]


_DEVICE_FAULTS: Mapping[FaultKind, tuple[set[Job], type[Exception]]] = {
    FaultKind.ENCODE_FAILS: ({Job.ENCODE}, RuntimeError),
    FaultKind.STEP_FAILS: ({Job.STEP}, RuntimeError),
    FaultKind.FREE_FAILS: ({Job.FREE}, RuntimeError),
    FaultKind.OUT_OF_MEMORY: ({Job.ENCODE, Job.STEP}, MemoryError),
    FaultKind.OPEN_FAILS: ({Job.OPEN}, RuntimeError),
    FaultKind.RELEASE_FAILS: ({Job.CLOSE}, RuntimeError),
    FaultKind.SLEEP_FAILS: ({Job.SLEEP}, MemoryError),
    FaultKind.WAKE_FAILS: ({Job.WAKE}, MemoryError),
    FaultKind.DEVICE_LOST: ({Job.ENCODE, Job.STEP, Job.FREE}, DeviceLost),
}


OCCASIONS: Mapping[FaultKind, str] = {
    FaultKind.CLIENT_RAISES: "reads of clients",
    FaultKind.STALL: "reads of clients",
    FaultKind.OBSERVER_FAILS: "events",
    FaultKind.STEP_HANGS: "calls of step",
    **{kind: f"calls of {', '.join(sorted(job.value for job in jobs))}" for kind, (jobs, _) in _DEVICE_FAULTS.items()},
}
"""The faults that happen to something, and what they are counted in. The others happen at a step of a task."""


@define(eq=False)
class _Injector(trio.abc.Instrument):
    """Counts the steps of every task, and makes the fault happen."""

    fault: Fault | None
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    steps: Counter[str] = field(factory=Counter)
    met: bool = False
    over: bool = False
    put_back: Callable[[str, object], None] = lambda *_: None  # a message that an actor was about to read
    release_failed: bool = False
    _releases_fail: bool = False
    _occasions: int = 0
    _roles: dict[str, str] = field(factory=dict)  # by the name of the task

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio."""
        if self.over:
            return
        name = self._roles.get(task.name) or self._roles.setdefault(task.name, role(task))
        self.steps[name] += 1
        fault = self.fault
        if fault is not None and name == fault.task and self.steps[name] == fault.step:
            self._fire(task, fault)

    def _fire(self, task: trio.lowlevel.Task, fault: Fault) -> None:
        kind = fault.kind
        if kind in {FaultKind.CANCEL, FaultKind.CANCEL_RELEASE_FAILS}:
            self.met, self._releases_fail = True, kind is FaultKind.CANCEL_RELEASE_FAILS
            self.scope.cancel()
        elif kind is FaultKind.INTERRUPT:
            self.met = True
            signal.raise_signal(signal.SIGINT)
        elif role(task) in _ACTORS and leaves_a_nursery(task):
            self.fault = evolve(fault, step=fault.step + 1)
        elif role(task) in _ACTORS:
            self.met = True
            unread = throw_into(task, Injected(f"in {role(task)}"))
            if unread is not None:
                self.put_back(role(task), unread)

    def happens(self, kind: FaultKind) -> bool:
        """Another occasion for ``kind``. Whether it happens now."""
        fault = self.fault
        if fault is None or fault.kind is not kind:
            return False
        self._occasions += 1
        if self._occasions != fault.step:
            return False
        self.met = True
        return True

    def on_device(self, job: Job, _: object) -> BaseException | None:
        """See `SimExecutor.fault`."""
        if self.fault is not None and self.fault.kind in _DEVICE_FAULTS:
            jobs, error = _DEVICE_FAULTS[self.fault.kind]
            if job in jobs and self.happens(self.fault.kind):
                self.release_failed = job is Job.CLOSE
                return error(f"injected into {job.value}")
        if job is Job.CLOSE and self._releases_fail:
            self.release_failed = True
            return Injected("into close")
        return None

    def hangs(self, job: Job) -> bool:
        """See `SimWorker.hangs`."""
        return job is Job.STEP and self.happens(FaultKind.STEP_HANGS)


@define(eq=False)
class _Run:
    """One simulated run."""

    scenario: Scenario
    injector: _Injector
    executor: SimExecutor = field(init=False)
    worker: SimWorker = field(init=False)
    engine: Engine = field(init=False)
    trace: list[events.Event] = field(factory=list)
    ends: list[str] = field(init=False)
    error: BaseException | None = None
    violation: InvariantViolation | None = None
    blind: bool = False  # the observer has raised: what happened afterwards is not known
    seconds: float = 0.0
    checker: TraceChecker = field(init=False)

    def __attrs_post_init__(self) -> None:
        scenario = self.scenario
        self.ends = ["not started"] * len(scenario.clients)
        self.executor = SimExecutor(scenario.model, fault=self.injector.on_device)
        settings: dict[str, object] = {"drain_seconds": 1.0, "stage_seconds": 2.0, **scenario.config}
        config = EngineConfig(observer=self._observe, **settings)  # type: ignore[arg-type]
        self.checker = TraceChecker(capacity=config.encoder_cache_bytes, steps_in_flight=config.steps_in_flight)
        self.injector.put_back = self._put_back
        self.worker = SimWorker(hangs=self.injector.hangs)
        self.engine = sim_engine(self.executor, config=config, worker=self.worker)

    def _put_back(self, actor: str, message: object) -> None:
        if (channel := _ACTORS[actor]) is not None:
            getattr(self.engine.inside.supervisor, channel).send_nowait(message)

    def _observe(self, event: events.Event) -> None:
        self.trace.append(event)
        if self.injector.happens(FaultKind.OBSERVER_FAILS):
            self.blind = True
            raise Injected("into the observer")
        if self.violation is not None:
            return
        try:
            self.checker(event)
            self._compare_with_device(event)
        except InvariantViolation as violation:
            self.violation = violation

    def _compare_with_device(self, event: events.Event) -> None:
        """Books balance: what the engine says is on the device is there, and nothing else."""
        if not (self.checker.orderly and isinstance(event, events.EncodeDone | events.EntryFreed)):
            return
        if self.executor.generation != self.checker.generation:
            return  # the encoder cache has not heard of the restart yet
        outputs = self.executor.outputs.keys()
        if self.checker.resident <= outputs <= self.checker.on_device:
            return
        lost, kept = sorted(self.checker.resident - outputs), sorted(outputs - self.checker.on_device)
        what = f"not on the device: {lost}; on the device, and in no book: {kept}"
        raise InvariantViolation("books balance", what, tuple(self.trace[-8:]))

    async def main(self) -> None:
        begun = trio.current_time()
        with self.injector.scope:
            async with trio.open_nursery() as outside:
                try:
                    async with self.engine:
                        await self._body(outside)
                except Exception as error:  # noqa: BLE001  (judged afterwards)
                    self.error = error
                finally:
                    self.injector.over = True
                    self.seconds = trio.current_time() - begun

    async def _body(self, outside: trio.Nursery) -> None:
        with trio.move_on_after(min(PATIENCE, self.scenario.leaves)) as scope:
            if self.scenario.outside:
                self._start_clients(outside)
                await trio.sleep(self.scenario.leaves)
                return
            async with trio.open_nursery() as nursery:
                self._start_clients(nursery)
                if self.scenario.naps:
                    nursery.start_soon(self._operate, name="operator")
        if scope.cancelled_caught and self.scenario.leaves > PATIENCE and not self._may_wait_for_ever():
            unfinished = [number for number, end in enumerate(self.ends) if end in {"not started", "cancelled"}]
            raise InvariantViolation("terminal once", f"clients {unfinished} wait for ever", tuple(self.trace[-20:]))

    @property
    def books(self) -> EngineStatistics | None:
        """Of the engine, once its block was entered."""
        supervisor = self.engine.inside.supervisor
        opened = events.StageReached("accepting") in self.trace
        return supervisor.statistics() if opened and supervisor is not None else None

    def _start_clients(self, nursery: trio.Nursery) -> None:
        for number, client in enumerate(self.scenario.clients):
            nursery.start_soon(self._client, number, client, name=f"client {number}")

    def _may_wait_for_ever(self) -> bool:
        return self._kind is FaultKind.STEP_HANGS

    async def _operate(self) -> None:
        asleep, begun = False, trio.current_time()
        for after in self.scenario.naps:
            await trio.sleep_until(begun + after)
            asleep = not asleep
            try:
                await (self._sleep() if asleep else self._wake())
            except EngineClosed:
                return
            assert self.executor.is_asleep is asleep, f"{'sleep' if asleep else 'wake'}() returned, and it did not"

    async def _sleep(self) -> None:
        try:
            await self.engine.sleep()
        except EngineClosed:
            raise
        except EngineError:
            assert self._kind is FaultKind.SLEEP_FAILS, "the device could not be given back, and nobody held it"
            await self.engine.sleep()

    async def _wake(self) -> None:
        try:
            await self.engine.wake()
        except EngineAsleep:
            assert self._kind is FaultKind.WAKE_FAILS, "the device could not be taken, and nobody had taken it"
            await self.engine.wake()

    @property
    def _kind(self) -> FaultKind | None:
        return None if self.injector.fault is None else self.injector.fault.kind

    async def _client(self, number: int, client: Client) -> None:
        try:
            await self._ask(number, client)
        except Injected:
            self.ends[number] = "crashed"
            if not self.scenario.outside:
                raise

    async def _ask(self, number: int, client: Client) -> None:
        if client.arrives:
            await trio.sleep(client.arrives)
        self.ends[number] = "cancelled"
        try:
            with trio.move_on_after(client.patience) as scope:
                await (self._read(client) if client.pooling is None else self._read_vector(client))
            self.ends[number] = "left" if scope.cancelled_caught else "finished"
        except TrioletError as error:
            self.ends[number] = type(error).__name__

    async def _read(self, client: Client) -> None:
        true = true_tokens(client, self.scenario.model)
        got: tuple[int, ...] = ()
        async with self._stream(client) as deltas:
            async for delta in deltas:
                got += delta.token_ids
                assert got == true[: len(got)], f"{client} got the tokens {got}, not {true}"
                if await self._stalls():
                    return
                if client.pause:
                    await trio.sleep(client.pause)
            told = deltas.timings
        assert got == true, f"{client} finished with the tokens {got}, not {true}"
        assert told is not None, f"{client} was not told how long it took"
        assert 0 <= told.encoder_wait <= told.queued <= told.total, f"{client} took {told}"

    async def _read_vector(self, client: Client) -> None:
        async with self.engine.inside._submitted(self._request(client), wait=True) as mailbox:
            await mailbox.wait_end()
            mailbox.take_end()
            if await self._stalls():
                return
        got = [part.vector for part in mailbox.unread]
        true = true_vector(client, self.scenario.model)
        assert got == [true], f"{client} finished with the vectors {got}, not {true}"

    async def _stalls(self) -> bool:
        """A client has read something. Whether it has stopped reading; it may raise."""
        if self.injector.happens(FaultKind.CLIENT_RAISES):
            raise Injected("in a client")
        if self.injector.happens(FaultKind.STALL):
            await trio.sleep(PATIENCE / 2)
            return True
        return False

    def _stream(self, client: Client) -> AbstractAsyncContextManager[Deltas | DeltaStream]:
        """Images are prepared here: `Engine.stream` would do it in a thread, whose turn no schedule decides."""
        if self.scenario.model.kind is not Kind.ENCODER_DECODER:
            return self.engine.inside._deltas(self._request(client), wait=True, texts=None)
        return self.engine.stream(
            prompt_token_ids=client.prompt,
            audio=audio(client.audio),
            sampling=client.sampling,
            priority=client.priority,
        )

    def _request(self, client: Client) -> Request:
        prompt = prepared(client, self.scenario.model)
        return Request(
            id=self.engine.inside._new_id(None),
            prompt_token_ids=prompt.token_ids,
            items=prompt.items,
            rules=LogitRules(),
            max_tokens=client.max_tokens if client.pooling is None else 1,
            pooling=client.pooling,
            priority=client.priority,
        )


def simulate(scenario: Scenario, schedule: Schedule | None = None, fault: Fault | None = None) -> Outcome:
    """Runs ``scenario`` once and checks everything that the engine promises.

    Args:
        scenario: see `SCENARIOS` for those that are shipped.
        schedule: which task runs next; one task a tick, by chance, by default.
        fault: what goes wrong, and when.

    Raises:
        InvariantViolation: a promise is broken; the note says how to run it again.
        AssertionError: a client got a wrong token, or the simulated device was misused (a page freed too early, say).
        Deadlock: all tasks wait for ever.
        ValueError: a fault at a step that cannot be: the task is not there, or the step is below 1.
        RuntimeError: ^C is to be injected where the program does not listen to it.
    """
    schedule = schedule or Uniform()
    _check_fault(fault)
    injector = _Injector(fault)
    run = _Run(scenario, injector)
    try:
        interrupted = _run_to_its_end(run, schedule)
        if run.violation is not None:
            raise run.violation
        _judge(run, interrupted=interrupted)
    except Exception as error:
        error.add_note(f"run it again with {again(scenario, schedule, fault)}")
        raise
    unknown = fault is not None and fault.kind not in OCCASIONS and fault.task not in injector.steps
    if fault is not None and unknown and not injector.met:
        raise ValueError(f"{fault!r}: no such task; allowed: {', '.join(sorted(injector.steps))}")
    return Outcome(
        scenario=scenario.name,
        met=injector.met,
        steps=dict(injector.steps),
        ends=tuple(run.ends),
        error=run.error,
        trace=tuple(run.trace),
        seconds=run.seconds,
        requests=run.books.requests if run.books is not None else None,
    )


def again(scenario: Scenario, schedule: Schedule, fault: Fault | None) -> str:
    """The line of Python that runs it again."""
    shipped = SCENARIOS.get(scenario.name) == scenario
    return f"simulate({f'SCENARIOS[{scenario.name!r}]' if shipped else repr(scenario)}, {schedule!r}, {fault!r})"


def _check_fault(fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.task != OCCASIONS.get(fault.kind, fault.task):
        raise ValueError(f"{fault!r}: this kind is counted in {OCCASIONS[fault.kind]!r}")
    if fault.step < 1:
        raise ValueError(f"{fault!r}: steps are counted from 1")
    if fault.kind is FaultKind.INTERRUPT and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        raise RuntimeError("SIGINT is ignored or handled by others here, so that no ^C can be injected")


def _run_to_its_end(run: _Run, schedule: Schedule) -> bool:
    """Whether it ended with the ^C that was injected, and nothing else."""
    fault = run.injector.fault
    try:
        run_scheduled(run.main, schedule=schedule, instruments=[run.injector])
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if not (fault is not None and fault.kind is FaultKind.INTERRUPT and run.injector.met):
            raise
        others = error.split(KeyboardInterrupt)[1] if isinstance(error, BaseExceptionGroup) else None
        if others is not None:
            raise others from None
        _judge_notes(error)
        return True
    return False


def _judge_notes(interrupt: BaseException) -> None:
    """What else went wrong would be in the notes of the ^C."""
    inside = interrupt.exceptions if isinstance(interrupt, BaseExceptionGroup) else (interrupt,)
    notes = [note for error in (interrupt, *inside) for note in getattr(error, "__notes__", ())]
    assert not notes, f"more than the ^C went wrong: {notes}"


def _judge(run: _Run, *, interrupted: bool) -> None:
    """Everything must be back, and everybody must have been told the truth."""
    kind = run.injector.fault.kind if run.injector.fault is not None and run.injector.met else None
    _judge_error(run, kind)
    assert interrupted == (kind is FaultKind.INTERRUPT), "the ^C did not come out"
    done = run.scenario.leaves < FOREVER or set(run.ends) <= {"finished", "left", run.scenario.refusal}
    assert done or kind is not FaultKind.CANCEL or run.injector.scope.cancelled_caught, "the cancellation was swallowed"
    assert not run.executor.misuses, f"the device was misused: {run.executor.misuses[0]}"
    hung = events.StageReached("device call abandoned") in run.trace
    assert hung or not run.executor.is_open, "the device was not released"
    assert not run.worker.abandoned or kind in {FaultKind.STEP_HANGS, FaultKind.CRASH}, (
        "the way out did not wait for it"
    )
    opened = events.StageReached("accepting") in run.trace
    failed = [event for event in run.trace if isinstance(event, events.ActorFailed)]
    assert not failed or kind in _FATAL, f"an actor failed: {failed[0]}"
    if not run.blind:
        run.checker.end()
    if opened and not (hung or failed or run.blind):
        _judge_teardown(run)
    _judge_books(run, opened=opened, whole=not (hung or failed))
    _judge_ends(run, kind)


_FATAL = {FaultKind.CRASH, FaultKind.DEVICE_LOST, FaultKind.STEP_HANGS}
_WELL = {"finished", "left"}
_STOPPED = {"cancelled", "not started"}
_BROKEN = _STOPPED | {"crashed", RunnerCrashed.__name__, EngineClosed.__name__, EngineStateError.__name__}
_MAY_END: Mapping[FaultKind | None, set[str]] = {
    FaultKind.ENCODE_FAILS: _WELL | {EncodeFailed.__name__},
    FaultKind.OUT_OF_MEMORY: _WELL | {EncodeFailed.__name__},
    FaultKind.WAKE_FAILS: _WELL | {EngineAsleep.__name__},
    FaultKind.CANCEL: _WELL | _STOPPED,
    FaultKind.CANCEL_RELEASE_FAILS: _WELL | _STOPPED,
    FaultKind.INTERRUPT: _WELL | _STOPPED,
    FaultKind.STEP_HANGS: _WELL | _STOPPED,
    FaultKind.CRASH: _WELL | _BROKEN,
    FaultKind.CLIENT_RAISES: _WELL | _STOPPED | {"crashed"},
    FaultKind.OPEN_FAILS: {"not started"},
    FaultKind.DEVICE_LOST: _WELL | _BROKEN,
}


def _judge_error(run: _Run, kind: FaultKind | None) -> None:
    """What left the block must be the one error that tells of the fault, and of nothing else."""
    error = run.error
    if kind is FaultKind.CLIENT_RAISES and run.scenario.outside:
        assert error is None, f"a client outside of the block has raised, and {error!r} left it"
    elif kind is FaultKind.OPEN_FAILS:
        assert isinstance(error, RuntimeError), f"the load's error was swallowed: {error!r}"
    elif kind in {FaultKind.CRASH, FaultKind.CLIENT_RAISES, FaultKind.OBSERVER_FAILS}:
        assert _tells_of(error, Injected), f"the crash was swallowed; what left the block is {error!r}"
    elif kind is FaultKind.DEVICE_LOST:
        assert isinstance(error, RunnerCrashed), f"the lost device was swallowed; what left the block is {error!r}"
        assert _tells_of(error, DeviceLost), "nobody says why"
    elif run.injector.release_failed:
        assert isinstance(error, EngineTeardownError), f"the release that failed was swallowed: {error!r}"
    elif kind is FaultKind.STEP_HANGS:
        assert isinstance(error, EngineTeardownError), f"a step hung, and nobody says so: {error!r}"
    elif error is not None:
        raise error


def _tells_of(error: BaseException | None, kind: type[Exception]) -> bool:
    """Whether it is of ``kind``, holds one, or was caused by one."""
    if error is None:
        return False
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return isinstance(error, kind) or any(_tells_of(other, kind) for other in (*inside, error.__cause__))


def _judge_teardown(run: _Run) -> None:
    assert not run.executor.left, f"encoder outputs are left: {sorted(run.executor.left)}"
    reached = [event.stage for event in run.trace if isinstance(event, events.StageReached)]
    stages = tuple(stage for stage in reached if stage in TEARDOWN)
    assert stages == TEARDOWN, f"the teardown went through {stages}"
    cut_off = [stage for stage in reached if stage.endswith("cut off")]
    assert not cut_off, f"{cut_off}, though the device answered"


def _may_end(run: _Run, kind: FaultKind | None) -> set[str]:
    """How clients may end after a fault of ``kind``, those outside of the block included."""
    allowed = set(_MAY_END.get(kind, _WELL))
    alone = Counter(event.keys for event in run.trace if isinstance(event, events.EncodeBroke) and len(event.keys) == 1)
    if not any(count > 1 for count in alone.values()):
        allowed -= {EncodeFailed.__name__}  # a batch that fails is tried again in halves, an item alone once more
    failed = [event.actor for event in run.trace if isinstance(event, events.ActorFailed)]
    if failed and failed[0] != "runner":
        allowed -= {RunnerCrashed.__name__}
    elif failed and run.scenario.outside:
        allowed -= {EngineClosed.__name__}
    elif run.scenario.outside and kind is not None:  # the time to drain may be over before they are done
        allowed |= {EngineClosed.__name__, EngineStateError.__name__}
    return allowed


def _judge_ends(run: _Run, kind: FaultKind | None) -> None:
    allowed = _may_end(run, kind) | {run.scenario.refusal or "finished"}
    if run.scenario.leaves < FOREVER and not run.scenario.outside:
        allowed |= _STOPPED
    strange = {number: end for number, end in enumerate(run.ends) if end not in allowed}
    assert not strange, f"clients ended as {strange}; allowed: {sorted(allowed)}"


def _judge_books(run: _Run, *, opened: bool, whole: bool) -> None:
    """No request holds a permit, a place, a page, a slot or an entry; a step that hangs keeps what it was given."""
    engine = run.engine
    pending = engine.inside.pending
    assert not pending, f"{pending} permits of the queue did not come back"
    books = run.books
    if not (opened and whole) or books is None:
        return
    requests = books.requests
    left = requests.waiting + requests.running + requests.leaving + requests.cross_slots_used
    assert not left, f"the planner still has {requests}"
    assert requests.pages_free == requests.pages, f"{requests.pages - requests.pages_free} pages did not come back"
    cache = books.encoder_cache
    assert not (held := cache.held + cache.waiting), f"{held} holders or waiters are left: {cache}"
    assert not cache.entries, f"the ledger still has entries: {cache}"
    assert cache.taken == 0, f"the ledger's bytes do not balance: {cache}"
