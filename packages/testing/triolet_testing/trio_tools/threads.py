"""The replacement of threads, which no schedule controls. Within `in_the_loop` their work is done in the loop
instead.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio

Result = TypeVar("Result")
_CALLERS = ("trio.to_thread", "anyio._backends._trio")  # the modules in which programs and libraries find `run_sync`


@contextmanager
def in_the_loop() -> Iterator[None]:
    """Makes `trio.to_thread.run_sync`, and anyio's function that uses it, call the function at once within the block.
    The call takes no virtual time, so that each run is the same. The function cannot use `trio.from_thread`."""
    original = trio.to_thread.run_sync
    modules = [module for name in _CALLERS if getattr(module := sys.modules.get(name), "run_sync", None) is original]
    for module in modules:
        module.run_sync = _run_sync  # type: ignore[union-attr]
    try:
        yield
    finally:
        for module in modules:
            module.run_sync = original  # type: ignore[union-attr]


async def _run_sync(function: Callable[..., Result], *args: Any, **options: Any) -> Result:
    """Implements `trio.to_thread.run_sync`. If the caller may abandon the thread, it may be cancelled after the
    function has run, and the result is lost. Other options concern only real threads and are ignored.
    """
    abandons = options.get("abandon_on_cancel") or options.get("cancellable")
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        return contextvars.copy_context().run(function, *args)
    finally:
        if abandons:
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
