"""Is your scheduler sound? The subject is a whole one, with its pages and its encoder cache::

    from triolet.testing.kit import EOS, Chunk, Step, examine_scheduler

    findings = examine_scheduler(MyAdapter)  # MyAdapter(limits) has the four methods of `Scheduler`
    print(findings)

The kit plays the clients, who ask, leave, and leave again, and the device, which keeps for every position of every page
a fingerprint of the whole prefix that was written there (`triolet.testing.kit.paged_device`). Nothing of the
scheduler's books is read: what counts is what its steps would do to a device.

===================  ==================================================================================
of an engine         here
===================  ==================================================================================
a request comes      ``add_request(request)``
the step loop plans  ``schedule()`` answers a `Step`: frees, encodings, and a `Chunk` for each request
the device runs      the kit: frees, encodings, writes, reads; steps in the order they were planned
results come         ``update(step, tokens)`` answers the ids of the requests that have ended by them
a client leaves      ``finish(request_id)``, also for a request that has ended
preemption           a later chunk of the request begins further in front; nobody needs to say so
a prefix hit         the first chunk of a request begins behind pages that it did not write
===================  ==================================================================================

Values are duck-typed: what counts are the attributes of `NewRequest`, `Item`, `Limits`, `Step` and `Chunk`. In a
regression test they are of classes of the same names, which the test carries along.

Not seen: steps that fail, pages that move or are copied, draft tokens, beams, and cross-attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn, Protocol

from attrs import field, frozen

from . import paged_device, scheduler_play, wrong_adapter
from .findings import (
    RAISES_NOTHING,
    WORKLOADS,
    BrokenPromise,
    Findings,
    Promise,
    Script,
    Severity,
    Table,
    carried,
    examine,
    import_of,
    raised,
)
from .scheduler_play import Item, Limits, NewRequest, SchedulerPlay
from .scheduler_workloads import SchedulerDeclaration, SchedulerWorkload, draw, simpler
from .wrong_adapter import WrongAdapter

__all__ = [
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


def _pages(pages: Iterable[int]) -> tuple[int, ...]:
    return tuple(pages)


def _keys(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(keys)


def _chunks(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    return tuple(chunks)


@frozen
class Chunk:
    """One request's part of a step: feed its tokens at positions ``start .. start+length-1``, over ``pages``: position
    p lies in ``pages[p // page_size]``. All positions before are read. ``samples``: a token is sampled behind it."""

    request: str
    start: int
    length: int
    pages: tuple[int, ...] = field(converter=_pages)
    samples: bool


@frozen(kw_only=True)
class Step:
    """What the device does in one launch, in this order: frees outputs of the encoder, encodes items, runs chunks.
    ``own``: whatever the adapter wants to have at hand when `Scheduler.update` gets the step, the engine's plan say.
    """

    chunks: tuple[Chunk, ...] = field(default=(), converter=_chunks)
    encodes: tuple[str, ...] = field(default=(), converter=_keys)
    frees: tuple[str, ...] = field(default=(), converter=_keys)
    own: Any = field(default=None, repr=False, eq=False)


class Scheduler(Protocol):
    """What the kit needs of a scheduler."""

    def add_request(self, request: NewRequest) -> bool | None:
        """A client asks. ``False``: the request is refused, since it can never fit. Every other answer takes it."""
        ...

    def schedule(self) -> Step | None:
        """Plans the next step; ``None``: there is nothing to do now. What is planned is run, and `update` told of it,
        even if there is nothing to do in it. Three turns in a row that bring nothing to do, while nothing is in flight,
        are taken for a standstill."""
        ...

    def update(self, step: Step, tokens: Mapping[str, int]) -> Iterable[str] | None:
        """The oldest planned ``step`` has run. ``tokens``: what its sampling chunks have sampled, also for requests
        that have ended meanwhile. Returns the ids of the requests that have ended by it: by the token `EOS` (0, as
        the kit's device has it), or with as many tokens as they asked for; by this step, not by a later one."""
        ...

    def finish(self, request_id: str) -> None:
        """The client has left: no step is planned for the request any more. The request may be in a step in flight, may
        have ended, and may have been refused."""
        ...


MakeScheduler = Callable[[Limits], Scheduler]


PROMISES = {
    promise.name: promise
    for promise in (
        Promise(
            paged_device.GIVEN_AWAY,
            Severity.CORRUPTS,
            "A request goes on with the keys and values of another one: it answers with the other's text, which may be "
            "another user's.",
        ),
        Promise(
            paged_device.SHARED_WRITTEN,
            Severity.CORRUPTS,
            "All who share the page read what one of them has written over it: their answers change, and so do those "
            "of everybody who finds the page later.",
        ),
        Promise(
            paged_device.PREFIX_HITS,
            Severity.CORRUPTS,
            "A request skips the computation of its prompt and goes on behind another prompt, or behind nothing.",
        ),
        Promise(
            paged_device.BEFORE_READY,
            Severity.CORRUPTS,
            "The decoder reads an output that does not exist: garbage, or an illegal access that ends the process.",
        ),
        Promise(
            paged_device.FREE_HELD,
            Severity.CORRUPTS,
            "A request that still needs the output finds nothing, or another image in its place.",
        ),
        Promise(
            paged_device.PHANTOM,
            Severity.CORRUPTS,
            "The books list an output that is gone: everybody who finds it there reads garbage, until a restart.",
        ),
        RAISES_NOTHING,
        Promise(
            scheduler_play.STARVES,
            Severity.HANGS,
            "A client waits until its own timeout, and nothing in the log says why.",
        ),
        Promise(
            scheduler_play.REFUSED,
            Severity.HANGS,
            "A request that the engine could serve gets an error, or no answer at all.",
        ),
        Promise(
            scheduler_play.TERMINAL,
            Severity.HANGS,
            "A request that ends twice, too early or never leaves its client with half an answer, or the device with "
            "work for nobody.",
        ),
        Promise(
            scheduler_play.ALWAYS_FREED,
            Severity.LEAKS,
            "What does not come back is missing for ever: the engine serves fewer and fewer, and stops at last.",
        ),
        Promise(
            scheduler_play.FREE_FOLLOWS,
            Severity.CORRUPTS,
            "Whatever still reads the page beside the steps, a transfer or the repetition of a failed step, reads "
            "another request's keys and values.",
        ),
        Promise(
            paged_device.BALANCE,
            Severity.CRASHES,
            "What is planned is more than there is: the step runs out of memory, or writes beyond its buffers.",
        ),
        Promise(
            paged_device.ENCODE_ONCE,
            Severity.WASTES,
            "The encoder computes what the device has already, and the copy that the books forget stays for ever.",
        ),
    )
}


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
        make: makes a scheduler of these limits, with nothing in it.
        declared: what the scheduler does not promise.
        seed: of the workloads.
        workloads: how many are played; a thousand of a small scheduler take about a second.
        subject: what regression tests import, ``package.module:factory``; by default where ``make`` was defined.

    Raises:
        WrongAdapter: the adapter lacks a method, or does not speak the protocol.
    """
    declared = declared or SchedulerDeclaration()
    play = partial(play_scheduler, make, declared=declared)
    script = _script(import_of(make, subject), declared)
    return examine(partial(draw, declared), play, simpler, script, seed=seed, workloads=workloads)


def play_scheduler(
    make: MakeScheduler, workload: SchedulerWorkload, declared: SchedulerDeclaration | None = None
) -> None:
    """Plays one workload on a new scheduler.

    Raises:
        BrokenPromise: with the history as a table.
        WrongAdapter: the adapter does not speak the protocol.
    """
    declared = declared or SchedulerDeclaration()
    first = _error(make, workload, declared, None)
    if first is None:
        return
    told: list[tuple[str, str, str]] = []
    error = _error(make, workload, declared, told) or first  # played again, and told
    if isinstance(error, WrongAdapter):
        raise error
    if isinstance(error, _Broken):
        raise BrokenPromise(PROMISES[error.promise], error.what, _table(told))
    raise raised(error, _table(told)) from error


_Told = list[tuple[str, str, str]]


def _error(
    make: MakeScheduler,
    workload: SchedulerWorkload,
    declared: SchedulerDeclaration,
    told: list[tuple[str, str, str]] | None,
) -> Exception | None:
    """How a play ends, unless it ends well."""
    try:
        _play(make, workload, declared, told)
    except Exception as error:  # noqa: BLE001  (a finding)
        return error
    return None


class _Broken(Exception):
    def __init__(self, promise: str, what: str) -> None:
        super().__init__(promise, what)
        self.promise, self.what = promise, what


def _fail(promise: str, what: str) -> NoReturn:
    raise _Broken(promise, what)


def _play(
    make: MakeScheduler,
    workload: SchedulerWorkload,
    declared: SchedulerDeclaration,
    told: list[tuple[str, str, str]] | None,
) -> None:
    play = SchedulerPlay(make(workload.limits), workload.limits, declared.settled, declared.missed_free)
    play.told = told
    play.device.fail = _fail  # type: ignore[method-assign]  # as an exception that no scheduler raises
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


def _table(told: list[tuple[str, str, str]]) -> Table:
    return Table(("what happens", "the scheduler", "encoder outputs"), told)


# -- regression tests ----------------------------------------------------------------------------------------------


def _script(imported: tuple[str, str], declared: SchedulerDeclaration) -> Script[SchedulerWorkload]:
    """Tests that carry the clients and the device along."""
    line, factory = imported
    head = carried(wrong_adapter, paged_device, scheduler_play)
    return Script(f"{head}\n\n{line}  # noqa: E402\n", partial(_regression, factory, declared))


def _regression(factory: str, declared: SchedulerDeclaration, workload: SchedulerWorkload) -> str:
    lines = [
        f"limits = {workload.limits!r}",
        f"play = SchedulerPlay({factory}(limits), limits, {declared.settled}, {declared.missed_free!r})",
    ]
    for what, number in workload.operations:
        match what:
            case "ask":
                lines.append(f"play.ask({workload.requests[number]!r})")
            case "leave":
                lines.append(f"play.finish({workload.requests[number].id!r})")
            case _:
                lines.append(f"play.{what}()")
    return "\n".join([*lines, "play.serve_everybody()", "play.look_for_leaks()"])
