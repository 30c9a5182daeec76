"""`Compiler`: compiles the structures of an engine's requests, in time and bytes that are bounded.

A stranger's structure of 200 bytes may take minutes, gigabytes or all of the stack to compile. So each new one is first
compiled in a process of its own, which ends by itself at a limit and is killed when its caller is cancelled. A
structure that has passed is compiled again in a thread. That takes no longer. Callers of the same structure share one
trial, and what was refused is refused again for a while without any.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing.spawn
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from weakref import WeakValueDictionary

import trio
from attrs import define, field, frozen

from ...core.errors import EngineError, InvalidRequest
from ...core.model import Structures
from ...core.request import Structure
from ...models.sampling import grammar
from ...models.sampling.structure import Tried, bad
from .threads import run_in_thread

_log = logging.getLogger("triolet")
_ADVICE = "give smaller numbers in multipleOf, fewer and shorter repetitions, and fewer optional properties"
_MOST_REFUSED, _MOST_TOLD, _REFUSED_SECONDS, _QUIET_SECONDS = 256, 2_000, 60.0, 60.0
_HAS_LIMITS = hasattr(signal, "SIGPROF") and not getattr(sys, "frozen", False)
"""False on Windows, and in a program that cannot start Python: there each structure is compiled in a thread at once."""


@frozen
class _Lane:
    """Compilations that take up to ``seconds`` of computing. Others do not wait for them."""

    seconds: float
    trials: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(2))
    threads: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(1))


@define(eq=False)
class _Trial:
    """A structure that somebody compiles or waits for."""

    turn: trio.Lock = field(factory=trio.Lock, init=False)
    found: Structure | None = field(default=None, init=False)


@define(eq=False)
class Compiler:
    """One engine's compilations. A structure that takes long in the first lane goes on in the second, so that it does
    not hold up others for long."""

    _lanes: tuple[_Lane, ...] = field(factory=lambda: (_Lane(0.3), _Lane(2.0)))
    _trials: WeakValueDictionary[tuple[str, str], _Trial] = field(factory=WeakValueDictionary, init=False)
    _refused: dict[int, tuple[float, str]] = field(factory=dict, init=False)  # by hash: until when, the reason
    _quiet_until: float = field(default=-math.inf, init=False)

    async def compile(self, structure: Structure, structures: Structures | None) -> Structure:
        """Returns ``structure`` with its grammar, or as it is if another process compiles it (``structures`` is
        ``None``).

        Raises:
            InvalidRequest: the structure cannot be followed, or not within the limits.
        """
        if structures is not None and (kept := structures.find(structure)) is not None:
            return kept
        key = structure.kind, structure.text
        trial = self._trials.setdefault(key, _Trial())
        async with trial.turn:
            until, told = self._refused.get(hash(key), (0.0, ""))
            if trio.current_time() < until:
                raise InvalidRequest(told)
            try:
                trial.found = trial.found or await self._compile(structure, structures)
            except InvalidRequest as error:
                self._refused[hash(key)] = trio.current_time() + _REFUSED_SECONDS, str(error)[:_MOST_TOLD]
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
                raise
            return trial.found

    async def _compile(self, structure: Structure, structures: Structures | None) -> Structure:
        for lane in self._lanes:
            async with lane.trials:
                tried = await _try(structure, lane.seconds, self._tell)
            if tried is None:
                continue
            if structures is None:
                return structure
            work = partial(structures.compile, tried)
            found = await run_in_thread(work, limiter=lane.threads, abandon_on_cancel=True)
            structures.keep(found)
            return found
        raise bad(structure, f"compiling it takes more than {self._lanes[-1].seconds:g} s of computing; {_ADVICE}")

    def _tell(self, left_out: Sequence[str]) -> None:
        """Logs what is left out of a structure: one line, and at most one in `_QUIET_SECONDS`, since strangers choose
        what they ask for."""
        now = trio.current_time()
        if left_out and now >= self._quiet_until:
            self._quiet_until = now + _QUIET_SECONDS
            more = f" (and {len(left_out) - 1} more of this request)" if len(left_out) > 1 else ""
            _log.warning("%s%s", left_out[0][:_MOST_TOLD], more)


async def _try(structure: Structure, seconds: float, tell: Callable[[Sequence[str]], None]) -> Structure | None:
    """Makes the grammar of ``structure`` in a process. ``None``: it takes more than ``seconds`` of computing. ``tell``
    gets what the grammar leaves out.

    Raises:
        InvalidRequest: the structure cannot be followed, or takes too much memory.
        EngineError: the process failed otherwise, which is no fault of the structure.
    """
    if not _HAS_LIMITS:
        return structure
    library = find_spec("llguidance")
    assert library is not None, "llguidance is a dependency"
    folder = str(Path(str(library.origin)).parents[1])
    ended: CompletedProcess[bytes] = await trio.run_process(
        [multiprocessing.spawn.get_executable(), "-I", "-S", grammar.__file__, str(seconds), folder],
        stdin=json.dumps([structure.kind, structure.text]).encode(),
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        start_new_session=True,  # ^C is for the caller, which then ends the process
        deliver_cancel=_kill,
    )
    if ended.returncode == -signal.SIGPROF:
        return None
    if ended.returncode > 0:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise EngineError(f"the program that compiles structures failed ({ended.returncode}): {last[:_MOST_TOLD]}")
    if ended.returncode:
        raise bad(
            structure,
            f"compiling it takes more than {grammar.MEMORY // 2**20} MiB, or it is nested or refers too deeply "
            f"(the process ended with {ended.returncode}); {_ADVICE}",
        )
    told = json.loads(ended.stdout)
    if "fault" in told:
        raise bad(structure, told["fault"])
    tell(told.pop("left_out"))
    return Tried(kind=structure.kind, text=structure.text, **told)


async def _kill(process: trio.Process) -> None:
    process.kill()
