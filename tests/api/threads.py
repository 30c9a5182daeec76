"""A bench for `SyncEngine`: no event loop, and events of the standard library."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field

from triolet import SyncEngine

from .hosts import PATIENCE, Bench, _threads, expected, query

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
        return self.make(SyncEngine, settings)

    def run(self, main: Callable[[], Any]) -> Any:
        before = _threads()
        result = main()
        assert _threads() == before, "a thread of ours is left"
        self.check()
        return result


PROGRAM = """
import asyncio, os, signal, sys, threading
from triolet import EngineConfig, SyncEngine
from triolet.actors.worker import Job, ThreadWorker
from triolet.api.engine import Engine
from triolet.core.events import StageReached
from triolet_testing.sim import SimExecutor

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it

def ignored(told):  # Python loses what a handler raises in a callback of the collector: press again
    if told.exc_type is KeyboardInterrupt:
        print("lost", flush=True)
    else:
        sys.__unraisablehook__(told)

sys.unraisablehook = ignored

def tell(event):
    if isinstance(event, StageReached):
        print(event.stage, flush=True)

def make(kind, fault=lambda job, _: None, **settings):
    config = EngineConfig(**{"observer": lambda event: tell(event), "stage_seconds": 86_400, **settings})
    return kind.from_parts(lambda: SimExecutor(fault=fault), ThreadWorker, config=config)

def ask(engine):
    import numpy
    return engine.generate(prompt_token_ids=[1, 2], audio=numpy.zeros(1600, numpy.float32), max_tokens=5)
"""
"""The beginning of programs that run in a process of their own. Their device takes no time."""

END = ["device released", "runner stopped", "channels closed"]


def run_program(code: str, *at: str) -> tuple[list[str], int, str]:
    """Its lines, its status and its errors. Sends a ^C for each line that is one of ``at``, and one for each that was
    lost."""
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        lines: list[str] = []
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            lines.append(line.strip())
            if lines[-1] in (*at, "lost"):
                process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
        status = process.wait()
        watchdog.cancel()
    assert "Exception ignored" not in errors, errors
    return lines, status, errors


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
