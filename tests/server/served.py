"""A server in a thread of its own, for clients that block.

Its limits of time are so long that no test meets one by accident, however long the machine stops a thread. A test of
such a limit gives a clock that stands still, and lets time pass itself."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import outcome
import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from triolet import Engine, Engines, ModelSpec
from triolet.core.config import EngineConfig
from triolet.server import exchange, serving
from triolet.server.listening import Listener
from triolet.server.server import Observers, Server
from triolet.server.settings import ServerSettings

PATIENCE = 300  # seconds, for what happens at once: only a fault takes so long
_PATIENT = dict.fromkeys(("body_seconds", "keep_alive_seconds", "send_seconds", "drain_seconds", "url_seconds"), 900.0)


@define
class Served:
    """A server that runs, its address, and its own trio loop."""

    server: Server
    listener: Listener
    url: str
    token: trio.lowlevel.TrioToken
    end: Callable[[], None]  # begins the server's end; called in the server's loop
    _clock: MockClock | None = None

    def ask(self, function: Any) -> Any:
        """The result of ``function``, called in the server's loop."""
        return trio.from_thread.run_sync(function, trio_token=self.token)

    def engine(self, model: str, call: Callable[[Engine], Awaitable[Any]]) -> Any:
        """The result of ``call``, which gets the engine of ``model``, in the server's loop."""

        async def ask() -> Any:
            async with self.server.engines.use(model) as engine:
                return await call(engine)

        return trio.from_thread.run(ask, trio_token=self.token)

    def get(self, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, str]:
        """The status and the text of the answer to a GET, or to a POST of ``body``: bytes, or what becomes JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {} if data is None else {"content-type": kind})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                text = answer.readline() if path == "/events" else answer.read()
                return answer.status, text.decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def post(self, path: str, body: Any, kind: str = "application/json") -> tuple[int, Any]:
        """As `get`; the answer is JSON."""
        status, text = self.get(path, body, kind)
        return status, json.loads(text)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def works(self) -> bool:
        """Whether an engine has a request."""
        engines = [one.engine.requests for one in self._models() if one.engine is not None]
        return any(one.waiting + one.running + one.leaving + one.steps_in_flight for one in engines)

    def is_idle(self) -> bool:
        """Whether nothing is left of any request: no exchange, no user of a model, no request or encoder output."""
        caches = [one.engine.encoder_cache for one in self._models() if one.engine is not None]
        held = sum(one.held + one.waiting for one in caches) + sum(one.users + one.waiting for one in self._models())
        return not (self.server.exchanges or self.works() or held)

    def _models(self) -> list[Any]:
        return list(self.server.engines.statistics().values())

    @contextmanager
    def when(self, condition: Callable[[], bool], act: Callable[[], object] = bool) -> Iterator[None]:
        """Calls ``act`` as soon as ``condition`` holds, both in the server's loop and with nothing in between, whatever
        the block does meanwhile and however slow it is. Waits for that at the end of the block."""
        look = _Look(condition, act)
        self.ask(look.begin)
        try:
            yield
            look.wait()
        finally:
            with suppress(trio.RunFinishedError):  # ``act`` may be `end`
                self.ask(look.end)

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns when ``condition``, called in the server's loop, holds."""
        with self.when(condition):
            pass

    def let_pass(self, seconds: float) -> None:
        """Lets time pass where the clock stands still, when the server has done all that it can do before."""
        assert self._clock is not None, "the server has the machine's clock; give it one that stands still"
        trio.from_thread.run(wait_all_tasks_blocked, trio_token=self.token)
        self.ask(lambda: self._jump(seconds))

    def _jump(self, seconds: float) -> None:
        assert self._clock is not None, "`let_pass` looked"
        self._clock.jump(seconds)


def head_of(connection: socket.socket) -> bytes:
    """The head of an answer, and no byte of what follows."""
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        found += connection.recv(1) or pytest.fail(f"the connection ended behind {found!r}")
    return found


@define(eq=False)
class _Look(trio.abc.Instrument):
    """Looks at a condition after each step of a task of the server, since nothing else changes it."""

    _condition: Callable[[], bool]
    _act: Callable[[], object]
    _found: SimpleQueue[outcome.Outcome[object]] = field(factory=SimpleQueue, init=False)
    _looks: bool = field(default=False, init=False)

    def begin(self) -> None:
        self._looks = True
        trio.lowlevel.add_instrument(self)
        self._look()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._looks:
            self._look()

    def wait(self) -> None:
        self._found.get(timeout=PATIENCE).unwrap()

    def end(self) -> None:
        self._looks = False
        trio.lowlevel.remove_instrument(self)

    def _look(self) -> None:
        found = outcome.capture(self._condition)
        if isinstance(found, outcome.Value) and not found.value:
            return
        self._looks = False
        self._found.put(found if isinstance(found, outcome.Error) else outcome.capture(self._act))


@contextmanager
def served(
    models: Mapping[str, str | ModelSpec], *, clock: MockClock | None = None, **settings: Any
) -> Iterator[Served]:
    """A server of ``models`` on a free port, for the block. Its error, if it has one, is raised at the end.

    Args:
        clock: one that stands still; `Served.let_pass` moves it. From the end of the block on it runs.
    """
    told: SimpleQueue[Any] = SimpleQueue()
    leave = trio.Event()

    async def main() -> None:
        observers = Observers()
        specs = {
            name: path
            if isinstance(path, ModelSpec)
            else ModelSpec(path, config=EngineConfig(device="cpu", observer=observers.of(name)))
            for name, path in models.items()
        }
        async with Engines(specs) as engines:
            server = Server(ServerSettings(**{"port": 0, **_PATIENT, **settings}), engines, observers)
            with Listener(server.settings) as listener:
                async with serving.serving(server, listener) as address:
                    token = trio.lowlevel.current_trio_token()
                    told.put(Served(server, listener, address, token, end, clock))
                    await leave.wait()

    def end() -> None:
        if clock is not None:
            clock.rate = 1.0
        leave.set()

    def run() -> None:
        told.put(outcome.capture(trio.run, main, clock=clock))

    thread = threading.Thread(target=run, name="served", daemon=True)  # one that hangs fails the test, not the run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_LINGER_SECONDS", 900.0)
        patch.setattr(serving, "_TELL_SECONDS", 900.0)
        thread.start()
        first = told.get(timeout=PATIENCE)
        if not isinstance(first, Served):
            thread.join()
            first.unwrap()
        try:
            yield first
        finally:
            first.token.run_sync_soon(end)
            told.get(timeout=PATIENCE).unwrap()
            thread.join()
