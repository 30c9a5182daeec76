"""A fork has a copy of an engine, and none of its threads: every way out of a block, every release and finalizer does
nothing there, calls say so, and the parent's engine goes on."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import anyio.lowlevel
import pytest
import trio

from triolet import Engine, EngineConfig, SyncEngine
from triolet.actors.worker import ThreadWorker
from triolet.api.engines import Engines
from triolet.core.errors import EngineStateError
from triolet.models.executor import TorchExecutor
from triolet_testing.sim import SimExecutor

from ..checkpoints.families import make_checkpoint
from .hosts import PATIENCE, UNHURRIED, audio, query
from .threads import ask, read

pytestmark = pytest.mark.real_time
REFUSED, RAISED = 90, 91  # statuses of forks that an `EngineStateError` or another error has ended


def status_of(child: Callable[[], object]) -> int:
    """The status of a fork that runs ``child`` and nothing else of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on, of forks beside threads
        pid = os.fork()
    if pid:
        return end_of(pid)
    status: Any = RAISED
    signal.alarm(int(PATIENCE))  # ends it where it hangs
    try:
        child()
        status = 0
    except SystemExit as end:
        status = end.code
    except EngineStateError as refused:
        status = REFUSED if "open another engine" in str(refused) else RAISED
    finally:
        os._exit(status)


def end_of(pid: int) -> int:
    """Waits for the end of a fork, and returns its status."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def make(kind: Any, device: Callable[[], SimExecutor] = SimExecutor, **settings: Any) -> Any:
    config = EngineConfig(**{**UNHURRIED, **settings})
    return kind.from_parts(device, ThreadWorker, config=config)


def fail() -> NoReturn:
    raise ValueError


WAYS: dict[str, tuple[Callable[[], object], int]] = {
    "returns": (lambda: None, 0),
    "raises": (fail, RAISED),
    "exits": (lambda: sys.exit(3), 3),
    "is ended": (lambda: os._exit(4), 4),
}
ways = pytest.mark.parametrize("way", WAYS)


# -- the native library ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("forks"))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8, 16])
def test_a_fork_lets_go_of_a_model_at_any_number_of_threads(checkpoint: Path, threads: int) -> None:
    """glibc forgets the threads of a fork's parent, and `join` of them takes the memory of others with it: from four
    threads on each fork died of it."""
    executor = TorchExecutor(checkpoint, EngineConfig(threads=threads))
    executor.open()
    try:
        assert executor._open is not None
        runner = executor._open.parts.network.native
        for let_go in (executor.close, runner.release, runner.__del__):
            assert status_of(let_go) == 0
    finally:
        executor.close()


def test_a_fork_opens_an_engine_of_its_own(checkpoint: Path) -> None:
    """Beside its parent's, whose threads are in the middle of nothing."""
    with SyncEngine(checkpoint, config=EngineConfig(threads=4)) as engine:
        asked = {"prompt_token_ids": [1, 2, 3], "max_tokens": 8}
        tokens = engine.generate(**asked).token_ids

        def child() -> None:
            with SyncEngine(checkpoint, config=EngineConfig(threads=4)) as own:
                assert own.generate(**asked).token_ids == tokens

        assert status_of(child) == 0
        assert engine.generate(**asked).token_ids == tokens


# -- blocks, in threads ----------------------------------------------------------------------------------------------


@ways
def test_a_fork_leaves_the_block_of_an_engine_and_its_parents_goes_on(way: str) -> None:
    act, expected = WAYS[way]

    def main() -> None:
        here, trace = os.getpid(), list[object]()
        with make(SyncEngine, observer=trace.append) as engine:
            ask(engine, 1)
            with engine.stream(**query(2)), engine.live():
                told = len(trace)
                status = 0 if (pid := os.fork()) == 0 else end_of(pid)
                if os.getpid() != here:
                    act()
                    return
            assert status == expected, status
            ask(engine, 3)
        assert told < len(trace)
        sys.exit(5)

    def child() -> None:
        try:
            main()
        except ValueError:
            sys.exit(RAISED)

    assert status_of(child) == 5


def test_a_fork_that_uses_its_parents_engine_is_told_to_open_another() -> None:
    engine = make(SyncEngine)
    engine.open()
    try:
        with engine.stream(**query(1)) as deltas, engine.live() as session:
            for use in (
                lambda: ask(engine, 1),
                lambda: read(engine, 1),
                engine.statistics,
                engine.sleep,
                engine.wake,
                lambda: next(deltas),
                lambda: next(session),
                lambda: session.feed(audio(1)),
                session.finish,
                lambda: engine.live().__enter__(),
            ):
                assert status_of(use) == REFUSED, use
        for end in (engine.close, engine.close, gc.collect):
            assert status_of(end) == 0
        ask(engine, 2)
    finally:
        engine.close()


