"""Mistakes of public engines planted into our own code, and what must notice them.

Within `planted` one function has one fragment of its source replaced. A killer is a property that passes on our code
and must fail meanwhile.
"""

from __future__ import annotations
import __future__

import functools
import gc
import importlib
import inspect
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers

from triolet import EngineConfig
from triolet_testing.sim import SimExecutor
from triolet_testing.trio_tools.schedules import Batches, Schedule, run_scheduled

from ..actors import shared

Killer = Callable[[], object]

# -- planting --------------------------------------------------------------------------------------------------------


@contextmanager
def planted(function: str, fragment: str, mistake: str) -> Iterator[None]:
    """Puts ``mistake`` in the place of ``fragment`` within the block.

    Args:
        function: its name in the package: ``core.ledger:EncoderLedger.freed``.
        fragment: occurs once in the function's source, which is taken without the function's own indentation.
    """
    module, path = function.split(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(f"triolet.{module}"))
    original = vars(owner)[name]
    setattr(owner, name, _mistaken(original, fragment, mistake))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _mistaken(original: Any, fragment: str, mistake: str) -> object:
    """The function, decorated as in its source, compiled anew in its own module."""
    function: FunctionType = inspect.unwrap(original.fget if isinstance(original, property) else original)
    source = textwrap.dedent(inspect.getsource(function))
    occurrences = source.count(fragment)
    assert occurrences == 1, f"{fragment!r} occurs {occurrences} times in {function.__qualname__}"
    source = source.replace(fragment, mistake)
    owner = function.__qualname__.rpartition(".")[0]
    source = source.replace("super()", f"super({owner}, self)")  # a function alone does not know its class
    filename = f"<mutant of {function.__qualname__}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    code = compile(source, filename, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    defined: dict[str, object] = {}
    exec(code, function.__globals__, defined)
    return defined[function.__name__]


# -- killing ---------------------------------------------------------------------------------------------------------


def evidence(error: BaseException) -> str:
    """What a failure says: its message, and the functions and the line that it came from."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(evidence(part) for part in error.exceptions)
    frames = traceback.extract_tb(error.__traceback__)
    where = " > ".join(frame.name for frame in frames)
    return f"{type(error).__name__}: {error}\nat {where}\n{frames[-1].line}"


def verdict(killer: Killer) -> str | None:
    """What the killer says; ``None`` where it passes."""
    said = None
    with unheard() as collect, without_constants():
        try:
            killer()
        except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:  # noqa: BLE001  (whatever it comes to)
            said = evidence(error)
        if said is not None and "Deadlock" in said:
            collect()
    return said


@contextmanager
def unheard() -> Iterator[Callable[[], object]]:
    """A deadlock that no cancellation ends leaves tasks behind, which complain when they are collected: collect them
    within the block, and hear none of it."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield gc.collect
    finally:
        sys.unraisablehook = hook


@contextmanager
def without_constants() -> Iterator[None]:
    """Hypothesis takes numbers from the source of every module that is imported: without them, the examples do not
    depend on the tests that ran before in the same process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", providers.Constants)
        patch.setattr(providers, "CONSTANTS_CACHE", LRUCache(1024))
        yield


def engine_test(test: Callable[..., Any], *, seeds: int = 2, **parameters: object) -> Killer:
    """A test of ``tests/actors/`` with its fixtures, outside of pytest; one that deadlocks fails."""

    def kill() -> None:
        for seed in range(seeds):
            once(Batches(seed))

    def once(schedule: Schedule) -> None:
        trace = shared.Trace()
        with pytest.MonkeyPatch.context() as monkeypatch, without_collector():
            fixtures = {
                "executor": SimExecutor(),
                "trace": trace,
                "config": lambda **changes: EngineConfig(observer=trace.append, **changes),
                "monkeypatch": monkeypatch,
                **parameters,
            }
            arguments = {name: fixtures.get(name) for name in inspect.signature(test).parameters}
            run_scheduled(functools.partial(test, **arguments), schedule=schedule)

    return kill


@contextmanager
def without_collector() -> Iterator[None]:
    """Memory dies by reference count or not at all."""
    gc.collect()
    gc.freeze()  # what is there now stays, and need not be looked at for the next mutant
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
