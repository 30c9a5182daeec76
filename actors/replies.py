"""The answers of the scheduler to orders of the engine, for which tasks wait."""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import define, field

from ..core import tracebacks


@define(eq=False)
class Reply:
    """The `messages.Reply` to an order. A task waits for it."""

    done: trio.Event = field(factory=trio.Event)
    error: Exception | None = None

    def put(self, error: Exception | None) -> None:
        """Implements `messages.Reply`."""
        self.error = error
        self.done.set()


@define(eq=False)
class Loading:
    """The `messages.AdapterReply` to a load. A task waits for it; if the task gives up, what was loaded in vain is
    unloaded."""

    unload: Callable[[str], None]
    done: trio.Event = field(factory=trio.Event)
    key: str | None = None
    error: Exception | None = None
    given_up: bool = False

    def put(self, answer: str | Exception) -> None:
        """Implements `messages.AdapterReply`."""
        if isinstance(answer, Exception):
            self.error = answer
        else:
            self.key = answer
        if self.given_up and self.key is not None:
            self.unload(self.key)
        self.done.set()

    async def wait(self) -> str:
        """Returns the key, or raises the error."""
        try:
            await self.done.wait()
        except trio.Cancelled:
            self.given_up = True
            if self.key is not None:
                self.unload(self.key)
            raise
        tracebacks.raise_kept(self, "error")
        assert self.key is not None, "a load is answered by a key or an error"
        return self.key
