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
recurrent layers     (declared, ``states``) a chunk names its state, the one it goes on from, and those it keeps
===================  ==================================================================================

Values are duck-typed: an adapter may answer objects of its own with the attributes of `Step` and `Chunk`; without
``encodes`` and ``frees``, a step has none. `update` gets the object that `schedule` answered.

The kit does not cover steps that fail, pages that move or are copied, draft tokens, beams, and cross-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Protocol

from attrs import evolve

from .findings import BrokenPromise, Findings, Replay, Script, short
from .scheduler_play import COLUMNS, PROMISES, SchedulerPlay, counted, expected
from .scheduler_values import Chunk, Item, Limits, NewRequest, Step
from .scheduler_workloads import SchedulerDeclaration, SchedulerWorkload, draw, simpler
from .search import WORKLOADS, Played, Search, import_of, raised

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
    "replay_scheduler",
]


class Scheduler(Protocol):
    """A scheduler, as the kit calls it."""

    def add_request(self, request: NewRequest) -> bool | None:
        """Submits a client's request. ``False``: the request is refused, since it can never fit. Any other answer
        accepts it.
        """
        ...

    def schedule(self) -> Step | None:
        """Plans the next step; ``None``: there is nothing to do now. The kit runs every planned step, even one without
        work, and calls `update` with it. Sixteen turns in a row without work, while no step is in flight, count as a
        standstill.
        """
        ...

    def update(self, step: Step, tokens: Mapping[str, int]) -> Iterable[str] | None:
        """Reports that the oldest planned ``step`` has run. ``tokens`` are the tokens that its sampling chunks have
        sampled, also for requests that have ended meanwhile. Returns the ids of the requests that have ended with this
        step. A request ends with the token `EOS` (0 on the kit's device), or when it has as many tokens as it asked
        for.
        """
        ...

    def finish(self, request_id: str) -> None:
        """Reports that the client has left, so that no step is planned for the request any more. The request may be in
        a step in flight, may have ended, and may have been refused. An engine that is declared without ``aborts`` needs
        no such method.
        """
        ...

    # and, where the adapter has them:
    # close(): the workload is over; a `StepLoop` ends its thread.
    # events: how often what happened in the scheduler, by name; the search adds these to its statistics.


MakeScheduler = Callable[[Limits], Scheduler]


def examine_scheduler(
    make: MakeScheduler,
    declared: SchedulerDeclaration | None = None,
    *,
    seed: int = 0,
    workloads: int = WORKLOADS,
    subject: str | None = None,
    ignore: Collection[str] = (),
    must_happen: Collection[str] = (),
) -> Findings:
    """Looks for workloads that break the scheduler's promises. The same arguments give the same findings.

    Args:
        make: makes an empty scheduler with the given limits.
        declared: the ways in which the scheduler differs.
        seed: the seed of the workloads.
        workloads: how many workloads are played; a thousand take about a second with a small scheduler.
        subject: what regression tests import, ``package.module:factory``; by default the place where ``make`` was
            defined.
        ignore: the names of findings that are only counted, ``"PROMISE"`` or ``"PROMISE: KIND"``. A workload ends with
            its first broken promise, also with an ignored one.
        must_happen: the names of statistics, or of the adapter's own ``events``. If one of them never happens, the
            search fails.

    Raises:
        ValueError: ``ignore`` names no promise.
    """
    search = _search(make, declared or SchedulerDeclaration(), subject)
    return search.examine(seed=seed, workloads=workloads, ignore=ignore, must_happen=must_happen)


def replay_scheduler(
    make: MakeScheduler, declared: SchedulerDeclaration | None = None, *, number: int, seed: int = 0
) -> Replay:
    """Plays workload ``number`` of ``seed`` alone, as `examine_scheduler` does with the same arguments."""
    return _search(make, declared or SchedulerDeclaration(), None, told=True).replay(number, seed=seed)


def _search(
    make: MakeScheduler, declared: SchedulerDeclaration, subject: str | None, *, told: bool = False
) -> Search[SchedulerWorkload]:
    line, factory = import_of(make, subject)
    names = ("Item", "Limits", "NewRequest", "SchedulerDeclaration", "SchedulerWorkload", "play_scheduler")
    return Search(
        draw=partial(draw, declared),
        play=lambda workload, played: play_scheduler(make, workload, declared, played, told=told),
        simpler=partial(simpler, declared),
        script=Script(
            "triolet_kit",
            names,
            line,
            "play_scheduler",
            (factory,),
            (f"declared={short(declared)}",),
        ),
        promises=PROMISES,
        columns=COLUMNS,
        counted=counted(declared),
        expected=expected(declared),
    )


def play_scheduler(
    make: MakeScheduler,
    workload: SchedulerWorkload,
    declared: SchedulerDeclaration | None = None,
    played: Played | None = None,
    *,
    told: bool = False,
) -> None:
    """Plays one workload on a new scheduler. ``played`` is the record of it, with the history if it is to be ``told``.

    Raises:
        BrokenPromise: the scheduler broke a promise, or raised an error, or the adapter does not speak the protocol.
            The error has the history as a table.
    """
    declared = declared or SchedulerDeclaration()
    played = played or Played(COLUMNS, counted(declared))
    try:
        _play(make, workload, declared, played, told)
    except Exception as first:  # noqa: BLE001  (played again for its history, which most workloads do without)
        played.written_out = _written_out(workload, played)
        history, error = played, first
        if not told:
            history = Played(COLUMNS, counted(declared))
            try:
                _play(make, workload, declared, history, True)
            except Exception as again:  # noqa: BLE001
                error = again
        if isinstance(error, BrokenPromise):
            raise BrokenPromise(error.promise, error.what, history.table, error.kind) from None
        raise raised(error, history.table) from error


def _play(
    make: MakeScheduler, workload: SchedulerWorkload, declared: SchedulerDeclaration, played: Played, told: bool
) -> None:
    scheduler = make(workload.limits)
    try:
        _play_on(scheduler, workload, declared, played, told)
    finally:
        for name, count in dict(getattr(scheduler, "events", ())).items():
            played.statistics[name] = played.statistics.get(name, 0) + count
        getattr(scheduler, "close", int)()


def _play_on(
    scheduler: Scheduler, workload: SchedulerWorkload, declared: SchedulerDeclaration, played: Played, told: bool
) -> None:
    play = SchedulerPlay(scheduler, workload.limits, declared, played, told=told)
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
    if workload.ends:
        play.serve_everybody()
        play.look_for_leaks()


def _written_out(workload: SchedulerWorkload, played: Played) -> SchedulerWorkload:
    """Returns the workload with everything that clients and device did, its end included, as operations."""
    requests = [request for what, request in played.operations if what == "ask"]
    numbers = {request.id: number for number, request in enumerate(requests)}
    operations = [
        (what, numbers[request.id] if what == "ask" else numbers.get(request, 0)) for what, request in played.operations
    ]
    return evolve(workload, requests=tuple(requests), operations=tuple(operations), ends=False)
