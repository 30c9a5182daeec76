"""A server in a thread of its own, for clients that block."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import outcome
import trio
from attrs import define

from triolet import Engine, Engines, ModelSpec
from triolet.core.config import EngineConfig
from triolet.server.listening import Listener
from triolet.server.observers import Observers
from triolet.server.server import Server
from triolet.server.serving import serving
from triolet.server.settings import ServerSettings

_PATIENCE = 30  # seconds, for what happens at once


@define
class Served:
    """A server that runs, its address, and its own trio loop."""

    server: Server
    listener: Listener
    url: str
    token: trio.lowlevel.TrioToken

    def ask(self, function: Any) -> Any:
        """The result of ``function``, called in the server's loop."""
        return trio.from_thread.run_sync(function, trio_token=self.token)

    def engine(self, model: str, call: Callable[[Engine], Awaitable[Any]]) -> Any:
        """The result of ``call``, which gets the engine of ``model``, in the server's loop."""

        async def ask() -> Any:
            async with self.server.engines.use(model) as engine:
                return await call(engine)

        return trio.from_thread.run(ask, trio_token=self.token)

    def is_idle(self) -> bool:
        """Whether nothing is left of any request, neither here nor in an engine that is loaded."""
        engines = [one.engine for one in self.server.engines.statistics().values() if one.engine is not None]
        return not self.server.exchanges and not any(
            one.requests.waiting + one.requests.running + one.requests.leaving + one.requests.steps_in_flight
            for one in engines
        )

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns when ``condition``, called in the server's loop, holds."""

        async def look() -> None:
            with trio.fail_after(_PATIENCE):
                while not condition():
                    await trio.lowlevel.checkpoint()

        trio.from_thread.run(look, trio_token=self.token)


@contextmanager
def served(models: Mapping[str, str], **settings: Any) -> Iterator[Served]:
    """A server of ``models`` on a free port, for the block. Its error, if it has one, is raised at the end."""
    told: SimpleQueue[Any] = SimpleQueue()
    leave = trio.Event()

    async def main() -> None:
        observers = Observers()
        specs = {
            name: ModelSpec(path, config=EngineConfig(device="cpu", observer=observers.of(name)))
            for name, path in models.items()
        }
        async with Engines(specs) as engines:
            server = Server(ServerSettings(**{"port": 0, **settings}), engines, observers)
            with Listener(server.settings) as listener:
                async with serving(server, listener) as address:
                    told.put(Served(server, listener, address, trio.lowlevel.current_trio_token()))
                    await leave.wait()

    def run() -> None:
        told.put(outcome.capture(trio.run, main))

    thread = threading.Thread(target=run, name="served")
    thread.start()
    first = told.get()
    if not isinstance(first, Served):
        thread.join()
        first.unwrap()
    try:
        yield first
    finally:
        first.token.run_sync_soon(leave.set)
        thread.join()
        told.get().unwrap()
