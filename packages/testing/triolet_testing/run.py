"""One run of a scenario: its clients, its operator and the engine between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import trio
from attrs import define, field

from triolet.actors.statistics import EngineStatistics
from triolet.actors.supervisor import Supervisor
from triolet.actors.worker import Job
from triolet.api.engine import Engine
from triolet.api.outputs.streams import Deltas, DeltaStream
from triolet.core import events
from triolet.core.config import EngineConfig
from triolet.core.errors import (
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineStateError,
    InvariantViolation,
    TrioletError,
)
from triolet.core.model import Kind
from triolet.core.plan import DeviceMemory, StepPlan
from triolet.core.request import Request
from triolet.core.trace import TraceChecker

from .clients import Client, Scenario, audio, request_of, true_answer, true_probe, true_tokens
from .faults import ACTORS, FaultKind, Injected, Injector
from .sim import DeviceArgument, SimExecutor, SimWorker, sim_engine
from .step_judge import JudgedWorker, StepJudge

PATIENCE = 60.0
"""The virtual seconds after which a scenario's body leaves the block, even if clients still wait."""


def books_of(engine: Engine, trace: Sequence[events.Event]) -> EngineStatistics | None:
    """Returns the engine's statistics; ``None``: its block was never entered."""
    supervisor = engine.inside.backend
    opened = events.StageReached("accepting") in trace
    return supervisor.statistics() if opened and supervisor is not None else None


