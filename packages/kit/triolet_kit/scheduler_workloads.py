"""The workloads for schedulers: requests, and the order in which clients, scheduler and device act.

Many prompts begin alike, use few different tokens, or continue another request's answer. So prefix caches get many
hits, and wrong hits if they have faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from attrs import evolve, field, frozen, validators

from .findings import tupled
from .paged_device import EOS, Record, sampled
from .scheduler_values import Item, Limits, NewRequest
from .search import without_some

T = TypeVar("T")
Operation = tuple[str, int]
"""A word and a number. ``ask`` and ``leave`` have the number of the request; ``plan``, ``run`` and ``storm`` have 0."""

_PLACEHOLDER = 9  # the token at the positions of items
_MANY = 16  # step tokens
_LONG_BESIDE_SMALL: dict[str, Any] = {
    "longest": 1.0,
    "shortest": 0.9,
    "small": 0.5,
    "brief": 0.8,
    "tight": True,
    "rising": True,
    "leaves": 0.0,
}
"""Weights of a mix that chance alone seldom draws: prompts that need most of the pages, with short answers, and small
requests that come later and are more urgent. So requests are preempted within their prompts.
"""


@frozen(kw_only=True)
class SchedulerDeclaration:
    """The ways in which a scheduler differs from the kit's assumptions. Each argument changes one check, or one thing
    that workloads contain, and nothing else.

    Args:
        steps_in_flight: the most steps that are planned and not answered; 1 for an engine that waits for each step.
        items: requests have items that an encoder encodes. ``False`` for an engine that reads only text.
        priorities: requests have priorities, the smallest served first. ``False`` for a scheduler that serves by
            arrival alone.
        fair: a request is served at last, however many others of its priority come later. ``False`` for an engine that
            admits any request that fits.
        settled: a page is given to another request only after the steps that use the page are done. Most engines need
            not wait for that, since the device runs steps in order. An engine must wait if it runs a failed step again,
            or if other work than steps reads pages (a transfer to the host, for example).
        missed_free: ``"harmless"`` for a runner that ignores a free of a key that it does not have.
        refuses: workloads have requests that can never fit and must be refused. The default is ``False``, since most
            engines refuse such requests before the scheduler. (`StepDeclaration` has the default ``True``: only the
            manager of an encoder cache knows which items are larger than the cache.)
        page_sizes: the sizes of pages, in tokens, that the scheduler supports; ``(1,)`` for one without pages.
        aborts: clients may leave before their requests have ended. ``False`` for an engine without abort, whose adapter
            needs no ``finish``.
        decodes_all: a step feeds one token of each running request, whatever ``max_step_tokens`` says. So workloads
            have at least as many step tokens as places.
        headroom: the tokens beyond those that a request feeds for which the scheduler keeps pages, for example the last
            token of the answer, which is never fed. A request may be refused, or wait for ever, if it does not fit with
            these.
        discards: a token that a step in flight samples may be thrown away if its request is preempted meanwhile. The
            request samples it again.
        states: the model has recurrent layers, and each running request a state of them beside its pages. Each chunk
            names its state, and where it has one the state that it goes on from. A request that goes on after cached
            pages needs a state that has read exactly these. Workloads have a fixed number of states.
        overlaps: the step loop plans the next step before it waits for the last one, always. So no step is run while
            another one can be planned, and `Limits.steps_in_flight` is what is declared.
    """

    steps_in_flight: int = field(default=2, validator=validators.in_((1, 2)))
    items: bool = True
    priorities: bool = True
    fair: bool = True
    settled: bool = False
    missed_free: str = field(default="fault", validator=validators.in_(("fault", "harmless")))
    refuses: bool = False
    page_sizes: tuple[int, ...] = field(
        default=(1, 2, 4),
        converter=tupled,
        validator=[validators.min_len(1), validators.deep_iterable(validators.ge(1))],
    )
    aborts: bool = True
    decodes_all: bool = False
    headroom: int = field(default=0, validator=validators.ge(0))
    discards: bool = False
    states: bool = False
    overlaps: bool = False


@frozen(kw_only=True)
class SchedulerWorkload:
    """The actions of clients, scheduler and device in one game. At its end no client submits any more, and every
    request is served. Unless ``ends``, nothing follows the last operation.
    """

    limits: Limits
    requests: tuple[NewRequest, ...]
    operations: tuple[Operation, ...]
    ends: bool = True


# -- drawn by chance -----------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class _Weights:
    """The weights of the draws of one workload, which are drawn anew for each: some workloads have no aborts, some have
    little else. So a fault that needs one event often, and another one never, is found early.
    """

    room: tuple[int, int]  # the fewest and the most tokens that all pages hold
    tight: bool  # the largest request fills nearly all pages
    places: tuple[int, int]
    requests: tuple[int, int]
    tokens: int  # how many different ones prompts have
    bases: int  # how many beginnings prompts have
    longest: float  # of a beginning, in parts of all pages
    shortest: float  # of what a prompt has of it, in parts of the beginning
    small: float  # that a prompt has nothing of it
    brief: float  # that a request asks for two tokens at most
    again: float  # that a prompt has the text of another request, with its answer
    first: bool  # that of the first one, always
    cuts: float  # that it has only the beginning, so that its own answer repeats the rest
    items: float
    levels: int  # of priorities, but one, if they do not rise
    rising: bool  # each request is more urgent than those before it
    waits: float  # that turns pass before the next request comes
    turns: int  # the most of them
    runs: float  # that a turn is the device's
    leaves: float  # that a client leaves
    storms: float

    @classmethod
    def draw(cls, random: Random) -> _Weights:
        pick = random.choice
        drawn = cls(
            room=pick(((4, 8), (6, 16), (12, 40), (24, 64))),
            tight=pick((False, True)),
            places=pick(((1, 2), (2, 4), (2, 4), (4, 8))),
            requests=pick(((1, 3), (2, 5), (4, 9), (8, 16))),
            tokens=pick((1, 2, 2, 2)),
            bases=pick((1, 2, 2, 3)),
            longest=pick((0.3, 0.6, 1.0, 1.0)),
            shortest=pick((0.0, 0.0, 0.5, 0.9)),
            small=pick((0.0, 0.2, 0.5)),
            brief=pick((0.0, 0.0, 0.4, 0.8)),
            again=pick((0.0, 0.3, 0.6, 0.9)),
            first=pick((False, True)),
            cuts=pick((0.0, 0.5, 0.8)),
            items=pick((0.0, 0.5, 0.5, 0.8)),
            levels=pick((0, 1, 1, 3)),
            rising=pick((False, True)),
            waits=pick((0.3, 0.6, 1.0)),
            turns=pick((2, 4, 8, 16)),
            runs=pick((0.3, 0.5, 0.5, 0.7)),
            leaves=pick((0.0, 0.0, 0.0, 0.3, 0.6)),
            storms=pick((0.0, 0.3)),
        )
        return evolve(drawn, **_LONG_BESIDE_SMALL) if random.random() < 0.25 else drawn


def draw(declared: SchedulerDeclaration, random: Random) -> SchedulerWorkload:
    """Draws a workload."""
    weights, size, most = _Weights.draw(random), random.choice(declared.page_sizes), declared.steps_in_flight
    limits = Limits(
        pages=max(2, random.randint(*weights.room) // size) + -(-declared.headroom // size),
        page_size=size,
        max_step_tokens=random.choice((1, 2, 3, 4, 6, 8, _MANY)),
        max_running=random.randint(*weights.places),
        room=random.randint(1, 4) if declared.items else 0,
        steps_in_flight=declared.steps_in_flight if declared.overlaps else random.choice((1, most, most)),
    )
    if declared.states:
        limits = replace(limits, states=random.randint(1, limits.max_running + 2))
    if declared.decodes_all:
        limits = replace(limits, max_step_tokens=max(limits.max_step_tokens, limits.max_running))
    requests = _requests(declared, weights, limits, random)
    if weights.tight:
        needs = [len(one.tokens) + one.max_tokens - 1 + declared.headroom for one in requests]
        most = max((-(-need // size) for need in needs if need <= limits.pages * size), default=limits.pages)
        limits = replace(limits, pages=min(limits.pages, max(2, most + random.randint(0, 2))))
    operations = _operations(declared, weights, len(requests), random)
    return SchedulerWorkload(limits=limits, requests=requests, operations=operations)


def _requests(
    declared: SchedulerDeclaration, weights: _Weights, limits: Limits, random: Random
) -> tuple[NewRequest, ...]:
    most = limits.pages * limits.page_size
    fits = most - declared.headroom
    longest = max(6, int(most * weights.longest))
    bases = [[random.randint(1, weights.tokens) for _ in range(longest)] for _ in range(weights.bases)]
    sizes = [random.randint(1, limits.room) if limits.room else 0 for _ in range(3)]
    found: list[NewRequest] = []
    count = random.randint(*weights.requests)
    for number in range(count):
        tokens, items = _prompt(weights, bases, sizes, found, limits, random)
        tokens = tokens[: max(1, fits - 1)]
        items = tuple(item for item in items if item.start + item.length < len(tokens))
        if declared.refuses and random.random() < 0.1:
            tokens = (*tokens, *[1] * (most + 1 - len(tokens)))
        elif declared.refuses and items and random.random() < 0.1:
            items = (replace(items[0], key="huge", size=limits.room + 1), *items[1:])
        left = max(1, fits + 1 - len(tokens))
        found.append(
            NewRequest(
                id=f"r{number}",
                tokens=tokens,
                max_tokens=random.randint(1, min(left, 2) if random.random() < weights.brief else left),
                items=items,
                priority=_priority(weights, count - number, random) if declared.priorities else 0,
            )
        )
    return tuple(found)


def _priority(weights: _Weights, later: int, random: Random) -> int:
    return later if weights.rising else random.randint(0, weights.levels)


def _prompt(
    weights: _Weights,
    bases: list[list[int]],
    sizes: list[int],
    before: list[NewRequest],
    limits: Limits,
    random: Random,
) -> tuple[tuple[int, ...], tuple[Item, ...]]:
    if before and random.random() < weights.again:  # the next turn of a conversation
        last = before[0] if weights.first else random.choice(before)
        whole = (*last.tokens, *answer(last))
        if random.random() < weights.cuts:
            cut = whole[: random.randint(1, len(whole))]
            return cut, last.items
        return (*whole, random.randint(1, 2)), last.items
    longest = len(bases[0])
    least = int(longest * weights.shortest)
    tokens = random.choice(bases)[: random.randint(least, longest) if random.random() >= weights.small else 0]
    items: list[Item] = []
    while limits.room and random.random() < weights.items and len(items) < 3:
        number = random.choice((0, 0, 0, 1, 2))
        length = 1 + number
        items.append(Item(f"i{number}", sizes[number], len(tokens), length))
        tokens = [*tokens, *[_PLACEHOLDER] * length, *[random.randint(1, 2)] * random.randint(0, 1)]
    return (*tokens, random.randint(1, 3)), tuple(items)


def answer(request: NewRequest) -> tuple[int, ...]:
    """Returns the tokens that a request must get, whatever else happens, without the end-of-text."""
    record = Record(request)
    while len(record.tokens) < len(request.tokens) + request.max_tokens:
        token = sampled(record.upto(len(record.tokens))[-1])
        if token == EOS:
            break
        record.tokens.append(token)
    return tuple(record.tokens[len(request.tokens) :])


def _operations(
    declared: SchedulerDeclaration, weights: _Weights, requests: int, random: Random
) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    for number in range(requests):
        operations.append(("ask", number))
        if random.random() >= weights.waits:
            continue
        operations += _turns(weights, random.randint(1, weights.turns), random)
        if random.random() < weights.leaves:
            operations.append(("leave", random.randint(0, number)))
    operations += _turns(weights, random.randint(0, 6), random)
    if random.random() < weights.leaves:
        operations += [("leave", number) for number in range(requests) if random.random() < 0.5]
    if declared.fair and random.random() < weights.storms:
        operations.append(("storm", 0))
    return tuple(one for one in operations if declared.aborts or one[0] != "leave")


def _turns(weights: _Weights, count: int, random: Random) -> list[Operation]:
    return [("run" if random.random() < weights.runs else "plan", 0) for _ in range(count)]


# -- simpler ones --------------------------------------------------------------------------------------------------


def simpler(declared: SchedulerDeclaration, workload: SchedulerWorkload) -> Iterator[SchedulerWorkload]:
    """Yields workloads that are simpler than ``workload``, the boldest first."""
    for operations in without_some(workload.operations):
        yield _without_strangers(evolve(workload, operations=operations))
    for limits in _simpler_limits(declared, workload.limits):
        yield evolve(workload, limits=limits)
    for number, request in enumerate(workload.requests):
        for other in _simpler_requests(request):
            yield _with(workload, number, other)
    yield from _shorter_together(workload)
    for number, request in enumerate(workload.requests):
        for at, token in enumerate(request.tokens):
            if 1 < token < _PLACEHOLDER:
                yield _with(workload, number, replace(request, tokens=_changed(request.tokens, at, 1)))


def _with(workload: SchedulerWorkload, number: int, request: NewRequest) -> SchedulerWorkload:
    return evolve(workload, requests=_changed(workload.requests, number, request))


def _changed(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _simpler_limits(declared: SchedulerDeclaration, limits: Limits) -> Iterator[Limits]:
    """Yields limits with one number that is simpler: less of a thing, but the most step tokens, which split nothing."""
    if limits.max_step_tokens < _MANY:
        yield replace(limits, max_step_tokens=_MANY)
    fewest = declared.steps_in_flight if declared.overlaps else 1
    least = {"steps_in_flight": fewest, "max_running": 1, "page_size": min(declared.page_sizes)}
    least |= {"pages": 1 + -(-declared.headroom // limits.page_size), "room": min(1, limits.room)}
    least |= {"states": min(1, limits.states)}
    for name, few in least.items():
        now = getattr(limits, name)
        for fewer in sorted({few, (few + now) // 2, now - 1}):
            if few <= fewer < now and (name != "page_size" or fewer in declared.page_sizes):
                yield replace(limits, **{name: fewer})


def _shorter_together(workload: SchedulerWorkload) -> Iterator[SchedulerWorkload]:
    """Yields workloads in which several things get smaller at once, since none of them can alone: requests that begin
    alike, or a request and the pages that it fills.
    """
    if not any(request.items for request in workload.requests):
        for at in range(max((len(request.tokens) for request in workload.requests), default=0)):
            less = [(one, one.tokens[:at] + one.tokens[at + 1 :]) for one in workload.requests]
            yield evolve(workload, requests=tuple(replace(one, tokens=left or one.tokens) for one, left in less))
    limits = replace(workload.limits, pages=workload.limits.pages - 1)
    for number, request in enumerate(workload.requests if limits.pages else ()):
        for other in _simpler_requests(request):
            yield evolve(_with(workload, number, other), limits=limits)


def _without_strangers(workload: SchedulerWorkload) -> SchedulerWorkload:
    """Drops requests that no operation submits, and the operations by which their clients leave."""
    operations: list[Operation] = []
    numbers: dict[int, int] = {}
    for what, number in workload.operations:
        if what == "ask":
            numbers[number] = len(numbers)
        if what in {"ask", "leave"} and number not in numbers:
            continue
        operations.append((what, numbers.get(number, 0) if what in {"ask", "leave"} else 0))
    requests = tuple(replace(workload.requests[number], id=f"r{new}") for number, new in numbers.items())
    return evolve(workload, requests=requests, operations=tuple(operations))


def _simpler_requests(request: NewRequest) -> Iterator[NewRequest]:
    for items in without_some(request.items):
        yield replace(request, items=items)
    for lower in range(request.priority):
        yield replace(request, priority=lower)
    for fewer in {1, request.max_tokens - 1} - {0, request.max_tokens}:
        yield replace(request, max_tokens=fewer)
    last = max((item.start + item.length for item in request.items), default=0)
    for length in (len(request.tokens) // 2, len(request.tokens) - 1):
        if last < length:
            yield replace(request, tokens=request.tokens[:length])
    if set(request.tokens) - {1} and not request.items:
        yield replace(request, tokens=(1,) * len(request.tokens))
