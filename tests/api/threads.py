"""A bench for `SyncEngine`: no event loop, and events of the standard library."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field

from triolet import EngineConfig, SyncEngine

from .hosts import PATIENCE, UNHURRIED, Bench, _threads, expected, query

OURS = tuple(str(Path(__file__).resolve().parents[2] / room) for room in ("core", "actors", "api", "tests"))


class Signal(threading.Event):
    """An event that must be set in time."""

    def wait(self, timeout: float | None = PATIENCE) -> bool:
        assert super().wait(timeout), "it never came"
        return True


class Threads:
    """In the place of a host."""

    name = "threads"

    def signal(self) -> Any:
        return Signal()


@define(eq=False)
class SyncBench(Bench):
    """One `SyncEngine` over a gated device. Nothing is held by the bench that would keep the engine alive."""

    host: Any = field(factory=Threads)

    def engine(self, **settings: Any) -> Any:
        config = EngineConfig(**{**UNHURRIED, "verify": True, "observer": self._observe, **settings})
        return SyncEngine.from_parts(lambda: self.executor, lambda: self.worker, config=config)

    def run(self, main: Callable[[], Any]) -> Any:
        before = _threads()
        result = main()
        assert _threads() == before, "a thread of ours is left"
        self.check()
        return result


def ask(engine: SyncEngine, number: int, max_tokens: int = 20, **more: Any) -> None:
    """One request, whose tokens must be those it would have had alone."""
    assert engine.generate(**query(number, max_tokens), **more).token_ids == expected(number, max_tokens)


def read(engine: SyncEngine, number: int) -> tuple[int, ...]:
    with engine.stream(**query(number)) as deltas:
        return tuple(token for delta in deltas for token in delta.token_ids)


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "triolet-loop"]


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does, and nobody tells."""
    turn = threading.Event()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if condition():
            return
        turn.wait(0.01)
    raise AssertionError("it never came")


def ours(garbage: list[object]) -> list[object]:
    """Of what only a collection frees, what is of Triolet. A loop of trio leaves itself, with its first coroutine."""
    codes = [getattr(found, "f_code", getattr(found, "cr_code", None)) for found in garbage]
    return [
        found
        for found, code in zip(garbage, codes, strict=True)
        if type(found).__module__.startswith("triolet")
        or (code is not None and code.co_filename.startswith(OURS) and code.co_name != "_on_trio_main")
    ]


class _Mortal:
    pass


def press_in_a_callback() -> None:
    """Presses ^C while Python runs the callback of a weak reference, which loses what is raised there."""
    mortal = _Mortal()
    last_words = weakref.ref(mortal, lambda _: signal.raise_signal(signal.SIGINT))
    del mortal
    assert last_words() is None


def press_after(wait: Callable[[], object], then: Callable[[], object] = lambda: None) -> threading.Thread:
    """A thread that waits, presses ^C in the main thread, and does something behind it.

    What it waits for must come while the main thread is in a call of ours, and hold it there: elsewhere Python may run
    the handler in a callback of the collector, say, which loses what it raises.
    """

    def press() -> None:
        wait()
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
        then()

    thread = threading.Thread(target=press)
    thread.start()
    return thread