@define(eq=False)
class Run:
    """One simulated run."""

    scenario: Scenario
    injector: Injector
    executor: SimExecutor = field(init=False)
    judge: StepJudge = field(init=False)
    worker: SimWorker = field(init=False)
    engine: Engine = field(init=False)
    trace: list[events.Event] = field(factory=list)
    ends: list[str] = field(init=False)
    error: BaseException | None = None
    violation: InvariantViolation | None = None
    blind: bool = False  # the observer has raised, so later events are unknown
    seconds: float = 0.0
    users_interval: float = field(init=False)
    strange_interval: str | None = None  # when and how the switch interval was wrong
    checker: TraceChecker = field(init=False)
    operated: trio.Event = field(factory=trio.Event)  # the operator has given all orders, or the engine has ended

    def __attrs_post_init__(self) -> None:
        scenario = self.scenario
        self.ends = ["not started"] * len(scenario.clients)
        self.executor = SimExecutor(scenario.model, fault=self._on_device)
        settings: dict[str, object] = {"drain_seconds": 1.0, "stage_seconds": 2.0, **scenario.config}
        config = EngineConfig(observer=self._observe, **settings)  # type: ignore[arg-type]
        self.checker = TraceChecker(capacity=config.encoder_cache_bytes, steps_in_flight=config.steps_in_flight)
        self.injector.put_back = self._put_back
        self.judge = StepJudge(scenario.model, config)
        self.worker = JudgedWorker(hangs=self.injector.hangs, judge=self.judge)
        self.users_interval = self.worker.interpreter.read()
        self.engine = sim_engine(self.executor, config=config, worker=self.worker)

    def _put_back(self, actor: str, message: object) -> None:
        if (channel := ACTORS[actor]) is not None:
            getattr(self.engine.inside.backend, channel).send_nowait(message)

    def _observe(self, event: events.Event) -> None:
        self.trace.append(event)
        self._watch_interval(f"at {event}", working=self.worker.in_flight)
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

    def _on_device(self, job: Job, argument: DeviceArgument) -> BaseException | None:
        self._watch_interval(f"in {job}", working=not self.worker.abandoned)
        planner = self._supervisor()._planner
        if isinstance(argument, StepPlan) and planner is not None:  # the device keeps nothing that counts as free
            self.executor.give_away(planner._room.states._free)
        return self.injector.on_device(job, argument)

    def _watch_interval(self, when: str, *, working: bool) -> None:
        """Notes the first time at which the interpreter's switch interval is wrong."""
        interpreter = self.worker.interpreter
        if self.strange_interval is None and (interpreter.read() < self.users_interval) != working:
            doing = "calls are in flight" if working else "no call is in flight"
            self.strange_interval = f"{interpreter.microseconds} microseconds {when}, while {doing}"

    def _compare_with_device(self, event: events.Event) -> None:
        """Checks the promise "books balance": the device has exactly the bytes that the statistics report, also after a
        call that failed, and the outputs that the events report."""
        told, held = self._memory(), self.executor.memory()
        if self.executor.is_open and not self.worker.abandoned and told != held:
            raise InvariantViolation("books balance", f"reported: {told}; there is: {held}", tuple(self.trace[-8:]))
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

    def _memory(self) -> DeviceMemory:
        return self._supervisor()._runner.memory

    def _supervisor(self) -> Supervisor:
        supervisor = self.engine.inside.backend
        assert isinstance(supervisor, Supervisor), "events come from an engine of this process"
        return supervisor

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
            if self.scenario.naps:
                outside.start_soon(self._operate, name="operator")
            if self.scenario.outside:
                self._start_clients(outside)
                await trio.sleep(self.scenario.leaves)
                return
            async with trio.open_nursery() as nursery:
                self._start_clients(nursery)
                if self.scenario.naps:
                    nursery.start_soon(self.operated.wait, name="operator's end")
        if scope.cancelled_caught and self.scenario.leaves > PATIENCE and self._kind is not FaultKind.STEP_HANGS:
            unfinished = [number for number, end in enumerate(self.ends) if end in {"not started", "cancelled"}]
            raise InvariantViolation("terminal once", f"clients {unfinished} wait for ever", tuple(self.trace[-20:]))

    @property
    def books(self) -> EngineStatistics | None:
        """The engine's statistics; ``None``: its block was never entered."""
        return books_of(self.engine, self.trace)

    def _start_clients(self, nursery: trio.Nursery) -> None:
        for number, client in enumerate(self.scenario.clients):
            nursery.start_soon(self._client, number, client, name=f"client {number}")

    async def _operate(self) -> None:
        """Gives the orders from outside of the block: each is answered, however the engine ends."""
        try:
            await self._give_orders()
        finally:
            self.operated.set()

    async def _give_orders(self) -> None:
        asleep, begun = False, trio.current_time()
        for after in self.scenario.naps:
            await trio.sleep_until(begun + after)
            asleep = not asleep
            try:
                await self._order(asleep)
            except (EngineClosed, EngineStateError):
                return
            right = self.executor.is_asleep is asleep or not self.executor.is_open
            assert right, f"{'sleep' if asleep else 'wake'}() returned, and it did not"

    async def _order(self, asleep: bool) -> None:
        """Puts the engine to sleep, or wakes it. The engine may refuse only because of the fault, and only once."""
        order, fault = self.engine.wake, FaultKind.WAKE_FAILS
        refusal: type[EngineError] = EngineAsleep
        if asleep:
            order, fault, refusal = self.engine.sleep, FaultKind.SLEEP_FAILS, EngineError
        try:
            await order()
        except (EngineClosed, EngineStateError):
            raise
        except refusal:
            assert self._kind is fault, f"{fault.value}, though nothing keeps it"
            await order()

    @property
    def _kind(self) -> FaultKind | None:
        return None if self.injector.fault is None else self.injector.fault.kind

    async def _client(self, number: int, client: Client) -> None:
        if client.arrives:
            await trio.sleep(client.arrives)
        self.ends[number] = "cancelled"
        try:
            with trio.move_on_after(client.patience) as scope:
                await self._reading(client)
            self.ends[number] = "left" if scope.cancelled_caught else "finished"
        except TrioletError as error:
            self.ends[number] = type(error).__name__
        except Injected:
            self.ends[number] = "crashed"
            if not self.scenario.outside:
                raise

    async def _reading(self, client: Client) -> None:
        if client.adapter:
            await self._read_by_adapter(client)
        elif client.reads_only:
            await self._read_answer(client)
        elif client.probe is not None:
            await self._read_together(client)
        else:
            await self._read(client)

    async def _read_by_adapter(self, client: Client) -> None:
        supervisor = self._supervisor()
        loaded = [await supervisor.load_adapter(client.adapter)]

        def unload() -> None:
            while loaded:
                supervisor.unload_adapter(loaded.pop())

        try:
            await self._read(client, unload)
        finally:
            unload()

    async def _read_together(self, client: Client) -> None:
        answer = await self.engine.inside._run(self._request(client), priority=client.priority, wait=True)
        await self._stalls()
        true = true_tokens(client, self.scenario.model)
        assert answer.token_ids == true, f"{client} finished with the tokens {answer.token_ids}, not {true}"
        assert answer.probe == true_probe(client), f"{client} was told {answer.probe} of its probe"

    async def _read(self, client: Client, on_entered: Callable[[], None] = lambda: None) -> None:
        true = true_tokens(client, self.scenario.model)
        got: tuple[int, ...] = ()
        async with self._stream(client) as deltas:
            on_entered()
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

    async def _read_answer(self, client: Client) -> None:
        async with self.engine.inside._submitted(self._request(client), trio.current_time(), wait=True) as mailbox:
            await mailbox.wait_end()
            mailbox.take_end()
            if await self._stalls():
                return
        got = [part.vector or part.aligned for part in mailbox.unread]
        true = true_answer(client, self.scenario.model)
        assert got == [true], f"{client} finished with the answers {got}, not {true}"

    async def _stalls(self) -> bool:
        """Returns whether a client that has read a delta stops reading. Raises an error if that is the fault."""
        if self.injector.happens(FaultKind.CLIENT_RAISES):
            raise Injected("in a client")
        if self.injector.happens(FaultKind.STALL):
            await trio.sleep(PATIENCE / 2)
            return True
        return False

    def _stream(self, client: Client) -> AbstractAsyncContextManager[Deltas | DeltaStream]:
        """Opens a stream. A request with images is made here, since `Engine.stream` would make it in a thread, which no
        schedule controls.
        """
        if self.scenario.model.kind is not Kind.ENCODER_DECODER:
            return self.engine.inside.follow(self._request(client), trio.current_time(), wait=True)
        return self.engine.stream(
            prompt_token_ids=client.prompt,
            audio=audio(client.audio),
            sampling=client.sampling,
            priority=client.priority,
        )

    def _request(self, client: Client) -> Request:
        return request_of(client, self.scenario.model, self.engine.inside._new_id(None))
