"""`Engines`: several models in one program, under one memory budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import trio
from attrs import frozen

from ..actors.statistics import EngineStatistics
from ..core.checks import integer, number, shown
from ..core.errors import EngineStateError, InvalidRequest, TrioletError, UnknownModel
from ..core.model import ModelDescription
from ..core.residency import ModelState
from .engine import Engine
from .model_spec import ModelSpec
from .residents import Resident, Residents

_BUDGET = integer(1, 2**50, " of bytes").or_none("as much as the models take")
_IDLE = number(0, math.inf).or_none("an idle model stays")
_DRAIN = number(0, math.inf, "; 0 aborts at once").or_none("each engine's EngineConfig.drain_seconds")


@frozen(kw_only=True)
class ModelStatistics:
    """A snapshot of one of several models.

    Args:
        state: absent, loading (its files are read, or its weights), ready, unloading, or failed: absent, since the last
            load failed.
        users: uses that go on.
        waiting: uses that wait.
        bytes: what it counts against the budget: while it loads an estimate, then what its engine holds and all that
            encoder outputs may take.
        loads: how often it was loaded.
        last_used: seconds since its last use ended; 0: it is in use; ``None``: it was never used.
        last_error: type and text of the last error of a load, of the engine or of its end.
        engine: the engine's own snapshot, while the model is ready.
        description: its limits and vocabulary, while the model is ready.
    """

    state: ModelState
    users: int
    waiting: int
    bytes: int
    loads: int
    last_used: float | None
    last_error: str | None
    engine: EngineStatistics | None
    description: ModelDescription | None


class Engines:
    """Several models, each with an `Engine` while it is loaded.

    ::

        models = {"speech": "openai/whisper-base", "chat": ModelSpec("Qwen/Qwen3-0.6B", config=EngineConfig(...))}
        async with Engines(models, memory_budget=4 * 2**30, idle_seconds=600) as engines:
            async with engines.use("speech") as engine:
                transcript = await engine.transcribe("speech.wav")

    The first use of a model loads it; other uses of it wait meanwhile, and those of ready models go on. A model that
    nobody uses is unloaded after ``idle_seconds``, or when another one needs the room: the least recently used first,
    and as few as are needed. A model in use is never unloaded. Waiting models are served in the order of arrival; where
    a model in use is to give way, later uses of it wait behind the one that needs the room.

    However the block ends, waiting uses get `EngineClosed`, loads are given up, and all engines end at once, each in
    the order of its own block: after their drain if the block ends well, else without one. On trio, asyncio and anyio
    alike; the block is entered and left by the same task.

    Args:
        models: a checkpoint's folder, a hub id or a `ModelSpec` for each name.
        memory_budget: bytes of all loaded models together: weights, keys and values, and what encoder outputs may take;
            ``None``: as much as the models take.
        idle_seconds: an idle model is unloaded after this time; ``None``: never for that.

    Raises (on making one):
        InvalidRequest: a value that cannot work, or two models of one name.

    Raises (on entering):
        EngineStateError: entered twice, or in no task of trio or asyncio.

    Raises (on leaving, beside the block's own error):
        RunnerCrashed: an engine failed while it ended.
        EngineTeardownError: something could not be given back in time, or a release failed.
        InvariantViolation: with ``EngineConfig(verify=True)``, an engine broke one of its promises.

    Raises (on every use):
        EngineStateError: outside of its block, or outside of the event loop that entered it.
    """

    def __init__(
        self,
        models: Mapping[str, str | Path | ModelSpec],
        *,
        memory_budget: int | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        if not isinstance(models, Mapping) or not models:
            raise InvalidRequest(
                f"models={shown(models)}; allowed: a mapping of names to checkpoints or ModelSpec(...)"
            )
        specs = {name: spec if isinstance(spec, ModelSpec) else ModelSpec(spec) for name, spec in models.items()}
        self._names = _names(specs)
        self._models = MappingProxyType(specs)
        self._budget = _BUDGET.of("memory_budget", memory_budget)
        idle = _IDLE.of("idle_seconds", idle_seconds)
        self._idle_seconds = math.inf if idle is None else idle
        self._residents: Residents | None = None  # while the block lasts
        self._block: AbstractAsyncContextManager[None] | None = None

    def __repr__(self) -> str:
        return f"<Engines of {', '.join(self._models)}>"

    # -- the block ---------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Self:
        if self._block is not None:
            raise EngineStateError("these engines were entered before, and are entered once; make new Engines(...)")
        _current_loop()
        await anyio.lowlevel.checkpoint_if_cancelled()
        residents = Residents(self._models, self._budget, self._idle_seconds)
        self._block = residents.running()
        await self._block.__aenter__()
        self._residents = residents
        return self

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._block is not None, "left before entered"
        assert self._block is not None, "left before entered"
        try:
            return await self._block.__aexit__(kind, error, traceback)
        finally:
            self._residents = None
            del error, traceback

    @trio.lowlevel.enable_ki_protection
    async def aclose(self, drain: float | None = None) -> None:
        """Ends all engines before the block ends; returns when every device is released. Running requests have
        ``drain`` seconds (``None``: each engine's ``EngineConfig.drain_seconds``; 0 aborts at once)."""
        seconds = _DRAIN.of("drain", drain)
        residents = self._opened()
        residents.close(seconds)
        await residents.closed.wait()

    # -- models ------------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Mapping[str, ModelSpec]:
        """The models by their names, in the order given, without aliases."""
        return self._models

    @property
    def names(self) -> tuple[str, ...]:
        """The names and aliases of all models."""
        return tuple(self._names)

    def name_of(self, name: str) -> str:
        """The name of the model that has ``name`` for its name or alias.

        Raises:
            UnknownModel: there is none.
        """
        return self._found(name)

    def use(self, name: str) -> AbstractAsyncContextManager[Engine]:
        """The engine of a model, open: ``async with engines.use("name") as engine``. It stays loaded until the block
        ends. Loads it if need be; waits while it is loaded, and while others give way to it.

        A task uses one model at a time, since it might wait for itself. A use belongs to the task that enters it until
        it is left: a use in a child task is not refused, so a parent that waits for such a child may wait for ever.

        A use that is cancelled no longer waits. A load that nobody waits for any more is given up: what it has loaded
        is given back as soon as the call returns, unless a use comes before that.

        A load that fails fails all uses that wait for it, each with an exception of its own. The first use after ten
        seconds tries again; those before get the same error.

        Raises:
            UnknownModel: no model has this name or alias.
            CheckpointError, DeviceOutOfMemory: the model cannot be loaded, for these or other reasons; see `Engine`.
            ModelTooLarge: it needs more memory than ``memory_budget``.
            EngineStateError: this task uses a model, this one or another.
            EngineClosed: the block ends.
        """
        return self._opened().use(self._found(name))

    @trio.lowlevel.enable_ki_protection
    async def load(self, name: str) -> None:
        """Loads a model if need be, as a use does; returns when it is ready. A model that has just failed is tried
        again at once. Errors are those of `use`."""
        async with self._opened().use(self._found(name), at_once=True):
            pass

    @trio.lowlevel.enable_ki_protection
    async def unload(self, name: str) -> None:
        """Unloads a model when the uses that came before have ended; returns when it is gone. Later uses wait, and have
        it loaded anew. A caller that is cancelled before the uses have ended withdraws the order.

        Raises:
            UnknownModel: no model has this name or alias.
            EngineStateError: this task uses a model, this one or another.
            EngineTeardownError: something could not be given back in time, or a release failed.
        """
        await self._opened().unload(self._found(name))

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """A frozen snapshot of each model, by name."""
        residents, now = self._opened(), anyio.current_time()
        return MappingProxyType({name: _statistics(resident, now) for name, resident in residents.by_name.items()})

    def _found(self, name: str) -> str:
        if not isinstance(name, str) or name not in self._names:
            raise UnknownModel(f"there is no model {shown(name)}; allowed: {', '.join(self._names)}")
        return self._names[name]

    def _opened(self) -> Residents:
        """The residents, within the block and its loop."""
        if self._residents is None:
            state = "not entered yet" if self._block is None else "closed: their block has ended"
            raise EngineStateError(f"these engines are {state}; use them inside: async with Engines(...) as engines")
        if _current_loop() != self._residents.loop:
            raise EngineStateError(
                "these engines were used outside of the event loop that they were entered in; allowed: tasks of that "
                "loop. From another thread ask it by anyio.from_thread.run(...)"
            )
        return self._residents


def _statistics(resident: Resident, now: float) -> ModelStatistics:
    books, engine = resident.books, resident.engine
    last_used = None if books.last_use is None else now - books.last_use
    return ModelStatistics(
        state=books.state,
        users=len(books.users),
        waiting=len(books.waiting),
        bytes=books.held,
        loads=books.loads,
        last_used=0.0 if books.users else last_used,
        last_error=resident.last_error,
        engine=None if engine is None else _engine_statistics(engine),
        description=None if engine is None else engine.model,
    )


def _engine_statistics(engine: Engine) -> EngineStatistics | None:
    try:
        return engine.statistics()
    except TrioletError:  # it has failed, and its keeper has not heard of it yet
        return None


def _current_loop() -> anyio.lowlevel.EventLoopToken:
    try:
        return anyio.lowlevel.current_token()
    except RuntimeError:
        raise EngineStateError("no event loop is running here; allowed: a task of trio or asyncio") from None


def _names(specs: Mapping[str, ModelSpec]) -> dict[str, str]:
    """Names and aliases, each with its model's name."""
    found: dict[str, str] = {}
    for owner, spec in specs.items():
        if not isinstance(owner, str) or not owner.strip():
            raise InvalidRequest(f"a model is named {shown(owner)}; allowed: a text that is not blank")
        for name in (owner, *spec.aliases):
            if name in found:
                raise InvalidRequest(f"{name!r} names {found[name]!r} and {owner!r}; allowed: a name for one model")
            found[name] = owner
    return found
