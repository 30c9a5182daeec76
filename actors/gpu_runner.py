"""The runner actor: owns the worker and the executor that runs on the worker, and so every tensor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import assert_never

import trio
from attrs import define, field

from ..core import events, tracebacks
from ..core.config import EngineConfig
from ..core.errors import DeviceLost, EngineTeardownError, caused
from ..core.executor import Executor
from ..core.model import ModelDescription
from ..core.plan import DeviceMemory, StepPlan, StepResult
from ..core.power import Order
from ..core.restart import RestartPolicy
from ..core.share import TimeShare
from . import messages as m
from .emit import Emit
from .process import Process
from .worker import Call, Ended, Job, Worker

ANSWERED_WITHIN = 4
"""The number of turns of the trio loop within which the next step follows the end of a step or encode batch. The
messages pass through the encoder cache, the scheduler and the step lane."""


def torch_executor(model: str | Path, config: EngineConfig) -> Executor:
    """Returns the executor for a checkpoint. Call this function on the worker, since it imports torch."""
    from ..models.machine.openmp import prepare_openmp

    prepare_openmp()
    from ..models.executor import TorchExecutor

    return TorchExecutor(model, config)


class StepSkipped(Exception):
    """The step was not run, since an earlier step failed or the runner is stopping."""


class _NotGivenBack(Exception):
    """A sleep has given back only a part of the device. The device's state is unknown, and no restart can help."""


