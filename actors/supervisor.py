"""The supervisor: starts the actors, watches them, and stops them in order however the engine ends.

The order follows the flow of data::

    intake closes -> the scheduler drains (or aborts), and the step lane closes
                  -> the encoder cache frees every entry, and the encode lane closes
                  -> the runner finishes its calls and gives the device back
                  -> channels close

Each stage is bounded in time, and an actor that exceeds its time is cancelled hard. The teardown runs in a task of its
own, since a KeyboardInterrupt breaks through shields in the main task.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from attrs import define, field

from ..core import events, log_lines, tracebacks
from ..core.batch_size import BatchSize
from ..core.config import EngineConfig
from ..core.errors import EngineClosed, EngineTeardownError, InvariantViolation, RunnerCrashed, caused
from ..core.executor import Executor
from ..core.ledger import EncoderLedger
from ..core.model import ModelDescription
from ..core.planning.limits import PlannerLimits
from ..core.planning.planner import Planner
from ..core.power import Order, PowerState
from ..core.request import Request
from ..core.trace import TraceChecker
from . import messages as m
from .emit import Emit
from .encoder_cache import EncoderCache
from .gpu_runner import GpuRunner
from .process import Process
from .replies import Loading, Reply
from .scheduler import Scheduler
from .statistics import EngineStatistics
from .worker import Worker

RunActor = Callable[..., Awaitable[None]]
"""An actor's ``run``, which takes a ``task_status``."""


@define(eq=False)
class _Child:
    """One supervised actor. Cancelling ``scope`` stops the actor, and ``done`` is set when it has ended. ``error`` is
    the error that ended it."""

    name: str
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    done: trio.Event = field(factory=trio.Event)
    started: bool = False
    error: BaseException | None = None


@define(eq=False)
class _Status:
    """Passes ``started()`` on, and shields the child from then on: only the supervisor stops a running actor.

    If the parent is cancelled already, trio leaves the child in the nursery of ``start`` and cancels both. The child is
    not shielded then.
    """

    child: _Child
    status: trio.TaskStatus[Any]

    def started(self, value: Any = None) -> None:
        cancelled = trio.current_effective_deadline() == -math.inf
        self.status.started(value)
        if not cancelled:
            self.child.started = True
            self.child.scope.shield = True


