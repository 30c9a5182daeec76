"""The tasks that hold the engines of several models open, and the way of a use to its engine.

`triolet.core.residency` decides. `Residents` carries its decisions out and tells it the facts, all in one event loop,
and without an await between the halves of a change. Each loaded model has a task of its own, its keeper, which enters
the engine's block and leaves it. Keepers are shielded: only `Residents` stops them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import assert_never

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import outcome
import trio
from attrs import define, field

from ..actors.supervisor import is_cancellation, leaving
from ..core import frames, log_lines
from ..core.errors import CallerError, EngineClosed, EngineError, InvariantViolation, ModelTooLarge, TrioletError
from ..core.log_lines import Line
from ..core.plan import DeviceMemory
from ..core.residency import Decision, Grant, Load, ModelFigures, ModelState, Refuse, Residency, Size, Unload
from .engine import Engine
from .model_spec import ModelSpec, counted_memory

RETRY_SECONDS = 10.0
"""A load that failed is tried again by the first use after this time. Uses before it get the same error."""


@define(eq=False)
class Resident:
    """One of the models: its engine and the task that holds it open, while it has any."""

    name: str
    spec: ModelSpec
    engine: Engine | None = None  # while it may be used
    scope: anyio.CancelScope | None = None  # of the task that sizes the model, or keeps its engine
    leave: anyio.Event | None = None  # the keeper is to leave the engine's block
    why: str = ""  # it is to leave
    drain: float | None = None  # seconds; None: the engine's own
    failure: Exception | None = None  # of the last load, for those who come too early for the next one
    failed_at: float = math.nan
    last_error: str | None = None


@define(eq=False)
class Use:
    """A use, or an order to unload, that waits for its answer. ``error``: the answer is no."""

    ticket: int
    resident: Resident
    unloads: bool = False
    answered: anyio.Event = field(factory=anyio.Event)
    error: Exception | None = None

    async def wait(self) -> None:
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
            del error


@define(eq=False)
class Residents:
    """See `triolet.api.engines.Engines`."""

    specs: Mapping[str, ModelSpec]
    budget: int | None
    idle_seconds: float
    closing: bool = field(default=False, init=False)
    _residents: dict[str, Resident] = field(init=False)
    _residency: Residency = field(init=False)
    _uses: dict[int, Use] = field(factory=dict, init=False)  # by ticket, that wait
    _tasks: anyio.abc.TaskGroup | None = field(default=None, init=False)  # within the block
    _jobs: int = field(default=0, init=False)  # tasks that size a model or keep an engine
    _hurried: bool = field(default=False, init=False)  # the surroundings were cancelled
    _gone: anyio.Event = field(init=False)  # all is closed
    _changed: anyio.Event = field(init=False)  # there is a deadline before the alarm, or no time to keep any more
    _alarm: float = field(default=math.inf, init=False)
    _errors: list[Exception] = field(factory=list, init=False)  # that leave the block
    _log: logging.Logger | None = field(factory=lambda: logging.getLogger("triolet.engines"), init=False)

    def __attrs_post_init__(self) -> None:
        self._residents = {name: Resident(name, spec) for name, spec in self.specs.items()}
        self._residency = Residency(tuple(self.specs), self.budget, self.idle_seconds, RETRY_SECONDS)

    # -- the block ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection  # ^C comes at the body's and the group's checkpoints, not between our lines
    async def running(self) -> AsyncIterator[None]:
        """The block. The body's own exception leaves it unchanged, never wrapped in a group."""
        body_error: BaseException | None = None
        self._gone, self._changed = anyio.Event(), anyio.Event()
        try:
            try:
                async with anyio.create_task_group() as self._tasks:
                    self._tasks.start_soon(self._hasten, name="triolet hastener of engines")
                    self._tasks.start_soon(self._keep_time, name="triolet timekeeper of engines")
                    for name in [name for name, spec in self.specs.items() if spec.preload]:
                        self._tasks.start_soon(self._preload, name, name=f"triolet preload of {name}")
                    try:
                        yield
                    except BaseException as error:  # noqa: BLE001  (raised again below, outside the group)
                        body_error = error
                    finally:
                        self.close(None)
                        if body_error is not None or self._hurried:
                            self._hurry()
            except BaseException as error:  # noqa: BLE001  (a cancellation or ^C while the engines end; raised below)
                body_error = _more_urgent(body_error, error)
            self._tasks = None
            self._raise_end(body_error)
        finally:
            del body_error

    def close(self, drain: float | None) -> None:
        """Begins the end: no use begins any more, loads are given up, requests that run have ``drain`` seconds
        (``None``: each engine's own)."""
        for resident in self._residents.values():
            resident.drain = drain
            if resident.scope is not None and resident.leave is None:
                resident.scope.cancel()
        self.closing = True
        self._residency.close()
        self._follow()
        self._check_gone()

    async def closed(self) -> None:
        """Returns when all engines are closed."""
        await self._gone.wait()

    def _hurry(self) -> None:
        """Ends all drains."""
        for resident in self._residents.values():
            if resident.scope is not None:
                resident.scope.cancel()

    async def _hasten(self) -> None:
        """Ends the drains where the surroundings are cancelled. A body that still runs is cancelled too, so the engines
        stay open until the body ends: else it would get `EngineClosed` instead."""
        try:
            await self._gone.wait()
        except anyio.get_cancelled_exc_class():
            self._hurried = True
            if self.closing:
                self._hurry()
            raise

    def _check_gone(self) -> None:
        if self.closing and not self._jobs:
            self._gone.set()

    def _raise_end(self, body_error: BaseException | None) -> None:
        """Raises the error that leaves the block."""
        errors, self._errors = self._errors, []
        for further in errors[1:]:
            errors[0].add_note(f"another engine's end failed too: {type(further).__name__}: {further}")
        for resident in self._residents.values():
            resident.failure = None
        error = leaving(body_error, errors[0] if errors else None, anyio.get_cancelled_exc_class())
        try:
            if error is not None:
                raise error
        finally:
            del error, body_error, errors  # a frame in its own error's traceback would be a reference cycle

    # -- uses --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def use(self, name: str, *, at_once: bool = False) -> AsyncIterator[Engine]:
        """See `Engines.use`; ``at_once``: the model is tried again though it has just failed."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        begun = False
        while not begun:  # again, where the engine failed before its user was told of it
            use = self._enter(name, self._residency.want(name, at_once=at_once))
            try:
                await use.wait()
                engine = use.resident.engine
                if engine is not None and self._residency.is_granted(use.ticket):
                    begun = True
                    yield engine
            finally:
                self._leave(use)

    @trio.lowlevel.enable_ki_protection
    async def unload(self, name: str) -> None:
        """See `Engines.unload`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        order = self._enter(name, self._residency.order_unload(name), unloads=True)
        try:
            await order.wait()
        finally:
            self._leave(order)

    def _enter(self, name: str, ticket: int, *, unloads: bool = False) -> Use:
        use = self._uses[ticket] = Use(ticket, self._residents[name], unloads)
        self._follow()
        return use

    def _leave(self, use: Use) -> None:
        self._uses.pop(use.ticket, None)
        self._residency.end(use.ticket, anyio.current_time())
        self._follow()

    async def _preload(self, name: str) -> None:
        with suppress(TrioletError):  # the log and the statistics tell it
            async with self.use(name):
                pass

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
                use.error = self._refusal(use.resident)
                use.answered.set()
            case Size(name):
                self._start(self._residents[name], self._size)
            case Load(name):
                self._start(self._residents[name], self._keep)
            case Unload(name, why):
                self._dismiss(self._residents[name], why)
            case _:
                assert_never(decision)

    def _dismiss(self, resident: Resident, why: str) -> None:
        assert resident.leave is not None, "only what is open is unloaded"
        resident.why = why
        resident.leave.set()

    def _refusal(self, resident: Resident) -> Exception:
        if self.closing or resident.failure is None:
            return EngineClosed("the block of these engines ends, and no use begins any more; open new ones")
        since = anyio.current_time() - resident.failed_at
        if not since:
            return retold(resident.failure)
        left = max(0.0, RETRY_SECONDS - since)
        return retold(resident.failure, f"; this was {since:.1f} s ago, and is tried again from {left:.1f} s on")

    async def _keep_time(self) -> None:
        """Wakes up for deadlines."""
        while not self.closing:
            self._changed, self._alarm = anyio.Event(), self._residency.next_deadline()
            with anyio.CancelScope(deadline=self._alarm):
                await self._changed.wait()
            self._follow()

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _start(self, resident: Resident, job: Callable[[Resident], Awaitable[None]]) -> None:
        assert self._tasks is not None, "something is begun outside of the block"
        resident.scope = anyio.CancelScope(shield=True)
        self._jobs += 1
        self._tasks.start_soon(self._run, resident, job, name=f"triolet keeper of {resident.name}")

    @trio.lowlevel.enable_ki_protection
    async def _run(self, resident: Resident, job: Callable[[Resident], Awaitable[None]]) -> None:
        """Runs a job to its end, and tells of it."""
        error: Exception | None = None
        assert resident.scope is not None, "it was made for this task"
        try:
            with resident.scope:
                try:
                    await job(resident)
                except Exception as caught:
                    frames.clear_frames(caught)  # they hold the engine
                    assert caught.__traceback__ is not None, "it was raised"
                    error = caught.with_traceback(caught.__traceback__.tb_next)  # without this frame, which goes on
        finally:
            resident.scope = resident.leave = None
            self._jobs -= 1
            self._ended(resident, error)
            self._follow()
            self._check_gone()
            del error

    async def _size(self, resident: Resident) -> None:
        """Finds out what the model needs."""
        needs = resident.spec.known_needs
        if needs is None:
            sizing = partial(outcome.capture, resident.spec.needs)
            needs = (await anyio.to_thread.run_sync(sizing, abandon_on_cancel=True)).unwrap()
        self._check_size(resident, needs, "is estimated to need")
        self._residency.sized(resident.name, needs.total)

    async def _keep(self, resident: Resident) -> None:
        """Loads the model, and holds its engine open until it is to go."""
        began = anyio.current_time()
        resident.leave = leave = anyio.Event()
        async with resident.spec.new_engine() as engine:
            held = counted_memory(engine)
            self._check_size(resident, held, "was loaded and needs")
            resident.engine = engine
            self._residency.opened(resident.name, held.total, anyio.current_time())
            seconds = anyio.current_time() - began
            self._write(log_lines.model_loaded(resident.name, seconds, held, self._residency.held, self.budget))
            self._follow()
            try:
                await leave.wait()
            finally:
                resident.engine = None
                self._residency.leaving(resident.name)
                self._follow()
            if resident.drain is not None:
                await engine.aclose(resident.drain)

    def _check_size(self, resident: Resident, needs: DeviceMemory, what: str) -> None:
        if self.budget is not None and needs.total > self.budget:
            raise ModelTooLarge(
                f"the model {resident.name!r} {what} {log_lines.owners(needs)}; allowed: memory_budget={self.budget}, "
                f"{log_lines.mebibytes(self.budget)}, of all models together. Give more, or have the model take less "
                "by its EngineConfig: self_kv_bytes, cross_kv_bytes, encoder_cache_bytes, max_positions, dtype, "
                "quantization"
            )

    def _ended(self, resident: Resident, error: Exception | None) -> None:
        """The resident's task is over."""
        figures = self._residency.figures(resident.name)
        if error is not None:
            resident.last_error = f"{type(error).__name__}: {error}"
            if self.closing and not isinstance(error, CallerError) or isinstance(error, InvariantViolation):
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

    def _ended_late(self, resident: Resident, error: Exception | None, figures: ModelFigures) -> None:
        """The model was loaded, and is no more."""
        self._residency.closed(resident.name)
        if error is None:
            self._write(log_lines.model_unloaded(resident.name, resident.why, figures.bytes))
            return
        self._write(log_lines.model_failed(resident.name, resident.why or "it failed while it was open", error))
        for use in self._uses.values():
            if use.resident is resident and use.unloads:
                use.error = retold(error)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def figures(self, name: str) -> ModelFigures:
        """Of a model."""
        return self._residency.figures(name)

    def resident(self, name: str) -> Resident:
        """A model's."""
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


def retold(error: Exception, more: str = "") -> Exception:
    """Another object with the same text, and ``more``: two tasks must not raise the same one."""
    again: Exception
    if isinstance(error, TrioletError) and not isinstance(error, InvariantViolation):
        again = type(error)(f"{error}{more}")
        again.__cause__ = error.__cause__
    else:
        again = EngineError(f"{type(error).__name__}: {error}{more}")
        again.__cause__ = error
    return again


def _more_urgent(body_error: BaseException | None, group_error: BaseException) -> BaseException:
    """The error that leaves the block where the group raised too. A cancellation of the surroundings is dropped for the
    body's error; a ^C goes before it."""
    rest = frames.without(group_error, anyio.get_cancelled_exc_class())
    if rest is None:
        return body_error or group_error
    if body_error is not None and not is_cancellation(body_error, anyio.get_cancelled_exc_class()):
        rest.__context__ = body_error
    return rest
