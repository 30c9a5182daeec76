"""The scheduler actor: owns the queue and the KV pages, which live in core's planner, and the requests' streams."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import assert_never

import trio
from attrs import define, field

from ..core import events
from ..core.errors import EngineClosed
from ..core.plan import StepPlan
from ..core.planner import Planner
from ..core.sequence import Abort, AcquireItem, Action, Commit, Fail, Finish, ReleaseItem
from . import messages as m
from .inbox import drain, take_all

Tell = Callable[[events.Event], None]


@define(eq=False)
class Scheduler:
    """Moves messages between the planner and the others.

    After every batch of messages the planner's actions go out, then as many steps as may be in flight. It ends when it
    was told to drain and nothing is left, or when the runner is gone.
    """

    inbox: trio.MemoryReceiveChannel[m.SchedulerMessage]
    to_encoder_cache: trio.MemorySendChannel[m.EncoderCacheMessage]
    to_runner: trio.MemorySendChannel[m.RunnerMessage]
    planner: Planner
    tell: Tell
    _streams: dict[str, m.Stream] = field(factory=dict, init=False)
    _unread: deque[m.SchedulerMessage] = field(factory=deque, init=False)  # taken from the inbox
    _deadline: float = field(default=math.inf, init=False)
    _draining: bool = field(default=False, init=False)
    _runner_gone: bool = field(default=False, init=False)
    _generation: int = field(default=0, init=False)  # of the runner, as far as is known

    @trio.lowlevel.enable_ki_protection
    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until drained. Whatever ends it: every stream is told, every entry released, both lanes closed."""
        try:
            task_status.started()
            while not self._finished():
                await self._take_messages()
                self._publish()
                self._dispatch()
        finally:
            self._wind_up()

    # -- in ----------------------------------------------------------------------------------------------------------

    async def _take_messages(self) -> None:
        if self._deadline < math.inf:
            await self._take_until_deadline()
        else:  # no scope for every token
            self._unread.extend(await take_all(self.inbox))
        while self._unread:
            self._handle(self._unread.popleft())

    async def _take_until_deadline(self) -> None:
        with trio.move_on_at(self._deadline) as scope:
            self._unread.extend(await take_all(self.inbox))
        if scope.cancelled_caught:
            self._deadline = math.inf
            self.planner.abort_all()
            self.tell(events.StageReached("drain deadline"))

    def _handle(self, message: m.SchedulerMessage) -> None:
        match message:
            case m.Submit(request, stream):
                self._streams[request.id] = stream
                self.tell(events.RequestAccepted(request.id))
                self.planner.submit(request)
            case m.AbortRequest(request_id):
                self.planner.abort(request_id)
            case m.EncoderReady(holder):
                self.planner.encoder_ready(holder)
            case m.EncoderRefused(holder, error):
                self.planner.encoder_refused(holder, error)
            case m.StepDone(result):
                self.tell(events.StepEnded(result.step_id, ok=True))
                self.planner.step_done(result)
            case m.StepFailed(step_id, error, skipped):
                self.tell(events.StepEnded(step_id, ok=False))
                self.planner.step_failed(step_id, error, skipped=skipped)
            case m.Drain(deadline):
                self._draining = True
                self._deadline = min(self._deadline, deadline)
            case m.GenerationLost(generation):
                self._generation = generation
                self.tell(events.StepsLost(generation))
                self.planner.generation_lost()
            case m.RunnerStopped(error):
                self._runner_gone = True
                self.planner.fail_all(error)
            case _:
                assert_never(message)

    def _finished(self) -> bool:
        return self._runner_gone or (self._draining and self.planner.idle)

    # -- out ---------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        for action in self.planner.take_actions():
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case AcquireItem(holder, item):
                self.to_encoder_cache.send_nowait(m.Acquire(holder, item))
            case ReleaseItem(holder, key):
                self.to_encoder_cache.send_nowait(m.Release(holder, key))
            case Commit(request_id, drawn):
                self._streams[request_id].put(m.Tokens(drawn))
            case Finish(request_id, reason):
                self._end(request_id, m.Finished(reason), "finished")
            case Fail(request_id, error):
                self._end(request_id, m.Failed(error), "failed")
            case Abort(request_id):
                self._end(request_id, m.Aborted(), "aborted")

    def _end(self, request_id: str, message: m.StreamMessage, outcome: str) -> None:
        self._streams.pop(request_id).put(message)
        self.tell(events.RequestEnded(request_id, outcome))

    def _dispatch(self) -> None:
        while not self._runner_gone and (plan := self.planner.next_step()) is not None:
            self._publish()  # planning may have asked for entries or released some
            self.tell(self._step_begun(plan))
            self.to_runner.send_nowait(m.Step(plan, self._generation))
        self._publish()

    def _step_begun(self, plan: StepPlan) -> events.StepBegun:
        reads = self.planner.reads_of(plan.step_id)
        return events.StepBegun(
            plan.step_id,
            self.planner.requests_of(plan.step_id),
            tuple(hold.key for hold in reads),
            tuple(hold.holder for hold in reads),
            plan.tokens,
        )

    def _wind_up(self) -> None:
        """Closes both lanes; what the requests hold of the encoder cache goes back with that. After a crash or a hard
        cancel there are streams that the planner can no longer end, and submits that were never read: they are told."""
        for request_id in list(self._streams):
            self._end(request_id, m.Failed(_stopped()), "failed")
        for message in (*self._unread, *drain(self.inbox)):
            if isinstance(message, m.Submit):
                message.stream.put(m.Failed(_stopped()))
        self.to_runner.send_nowait(m.StepLaneClosed())
        self.to_encoder_cache.send_nowait(m.SchedulerClosed())


def _stopped() -> EngineClosed:
    return EngineClosed("the engine stopped before the request ended; open a new one and retry")