@define(eq=False)
class Supervisor:
    """Owns the nursery of one engine and the channels between its actors."""

    config: EngineConfig
    make_executor: Callable[[], Executor]
    worker: Worker
    _accepting: bool = field(default=False, init=False)
    _process: Process = field(factory=Process, init=False)
    _planner: Planner | None = field(default=None, init=False)
    _power: PowerState = field(factory=PowerState, init=False)
    _emit: Emit = field(init=False)
    _opened_at: float = field(default=math.nan, init=False)
    _held: int = field(default=0, init=False)  # bytes on the device when the teardown began
    _ledger: EncoderLedger | None = field(default=None, init=False)
    _runner: GpuRunner = field(init=False)
    _children: dict[str, _Child] = field(factory=dict, init=False)  # in the order of their starts
    _fault: BaseException | None = field(default=None, init=False)
    failure: str | None = field(default=None, init=False)
    """The type and text of the error that ended the engine, if an error did."""
    _teardown_errors: list[Exception] = field(factory=list, init=False)
    _drain_seconds: float = field(default=0.0, init=False)
    _hurried: bool = field(default=False, init=False)  # the engine's surroundings were cancelled
    _stop: trio.Event = field(factory=trio.Event, init=False)
    _stopped: trio.Event = field(factory=trio.Event, init=False)
    _body: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _to_scheduler: trio.MemorySendChannel[m.SchedulerMessage] = field(init=False)
    _to_encoder_cache: trio.MemorySendChannel[m.EncoderCacheMessage] = field(init=False)
    _to_step_lane: trio.MemorySendChannel[m.StepLaneMessage] = field(init=False)
    _to_encode_lane: trio.MemorySendChannel[m.EncodeLaneMessage] = field(init=False)
    _scheduler_inbox: trio.MemoryReceiveChannel[m.SchedulerMessage] = field(init=False)
    _encoder_cache_inbox: trio.MemoryReceiveChannel[m.EncoderCacheMessage] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._to_scheduler, self._scheduler_inbox = trio.open_memory_channel(math.inf)
        self._to_encoder_cache, self._encoder_cache_inbox = trio.open_memory_channel(math.inf)
        self._to_step_lane, steps = trio.open_memory_channel[m.StepLaneMessage](math.inf)
        self._to_encode_lane, encodes = trio.open_memory_channel[m.EncodeLaneMessage](math.inf)
        config, checker = self.config, None
        if config.verify:
            checker = TraceChecker(capacity=config.encoder_cache_bytes, steps_in_flight=config.steps_in_flight)
        self._emit = Emit(config.observer, checker, self._stop, self._body)
        self._runner = GpuRunner(
            steps=steps,
            encodes=encodes,
            to_scheduler=self._to_scheduler,
            to_encoder_cache=self._to_encoder_cache,
            worker=self.worker,
            make_executor=self.make_executor,
            config=config,
            emit=self._emit,
        )

    # -- for the engine ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection  # ^C comes at the body's and the nursery's checkpoints, not between our lines
    async def running(self) -> AsyncIterator[ModelDescription]:
        """Runs the engine in a block. An exception of the body leaves the block unchanged, never wrapped in a group.

        Raises:
            CheckpointError: the model cannot be loaded.
            RunnerCrashed: an actor failed while the body ran; the body was cancelled.
            EngineTeardownError: something could not be given back in time, or a release failed.
            InvariantViolation: with ``EngineConfig(verify=True)``, the engine broke one of its promises.
        """
        body_error: BaseException | None = None
        try:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._supervise, name="triolet supervisor")
                    nursery.start_soon(self._hasten, name="triolet hastener")
                    try:
                        description = await self._start(nursery)
                        with self._body:
                            yield description
                        if not (self._stop.is_set() or self._hurried):  # after a fault no request can finish
                            self._drain_seconds = self.config.drain_seconds
                    except BaseException as error:  # noqa: BLE001  (raised again below, outside the nursery)
                        body_error = error
                    finally:
                        self._stop.set()
            except BaseException as error:  # noqa: BLE001  (a cancellation or ^C while the teardown ran; raised below)
                body_error = more_urgent(body_error, error, trio.Cancelled)
            self._raise_end(body_error)
        finally:
            del body_error

    async def stop(self, drain_seconds: float) -> None:
        """Stops the engine before its block ends. Requests that run longer than ``drain_seconds`` are aborted."""
        if not self._stop.is_set():
            self._drain_seconds = drain_seconds
        self._stop.set()
        self._drain_within(drain_seconds)
        await self._stopped.wait()

    def submit(self, request: Request, stream: m.Stream) -> None:
        """Hands a checked request over to the scheduler.

        Raises:
            EngineClosed: the engine is stopping.
        """
        if not self._accepting or self._stop.is_set():
            raise EngineClosed("the engine is stopping and takes no new requests; open a new engine")
        self._to_scheduler.send_nowait(m.Submit(request, stream))

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """Aborts a request, which counts as finished if it is ``stopped``. May be called under cancellation and while
        the engine stops. Never raises."""
        if not self._stopped.is_set():
            self._to_scheduler.send_nowait(m.AbortRequest(request_id, stopped))

    async def sleep(self) -> None:
        """Gives the device back, and returns when that is done."""
        await self._order(Order.SLEEP)

    async def wake(self) -> None:
        """Takes the device again, and returns when that is done."""
        await self._order(Order.WAKE)

    async def _order(self, order: Order) -> None:
        if not self._accepting or self._stop.is_set():
            raise EngineClosed("the engine is stopping: its device is given back for good")
        reply = Reply()
        self._to_scheduler.send_nowait(m.OrderPower(order, reply))
        await reply.done.wait()
        tracebacks.raise_kept(reply, "error")

    async def load_adapter(self, folder: str) -> str:
        """Loads an adapter, and returns its key. Each load is to be taken back by `unload_adapter`."""
        if not self._accepting or self._stop.is_set():
            raise EngineClosed("the engine is stopping and loads no adapters; open a new engine")
        loading = Loading(self.unload_adapter)
        self._to_scheduler.send_nowait(m.LoadAdapter(folder, loading))
        return await loading.wait()

    def unload_adapter(self, key: str) -> None:
        """Takes one load of an adapter back. Never waits, never raises."""
        if not self._stopped.is_set():
            self._to_scheduler.send_nowait(m.UnloadAdapter(key))

    def statistics(self) -> EngineStatistics:
        """Returns a snapshot of the engine's figures."""
        assert self._planner is not None, "statistics before the start"
        assert self._ledger is not None, "the ledger is made with the planner"
        return EngineStatistics(
            power=self._power.power,
            requests=self._planner.statistics(),
            encoder_cache=self._ledger.statistics(),
            device=self._runner.memory,
        )

    def held_keys(self) -> tuple[str, ...]:
        """Returns the keys of the encoder outputs that are resident or will be, in the order of their reservations."""
        assert self._ledger is not None, "the ledger is made with the planner"
        return tuple(self._ledger.entries())

    def keys_to_come(self) -> frozenset[str]:
        """Returns the keys of the encoder outputs that are still to be encoded."""
        assert self._ledger is not None, "the ledger is made with the planner"
        return self._ledger.keys_to_come()

    # -- start -------------------------------------------------------------------------------------------------------

    async def _start(self, nursery: trio.Nursery) -> ModelDescription:
        run_runner = partial(self._runner.run, nursery)
        description: ModelDescription = await self._start_child(nursery, "runner", run_runner)
        self._planner = Planner(PlannerLimits.of(description, self.config))
        batch_size = BatchSize(self.config.encode_budget(description.device))
        self._ledger = EncoderLedger(self.config.encoder_cache_bytes, batch_size)
        cache = EncoderCache(
            inbox=self._encoder_cache_inbox,
            to_scheduler=self._to_scheduler,
            to_runner=self._to_encode_lane,
            ledger=self._ledger,
            idle_seconds=self.config.encoder_idle_seconds,
            emit=self._emit,
        )
        await self._start_child(nursery, "encoder cache", cache.run)
        scheduler = Scheduler(
            inbox=self._scheduler_inbox,
            to_encoder_cache=self._to_encoder_cache,
            to_runner=self._to_step_lane,
            planner=self._planner,
            power=self._power,
            idle_sleep=self.config.idle_sleep,
            refuses_while_asleep=self.config.while_asleep == "refuse",
            emit=self._emit,
        )
        await self._start_child(nursery, "scheduler", scheduler.run)
        self._accepting = True
        self._emit(events.StageReached("accepting"))
        self._opened_at = trio.current_time()
        self._emit.write(log_lines.opened(description, self._runner.memory))
        return description

    async def _start_child(self, nursery: trio.Nursery, name: str, run: RunActor) -> Any:
        child = _Child(name)
        return await nursery.start(self._run_child, child, run, name=f"triolet {name}")

    @trio.lowlevel.enable_ki_protection
    async def _run_child(self, child: _Child, run: RunActor, *, task_status: trio.TaskStatus[Any]) -> None:
        """Runs an actor. Until the actor has called ``started()``, its error is raised as an error of the start. Later
        errors are reported, never raised."""
        self._children[child.name] = child
        try:
            with child.scope:
                await run(task_status=_Status(child, task_status))
        except BaseException as error:
            tracebacks.clear_frames(error)  # else the actor's locals would live as long as the error
            if not child.started:
                self._stop.set()  # at once: other actors may end by the last messages of this one, without a fault
                raise
            child.error = tracebacks.without(error, trio.Cancelled) or error
        finally:
            child.done.set()
        if child.started:
            self._child_ended(child)

    def _child_ended(self, child: _Child) -> None:
        """Handles the end of an actor. An end that nobody ordered is a fault. If the runner is gone, the other actors
        must not wait for it."""
        error, child.error = child.error, None  # the child is in a frame of its error's traceback
        if error is None and self._stop.is_set():
            return
        if isinstance(error, EngineTeardownError) and self._stop.is_set():
            self._teardown_errors.append(error)
            self._emit.write(log_lines.teardown(error))
            return
        cause = error or RuntimeError(f"the {child.name} ended, though nobody had asked it to")
        self._emit(events.ActorFailed(child.name, events.error_text(cause)))
        if self._fault is None:
            self._fault, self.failure = cause, events.error_text(cause)
        if child.name == "runner":
            crash = RunnerCrashed(
                f"the runner stopped ({type(cause).__name__}: {cause}), so requests that were running cannot go on; "
                "open a new engine and send them again"
            )
            self._to_scheduler.send_nowait(m.RunnerStopped(caused(crash, cause)))
            self._to_encoder_cache.send_nowait(m.RunnerLost())
        self._stop.set()
        self._body.cancel()

    # -- stop --------------------------------------------------------------------------------------------------------

    def _drain_within(self, seconds: float) -> None:
        """Orders the scheduler to drain. If the scheduler drains already, the earlier deadline holds."""
        if not self._stopped.is_set():
            self._to_scheduler.send_nowait(m.Drain(trio.current_time() + seconds))

    async def _hasten(self) -> None:
        """Cuts the drain short if the engine's surroundings are cancelled. A body that still runs is cancelled too, so
        the engine stays open until the body ends: otherwise the body would get `EngineClosed`."""
        try:
            await self._stopped.wait()
        except trio.Cancelled:
            self._drain_seconds = 0.0
            self._hurried = True
            if self._stop.is_set():
                self._drain_within(0.0)
            raise

    @trio.lowlevel.enable_ki_protection
    async def _supervise(self) -> None:
        """Waits for the order to stop, then runs the stages of the teardown. The shield keeps a cancellation from
        ending the teardown half-way."""
        with trio.CancelScope(shield=True):
            await self._stop.wait()
            if self._process.is_forked:
                self._forget()
                return
            if isinstance(self._emit.error, InvariantViolation) and self.failure is None:
                self.failure = events.error_text(self._emit.error)
            self._emit(events.StageReached("intake closed"))
            self._held = self._runner.memory.total
            self._drain_within(self._drain_seconds)
            await self._stop_child("scheduler", self._drain_seconds + self.config.stage_seconds)
            self._to_step_lane.close()
            # the scheduler's own last message, sent here too in case the scheduler never started
            self._to_encoder_cache.send_nowait(m.SchedulerClosed())
            await self._stop_child("encoder cache", self.config.stage_seconds)
            self._to_encode_lane.close()
            await self._stop_child("runner", self.config.stage_seconds)
            for end in (
                *(self._to_scheduler, self._to_encoder_cache),
                *(self._scheduler_inbox, self._encoder_cache_inbox, self._runner.steps, self._runner.encodes),
            ):
                end.close()
            self._emit(events.StageReached("channels closed"))
            self._emit.end()
            self._write_closed()
            self._stopped.set()

    def _forget(self) -> None:
        """Ends the tasks in a fork, without a word and without their threads."""
        self._emit.mute()
        for child in self._children.values():
            child.scope.cancel()
        self._stopped.set()

    def _write_closed(self) -> None:
        if self._planner is None or not self._accepting:
            return  # the engine never opened
        done, left = self._planner.statistics(), self._runner.memory.total
        seconds = trio.current_time() - self._opened_at
        self._emit.write(
            log_lines.closed(self._emit.ended, done.tokens_committed, done.steps, seconds, self._held, left)
        )

    async def _stop_child(self, name: str, seconds: float) -> None:
        """Waits ``seconds`` for an actor that was ordered to end, then cancels the actor hard."""
        child = self._children.get(name)
        if child is None:
            return
        with trio.move_on_after(seconds):
            await child.done.wait()
        if not child.done.is_set():
            self._emit(events.StageReached(f"{name} cut off"))
            child.scope.cancel()
            await child.done.wait()
        self._emit(events.StageReached(f"{name} stopped"))

    def _raise_end(self, body_error: BaseException | None) -> None:
        """Raises the error that leaves the block."""
        error = leaving(body_error, self._our_error(), trio.Cancelled)
        try:
            if error is not None:
                raise error
        finally:
            del error, body_error  # a frame in its own error's traceback would be a reference cycle

    def _our_error(self) -> Exception | None:
        """Returns the error of the engine itself, and keeps no reference to it."""
        fault, self._fault = self._fault, None
        teardown_errors, self._teardown_errors = self._teardown_errors, []
        self._children.clear()
        told, self._emit.error = self._emit.error, None
        if isinstance(told, InvariantViolation):
            return told
        fault = fault or told
        if fault is not None:
            error = RunnerCrashed(
                f"a part of the engine failed ({type(fault).__name__}: {fault}); the engine was stopped"
            )
            for further in teardown_errors:
                error.add_note(str(further))
            return caused(error, fault)
        return teardown_errors[0] if teardown_errors else None