@define(eq=False)
class GpuRunner:
    """Passes the messages of two lanes to one worker.

    The step lane passes the scheduler's messages on at once. The scheduler sends at most ``steps_in_flight`` steps
    ahead, so that the device has its next step when a step ends. The encode lane waits for its turn (`TimeShare`). The
    worker serves calls in the order of arrival. So calls end in the order of their messages in ``_begun``, and the
    runner reports their ends in that order.

    A restart ends the lanes, waits for the calls in flight, resets the executor, and starts the lanes anew in the next
    generation. ``make_executor`` and all calls of the executor run on the worker.

    A runner that is asleep has given the device back, and gets no steps or encode batches. Waking is an ordinary call.
    """

    steps: trio.MemoryReceiveChannel[m.StepLaneMessage]
    encodes: trio.MemoryReceiveChannel[m.EncodeLaneMessage]
    to_scheduler: trio.MemorySendChannel[m.SchedulerMessage]
    to_encoder_cache: trio.MemorySendChannel[m.EncoderCacheMessage]
    worker: Worker
    make_executor: Callable[[], Executor]
    config: EngineConfig
    emit: Emit
    memory: DeviceMemory = field(factory=lambda: DeviceMemory(device="", by_owner={}), init=False)
    _process: Process = field(factory=Process, init=False)
    _restarts: RestartPolicy = field(init=False)
    _executor: Executor | None = field(default=None, init=False)
    _ended: trio.MemorySendChannel[Ended | None] = field(init=False)  # ``None``: the lanes have ended
    _ends: trio.MemoryReceiveChannel[Ended | None] = field(init=False)
    _begun: deque[m.RunnerMessage] = field(factory=deque, init=False)  # messages with calls in flight, oldest first
    _share: TimeShare = field(factory=TimeShare, init=False)
    _turns: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)  # woken when a call ends
    _lanes: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _failure: BaseException | None = field(default=None, init=False)  # ended the lanes; not a request's error
    _broken_epoch: int = field(default=-1, init=False)  # read and written on the worker only
    _stopping: bool = field(default=False, init=False)
    _generation: int = field(default=0, init=False)
    _asleep: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._ended, self._ends = trio.open_memory_channel[Ended | None](math.inf)
        self._restarts = RestartPolicy(self.config.restarts, self.config.restart_seconds)

    @trio.lowlevel.enable_ki_protection
    async def run(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[ModelDescription] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Opens the executor and serves until both lanes are closed. However it ends, it gives the device back.

        Raises `EngineTeardownError` if a release fails or a call hangs. A worker whose call hangs is abandoned.
        """
        self.worker.start(nursery, self._deliver)
        try:
            task_status.started(await self._open())
            self.emit(events.StageReached("device taken"))
            while await self._serve_lanes():
                await self._start_anew()
        except BaseException as error:
            await self._close_after(error)
            raise
        await self._close()

    async def _close_after(self, error: BaseException) -> None:
        """Closes the executor after ``error``. An error of the teardown becomes a note of ``error``, unless ``error``
        is only a cancellation."""
        try:
            await self._close()
        except EngineTeardownError as further:
            cause = tracebacks.without(error, trio.Cancelled)
            if cause is None:
                raise
            cause.add_note(str(further))

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def _run(self, job: Job, call: Call) -> Ended:
        """Runs ``call`` after the calls in flight, and drops the results of those. Must be called only while no lane is
        served.
        """
        self._submit(job, call)
        while True:
            ended = await self._ends.receive()
            if ended is not None and ended.job is job:
                self._begun.clear()
                return ended

    async def _open(self) -> ModelDescription:
        ended = await self._run(Job.OPEN, self._open_executor)
        if ended.error is not None:
            raise ended.error
        assert isinstance(ended.value, ModelDescription), "an executor describes its model when it opens"
        return ended.value

    def _deliver(self, ended: Ended) -> None:
        """Receives the end of a call. An abandoned call may end long after the runner."""
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            self._ended.send_nowait(ended)

    def _opened(self) -> Executor:
        assert self._executor is not None, "a call before the executor was opened"
        return self._executor

    def _open_executor(self) -> ModelDescription:
        self._executor = self.make_executor()
        if self._stopping:  # `_close` came before there was an executor to tell
            self._executor.give_up()
        description = self._executor.open()
        self.memory = self._executor.memory()
        return description

    async def _close(self) -> None:
        """Waits for the calls in flight, closes the executor and ends the worker. All of this may take
        ``stage_seconds``.

        A worker that takes longer is abandoned. Abandoning a load is no error: the worker closes the executor as soon
        as the load returns.
        """
        if self._process.is_forked:
            return
        self._stopping = True
        if self._executor is not None:
            self._executor.give_up()
        ended: Ended | None = None
        try:
            with trio.move_on_after(self.config.stage_seconds, shield=True):
                ended = await self._run(Job.CLOSE, self._close_executor)
        finally:
            if ended is None:  # a call hangs, or this task failed: the worker gives the device back without it
                self.worker.abandon(self._close_executor)
                self.worker.switch_interval.leave(self)
        if ended is None:
            self.emit(events.StageReached("device call abandoned"))
            if self.memory.device == "":
                return  # the load hangs
            raise EngineTeardownError(
                f"a call on the device did not end within {self.config.stage_seconds} s; its thread is abandoned, "
                "and will release the device if the call ever returns. Start a new process to be safe"
            )
        self.worker.stop()
        self.emit(events.StageReached("device released"))
        if ended.error is not None:
            raise EngineTeardownError(f"the device was released, but {_told(ended.error)}") from ended.error
        kept = {owner: count for owner, count in self.memory.by_owner.items() if count}
        if kept:
            raise EngineTeardownError(
                f"the device was released, but other code still holds tensors of the engine, in bytes: {kept}; drop "
                "them before the engine's block ends"
            )

    def _close_executor(self) -> None:
        if self._executor is None:
            return
        try:
            self._executor.close()
        finally:
            self.memory = self._executor.memory()
            self._executor = None

    # -- restart -----------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Ends the lanes after an error that does not belong to a request. One restart is tried for all such errors,
        unless no restart can help against one of them.
        """
        if self._failure is None or _beyond_help(error):
            self._failure = error
        self._lanes.cancel()

    async def _start_anew(self) -> None:
        """Restarts in place: the weights stay, the executor forgets everything else, and messages of older generations
        are dropped. Raises the error that led to the restart if no restart can help."""
        error, self._failure = self._failure, None
        if error is not None:  # else a sleep failed, and its start has begun a new generation already
            pause = None if _beyond_help(error) else self._restarts.try_restart(trio.current_time())
            if pause is None:
                raise error
            self._generation += 1
            self.emit(events.RunnerRestarting(self._generation, f"{type(error).__name__}: {error}"))
            await trio.sleep(pause)
        ended = await self._run(Job.RESET, partial(self._call, self._opened().reset))
        if ended.error is not None and error is None:  # no restart was tried yet
            self._failure = ended.error
            await self._start_anew()
        elif ended.error is not None:
            raise ended.error from error
        else:
            self.to_encoder_cache.send_nowait(m.RunnerRestarted(self._generation, self._asleep))

    # -- the lanes ---------------------------------------------------------------------------------------------------

    async def _serve_lanes(self) -> bool:
        """Serves until both lanes have ended and every call has ended. True if the lanes must start anew."""
        self._lanes = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_lanes, name="triolet encode lane")
            await self._report_ends()
        return self._lanes.cancel_called

    @trio.lowlevel.enable_ki_protection
    async def _run_lanes(self) -> None:
        with self._lanes:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._step_lane, name="triolet step lane")
                await self._encode_lane()
        self._ended.send_nowait(None)

    @trio.lowlevel.enable_ki_protection
    async def _step_lane(self) -> None:
        async for message in self.steps:
            if isinstance(message, m.Sleep):
                self._generation += 1  # older messages are dropped: their senders did not know of the sleep
            self._begin(message)

    async def _encode_lane(self) -> None:
        async for message in self.encodes:
            if isinstance(message, m.Encode):
                await self._turn()
            self._begin(message)
            del message  # else the payloads of the batch would live until the next message

    async def _turn(self) -> None:
        """Waits until an encode launch may begin."""
        while self._share.steps_turn(trio.current_time()) and await self._steps_come():
            await self._turns.park()
        self._share.encode_sent(trio.current_time())

    async def _steps_come(self) -> bool:
        """True if a step is in flight, or will follow from the answer to a call that has ended."""
        for _ in range(ANSWERED_WITHIN):
            if any(isinstance(message, m.Step) for message in self._begun):
                return True
            await trio.lowlevel.checkpoint()
        return False

    def _begin(self, message: m.RunnerMessage) -> None:
        executor = self._opened()
        match message:
            case m.Step() | m.Encode() | m.Free() if message.generation != self._generation:
                return  # the sender will hear of the restart, and then send again what it still needs
            case m.Step(plan):
                self._submit(Job.STEP, self._step, plan)
            case m.Encode(items):
                self._submit(Job.ENCODE, partial(self._call, executor.encode), items)
            case m.Free(keys):
                self._submit(Job.FREE, partial(self._call, executor.free), keys)
            case m.Sleep():
                sleep = partial(executor.sleep, keep_weights=self.config.sleep_keeps_weights)
                self._submit(Job.SLEEP, partial(self._call, sleep))
            case m.Wake():
                self._submit(Job.WAKE, partial(self._call, executor.wake))
            case m.LoadAdapter(folder):
                self._submit(Job.ADAPTER, partial(self._call, executor.load_adapter), folder)
            case m.DropAdapter(key):
                self._submit(Job.ADAPTER, partial(self._call, executor.drop_adapter), key)
            case _:
                assert_never(message)
        self._begun.append(message)

    def _submit(self, job: Job, call: Call, *args: object) -> None:
        """Submits a call to the worker. Python switches quickly between threads until the call has ended or is
        abandoned."""
        if self.config.switch_interval == "short":
            self.worker.switch_interval.begin(self)
            call = partial(self._until_ended, call)
        self.worker.submit(job, call, *args)

    # -- reports -----------------------------------------------------------------------------------------------------

    async def _report_ends(self) -> None:
        serving = True
        while (serving or self._begun) and not _beyond_help(self._failure):
            ended = await self._ends.receive()
            if ended is None:
                serving = False
                continue
            message = self._begun.popleft()
            counted = self._share.encode_ended if isinstance(message, m.Encode) else self._share.step_ended
            counted(trio.current_time())
            self._report(message, ended)
            del message, ended  # else the objects of a failed call would live until the next call ends
            self._turns.unpark_all()

    def _report(self, message: m.RunnerMessage, ended: Ended) -> None:
        error = ended.error
        if error is not None and (isinstance(message, m.Free | m.DropAdapter) or _beyond_help(error)):
            self._fail(error)
            return
        assert error is None or isinstance(error, Exception), "all others are beyond help"
        match message:
            case m.Step(plan) if error is not None:
                skipped = isinstance(error, StepSkipped)
                self.to_scheduler.send_nowait(m.StepFailed(plan.step_id, error, skipped))
            case m.Step():
                assert isinstance(ended.value, StepResult), "a step returns a StepResult"
                self.to_scheduler.send_nowait(m.StepDone(ended.value))
            case m.Encode(items):
                keys = tuple(item.key for item in items)
                self.to_encoder_cache.send_nowait(m.Encoded(keys) if error is None else m.EncodeBroken(keys, error))
            case m.Free(keys):
                self.to_encoder_cache.send_nowait(m.Freed(keys))
            case m.LoadAdapter(_, reply):
                answer = error or ended.value
                assert isinstance(answer, str | Exception), "a load returns a key"
                self.to_scheduler.send_nowait(m.AdapterLoaded(reply, answer))
            case m.DropAdapter():
                pass
            case m.Sleep():
                self._report_sleep(error)
            case m.Wake():
                self._report_wake(error)
            case _:
                assert_never(message)

    def _report_sleep(self, error: Exception | None) -> None:
        if isinstance(error, ExceptionGroup):  # errors of releases
            self._fail(caused(_NotGivenBack(_told(error)), error))
            return
        if error is not None:  # later messages were dropped, so the lanes start anew
            self.to_scheduler.send_nowait(m.OrderFailed(Order.SLEEP, error))
            self._lanes.cancel()
            return
        self._asleep = True
        self.emit(events.RunnerAsleep(self._generation))
        self.to_encoder_cache.send_nowait(m.RunnerRestarted(self._generation, asleep=True))

    def _report_wake(self, error: Exception | None) -> None:
        if error is not None:
            self.to_scheduler.send_nowait(m.OrderFailed(Order.WAKE, error))
            return
        self._asleep = False
        self.emit(events.RunnerAwake())
        self.to_encoder_cache.send_nowait(m.RunnerWoke())

    # -- on the worker -----------------------------------------------------------------------------------------------

    def _until_ended(self, call: Call, *args: object) -> object:
        try:
            return call(*args)
        finally:
            self.worker.switch_interval.end(self)

    def _step(self, plan: StepPlan) -> StepResult:
        if plan.epoch == self._broken_epoch:
            raise StepSkipped(f"step {plan.step_id} was planned before an earlier one was known to have failed")
        self._check_not_stopping()
        try:
            return self._opened().step(plan)
        except BaseException:
            self._broken_epoch = plan.epoch
            raise

    def _call(self, call: Call, *args: object) -> object:
        """Makes a call of the executor that may change the memory on the device, even if the call raises."""
        self._check_not_stopping()
        try:
            return call(*args)
        finally:
            self.memory = self._opened().memory()

    def _check_not_stopping(self) -> None:
        if self._stopping:
            raise StepSkipped("the runner is stopping")


def _told(error: BaseException) -> str:
    """Returns the text of each failed release, with its notes, which name the owner."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_told, error.exceptions))
    notes = ", ".join(getattr(error, "__notes__", ["a release failed"]))
    return f"{notes}: {type(error).__name__}: {error}"


def _beyond_help(error: BaseException | None) -> bool:
    """True if a restart cannot help, as after any error that is not an `Exception` (an exit, an interrupt on the
    worker).
    """
    return error is not None and (not isinstance(error, Exception) or isinstance(error, DeviceLost | _NotGivenBack))
