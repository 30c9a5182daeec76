"""`Residents`: carries out the decisions of `triolet.core.residency`, and reports the facts to `core.residency`.

All code runs in one event loop, without an await between the halves of a change. Each loaded model has its own task,
the keeper. Keepers are shielded from cancellation: only `Residents` stops them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import assert_never

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import outcome
import trio
from attrs import define, field

from ..actors.process import Process
from ..actors.supervisor import leaving, more_urgent
from ..core import log_lines, tracebacks
from ..core.errors import (
    EngineClosed,
    EngineError,
    EngineStateError,
    EngineTeardownError,
    InvariantViolation,
    RunnerCrashed,
    TrioletError,
    caused,
)
from ..core.log_lines import Line
from ..core.residency import Decision, Grant, Load, Model, ModelState, Refuse, Residency, Size, Unload
from .engine import Engine
from .hosts.current import current_task
from .model_spec import ModelSpec, check_fits, counted_memory

RETRY_SECONDS = 10.0
"""The time after a failed load during which uses raise the same error. The first use after this time loads again."""


@define(eq=False)
class Resident:
    """One of the models, with its engine and its task while it has them. The task either determines the model's size,
    or is the model's keeper.
    """

    spec: ModelSpec
    books: Model
    engine: Engine | None = None  # while it may be used
    scope: anyio.CancelScope | None = None  # the cancel scope of the task, while the task runs
    leave: anyio.Event = field(factory=anyio.Event)  # set when the keeper has to leave the engine's block
    alarm: anyio.CancelScope = field(factory=anyio.CancelScope)  # wakes the keeper when the model was idle long enough
    why: str = ""  # the reason why the keeper has to leave
    drain: float | None = None  # seconds; None: the engine's own
    failure: Exception | None = None  # of the last load, raised by uses until the load is tried again
    last_error: str | None = None
    load_seconds: float = 0.0  # of all loads so far

    def hurry(self) -> None:
        """Ends the task as if its surroundings were cancelled."""
        if self.scope is not None:
            self.scope.cancel()


@define(eq=False)
class Use:
    """A use, or an order to unload, and its answer. If it is refused, ``error`` is the reason."""

    ticket: int
    resident: Resident
    is_order: bool
    answered: anyio.Event = field(factory=anyio.Event)
    error: Exception | None = None

    async def wait(self) -> None:
        """Waits for the answer. Returns if the use is granted, and raises ``error`` if it is refused."""
        with tracebacks.Untraced(anyio.get_cancelled_exc_class()):
            await self.answered.wait()
        if self.error is not None:
            raise self.error


@define(eq=False)
class Residents:
    """Implements `triolet.api.engines.Engines` within its block. The object is made in the event loop of the block."""

    specs: Mapping[str, ModelSpec]
    budget: int | None
    idle_seconds: float
    loop: anyio.lowlevel.EventLoopToken = field(factory=anyio.lowlevel.current_token, init=False)
    process: Process = field(factory=Process, init=False)
    closing: bool = field(default=False, init=False)
    closed: anyio.Event = field(factory=anyio.Event, init=False)  # set when all tasks of residents have ended for good
    by_name: dict[str, Resident] = field(init=False)
    _residency: Residency = field(init=False)
    _uses: dict[int, Use] = field(factory=dict, init=False)  # uses without an answer yet, by ticket
    _used_by: dict[object, str] = field(factory=dict, init=False)  # the model that each task uses or waits for
    _tasks: anyio.abc.TaskGroup = field(factory=anyio.create_task_group, init=False)
    _context: Context = field(factory=copy_context, init=False)  # of the block, since tasks outlive uses
    _hurried: bool = field(default=False, init=False)  # whether the surroundings were cancelled
    _running: int = field(default=0, init=False)  # number of tasks of residents
    _errors: list[Exception] = field(factory=list, init=False)  # errors that will leave the block
    _log: logging.Logger | None = field(factory=lambda: logging.getLogger("triolet.engines"), init=False)

    def __attrs_post_init__(self) -> None:
        self._residency = Residency(tuple(self.specs), self.budget, self.idle_seconds, RETRY_SECONDS)
        self.by_name = {name: Resident(spec, self._residency.models[name]) for name, spec in self.specs.items()}

    # -- the block ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Opens the block. An exception of the block's body leaves the block unchanged, not in a group."""
        body_error: BaseException | None = None
        try:
            try:
                async with self._tasks:
                    self._tasks.start_soon(self._hasten, name="triolet hastener of engines")
                    for name in [name for name, spec in self.specs.items() if spec.preload]:
                        self._tasks.start_soon(self._preload, name, name=f"triolet preload of {name}")
                    try:
                        yield
                    except BaseException as error:  # noqa: BLE001  (raised again below, outside the group)
                        body_error = error
                    try:
                        self.close(None if body_error is None else 0.0)
                        await self.closed.wait()
                    except BaseException:  # a cancellation of the surroundings, or ^C, which ends the drains
                        self.close(0.0)
                        raise
            except BaseException as error:  # noqa: BLE001  (a cancellation or ^C while the engines end; raised below)
                body_error = more_urgent(body_error, error, anyio.get_cancelled_exc_class())
            body_error = self._end_error(body_error)
            if body_error is not None:
                raise body_error
        finally:
            del body_error

    def close(self, drain: float | None) -> None:
        """Begins the end: no use begins any more, loads are given up, and running requests have ``drain`` seconds to
        end (``None``: each engine's own setting). A later call changes nothing, except that a ``drain`` of 0 ends the
        drains.
        """
        if self.closed.is_set():
            return
        drain = 0.0 if self._hurried else drain
        for resident in self.by_name.values():
            if drain == 0 or resident.books.state is ModelState.LOADING:
                resident.hurry()
            if drain == 0 or not self.closing:
                resident.drain = drain  # the keeper may leave before it is cancelled, and must then begin no drain
        self.closing = True
        self._residency.close()
        self._follow()

    @trio.lowlevel.enable_ki_protection
    async def _hasten(self) -> None:
        """Ends the drains if the surroundings of the block are cancelled. A body that waits for the end in a shield of
        its own would not notice that. Engines stay open while the body runs for other reasons.
        """
        try:
            await self.closed.wait()
        except anyio.get_cancelled_exc_class():
            self._hurried = True
            if self.closing:
                self.close(0.0)
            raise

    @trio.lowlevel.enable_ki_protection
    async def _preload(self, name: str) -> None:
        with suppress(TrioletError):  # the log and the statistics report it
            async with self.use(name):
                pass

    def _end_error(self, body_error: BaseException | None) -> BaseException | None:
        """Returns the error that leaves the block."""
        errors, self._errors = self._errors, []
        for further in errors[1:]:
            errors[0].add_note(f"another engine failed too: {type(further).__name__}: {further}")
        for resident in self.by_name.values():
            resident.failure = None  # its traceback has this object in a frame
        return leaving(body_error, errors[0] if errors else None, anyio.get_cancelled_exc_class())

    # -- uses --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def use(self, name: str, *, at_once: bool = False) -> AsyncIterator[Engine]:
        """Implements `Engines.use`. ``at_once``: a model whose last load failed is loaded again at once."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        task = self._free_task(f"use({name!r})")
        self._used_by[task] = name
        engine: Engine | None = None
        try:
            while engine is None:  # tries again if the engine failed after the grant, before this task ran
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

    async def unload(self, name: str) -> None:
        """Implements `Engines.unload`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._free_task(f"unload({name!r})")
        order = self._enter(name, self._residency.order_unload(name), is_order=True)
        try:
            await order.wait()
        finally:
            self._leave(order)

    def _free_task(self, call: str) -> object:
        """Returns the task that runs. Raises `EngineStateError` if the task already uses a model, since it might wait
        for itself, or for a task that waits for it."""
        task = current_task()
        used = self._used_by.get(task)
        if used is not None:
            raise EngineStateError(
                f"{call} was called by a task that already uses {used!r}, so the task might wait for itself; "
                f"allowed: one use at a time in each task. Leave the use of {used!r} first, or call from another "
                "task that this one does not wait for"
            )
        return task

    def _enter(self, name: str, ticket: int, *, is_order: bool = False) -> Use:
        use = self._uses[ticket] = Use(ticket, self.by_name[name], is_order)
        self._follow()
        return use

    def _leave(self, use: Use) -> None:
        if self.process.is_forked:
            return
        use.error = None  # the frames that raised it refer to the use
        self._uses.pop(use.ticket, None)
        self._residency.end(use.ticket, anyio.current_time())
        self._follow()

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Carries out the decisions that follow from the facts so far."""
        for decision in self._residency.decide(anyio.current_time()):
            self._carry_out(decision)
        for resident in self.by_name.values():
            resident.alarm.deadline = self._residency.deadline_of(resident.books)
        if self.closing and not self._running:
            self.closed.set()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Grant(ticket):
                self._uses.pop(ticket).answered.set()
            case Refuse(ticket):
                use = self._uses.pop(ticket)
                use.error = use.error or self._refusal(use.resident)
                use.answered.set()
            case Size(name):
                self._start(self.by_name[name], self._size)
            case Load(name):
                self._start(self.by_name[name], self._keep)
            case Unload(name, why):
                self.by_name[name].why = why
                self.by_name[name].leave.set()
            case _:
                assert_never(decision)

    def _refusal(self, resident: Resident) -> Exception:
        if self.closing or resident.failure is None:
            return EngineClosed("the block of these engines is ending, so no new use can begin; make new Engines(...)")
        since = anyio.current_time() - resident.books.failed_at
        left = max(0.0, RETRY_SECONDS - since)
        return _again(resident.failure, f"; this was {since:.1f} s ago. The model can be loaded again in {left:.1f} s")

    # -- tasks of residents ------------------------------------------------------------------------------------------

    def _start(self, resident: Resident, job: Callable[[Resident], Awaitable[None]]) -> None:
        resident.scope = anyio.CancelScope(shield=True)
        self._running += 1
        run = partial(self._run, resident, resident.scope, job)
        name = f"triolet keeper of {resident.books.name}"
        self._context.copy().run(partial(self._tasks.start_soon, run, name=name))

    @trio.lowlevel.enable_ki_protection
    async def _run(
        self, resident: Resident, scope: anyio.CancelScope, job: Callable[[Resident], Awaitable[None]]
    ) -> None:
        """Runs a task of a resident to its end, and reports the end."""
        error: Exception | None = None
        try:
            with scope:
                try:
                    await job(resident)
                except Exception as caught:  # noqa: BLE001  (raised by the uses that wait, or at the end of the block)
                    tracebacks.clear_frames(caught)  # the frames hold the engine
                    error = caught
        finally:
            resident.scope = None
            self._running -= 1
            self._ended(resident, error)
            del error
            self._follow()

    async def _size(self, resident: Resident) -> None:
        """Finds out how much memory the model needs."""
        needs = resident.spec.known_needs
        if needs is None:
            sizing = partial(outcome.capture, resident.spec.needs)
            needs = (await anyio.to_thread.run_sync(sizing, abandon_on_cancel=True)).unwrap()
        check_fits(resident.books.name, needs, self.budget, "is estimated to need")
        self._residency.sized(resident.books.name, needs.total)

    async def _keep(self, resident: Resident) -> None:
        """Loads the model, and keeps its engine open until the model is unloaded. The same task, the keeper, enters and
        leaves the engine's block. If the engine fails, it cancels the keeper."""
        name, began = resident.books.name, anyio.current_time()
        resident.why, resident.leave = "", anyio.Event()
        async with resident.spec.new_engine() as engine:
            for adapter, folder in resident.spec.adapters.items():
                await engine.load_adapter(adapter, folder)
            held = counted_memory(engine)
            check_fits(name, held, self.budget, "was loaded and needs")
            resident.engine, resident.failure = engine, None
            now = anyio.current_time()
            self._residency.opened(name, held.total, now)
            resident.load_seconds += now - began
            self._write(log_lines.model_loaded(name, now - began, held, self._residency.held, self.budget))
            try:
                while not resident.leave.is_set():
                    with anyio.CancelScope() as resident.alarm:
                        self._follow()
                        await resident.leave.wait()
            finally:
                resident.engine = None
                self._residency.leaving(name)
                self._follow()
            if resident.drain is not None:
                await engine.aclose(resident.drain)

    def _ended(self, resident: Resident, error: Exception | None) -> None:
        """Reports the end of a resident's task, with the error of the task, to the residency, the log and the uses."""
        books = resident.books
        if error is not None:
            resident.last_error = f"{type(error).__name__}: {error}"
            ended_badly = isinstance(error, EngineTeardownError | RunnerCrashed)
            if isinstance(error, InvariantViolation) or (self.closing and ended_badly):
                self._errors.append(error)
        loading, what = books.state is ModelState.LOADING, "failed while it was open"
        if loading:
            resident.failure, what = error, "not loaded"
            self._residency.failed(books.name, anyio.current_time())
        elif books.state is ModelState.UNLOADING:
            if resident.why:
                what = f"unloaded ({resident.why}), but not well"
            if error is None:
                self._write(log_lines.model_unloaded(books.name, resident.why, books.held))
            self._residency.closed(books.name)
        if error is not None:
            self._write(log_lines.model_failed(books.name, what, error))
            for use in self._uses.values():  # uses that wait for the load, or orders that wait for the end, raise it
                if use.resident is resident and use.is_order != loading:
                    use.error = _again(error)

    def _write(self, line: Line) -> None:
        """Writes a line to the log. If a handler raises, nothing more is logged, and the error leaves the block."""
        if self._log is None:
            return
        try:
            self._log.log(*line)
        except Exception as error:  # noqa: BLE001  (raised at the end of the block)
            error.add_note("raised by a handler or filter of the log 'triolet.engines', which must not raise")
            self._errors.append(error)
            self._log = None


def _again(error: Exception, more: str = "") -> Exception:
    """Returns another error with the same text and ``more``. Two tasks must not raise the same object."""
    again: Exception
    if isinstance(error, TrioletError) and not isinstance(error, InvariantViolation):
        again = caused(type(error)(f"{error}{more}"), error.__cause__)
    else:
        again = caused(EngineError(f"{type(error).__name__}: {error}{more}"), error)
    for note in getattr(error, "__notes__", ()):
        again.add_note(note)
    return again
