"""The scheduler actor: owns the planner, with the queue and the KV pages, and the streams of the requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import assert_never

import trio
from attrs import define, field

from ..core import events
from ..core.errors import EngineAsleep, EngineClosed, EngineError, EngineStateError, caused
from ..core.plan import StepPlan
from ..core.planning import actions as a
from ..core.planning.planner import Planner
from ..core.power import Order, Power, PowerState
from ..core.request import Request
from ..core.timings import Timings
from . import messages as m
from .emit import Emit
from .inbox import drain, take_all

_OVERTAKEN = {
    Order.SLEEP: "the engine was woken before it fell asleep",
    Order.WAKE: "the engine was put to sleep again before it woke",
}


@define(eq=False)
class _Client:
    """The stream of a request, and the times of the request's stages, in trio's time."""

    stream: m.Stream
    queued: float
    waits_since: float | None = None  # for encoder outputs
    encoder_wait: float = 0.0
    started: float | None = None
    first_token: float | None = None

    def acquires(self, now: float) -> None:
        """Notes that the request waits for encoder outputs. Waits after the first start do not count
        (`Timings.encoder_wait`)."""
        if self.started is None and self.waits_since is None:
            self.waits_since = now

    def waits_no_more(self, now: float) -> None:
        """Notes that the request holds its encoder outputs, or needs none any more."""
        if self.waits_since is not None:
            self.encoder_wait += now - self.waits_since
            self.waits_since = None

    def starts(self, now: float) -> None:
        """Notes that the request has a place."""
        self.waits_no_more(now)
        if self.started is None:
            self.started = now

    def timings(self, now: float) -> Timings:
        """Returns the timings of a request that ends now."""
        return Timings(
            queued=(now if self.started is None else self.started) - self.queued,
            encoder_wait=self.encoder_wait,
            first_token=None if self.first_token is None else self.first_token - self.queued,
            total=now - self.queued,
        )


@define(eq=False)
class Scheduler:
    """Moves messages between the planner and the other actors.

    After every batch of messages the actor carries out the planner's actions, and then sends as many steps as may be in
    flight. The actor ends when it was ordered to drain and no request is left, or when the runner is gone.
    """

    inbox: trio.MemoryReceiveChannel[m.SchedulerMessage]
    to_encoder_cache: trio.MemorySendChannel[m.EncoderCacheMessage]
    to_runner: trio.MemorySendChannel[m.StepLaneMessage]
    planner: Planner
    power: PowerState
    idle_sleep: float  # seconds
    refuses_while_asleep: bool
    emit: Emit
    _replies: dict[Order, list[m.Reply]] = field(factory=lambda: {order: [] for order in Order}, init=False)
    _clients: dict[str, _Client] = field(factory=dict, init=False)  # by request id
    _loading: list[m.AdapterReply] = field(factory=list, init=False)
    _unread: deque[m.SchedulerMessage] = field(factory=deque, init=False)  # taken from the inbox, not yet handled
    _deadline: float = field(default=math.inf, init=False)
    _draining: bool = field(default=False, init=False)
    _runner_gone: bool = field(default=False, init=False)
    _generation: int = field(default=0, init=False)  # the runner's, as last reported

    @trio.lowlevel.enable_ki_protection
    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until drained. However the loop ends, every stream is ended and every entry is released."""
        try:
            task_status.started()
            while not (self._runner_gone or (self._draining and self.planner.idle)):
                await self._take_messages()
                self._publish()
                self._dispatch()
        finally:
            self._wind_up()

    # -- in ----------------------------------------------------------------------------------------------------------

    async def _take_messages(self) -> None:
        dozes_at = self._dozes_at()
        if self._deadline == dozes_at == math.inf:  # a cancel scope for every token would cost time
            self._unread.extend(await take_all(self.inbox))
        else:
            await self._take_until(dozes_at)
        while self._unread:
            self._handle(self._unread.popleft())

    async def _take_until(self, dozes_at: float) -> None:
        with trio.move_on_at(min(self._deadline, dozes_at)) as scope:
            self._unread.extend(await take_all(self.inbox))
        if not scope.cancelled_caught:
            return
        if dozes_at < self._deadline:
            self.power.doze()
            self._give_order()
            return
        self._deadline = math.inf
        self.planner.abort_all()
        self.emit(events.StageReached("drain deadline"))

    def _dozes_at(self) -> float:
        """Returns the time at which the engine will have been idle for ``idle_sleep``."""
        idle = self.planner.idle and self.power.power is Power.AWAKE and not self._draining
        return trio.current_time() + self.idle_sleep if idle else math.inf

    def _handle(self, message: m.SchedulerMessage) -> None:
        match message:
            case m.Submit(request, stream):
                self._accept(request, stream)
            case m.AbortRequest(request_id, stopped):
                self.planner.abort(request_id, stopped=stopped)
            case m.EncoderReady(holder):
                self.planner.encoder_ready(holder)
            case m.EncoderRefused(holder, error):
                self.planner.encoder_refused(holder, error)
            case m.StepDone(result):
                self.emit(events.StepEnded(result.step_id, ok=True))
                self.planner.step_done(result)
            case m.StepFailed(step_id, error, skipped):
                self._step_failed(step_id, error, skipped=skipped)
            case m.Drain(deadline):
                self._draining = True
                self._deadline = min(self._deadline, deadline)
                self._give_up_what_nobody_will_run()
            case m.RunnerRestarted(generation, asleep):
                self._generation = generation
                self.emit(events.StepsLost(generation))
                self.planner.generation_lost()
                if asleep and self.power.power is Power.FALLING_ASLEEP:
                    self._slept()
            case m.RunnerWoke():
                self.power.woke()
                _answer(self._replies[Order.WAKE])
                self._give_order()
            case m.OrderFailed(order, error):
                self._order_failed(order, error)
            case m.OrderPower(order, reply):
                self._order(order, reply)
            case m.LoadAdapter(_, reply):
                self._loading.append(reply)
                self.to_runner.send_nowait(message)
            case m.AdapterLoaded(reply, answer):
                self._loading.remove(reply)
                if isinstance(answer, str):
                    self.planner.adapters.loaded(answer)
                reply.put(answer)
            case m.UnloadAdapter(key):
                self.planner.adapters.unload(key)
            case m.RunnerStopped(error):
                self._runner_gone = True
                self.planner.fail_all(error)
            case _:
                assert_never(message)

    def _step_failed(self, step_id: int, error: Exception, *, skipped: bool) -> None:
        self.emit(events.StepEnded(step_id, ok=False, error=events.error_text(error), skipped=skipped))
        requests = self.planner.in_flight(step_id).request_ids
        self.planner.step_failed(step_id, error, skipped=skipped)
        again = tuple(request_id for request_id in requests if self.planner.has(request_id))
        if again:
            self.emit(events.StepRetried(step_id, again))

    def _accept(self, request: Request, stream: m.Stream) -> None:
        if self.power.ordered and self.refuses_while_asleep:
            stream.end(
                m.Failed(
                    EngineAsleep(
                        "the engine is asleep and refuses requests; await engine.wake() first, or use "
                        "EngineConfig(while_asleep='wait')"
                    )
                )
            )
            return
        self._clients[request.id] = _Client(stream, trio.current_time())
        self.emit(events.RequestQueued(request.id))
        self.planner.submit(request)
        self.power.work_came()
        self._give_order()

    # -- sleep -------------------------------------------------------------------------------------------------------

    def _order(self, order: Order, reply: m.Reply) -> None:
        """Notes the order of a caller. It ends orders of the other kind, unless the runner carries one out: then the
        end of that answers them."""
        self.power.order(order)
        if self.power.under_way is not order.other:
            _answer(self._replies[order.other], partial(EngineStateError, _OVERTAKEN[order.other]))
        self._replies[order].append(reply)
        self._give_order()
        if self.power.under_way is None:
            _answer(self._replies[order])

    def _slept(self) -> None:
        self.power.slept()
        _answer(self._replies[Order.SLEEP])
        self._give_order()
        self._give_up_what_nobody_will_run()

    def _order_failed(self, order: Order, error: Exception) -> None:
        """Answers both kinds of orders: the engine is as one kind wants it. Fails the requests that woke the engine.
        Requests that wait for the end of an ordered sleep go on waiting."""
        self.power.failed(order)
        cannot = partial(_cannot_sleep if order is Order.SLEEP else _cannot_wake, error)
        _answer(self._replies[order], cannot)
        _answer(self._replies[order.other])
        if order is Order.WAKE and not self.power.ordered:
            self.planner.fail_waiting(cannot)
        self._give_up_what_nobody_will_run()

    def _give_order(self) -> None:
        match self.power.next_order():
            case Order.SLEEP:
                self.to_runner.send_nowait(m.Sleep())
            case Order.WAKE:
                self.to_runner.send_nowait(m.Wake())

    def _give_up_what_nobody_will_run(self) -> None:
        """Aborts the requests if the engine drains while it sleeps, since no order to wake can come any more."""
        if self._draining and not self.power.will_wake:
            self.planner.abort_all()

    # -- out ---------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        for action in self.planner.take_actions():
            self._act(action)

    def _commit(self, commit: a.Commit) -> None:
        client, sampled = self._clients[commit.request_id], commit.sampled
        if client.first_token is None and (sampled[-1].token_id is not None or sampled[-1].hypotheses):
            client.first_token = trio.current_time()
            self.emit(events.FirstToken(commit.request_id))
        client.stream.put(sampled)

    def _act(self, action: a.Action) -> None:
        match action:
            case a.Commit():
                self._commit(action)
            case m.Acquire(_, _, _, request_id):
                self._clients[request_id].acquires(trio.current_time())
                self.to_encoder_cache.send_nowait(action)
            case events.EncoderWaitOver(request_id):
                self._clients[request_id].waits_no_more(trio.current_time())
                self.emit(action)
            case m.Release():
                self.to_encoder_cache.send_nowait(action)
            case m.DropAdapter():
                self.to_runner.send_nowait(action)
            case events.RequestStarted(request_id):
                self._clients[request_id].starts(trio.current_time())
                self.emit(action)
            case events.Event():
                self.emit(action)
            case a.Finish(request_id, reason):
                timings = self._clients[request_id].timings(trio.current_time())
                self._end(request_id, m.Finished(reason, timings), "finished")
            case a.Fail(request_id, error):
                self._end(request_id, m.Failed(error), "failed", events.error_text(error))
            case a.Abort(request_id, stopped):
                timings = self._clients[request_id].timings(trio.current_time())
                self._end(request_id, m.Aborted(timings), "finished" if stopped else "aborted")
            case _:
                assert_never(action)

    def _end(self, request_id: str, end: m.End, outcome: str, error: str = "") -> None:
        self._clients.pop(request_id).stream.end(end)
        self.emit(events.RequestEnded(request_id, outcome, error))

    def _dispatch(self) -> None:
        while not self._runner_gone and self.power.may_work and (plan := self.planner.next_step()) is not None:
            self._publish()  # planning may have acquired or released encoder outputs
            if self.emit.is_followed:
                self.emit(self._step_begun(plan))
            self.to_runner.send_nowait(m.Step(plan, self._generation))
        self._publish()

    def _step_begun(self, plan: StepPlan) -> events.StepBegun:
        step = self.planner.in_flight(plan.step_id)
        return events.StepBegun(
            plan.step_id,
            step.request_ids,
            tuple(hold.key for hold in step.reads),
            tuple(hold.holder for hold in step.reads),
            plan.tokens,
            step.samples,
            self.planner.pages_used,
            tuple(state for part in plan.chunks for state in part.states),
            tuple(name for name, part in zip(step.request_ids, plan.chunks, strict=True) for _ in part.states),
            tuple(keep.state for part in plan.chunks for keep in part.keeps),
            tuple(start.state for start in plan.started if start.state is not None),
        )

    def _wind_up(self) -> None:
        """Ends all streams after a crash or a hard cancel, even those that the planner can no longer end, and those of
        submits that were not read. The last message, `SchedulerClosed`, gives back all that the requests hold.
        """
        for request_id in list(self._clients):
            self._end(request_id, m.Failed(_stopped()), "failed", events.error_text(_stopped()))
        for replies in self._replies.values():
            _answer(replies, _stopped)
        for loading in self._loading:
            loading.put(_stopped())
        for message in (*self._unread, *drain(self.inbox)):
            if isinstance(message, m.Submit):
                message.stream.end(m.Failed(_stopped()))
            elif isinstance(message, m.OrderPower | m.LoadAdapter):
                message.reply.put(_stopped())
        self.to_encoder_cache.send_nowait(m.SchedulerClosed())


def _answer(replies: list[m.Reply], error: Callable[[], Exception | None] = lambda: None) -> None:
    """Answers each reply with an error object of its own: two tasks must not raise the same object."""
    while replies:
        replies.pop().put(error())


def _cannot_sleep(cause: Exception) -> EngineError:
    error = EngineError(f"the device could not be given back, and is still held ({type(cause).__name__}: {cause})")
    return caused(error, cause)


def _cannot_wake(cause: Exception) -> EngineAsleep:
    error = EngineAsleep(
        f"the engine sleeps, and the device could not be taken again ({type(cause).__name__}: {cause}); free some of "
        f"it and try again"
    )
    return caused(error, cause)


def _stopped() -> EngineClosed:
    return EngineClosed("the engine stopped before the request had ended; open a new engine and send the request again")
