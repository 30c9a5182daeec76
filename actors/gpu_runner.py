"""The runner actor: owns the executor, the worker it runs on, and through it every tensor."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import assert_never

import trio
from attrs import define, field

from ..core import events, frames
from ..core.config import EngineConfig
from ..core.errors import DeviceLost, EngineTeardownError
from ..core.model import Executor, ModelDescription
from ..core.plan import DeviceMemory, EncodeJob, StepPlan, StepResult
from ..core.restart import RestartPolicy
from . import messages as m
from .emit import Emit
from .worker import Call, Job, Worker

Report = Callable[[m.JobDone], None]  # tells of a call's end whoever waits for it


def torch_executor(model: str | Path, config: EngineConfig) -> Executor:
    """The executor for a checkpoint. Imports torch, so call it on the worker."""
    from ..models.openmp import prepare_openmp

    prepare_openmp()
    from ..models.executor import TorchExecutor

    return TorchExecutor(model, config)


class StepSkipped(Exception):
    """The step was not run: the one before it failed, or the runner is stopping."""


class _NotGivenBack(Exception):
    """The device could not be given back whole: nobody knows what it still holds, and no restart can help."""


@define(eq=False)
class GpuRunner:
    """Two lanes onto one worker.

    The step lane holds what the scheduler dispatched, at most ``steps_in_flight`` steps; the encode lane has one call
    on the worker at a time. The worker serves in order of arrival, so the lanes take turns: between two encode batches
    every waiting step runs, between two steps at most one encode batch.

    ``make_executor`` runs on the worker, as does every call of the executor it makes. A call has a ticket, by which its
    end finds the report that waits for it.

    Asleep it has given the device back: nobody sends steps or encode batches, and waking is a call like any other.
    """

    inbox: trio.MemoryReceiveChannel[m.RunnerMessage]
    to_self: trio.MemorySendChannel[m.RunnerMessage]
    to_scheduler: trio.MemorySendChannel[m.SchedulerMessage]
    to_encoder_cache: trio.MemorySendChannel[m.EncoderCacheMessage]
    worker: Worker
    make_executor: Callable[[], Executor]
    close_seconds: float
    restarts: RestartPolicy
    keep_weights: bool
    emit: Emit
    memory: DeviceMemory = field(factory=lambda: DeviceMemory(device="", by_owner={}), init=False)
    _executor: Executor | None = field(default=None, init=False)
    _tickets: Iterator[int] = field(factory=itertools.count, init=False)
    _reports: dict[int, Report] = field(factory=dict, init=False)  # by ticket, in the order of the calls
    _encode_lane: deque[m.Encode | m.Free] = field(factory=deque, init=False)
    _encode_lane_busy: bool = field(default=False, init=False)
    _open_lanes: set[str] = field(factory=lambda: {"step", "encode"}, init=False)
    _broken_epoch: int = field(default=-1, init=False)  # read and written on the worker only
    _stopping: bool = field(default=False, init=False)
    _generation: int = field(default=0, init=False)
    _asleep: bool = field(default=False, init=False)
    _restarting: bool = field(default=False, init=False)

    @trio.lowlevel.enable_ki_protection
    async def run(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[ModelDescription] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Opens the executor, serves until both lanes are closed, then gives the device back, however it ends.

        Raises `EngineTeardownError` where a call hangs or a release fails; the worker is then abandoned.
        """
        self.worker.start(nursery, partial(_deliver, self.to_self))
        try:
            task_status.started(await self._open())
            self.emit(events.StageReached("device taken"))
            while self._open_lanes or self._reports:
                message = await self.inbox.receive()
                try:
                    self._handle(message)
                except Exception as error:  # noqa: BLE001  (raised again where a restart cannot help)
                    await self._restart(error)
        except BaseException as error:
            await self._close_after(error)
            raise
        await self._close()

    async def _close_after(self, error: BaseException) -> None:
        """What goes wrong in closing is told by the error that led to it; a cancellation tells nothing."""
        try:
            await self._close()
        except EngineTeardownError as further:
            if isinstance(error, trio.Cancelled):
                raise
            error.add_note(str(further))

    async def _restart(self, error: Exception) -> None:
        """Starts anew in place, after the calls that run: the weights stay, everything else the device holds is
        forgotten, and so is what is asked in ignorance of it. Raises ``error`` where that cannot help any more."""
        frames.clear_frames(error)  # the message that told of it is in them, and holds it
        beyond_help = isinstance(error, DeviceLost | _NotGivenBack)
        pause = None if beyond_help else self.restarts.try_restart(trio.current_time())
        if pause is None:
            raise error
        generation = self._generation = self._generation + 1
        self.emit(events.RunnerRestarting(generation, events.error_text(error)))
        self._empty_encode_lane()
        await trio.sleep(pause)
        ends: list[m.JobDone] = []
        self._restarting = True
        self._submit(Job.RESET, self._reset, ends.append)
        while not ends:
            self._handle(await self.inbox.receive())
        self._restarting = False
        if ends[0].error is not None:
            raise ends[0].error from error
        # not a later one: an order to sleep that has come meanwhile is about to end this one too
        self.to_encoder_cache.send_nowait(m.RunnerRestarted(generation, self._asleep))

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def _open(self) -> ModelDescription:
        done = await self._call(Job.OPEN, self._open_executor)
        if done.error is not None:
            raise done.error
        assert isinstance(done.value, ModelDescription), "an executor describes its model when it opens"
        return done.value

    async def _call(self, job: Job, call: Call) -> m.JobDone:
        """Runs it after those that run already, and listens to nothing else: while opening and closing nobody waits
        for another report."""
        ticket = self._submit(job, call, _report_to_nobody)
        while True:
            message = await self.inbox.receive()
            if isinstance(message, m.JobDone):
                self._reports.pop(message.ticket, None)
                if message.ticket == ticket:
                    return message

    def _open_executor(self) -> ModelDescription:
        self._executor = self.make_executor()
        description = self._executor.open()
        self.memory = self._executor.memory()
        return description

    async def _close(self) -> None:
        """Waits for the calls that run, closes the executor and ends the worker, all within ``close_seconds``.

        Past that the worker is abandoned. A load that is abandoned because its caller was cancelled is no error: the
        worker closes the executor as soon as the load returns.
        """
        self._stopping = True
        done: m.JobDone | None = None
        try:
            with trio.move_on_after(self.close_seconds, shield=True):
                done = await self._call(Job.CLOSE, self._close_executor)
        finally:
            if done is None:  # it hangs, or we failed: the device is given back whatever becomes of us
                self.worker.abandon(self._close_executor)
        if done is None:
            self._reports.clear()  # nobody will be told, and they refer to this runner
            self.emit(events.StageReached("device call abandoned"))
            if self.memory.device == "":
                return  # it hangs in its load
            raise EngineTeardownError(
                f"a call on the device did not end within {self.close_seconds} s; its thread is abandoned and will "
                f"release the device if the call ever returns; a new process is the safe way on"
            )
        self.worker.stop()
        self.emit(events.StageReached("device released"))
        if done.error is not None:
            raise EngineTeardownError(f"the device was released, but {_told(done.error)}") from done.error
        kept = {owner: count for owner, count in self.memory.by_owner.items() if count}
        if kept:
            raise EngineTeardownError(
                f"the device was released, but somebody else keeps what was on it, in bytes: {kept}; whoever holds an "
                f"engine's tensors must let them go before its block ends"
            )

    def _close_executor(self) -> None:
        if self._executor is None:
            return
        try:
            self._executor.close()
        finally:
            self.memory = self._executor.memory()
            self._executor = None

    # -- serving -----------------------------------------------------------------------------------------------------

    def _handle(self, message: m.RunnerMessage) -> None:
        match message:
            case m.JobDone(ticket):
                self._reports.pop(ticket)(message)
            case m.Step() | m.Encode() | m.Free() if message.generation != self._generation:
                pass  # whoever sent it will hear of the restart, and asks again for what is still wanted
            case m.Step(plan):
                self._submit_step(plan)
            case m.Encode() | m.Free():
                self._encode_lane.append(message)
                self._advance_encode_lane()
            case m.Sleep():
                self._generation += 1
                self._empty_encode_lane()
                self._submit(Job.SLEEP, self._sleep, partial(self._slept, self._generation))
            case m.Wake():
                self._submit(Job.WAKE, self._wake, self._woke)
            case m.StepLaneClosed():
                self._open_lanes.discard("step")
            case m.EncodeLaneClosed():
                self._open_lanes.discard("encode")
            case _:
                assert_never(message)

    def _submit_step(self, plan: StepPlan) -> None:
        step_id = plan.step_id

        def report(done: m.JobDone) -> None:
            if done.error is None:
                assert isinstance(done.value, StepResult), "a step returns a StepResult"
                self.to_scheduler.send_nowait(m.StepDone(done.value))
                return
            error = _as_exception(done.error)
            if isinstance(error, DeviceLost):
                raise error
            self.to_scheduler.send_nowait(m.StepFailed(step_id, error, skipped=isinstance(error, StepSkipped)))

        self._submit(Job.STEP, partial(self._step, plan), report)

    def _advance_encode_lane(self) -> None:
        if self._encode_lane_busy or not self._encode_lane:
            return
        self._encode_lane_busy = True
        message = self._encode_lane.popleft()
        if isinstance(message, m.Encode):
            self._submit_encode(message.jobs)
        else:
            self._submit_free(message.keys)

    def _submit_encode(self, jobs: tuple[EncodeJob, ...]) -> None:
        keys = tuple(job.key for job in jobs)

        def report(done: m.JobDone) -> None:
            if done.error is None:
                self.to_encoder_cache.send_nowait(m.Encoded(keys))
            elif isinstance(done.error, DeviceLost):
                raise done.error
            else:
                self.to_encoder_cache.send_nowait(m.EncodeBroken(keys, _as_exception(done.error)))
            self._encode_lane_turn_over()

        self._submit(Job.ENCODE, partial(self._encode, jobs), report)

    def _submit_free(self, keys: tuple[str, ...]) -> None:
        def report(done: m.JobDone) -> None:
            if done.error is not None:
                raise done.error  # the device's state is unknown
            self.to_encoder_cache.send_nowait(m.Freed(keys))
            self._encode_lane_turn_over()

        self._submit(Job.FREE, partial(self._free, keys), report)

    def _slept(self, generation: int, done: m.JobDone) -> None:
        if isinstance(done.error, DeviceLost):
            raise done.error
        if isinstance(done.error, ExceptionGroup):  # of releases
            raise _NotGivenBack(_told(done.error)) from done.error
        if done.error is not None:
            self.to_scheduler.send_nowait(m.SleepFailed(_as_exception(done.error)))
            if self._restarting:
                return  # the reset is under way already, and in the name of a later generation
            # what was asked meanwhile was dropped
            self._submit(Job.RESET, self._reset, partial(self._reset_after_sleep, generation))
            return
        self._asleep = True
        self.emit(events.RunnerAsleep(generation))
        if not self._restarting:  # else it is told when that is over
            self.to_encoder_cache.send_nowait(m.RunnerRestarted(generation, asleep=True))

    def _reset_after_sleep(self, generation: int, done: m.JobDone) -> None:
        if done.error is not None:
            raise done.error
        self.to_encoder_cache.send_nowait(m.RunnerRestarted(generation, asleep=False))

    def _woke(self, done: m.JobDone) -> None:
        if isinstance(done.error, DeviceLost):
            raise done.error
        if done.error is not None:
            self.to_scheduler.send_nowait(m.WakeFailed(_as_exception(done.error)))
            return
        self._asleep = False
        self.emit(events.RunnerAwake())
        self.to_encoder_cache.send_nowait(m.RunnerWoke())

    def _empty_encode_lane(self) -> None:
        self._encode_lane.clear()
        self._encode_lane_busy = False

    def _encode_lane_turn_over(self) -> None:
        self._encode_lane_busy = False
        self._advance_encode_lane()

    def _submit(self, job: Job, call: Call, report: Report) -> int:
        ticket = next(self._tickets)
        self._reports[ticket] = report
        self.worker.submit(job, ticket, call)
        return ticket

    # -- on the worker -----------------------------------------------------------------------------------------------

    def _ready_executor(self) -> Executor:
        if self._stopping:
            raise StepSkipped("the runner is stopping")
        assert self._executor is not None, "a call before the executor was opened"
        return self._executor

    def _step(self, plan: StepPlan) -> StepResult:
        executor = self._ready_executor()
        if plan.epoch == self._broken_epoch:
            raise StepSkipped(f"step {plan.step_id} was planned before an earlier one was known to have failed")
        try:
            return executor.step(plan)
        except BaseException:
            self._broken_epoch = plan.epoch
            raise

    def _encode(self, jobs: tuple[EncodeJob, ...]) -> None:
        executor = self._ready_executor()
        executor.encode(jobs)
        self.memory = executor.memory()

    def _reset(self) -> None:
        executor = self._ready_executor()
        executor.reset()
        self.memory = executor.memory()

    def _sleep(self) -> None:
        executor = self._ready_executor()
        try:
            executor.sleep(keep_weights=self.keep_weights)
        finally:
            self.memory = executor.memory()

    def _wake(self) -> None:
        executor = self._ready_executor()
        executor.wake()
        self.memory = executor.memory()

    def _free(self, keys: tuple[str, ...]) -> None:
        executor = self._ready_executor()
        executor.free(keys)
        self.memory = executor.memory()


def _deliver(inbox: trio.MemorySendChannel[m.RunnerMessage], done: m.JobDone) -> None:
    """Tells the runner of a call's end. A call that was abandoned may end long after the runner's channels closed."""
    with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
        inbox.send_nowait(done)


def _told(error: BaseException) -> str:
    """Each failed release and, from its notes, whose it was."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_told, error.exceptions))
    notes = ", ".join(getattr(error, "__notes__", ["a release failed"]))
    return f"{notes}: {type(error).__name__}: {error}"


def _report_to_nobody(done: m.JobDone) -> None:
    """For the calls that the runner itself waits for."""


def _as_exception(error: BaseException) -> Exception:
    """What is no `Exception` (an exit, an interrupt on the worker) is no request's fault: it ends the runner."""
    if isinstance(error, Exception):
        return error
    raise error