def more_urgent(
    body_error: BaseException | None, nursery_error: BaseException, cancelled: type[BaseException]
) -> BaseException:
    """Returns the error that leaves a block if its nursery raised too. A cancellation of the surroundings, which is an
    instance of ``cancelled``, is dropped in favour of the body's error. A ^C takes precedence over the body's error."""
    rest = tracebacks.without(nursery_error, cancelled)
    if rest is None:
        return body_error or nursery_error
    if body_error is not None:
        rest.__context__ = body_error
    return rest


def leaving(
    body_error: BaseException | None, ours: BaseException | None, cancelled: type[BaseException]
) -> BaseException | None:
    """Returns the one exception that leaves an engine's block: the body's error, with the engine's error (``ours``) in
    a note, or else ``ours``. A broken promise takes precedence over an error of the body, since that error may follow
    from it. ``ours`` also takes precedence over a cancellation of the body, which is an instance of ``cancelled``.
    """
    if ours is None:
        return body_error
    if body_error is None:
        return ours
    if isinstance(ours, InvariantViolation) and isinstance(body_error, Exception):
        ours.__cause__ = body_error
        return ours
    if is_cancellation(body_error, cancelled) or isinstance(body_error, GeneratorExit):  # the latter is swallowed
        return ours
    body_error.add_note(f"the engine's end failed too: {type(ours).__name__}: {ours}")
    return body_error


def is_cancellation(error: BaseException, cancelled: type[BaseException]) -> bool:
    """True if ``error`` is an instance of ``cancelled``, or a group of nothing but such instances."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(cancelled)[1] is None
    return isinstance(error, cancelled)
