"""The search for faults of a whole scheduler, with its pages and its encoder cache::

    from triolet_kit import EOS, Chunk, Step, examine_scheduler

    findings = examine_scheduler(MyAdapter)  # MyAdapter(limits) has the four methods of `Scheduler`
    print(findings)

The kit plays the clients, who submit requests, leave, and leave again. It also plays the device, which keeps a
fingerprint of the whole prefix at every position of every page (`triolet_kit.paged_device`). The kit does not read the
scheduler's books; it judges what the scheduler's steps would do to a device.

===================  ==================================================================================
of an engine         here
===================  ==================================================================================
a request comes      ``add_request(request)``
the step loop plans  ``schedule()`` answers a `Step`: frees, encodings, and a `Chunk` for each request
the device runs      the kit: frees, encodings, writes, reads; steps in the order they were planned
results come         ``update(step, tokens)`` answers the ids of the requests that have ended by them
a client leaves      ``finish(request_id)``, also for a request that has ended
preemption           a later chunk of the request begins at an earlier position; no call reports this
a prefix hit         the first chunk of a request begins after pages that it did not write
===================  ==================================================================================

Values are duck-typed: the attributes of `NewRequest`, `Item`, `Limits`, `Step` and `Chunk` count.

The kit does not cover steps that fail, pages that move or are copied, draft tokens, beams, and cross-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from attrs import field, frozen

from .findings import WORKLOADS, BrokenPromise, Findings, Script, Table, examine, import_of, raised, short, tupled
from .scheduler_play import PROMISES, Item, Limits, NewRequest, SchedulerPlay
from .scheduler_workloads import SchedulerDeclaration, SchedulerWorkload, draw, simpler
from .wrong_adapter import WrongAdapter

__all__ = [
    "PROMISES",
    "Chunk",
    "Item",
    "Limits",
    "NewRequest",
    "Scheduler",
    "SchedulerDeclaration",
    "SchedulerWorkload",
    "Step",
    "examine_scheduler",
    "play_scheduler",
]


@frozen
class Chunk:
    """One request's part of a step: feed its tokens at positions ``start .. start+length-1``, over ``pages``. Position
    p lies in ``pages[p // page_size]``. The chunk reads all positions before its end. ``samples``: a token is sampled
    after it."""

    request: str
    start: int
    length: int
    pages: tuple[int, ...] = field(converter=tupled)
    samples: bool


@frozen(kw_only=True)
class Step:
    """One launch of the device, which frees encoder outputs, encodes items and runs chunks, in this order. ``own`` is
    for the adapter, which gets it back with the step in `Scheduler.update`. For example, it is the engine's plan.
    """

    chunks: tuple[Chunk, ...] = field(default=(), converter=tupled)
    encodes: tuple[str, ...] = field(default=(), converter=tupled)
    frees: tuple[str, ...] = field(default=(), converter=tupled)
    own: Any = field(default=None, repr=False, eq=False)


class Scheduler(Protocol):
    """A scheduler, as the kit calls it."""

    def add_request(self, request: NewRequest) -> bool | None:
        """Submits a client's request. ``False``: the request is refused, since it can never fit. Any other answer
        accepts it."""
        ...

    def schedule(self) -> Step | None:
        """Plans the next step; ``None``: there is nothing to do now. The kit runs every planned step, even one without
        work, and calls `update` with it. Three turns in a row without work, while no step is in flight, count as a
        standstill."""
        ...

    def update(self, step: Step, tokens: Mapping[str, int]) -> Iterable[str] | None:
        """Reports that the oldest planned ``step`` has run. ``tokens`` are the tokens that its sampling chunks have
        sampled, also for requests that have ended meanwhile. Returns the ids of the requests that have ended with this
        step. A request ends with the token `EOS` (0 on the kit's device), or when it has as many tokens as it asked
        for."""
        ...

    def finish(self, request_id: str) -> None:
        """Reports that the client has left, so that no step is planned for the request any more. The request may be in
        a step in flight, may have ended, and may have been refused."""
        ...


MakeScheduler = Callable[[Limits], Scheduler]


def examine_scheduler(
    make: MakeScheduler,
    declared: SchedulerDeclaration | None = None,
    *,
    seed: int = 0,
    workloads: int = WORKLOADS,
    subject: str | None = None,
) -> Findings:
    """Looks for workloads that break the scheduler's promises. The same arguments give the same findings.

    Args:
        make: makes an empty scheduler with the given limits.
        declared: the ways in which the scheduler differs.
        seed: the seed of the workloads.
        workloads: how many workloads are played; a thousand take about a second with a small scheduler.
        subject: what regression tests import, ``package.module:factory``; by default the place where ``make`` was
            defined.

    Raises:
        WrongAdapter: the adapter lacks a method, or does not speak the protocol.
    """
    declared = declared or SchedulerDeclaration()
    line, factory = import_of(make, subject)
    names = "Item, Limits, NewRequest, SchedulerDeclaration, SchedulerWorkload, play_scheduler"
    return examine(
        partial(draw, declared),
        partial(play_scheduler, make, declared=declared),
        simpler,
        Script(
            f"from triolet_kit.schedulers import {names}\n\n{line}\n",
            "play_scheduler",
            (factory,),
            (f"declared={short(declared)}",),
        ),
        seed=seed,
        workloads=workloads,
    )


def play_scheduler(
    make: MakeScheduler, workload: SchedulerWorkload, declared: SchedulerDeclaration | None = None
) -> None:
    """Plays one workload on a new scheduler.

    Raises:
        BrokenPromise: the scheduler broke a promise. The error has the history as a table.
        WrongAdapter: the adapter does not speak the protocol.
    """
    declared = declared or SchedulerDeclaration()
    try:
        _play(make, workload, declared, None)
    except WrongAdapter:
        raise
    except Exception as first:  # noqa: BLE001  (played again for its history, which most workloads do without)
        told: list[tuple[str, str, str]] = []
        error = first
        try:
            _play(make, workload, declared, told)
        except Exception as again:  # noqa: BLE001
            error = again
        table = Table(("what happens", "the scheduler", "encoder outputs"), told)
        if isinstance(error, BrokenPromise):
            raise BrokenPromise(error.promise, error.what, table) from None
        raise raised(error, table) from error


def _play(
    make: MakeScheduler,
    workload: SchedulerWorkload,
    declared: SchedulerDeclaration,
    told: list[tuple[str, str, str]] | None,
) -> None:
    play = SchedulerPlay(make(workload.limits), workload.limits, declared.settled, declared.missed_free)
    play.told = told
    for what, number in workload.operations:
        match what:
            case "ask":
                play.ask(workload.requests[number])
            case "leave":
                play.finish(workload.requests[number].id)
            case "plan":
                play.plan()
            case "run":
                play.run()
            case "storm":
                play.storm()
    play.serve_everybody()
    play.look_for_leaks()
