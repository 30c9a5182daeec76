"""`Resident`: one of several models, and the task that sizes it or keeps its engine open."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import outcome
from attrs import define

from ..core import log_lines
from ..core.errors import EngineError, InvariantViolation, ModelTooLarge, TrioletError
from ..core.plan import DeviceMemory
from .engine import Engine
from .model_spec import ModelSpec, counted_memory


@define(eq=False)
class Resident:
    """One of the models: its engine and its task, while it has any.

    A keeper enters the engine's block and leaves it, so that it is one task that does both. Where the engine fails, it
    is the keeper that is cancelled for it.
    """

    name: str
    spec: ModelSpec
    budget: int | None
    engine: Engine | None = None  # while it may be used
    scope: anyio.CancelScope | None = None  # of the task, while it runs
    leave: anyio.Event | None = None  # the keeper is to leave the engine's block
    why: str = ""  # it is to leave
    drain: float | None = None  # seconds; None: the engine's own
    failure: Exception | None = None  # of the last load, for those who come too early for the next one
    failed_at: float = math.nan
    last_error: str | None = None

    async def size(self) -> DeviceMemory:
        """Finds out how much the model needs."""
        needs = self.spec.known_needs
        if needs is None:
            sizing = partial(outcome.capture, self.spec.needs)
            needs = (await anyio.to_thread.run_sync(sizing, abandon_on_cancel=True)).unwrap()
        self._check_size(needs, "is estimated to need")
        return needs

    async def keep(self, opened: Callable[[DeviceMemory, float], None], leaving: Callable[[], None]) -> None:
        """Loads the model, and holds its engine open until it is to go. ``opened`` hears what the model holds and how
        many seconds the load took; ``leaving`` hears that the engine ends, asked to or not."""
        began, self.why = anyio.current_time(), ""
        self.leave = leave = anyio.Event()
        async with self.spec.new_engine() as engine:
            held = counted_memory(engine)
            self._check_size(held, "was loaded and needs")
            self.engine, self.failure = engine, None
            opened(held, anyio.current_time() - began)
            try:
                await leave.wait()
            finally:
                self.engine = None
                leaving()
            if self.drain is not None:
                await engine.aclose(self.drain)

    def dismiss(self, why: str) -> None:
        """Has the keeper leave."""
        assert self.leave is not None, "only what is open is unloaded"
        self.why = why
        self.leave.set()

    def hurry(self) -> None:
        """Ends the task as if its surroundings were cancelled."""
        if self.scope is not None:
            self.scope.cancel()

    def _check_size(self, needs: DeviceMemory, what: str) -> None:
        if self.budget is not None and needs.total > self.budget:
            raise ModelTooLarge(
                f"the model {self.name!r} {what} {log_lines.owners(needs)}; allowed: memory_budget={self.budget}, "
                f"{log_lines.mebibytes(self.budget)}, for all models together. Give more, or have the model take less "
                "by its EngineConfig: self_kv_bytes, cross_kv_bytes, encoder_cache_bytes, max_positions, dtype, "
                "kv_dtype, quantization"
            )


def retold(error: Exception, more: str = "") -> Exception:
    """Another object with the same text, and ``more``: two tasks must not raise the same one."""
    again: Exception
    if isinstance(error, TrioletError) and not isinstance(error, InvariantViolation):
        again = type(error)(f"{error}{more}")
        again.__cause__ = error.__cause__
    else:
        again = EngineError(f"{type(error).__name__}: {error}{more}")
        again.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        again.add_note(note)
    return again