def test_a_fork_that_drops_an_engine_leaves_its_parents_alone() -> None:
    """No block is left: the host is collected, with a live session and a stream."""
    engine = make(SyncEngine)
    engine.open()
    held = [engine, engine.stream(**query(1)), engine.live()]
    held += [block.__enter__() for block in held[1:]]

    def child() -> None:
        nonlocal engine
        del engine
        held.clear()
        gc.collect()

    assert status_of(child) == 0
    ask(engine, 1)
    for block in held[1:3]:
        block.__exit__(None, None, None)
    engine.close()


def _child_of_multiprocessing(use: bool) -> None:
    if use:
        try:
            ask(_engine[0], 1)
        except EngineStateError:
            sys.exit(REFUSED)
    sys.exit(3)


_engine: list[Any] = []  # for the children of multiprocessing


@pytest.mark.parametrize("use", [False, True], ids=["idle", "uses it"])
def test_a_child_of_multiprocessing_ends(use: bool) -> None:
    with make(SyncEngine) as engine:
        _engine[:] = [engine]
        try:
            process = multiprocessing.get_context("fork").Process(target=_child_of_multiprocessing, args=(use,))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                process.start()
            process.join(PATIENCE)
            assert process.exitcode == (REFUSED if use else 3)
            ask(engine, 1)
        finally:
            _engine.clear()


# -- blocks, in event loops ------------------------------------------------------------------------------------------


def run_trio(main: Callable[..., Any], *arguments: Any) -> Any:
    return trio.run(main, *arguments)


def run_asyncio(main: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.run(main(*arguments))


loops = pytest.mark.parametrize("run", [run_trio, run_asyncio], ids=["trio", "asyncio"])


@loops
@ways
def test_a_fork_leaves_the_block_of_an_engine_in_an_event_loop(way: str, run: Callable[..., Any]) -> None:
    """Here the parent ends at once. A loop that goes on beside a fork of itself may sleep for ever, with an engine or
    without one, since both have one epoll. So would a fork that inherits trio's lock while a thread holds it: the
    device's thread stands still in a step by then."""
    act, expected = WAYS[way]

    def stand_still(*_: object) -> None:
        held.set()
        threading.Event().wait()

    async def main() -> None:
        here = os.getpid()
        async with make(Engine, lambda: device) as engine, engine.live():
            await engine.generate(**query(1))
            device.fault = stand_still
            async with engine.stream(**query(2)):
                while not held.is_set():
                    await anyio.lowlevel.checkpoint()
                if run is run_trio:
                    trio.lowlevel.current_trio_token().run_sync_soon(int)  # nobody has the lock any more
                if pid := os.fork():
                    os._exit(5 if end_of(pid) == expected else 6)
                assert os.getpid() != here
                act()

    device, held = SimExecutor(), threading.Event()
    assert status_of(lambda: run(main)) == 5


@loops
def test_a_fork_in_an_event_loop_is_told_to_open_another_engine(run: Callable[..., Any]) -> None:
    async def main() -> None:
        async with make(Engine) as engine, engine.stream(**query(2)) as deltas, engine.live() as session:
            for use in (
                lambda: engine.generate(**query(1)),
                lambda: anext(deltas),
                lambda: session.feed(audio(1)),
                engine.sleep,
            ):
                assert status_of(lambda use=use: step(use())) == REFUSED, use
            assert status_of(engine.statistics) == REFUSED
            assert status_of(lambda: step(engine.aclose())) == 0
            await engine.generate(**query(1))

    run(main)


def step(coroutine: Any) -> None:
    """Runs a coroutine that must not wait for the loop."""
    try:
        while True:
            coroutine.send(None)
            raise AssertionError("it waits")
    except StopIteration:
        pass


@loops
def test_a_fork_leaves_the_block_of_engines(run: Callable[..., Any], checkpoint: Path) -> None:
    async def main() -> None:
        async with Engines({"tiny": checkpoint}) as engines, engines.use("tiny") as engine:
            await engine.generate(prompt_token_ids=[1, 2], max_tokens=2)
            assert status_of(engines.statistics) == REFUSED
            assert status_of(lambda: step(engines.use("tiny").__aenter__())) == REFUSED
            if pid := os.fork():
                os._exit(5 if end_of(pid) == 3 else 6)
            sys.exit(3)

    assert status_of(lambda: run(main)) == 5
