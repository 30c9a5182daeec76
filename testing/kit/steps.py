"""Is the cache manager of your step engine sound? The step protocol: the kit plays requests and the device.

::

    def test_my_cache_keeps_its_promises():
        examine_steps(MyAdapter).raise_if_any()  # MyAdapter(room) has the methods of `StepCache`

The engine plans steps: in each, requests ask for encoder outputs, and some requests are preempted. The device runs the
steps in their order, and in each the frees, then the encodings, then the reads. ``docs/adapt_your_cache.md`` has the
protocol as a table, and adapts a cache manager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, Protocol

from .findings import WORKLOADS, BrokenPromise, Findings, Script, Table, examine, import_of, raised, short
from .step_game import COLUMNS, PROMISES, StepDeclaration, StepGame
from .step_workloads import StepWorkload, draw_workload, simpler_workloads
from .wrong_adapter import WrongAdapter

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
]

Wanted = tuple[Literal["ask"], str, str, int] | tuple[Literal["preempt"], str]
"""``("ask", request, key, size)`` or ``("preempt", request)``."""

StepPlanned = tuple[Collection[str], Collection[str], Collection[str]]
"""The answers, the keys that the step frees, and those that it encodes."""


class StepCache(Protocol):
    """The cache manager of a step engine, as the kit calls it: it decides about keys and sizes, never tensors. Requests
    and keys are texts, sizes and room are in one unit (bytes, embeddings), and everything is plain Python, so that an
    adapter need not import Triolet."""

    def plan(self, wanted: Sequence[Wanted], budget: int) -> StepPlanned:
        """Plans the next step. The answers are one for each ``ask``, in order:

        - ``"hit"``: the output is there when the step reads, since an earlier step, or this one, encodes it.
        - ``"encode"``: the same, and this step encodes it, for this request and all that share it.
        - ``"later"``: no room, or no budget. The request asks again in later steps, or ends. Where nobody holds
          anything, eight steps in a row that serve nobody and change nothing are taken for a wait for ever.
        - ``"never"``: larger than the whole room.

        After ``"hit"`` and ``"encode"`` the request holds the key, once, however often it asks again. ``preempt`` takes
        back all that the request holds and has asked for, in this step too; who shares a key with it keeps it.

        The encodings of one step take ``budget`` together, at most. The output of ``key`` has ``size`` in every call.
        """
        ...

    def executed(self, failed: Sequence[str]) -> None:
        """The oldest planned step has run. The encodings of ``failed`` left nothing, and all holds of these keys are
        over: who still needs one asks anew."""
        ...

    def release(self, request: str, key: str) -> None:
        """``request`` has read ``key``, and goes on. May come again, as a step loop does in each later step."""
        ...

    def finish(self, request: str) -> None:
        """``request`` has ended, was aborted, or was preempted between two steps: all that it holds and waits for is
        given back. May come again, and for a request that holds nothing. A preempted request asks anew later."""
        ...

    # and, where the declaration says so:
    # reset(): the device was emptied between two steps; nobody holds anything any more.
    # close(): no request asks any more; the next steps free all that is on the device.


MakeStepCache = Callable[[int], StepCache]
"""Makes an empty cache of so much room."""


# -- playing ---------------------------------------------------------------------------------------------------------


def play_steps(make_cache: MakeStepCache, declared: StepDeclaration, workload: StepWorkload) -> None:
    """Plays ``workload`` on a new cache, brings it to its end (`StepGame.end`), and checks every promise on the way.

    Raises:
        BrokenPromise: the cache broke one, or raised an error.
        WrongAdapter: the adapter does not speak the protocol.
    """
    rows: list[tuple[str, ...]] = []
    try:
        game = StepGame(make_cache(workload.room), workload.room, workload.sizes, declared)
        rows = game.rows
        for name, arguments in workload.operations:
            getattr(game, name)(*arguments)
        if workload.hurried:
            game.close(workload.late_failures)
        else:
            game.end()
    except (BrokenPromise, WrongAdapter):
        raise
    except Exception as error:
        raise raised(error, Table(COLUMNS, rows)) from error


def examine_steps(
    make_cache: MakeStepCache,
    declared: StepDeclaration | None = None,
    *,
    seed: int = 0,
    workloads: int = WORKLOADS,
    subject: str | None = None,
) -> Findings:
    """Looks for workloads that break the promises of a `StepCache`.

    Args:
        make_cache: makes an empty cache of so much room; the adapter's class, if it takes the room alone.
        declared: what the engine does otherwise.
        seed: the same seed plays the same workloads.
        workloads: how many; a thousand take about a second.
        subject: what regression tests import, ``package.module:factory``; by default where ``make_cache`` was defined.

    Raises:
        TypeError: the adapter lacks a method, or does not speak the protocol.
    """
    declared = declared or StepDeclaration()
    line, factory = import_of(make_cache, subject)
    imports = f"from triolet.testing.kit.steps import StepDeclaration, StepWorkload, play_steps\n\n{line}\n"
    return examine(
        lambda chance: draw_workload(chance, declared),
        partial(play_steps, make_cache, declared),
        simpler_workloads,
        Script(imports, "play_steps", (factory, short(declared))),
        seed=seed,
        workloads=workloads,
    )
