"""The step protocol, by which the kit checks the cache manager of a step engine. The kit plays the requests and the
device.

::

    def test_my_cache_keeps_its_promises():
        examine_steps(MyAdapter).raise_if_any()  # MyAdapter(room) has the methods of `StepCache`

The engine plans steps. In each step, requests ask for encoder outputs, and some requests are preempted. The device runs
the steps in their order, and in each step first the frees, then the encodings, then the reads.
``docs/adapt_your_cache.md`` shows the protocol as a table, and an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, Protocol

from .findings import SPEAKS, BrokenPromise, Findings, Replay, Script, short
from .search import WORKLOADS, Played, Search, import_of, raised
from .step_declaration import StepDeclaration
from .step_game import COLUMNS, COUNTED, PROMISES, RULED_OUT, StepGame
from .step_workloads import StepWorkload, draw_workload, simpler_workloads
from .wrong_adapter import SCHEDULER

__all__ = [
    "PROMISES",
    "MakeStepCache",
    "StepCache",
    "StepDeclaration",
    "StepPlanned",
    "StepWorkload",
    "Wanted",
    "examine_steps",
    "play_steps",
    "replay_steps",
]

Wanted = tuple[Literal["ask"], str, str, int] | tuple[Literal["preempt"], str]
"""One call of a step: ``("ask", request, key, size)`` or ``("preempt", request)``."""

StepPlanned = tuple[Collection[str], Collection[str], Collection[str]]
"""A planned step: the answers, the keys that it frees, and the keys that it encodes."""


class StepCache(Protocol):
    """The cache manager of a step engine, as the kit calls it. It decides about keys and sizes, never about tensors.
    Requests and keys are texts; sizes and room have one unit (bytes, embeddings). All values are plain Python, so that
    an adapter need not import the kit.
    """

    def plan(self, wanted: Sequence[Wanted], budget: int) -> StepPlanned:
        """Plans the next step. There is one answer for each ``ask``, in their order:

        - ``"hit"``: the output is there when the step reads, since an earlier step or this one encodes it.
        - ``"encode"``: as ``"hit"``, but this step encodes the output, for this request and all that share it.
        - ``"later"``: there is no room, or no budget. The request asks again in later steps, or ends. If no request
          holds anything, eight steps in a row that serve no request and change nothing count as a wait for ever.
        - ``"never"``: the output is larger than the whole room.

        After ``"hit"`` and ``"encode"`` the request holds the key, once, however often it asks again. ``preempt`` takes
        back everything that the request holds and has asked for, also in this step. Other requests that share a key
        keep it.

        The encodings of one step together take at most ``budget``. The output of ``key`` has the same ``size`` in every
        call.
        """
        ...

    def executed(self, failed: Sequence[str]) -> None:
        """Reports that the oldest planned step has run. The encodings of ``failed`` left nothing, and all holds of
        these keys are over. A request that still needs such a key asks anew.
        """
        ...

    def release(self, request: str, key: str) -> None:
        """Reports that ``request`` has read ``key`` and goes on. The call may be repeated, since some step loops
        release what was read in every later step.
        """
        ...

    def finish(self, request: str) -> None:
        """Reports that ``request`` has ended, was aborted, or was preempted between two steps. Everything that it holds
        and waits for is given back. The call may be repeated, and made for a request that holds nothing. A preempted
        request asks anew later.
        """
        ...

    # and, if the declaration says so:
    # reset(): reports that the device was emptied between two steps, and that nobody holds anything any more.
    # close(): reports that no request asks any more; the next steps free everything that is on the device.


MakeStepCache = Callable[[int], StepCache]
"""Makes an empty cache with the given room."""


# -- playing ---------------------------------------------------------------------------------------------------------


def play_steps(
    make_cache: MakeStepCache, declared: StepDeclaration, workload: StepWorkload, played: Played | None = None
) -> None:
    """Plays ``workload`` on a new cache, brings it to its end (`StepGame.end`), and checks every promise on the way.
    ``played`` is the record of it.

    Raises:
        BrokenPromise: the cache broke a promise, or raised an error, or the adapter does not speak the protocol.
    """
    played = played or Played(COLUMNS, COUNTED)
    sizes = dict(workload.sizes)
    try:
        game = StepGame(_made(make_cache, workload.room), workload.room, sizes, declared, played)
        for name, arguments in workload.operations:
            getattr(game, name)(*arguments)
        if workload.ends and workload.hurried:
            game.close(workload.late_failures)
        elif workload.ends:
            game.end()
    except Exception as error:
        played.written_out = StepWorkload(workload.room, sizes, tuple(played.operations), ends=False)
        if isinstance(error, BrokenPromise):
            raise BrokenPromise(error.promise, error.what, played.table, error.kind) from None
        raise raised(error, played.table) from error


def _made(make_cache: MakeStepCache, room: int) -> StepCache:
    try:
        return make_cache(room)
    except AttributeError as error:
        if not isinstance(error.obj, int):
            raise
        what = f"the cache is made with its room, an integer, and asks it for {error.name!r}. {SCHEDULER}"
        raise BrokenPromise(SPEAKS, what, kind="made with a room") from error


def examine_steps(
    make_cache: MakeStepCache,
    declared: StepDeclaration | None = None,
    *,
    seed: int = 0,
    workloads: int = WORKLOADS,
    subject: str | None = None,
    ignore: Collection[str] = (),
    must_happen: Collection[str] = (),
) -> Findings:
    """Looks for workloads that break the promises of a `StepCache`.

    Args:
        make_cache: makes an empty cache with the given room; the adapter's class, if the room is its only argument.
        declared: the ways in which the engine differs.
        seed: the same seed plays the same workloads.
        workloads: how many workloads are played; a thousand take about a second.
        subject: what regression tests import, ``package.module:factory``; by default the place where ``make_cache`` was
            defined.
        ignore: the names of findings that are only counted, ``"PROMISE"`` or ``"PROMISE: KIND"``. A workload ends with
            its first broken promise, also with an ignored one.
        must_happen: the names of statistics. If one of them stays zero, the search fails.

    Raises:
        ValueError: ``ignore`` names no promise.
    """
    search = _search(make_cache, declared or StepDeclaration(), subject)
    return search.examine(seed=seed, workloads=workloads, ignore=ignore, must_happen=must_happen)


def replay_steps(
    make_cache: MakeStepCache, declared: StepDeclaration | None = None, *, number: int, seed: int = 0
) -> Replay:
    """Plays workload ``number`` of ``seed`` alone, as `examine_steps` does with the same arguments."""
    return _search(make_cache, declared or StepDeclaration(), None).replay(number, seed=seed)


def _search(make_cache: MakeStepCache, declared: StepDeclaration, subject: str | None) -> Search[StepWorkload]:
    line, factory = import_of(make_cache, subject)
    names = ("StepDeclaration", "StepWorkload", "play_steps")
    return Search(
        draw=lambda chance: draw_workload(chance, declared),
        play=partial(play_steps, make_cache, declared),
        simpler=simpler_workloads,
        script=Script("triolet_kit", names, line, "play_steps", (factory, short(declared))),
        promises=PROMISES,
        columns=COLUMNS,
        counted=COUNTED,
        expected=tuple(name for name in COUNTED if getattr(declared, RULED_OUT.get(name, ""), True)),
    )
