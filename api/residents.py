"""`Residents`: carries out what `triolet.core.residency` decides, and reports the facts to it.

All of it happens in one event loop, without an await between the halves of a change. Each loaded model has a task of
its own, its keeper. Keepers are shielded: only `Residents` stops them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import assert_never

import anyio
import anyio.abc
import anyio.lowlevel
import trio
from attrs import define, field

from ..actors.supervisor import leaving
from ..core import frames, log_lines
from ..core.errors import (
    EngineClosed,
    EngineStateError,
    EngineTeardownError,
    InvariantViolation,
    RunnerCrashed,
    TrioletError,
)
from ..core.log_lines import Line
from ..core.plan import DeviceMemory
from ..core.residency import Decision, Grant, Load, ModelFigures, ModelState, Refuse, Residency, Size, Unload
from .engine import Engine
from .hosts.current import current_task
from .model_spec import ModelSpec
from .resident import Resident, retold

RETRY_SECONDS = 10.0
"""A load that failed is tried again by the first use after this time. Uses before it get the same error."""


@define(eq=False)
class Use:
    """A use, or an order to unload, on its way to its answer. Where it is refused, ``error`` is why."""

    ticket: int
    resident: Resident
    is_order: bool
    answered: anyio.Event = field(factory=anyio.Event)
    error: Exception | None = None

    async def wait(self) -> None:
        """Returns when it is granted, and raises ``error`` when it is refused."""
        try:
            await self.answered.wait()
        except anyio.get_cancelled_exc_class() as cancelled:
            cancelled.__traceback__ = None  # see `Mailbox.wait`
            raise
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # a frame in its own error's traceback would be a reference cycle


@define(eq=False)
class Residents:
    """Implements `triolet.api.engines.Engines`."""

    specs: Mapping[str, ModelSpec]
    budget: int | None
    idle_seconds: float
    closing: bool = field(default=False, init=False)
    _residents: dict[str, Resident] = field(init=False)
    _residency: Residency = field(init=False)
    _uses: dict[int, Use] = field(factory=dict, init=False)  # by ticket, that have no answer yet
    _used_by: dict[object, str] = field(factory=dict, init=False)  # the model that each task uses or waits for
    _tasks: anyio.abc.TaskGroup | None = field(default=None, init=False)  # within the block
    _context: Context = field(factory=copy_context, init=False)  # of the block: tasks outlive the uses that begin them
    _running: int = field(default=0, init=False)  # tasks of residents
    _hurried: bool = field(default=False, init=False)  # the surroundings were cancelled
    _gone: anyio.Event = field(init=False)  # no task of a resident is left, and none will be
    _to_cancel: list[Resident] = field(factory=list, init=False)
    _cancelling: anyio.Event = field(init=False)  # there are some to cancel, or all is closed
    _changed: anyio.Event = field(init=False)  # there is a deadline before the alarm, or no more need of one
    _alarm: float = field(default=math.inf, init=False)
    _errors: list[Exception] = field(factory=list, init=False)  # that leave the block
    _log: logging.Logger | None = field(factory=lambda: logging.getLogger("triolet.engines"), init=False)

    def __attrs_post_init__(self) -> None:
        self._residents = {name: Resident(name, spec, self.budget) for name, spec in self.specs.items()}
        self._residency = Residency(tuple(self.specs), self.budget, self.idle_seconds, RETRY_SECONDS)

    # -- the block ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection  # ^C comes at the body's and the group's checkpoints, not between our lines
    async def running(self) -> AsyncIterator[None]:
        """The block. The body's own exception leaves it unchanged, never wrapped in a group."""
        body_error: BaseException | None = None
        self._gone, self._changed, self._cancelling = anyio.Event(), anyio.Event(), anyio.Event()
        self._context = copy_context()
        try:
            try:
                async with anyio.create_task_group() as self._tasks:
                    self._start_service()
                    try:
                        yield
                    except BaseException as error:  # noqa: BLE001  (raised again below, outside the group)
                        body_error = error
                    finally:
                        self.close(0.0 if body_error is not None or self._hurried else None)
            except BaseException as error:  # noqa: BLE001  (a cancellation or ^C while the engines end; raised below)
                body_error = _more_urgent(body_error, error)
            self._tasks = None
            self._raise_end(body_error)
        finally:
            del body_error

    def close(self, drain: float | None) -> None:
        """Begins the end: no use begins any more, loads are given up, and requests that run have ``drain`` seconds
        (``None``: each engine's own). Once it has begun, it is only hastened, by no seconds."""
        if self._gone.is_set():
            return
        for resident in self._residents.values():
            is_loading = self._residency.figures(resident.name).state is ModelState.LOADING
            if drain == 0 or is_loading:
                self._to_cancel.append(resident)
            if drain == 0 or not self.closing:
                resident.drain = drain  # the keeper may leave before its cancellation comes, and must begin no drain
        self.closing = True
        self._cancelling.set()
        self._residency.close()
        self._follow()
        self._check_gone()

    async def closed(self) -> None:
        """Returns when all engines are closed."""
        await self._gone.wait()

    def _start_service(self) -> None:
        assert self._tasks is not None, "it belongs to the block"
        self._tasks.start_soon(self._cancel, name="triolet canceller of engines")
        self._tasks.start_soon(self._hasten, name="triolet hastener of engines")
        self._tasks.start_soon(self._keep_time, name="triolet timekeeper of engines")
        for name in [name for name, spec in self.specs.items() if spec.preload]:
            self._tasks.start_soon(self._preload, name, name=f"triolet preload of {name}")

    @trio.lowlevel.enable_ki_protection
    async def _cancel(self) -> None:
        """Cancels tasks of residents. It is a task of its own that does: the context of a cancellation is the error
        that is being handled where it is ordered, and an engine clears the frames of all contexts."""
        with anyio.CancelScope(shield=True):
            while not self._gone.is_set():
                await self._cancelling.wait()
                self._cancelling = anyio.Event()
                while self._to_cancel:
                    self._to_cancel.pop().hurry()

    @trio.lowlevel.enable_ki_protection
    async def _hasten(self) -> None:
        """Ends the drains where the surroundings are cancelled. A body that still runs is cancelled too, so the engines
        stay open until the body ends: else it would get `EngineClosed` instead."""
        try:
            await self._gone.wait()
        except anyio.get_cancelled_exc_class():
            self._hurried = True
            if self.closing:
                self.close(0.0)
            raise

    @trio.lowlevel.enable_ki_protection
    async def _keep_time(self) -> None:
        """Wakes up for deadlines."""
        while not self.closing:
            self._changed, self._alarm = anyio.Event(), self._residency.next_deadline()
            with anyio.CancelScope(deadline=self._alarm):
                await self._changed.wait()
            self._follow()

    @trio.lowlevel.enable_ki_protection
    async def _preload(self, name: str) -> None:
        with suppress(TrioletError):  # the log and the statistics tell it
            async with self.use(name):
                pass

    def _check_gone(self) -> None:
        if self.closing and not self._running:
            self._gone.set()
            self._cancelling.set()

    def _raise_end(self, body_error: BaseException | None) -> None:
        """Raises the error that leaves the block."""
        errors, self._errors = self._errors, []
        for further in errors[1:]:
            errors[0].add_note(f"another engine failed too: {type(further).__name__}: {further}")
        for resident in self._residents.values():
            resident.failure = None
        error = leaving(body_error, errors[0] if errors else None, anyio.get_cancelled_exc_class())
        try:
            if error is not None:
                raise error
        finally:
            del error, body_error, errors

    # -- uses --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def use(self, name: str, *, at_once: bool = False) -> AsyncIterator[Engine]:
        """See `Engines.use`; ``at_once``: a model that has just failed is tried again."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        task = self._free_task(f"use({name!r})")
        self._used_by[task] = name
        engine: Engine | None = None
        try:
            while engine is None:  # again, where the engine failed before the user heard of it
                use = self._enter(name, self._residency.want(name, at_once=at_once))
                try:
                    await use.wait()
                    engine = use.resident.engine if self._residency.is_granted(use.ticket) else None
                    if engine is not None:
                        yield engine
                finally:
                    self._leave(use)
        finally:
            del self._used_by[task]

    @trio.lowlevel.enable_ki_protection
    async def unload(self, name: str) -> None:
        """See `Engines.unload`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._free_task(f"unload({name!r})")
        order = self._enter(name, self._residency.order_unload(name), is_order=True)
        try:
            await order.wait()
        finally:
            self._leave(order)

    def _free_task(self, call: str) -> object:
        """The task that runs, which must use no model: it might wait for itself, or for a task that waits for it."""
        task = current_task()
        used = self._used_by.get(task)
        if used is not None:
            raise EngineStateError(
                f"{call} by a task that uses {used!r}: it might wait for itself; allowed: one use at a time in a task. "
                f"Leave the use of {used!r} first, or call from another task that this one does not wait for"
            )
        return task

    def _enter(self, name: str, ticket: int, *, is_order: bool = False) -> Use:
        use = self._uses[ticket] = Use(ticket, self._residents[name], is_order)
        self._follow()
        return use

    def _leave(self, use: Use) -> None:
        self._uses.pop(use.ticket, None)
        self._residency.end(use.ticket, anyio.current_time())
        self._follow()

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Carries out what follows from the facts so far."""
        for decision in self._residency.decide(anyio.current_time()):
            self._carry_out(decision)
        if self.closing or self._residency.next_deadline() < self._alarm:
            self._changed.set()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Grant(ticket):
                self._uses.pop(ticket).answered.set()
            case Refuse(ticket):
                use = self._uses.pop(ticket)
                use.error = use.error or self._refusal(use.resident)
                use.answered.set()
            case Size(name):
                self._start(self._residents[name], self._size)
            case Load(name):
                self._start(self._residents[name], self._keep)
            case Unload(name, why):
                self._residents[name].dismiss(why)
            case _:
                assert_never(decision)

    def _refusal(self, resident: Resident) -> Exception:
        if self.closing or resident.failure is None:
            return EngineClosed("the block of these engines ends, and no use begins any more; open new ones")
        since = anyio.current_time() - resident.failed_at
        left = max(0.0, RETRY_SECONDS - since)
        return retold(resident.failure, f"; this was {since:.1f} s ago, and is tried again from {left:.1f} s on")

    # -- tasks of residents ------------------------------------------------------------------------------------------

    def _start(self, resident: Resident, job: Callable[[Resident], Awaitable[None]]) -> None:
        assert self._tasks is not None, "something is begun outside of the block"
        resident.scope = anyio.CancelScope(shield=True)
        self._running += 1
        start = partial(self._tasks.start_soon, self._run, resident, job, name=f"triolet keeper of {resident.name}")
        self._context.copy().run(start)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, resident: Resident, job: Callable[[Resident], Awaitable[None]]) -> None:
        """Runs a task of a resident to its end, and reports that."""
        assert resident.scope is not None, "it was made for this task"
        error: Exception | None = None
        try:
            with resident.scope:
                try:
                    await job(resident)
                except Exception as caught:  # noqa: BLE001  (told to whoever waits, or raised at the end of the block)
                    frames.clear_frames(caught)  # they hold the engine
                    error = caught
        finally:
            resident.scope = resident.leave = None
            self._running -= 1
            self._ended(resident, error)
            del error
            self._follow()
            self._check_gone()

    async def _size(self, resident: Resident) -> None:
        self._residency.sized(resident.name, (await resident.size()).total)

    async def _keep(self, resident: Resident) -> None:
        await resident.keep(partial(self._opened, resident), partial(self._leaving, resident))

    def _opened(self, resident: Resident, held: DeviceMemory, seconds: float) -> None:
        self._residency.opened(resident.name, held.total, anyio.current_time())
        self._write(log_lines.model_loaded(resident.name, seconds, held, self._residency.held, self.budget))
        self._follow()

    def _leaving(self, resident: Resident) -> None:
        self._residency.leaving(resident.name)
        self._follow()

    def _ended(self, resident: Resident, error: Exception | None) -> None:
        figures = self._residency.figures(resident.name)
        if error is not None:
            resident.last_error = f"{type(error).__name__}: {error}"
            ended_badly = isinstance(error, EngineTeardownError | RunnerCrashed)
            if isinstance(error, InvariantViolation) or (self.closing and ended_badly):
                self._errors.append(error)
        if figures.state is ModelState.LOADING:
            self._ended_early(resident, error)
        elif figures.state is ModelState.UNLOADING:
            self._ended_late(resident, error, figures)

    def _ended_early(self, resident: Resident, error: Exception | None) -> None:
        """The model was not loaded."""
        resident.failure, resident.failed_at = error, anyio.current_time()
        self._residency.failed(resident.name, resident.failed_at)
        if error is not None:
            self._write(log_lines.model_failed(resident.name, "not loaded", error))
            self._tell(resident, error, orders=False)

    def _ended_late(self, resident: Resident, error: Exception | None, figures: ModelFigures) -> None:
        """The model was loaded, and is no more."""
        self._residency.closed(resident.name)
        if error is None:
            self._write(log_lines.model_unloaded(resident.name, resident.why, figures.bytes))
            return
        what = f"unloaded ({resident.why}), but not well" if resident.why else "failed while it was open"
        self._write(log_lines.model_failed(resident.name, what, error))
        self._tell(resident, error, orders=True)

    def _tell(self, resident: Resident, error: Exception, *, orders: bool) -> None:
        """Gives the error to those who wait now, for the model or for its end: they get it when they are answered."""
        for use in self._uses.values():
            if use.resident is resident and use.is_order == orders:
                use.error = retold(error)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def figures(self, name: str) -> ModelFigures:
        """The figures of a model."""
        return self._residency.figures(name)

    def resident(self, name: str) -> Resident:
        """The resident of a model."""
        return self._residents[name]

    def _write(self, line: Line) -> None:
        """Writes a line to the log. A handler that raises gets no more lines, and its error leaves the block."""
        if self._log is None:
            return
        try:
            self._log.log(*line)
        except Exception as error:  # noqa: BLE001  (raised at the end of the block)
            error.add_note("raised by a handler or filter of the log 'triolet.engines', which must not raise")
            self._errors.append(error)
            self._log = None


def _more_urgent(body_error: BaseException | None, group_error: BaseException) -> BaseException:
    """The error that leaves the block where the group raised too. A cancellation of the surroundings is dropped for the
    body's error; a ^C goes before it."""
    rest = frames.without(group_error, anyio.get_cancelled_exc_class())
    if rest is None:
        return body_error or group_error
    if body_error is not None:
        rest.__context__ = body_error
    return rest
