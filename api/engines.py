"""`Engines`: several models in one program, under one memory budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Self

import anyio
import anyio.lowlevel
import trio
from attrs import frozen

from ..actors.statistics import EngineStatistics
from ..core.checks import integer, number, shown
from ..core.errors import EngineStateError, InvalidRequest, Left, TrioletError, UnknownModel
from ..core.model import ModelDescription
from ..core.residency import ModelState
from .engine import Engine
from .model_spec import ModelSpec, check_fits
from .residents import Resident, Residents

_BUDGET = integer(1, 2**50, " of bytes").or_none("as much as the models take")
_IDLE = number(0, math.inf).or_none("an idle model stays")
_DRAIN = number(0, math.inf, "; 0 aborts at once").or_none("each engine's EngineConfig.drain_seconds")


@frozen(kw_only=True)
class ModelStatistics:
    """A snapshot of one of several models.

    Args:
        state: absent, loading, ready, unloading, or failed: absent, since the last load failed.
        users: number of uses that have the model.
        waiting: number of uses that wait for the model.
        bytes: the bytes that count against the budget. While the model loads, this is an estimate; then it is what the
            engine holds and all that encoder outputs may take.
        loads: number of times that the model was loaded.
        load_seconds: the seconds that these loads took together.
        last_used: seconds since the last use ended; 0: the model is in use; ``None``: the model was never used.
        last_error: type and text of the last error of a load, of the engine, or of its end; ``None``: no error.
        engine: the engine's own snapshot, while the model is ready.
        description: the model's limits and vocabulary, while the model is ready.
    """

    state: ModelState
    users: int
    waiting: int
    bytes: int
    loads: int
    load_seconds: float
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

    The first use of a model loads the model. Other uses of this model wait meanwhile, while uses of ready models go on.
    A model that is not in use is unloaded after ``idle_seconds``, or when another model needs the room. The least
    recently used model is unloaded first, and no more models than necessary. A model in use is never unloaded. Waiting
    models are served in the order of arrival. If a model in use has to give way, its later uses wait until the model
    that needs the room has been served.

    When the block ends, for any reason, waiting uses raise `EngineClosed`, loads are given up, and all engines end at
    the same time, each in the order of its own block. Requests are drained if the block ends without an error, else
    aborted. `Engines` works on trio, asyncio and anyio. The same task must enter and leave the block.

    Args:
        models: for each name a checkpoint's folder, a hub id or a `ModelSpec`.
        memory_budget: bytes for all loaded models together: weights, keys and values, and all that encoder outputs may
            take; ``None``: no limit.
        idle_seconds: a model that is not in use is unloaded after this time; ``None``: idle models stay.

    Raises (on making one):
        InvalidRequest: a value is not allowed, or two models have the same name.

    Raises (on entering):
        EngineStateError: the block is entered twice, or not in a task of trio or asyncio.

    Raises (on leaving, in addition to the block's own error):
        RunnerCrashed: an engine failed while it ended.
        EngineTeardownError: something could not be released in time, or a release failed.
        InvariantViolation: with ``EngineConfig(verify=True)``, an engine broke one of its promises.

    Raises (on every use):
        EngineStateError: the call is outside of the block, or outside of the event loop in which it was entered.
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
            raise EngineStateError(
                "these engines were entered before, and engines can be entered only once; make new Engines(...)"
            )
        _current_loop()
        await anyio.lowlevel.checkpoint_if_cancelled()
        residents = Residents(self._models, self._budget, self._idle_seconds)
        self._block = residents.running()
        await self._block.__aenter__()
        self._residents = residents
        return self

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(self, *end: *Left) -> bool | None:
        assert self._block is not None, "left before entered"
        forked = self._residents is not None and self._residents.process.is_forked
        if forked and not trio.lowlevel.in_trio_run():  # asyncio runs no loop there in which anything could be awaited
            return None
        try:
            return await self._block.__aexit__(*end)
        finally:
            self._residents = None

    @trio.lowlevel.enable_ki_protection
    async def aclose(self, drain: float | None = None) -> None:
        """Ends all engines before the block ends, and returns when every device is released. Running requests have
        ``drain`` seconds to end (``None``: each engine's ``EngineConfig.drain_seconds``; 0 aborts at once)."""
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
        """The names and aliases of all models, and those of their adapters."""
        return tuple(self._names)

    def adapter_of(self, name: str) -> str | None:
        """Returns ``name`` if it is that of an adapter, as requests name it; ``None``: it is that of a model."""
        return name if name in self._models[self.name_of(name)].adapters else None

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters of all models."""
        return tuple(name for spec in self._models.values() for name in spec.adapters)

    def name_of(self, name: str) -> str:
        """Returns the name of the model whose name or alias is ``name``, or which has the adapter of this name.

        Raises:
            UnknownModel: there is no such model.
        """
        if not isinstance(name, str) or name not in self._names:
            raise UnknownModel(f"there is no model {shown(name)}; allowed: {', '.join(self._names)}")
        return self._names[name]

    def check_fits(self) -> None:
        """Checks that each model that is on this machine can be loaded within ``memory_budget``. Models that would have
        to be downloaded are not checked. Reads files, and may take seconds.

        Raises:
            ModelTooLarge: a model can never be loaded; the text has the figures, and says what to do.
            CheckpointError: a model's files cannot be read.
        """
        for name, spec in self._models.items():
            if self._budget is not None and spec.is_here:
                check_fits(name, spec.needs(), self._budget, "is estimated to need")

    def use(self, name: str) -> AbstractAsyncContextManager[Engine]:
        """Opens a block with the engine of a model: ``async with engines.use("name") as engine``. The model stays
        loaded until the block ends. If the model is not loaded, the use loads it, and waits for the load and for other
        models that give way.

        A task may use one model at a time, since otherwise it might wait for itself. A use belongs to the task that
        enters it. So a child task may use another model, but a parent that keeps its own use and waits for the child
        may wait for ever.

        A cancelled use no longer waits. A load that no use waits for is given up. Its memory is released as soon as the
        loading call returns, unless another use comes before.

        If a load fails, each use that waits for it raises an exception of its own. Uses within the next ten seconds
        raise the same error; the first use after them loads again.

        Raises:
            UnknownModel: no model has this name or alias, or an adapter of this name.
            CheckpointError, DeviceOutOfMemory: the model cannot be loaded, for these or other reasons; see `Engine`.
            ModelTooLarge: the model needs more memory than ``memory_budget``.
            EngineStateError: this task already uses a model.
            EngineClosed: the block of the engines ends.
        """
        return self._opened().use(self.name_of(name))

    @trio.lowlevel.enable_ki_protection
    async def load(self, name: str) -> None:
        """Loads a model unless it is loaded, and returns when the model is ready. A model whose last load failed is
        loaded again at once. Errors are those of `use`."""
        async with self._opened().use(self.name_of(name), at_once=True):
            pass

    @trio.lowlevel.enable_ki_protection
    async def unload(self, name: str) -> None:
        """Unloads a model when all earlier uses have ended, and returns when the model is unloaded. Later uses wait,
        and load the model again. If the caller is cancelled before the earlier uses have ended, the model stays.

        Raises:
            UnknownModel: no model has this name or alias.
            EngineStateError: this task uses a model.
            EngineTeardownError: something could not be released in time, or a release failed.
        """
        await self._opened().unload(self.name_of(name))

    def statistics(self) -> Mapping[str, ModelStatistics]:
        """Returns a frozen snapshot of each model, by name."""
        residents, now = self._opened(), anyio.current_time()
        return MappingProxyType({name: _statistics(resident, now) for name, resident in residents.by_name.items()})

    def _opened(self) -> Residents:
        """Returns the residents, if the call is within the block and its event loop."""
        if self._residents is None:
            state = "not entered yet" if self._block is None else "closed: their block has ended"
            raise EngineStateError(f"these engines are {state}; use them inside: async with Engines(...) as engines")
        self._residents.process.check()
        if _current_loop() != self._residents.loop:
            raise EngineStateError(
                "these engines were used outside of the event loop that they were entered in; allowed: tasks of "
                "that loop. From another thread use anyio.from_thread.run(...)"
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
        load_seconds=resident.load_seconds,
        last_used=0.0 if books.users else last_used,
        last_error=resident.last_error,
        engine=None if engine is None else _engine_statistics(engine),
        description=None if engine is None else engine.model,
    )


def _engine_statistics(engine: Engine) -> EngineStatistics | None:
    try:
        return engine.statistics()
    except TrioletError:  # the engine has failed, and its keeper has not noticed yet
        return None


def _current_loop() -> anyio.lowlevel.EventLoopToken:
    try:
        return anyio.lowlevel.current_token()
    except RuntimeError:
        raise EngineStateError("no event loop is running here; allowed: a task of trio or asyncio") from None


def _names(specs: Mapping[str, ModelSpec]) -> dict[str, str]:
    """Returns for each name and alias the name of its model."""
    found: dict[str, str] = {}
    for owner, spec in specs.items():
        if not isinstance(owner, str) or not owner.strip():
            raise InvalidRequest(f"a model is named {shown(owner)}; allowed: a text that is not blank")
        for name in (owner, *spec.aliases, *spec.adapters):
            if name in found:
                raise InvalidRequest(
                    f"the name {name!r} is given to the models {found[name]!r} and {owner!r}; give each model its "
                    "own names"
                )
            found[name] = owner
    return found
