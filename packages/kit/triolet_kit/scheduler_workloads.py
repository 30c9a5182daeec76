"""The workloads for schedulers: requests, and the order in which clients, scheduler and device act.

Many prompts begin alike, use few different tokens, or continue another request's answer. So prefix caches get many
hits, and wrong hits if they have faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from attrs import evolve, field, frozen, validators

from .paged_device import EOS, Record, sampled
from .scheduler_values import Item, Limits, NewRequest
from .search import without_some

Operation = tuple[str, int]
"""A word and a number. ``ask`` and ``leave`` have the number of the request; ``plan``, ``run`` and ``storm`` have 0."""

_PLACEHOLDER = 9  # the token at the positions of items
_MANY = 16  # step tokens


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
        page_size: the smallest page size that the scheduler supports.
        aborts: clients may leave before their requests have ended. ``False`` for an engine without abort, whose adapter
            needs no ``finish``.
        decodes_all: a step feeds one token of each running request, whatever ``max_step_tokens`` says. So workloads
            have at least as many step tokens as places.
    """

    steps_in_flight: int = field(default=2, validator=validators.in_((1, 2)))
    items: bool = True
    priorities: bool = True
    fair: bool = True
    settled: bool = False
    missed_free: str = field(default="fault", validator=validators.in_(("fault", "harmless")))
    refuses: bool = False
    page_size: int = field(default=1, validator=validators.ge(1))
    aborts: bool = True
    decodes_all: bool = False


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


def draw(declared: SchedulerDeclaration, random: Random) -> SchedulerWorkload:
    """Draws a workload."""
    page_size = declared.page_size * random.choice((1, 2, 4) if declared.page_size < 4 else (1,))
    limits = Limits(
        pages=random.randint(3, 10),
        page_size=page_size,
        max_step_tokens=random.choice((1, 2, 3, 4, 6, 8, _MANY)),
        max_running=random.randint(1, 4),
        room=random.randint(1, 4) if declared.items else 0,
        steps_in_flight=random.randint(1, declared.steps_in_flight),
    )
    if declared.decodes_all:
        limits = replace(limits, max_step_tokens=max(limits.max_step_tokens, limits.max_running))
    requests = _requests(declared, limits, random)
    return SchedulerWorkload(limits=limits, requests=requests, operations=_operations(declared, len(requests), random))


def _requests(declared: SchedulerDeclaration, limits: Limits, random: Random) -> tuple[NewRequest, ...]:
    longest = max(6, limits.pages * limits.page_size // 2)
    bases = [[random.randint(1, 2) for _ in range(longest)] for _ in range(2)]
    sizes = [random.randint(1, limits.room) if limits.room else 0 for _ in range(3)]
    found: list[NewRequest] = []
    for number in range(random.randint(1, 5)):
        most = limits.pages * limits.page_size
        tokens, items = _prompt(bases, sizes, found, limits, random)
        room = max(1, most - 1)
        tokens = tokens[:room]
        items = tuple(item for item in items if item.start + item.length < len(tokens))
        if declared.refuses and random.random() < 0.1:
            tokens = (*tokens, *[1] * (most + 1 - len(tokens)))
        elif declared.refuses and items and random.random() < 0.1:
            items = (replace(items[0], key="huge", size=limits.room + 1), *items[1:])
        left = max(1, most + 1 - len(tokens))
        found.append(
            NewRequest(
                id=f"r{number}",
                tokens=tokens,
                max_tokens=random.randint(1, min(4 + 2 * limits.page_size, left)),
                items=items,
                priority=random.randint(0, 1) if declared.priorities else 0,
            )
        )
    return tuple(found)


def _prompt(
    bases: list[list[int]], sizes: list[int], before: list[NewRequest], limits: Limits, random: Random
) -> tuple[tuple[int, ...], tuple[Item, ...]]:
    if before and random.random() < 0.25:  # the next turn of a conversation
        last = random.choice(before)
        return (*last.tokens, *answer(last), random.randint(1, 2)), last.items
    tokens = random.choice(bases)[: random.randint(0, len(bases[0]))]
    items: list[Item] = []
    while limits.room and random.random() < 0.5 and len(items) < 3:
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


def _operations(declared: SchedulerDeclaration, requests: int, random: Random) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    for number in range(requests):
        operations.append(("ask", number))
        if random.random() < 0.4:
            continue
        operations += _turns(random.randint(1, 8), random)
        if random.random() < 0.3:
            operations.append(("leave", random.randint(0, number)))
    operations += _turns(random.randint(0, 6), random)
    if random.random() < 0.3:
        operations += [("leave", number) for number in range(requests) if random.random() < 0.5]
    if declared.fair and random.random() < 0.15:
        operations.append(("storm", 0))
    return tuple(one for one in operations if declared.aborts or one[0] != "leave")


def _turns(count: int, random: Random) -> list[Operation]:
    return [(random.choice(("plan", "run")), 0) for _ in range(count)]


# -- simpler ones --------------------------------------------------------------------------------------------------


def simpler(workload: SchedulerWorkload) -> Iterator[SchedulerWorkload]:
    """Yields workloads that are simpler than ``workload``, the boldest first."""
    if workload.limits.max_step_tokens < _MANY:
        yield evolve(workload, limits=replace(workload.limits, max_step_tokens=_MANY))
    for operations in without_some(workload.operations):
        yield _without_strangers(evolve(workload, operations=operations))
    for number, request in enumerate(workload.requests):
        for other in _simpler_requests(request):
            requests = (*workload.requests[:number], other, *workload.requests[number + 1 :])
            yield evolve(workload, requests=requests)


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
    if request.priority:
        yield replace(request, priority=0)
    for fewer in {1, request.max_tokens - 1} - {0, request.max_tokens}:
        yield replace(request, max_tokens=fewer)
    last = max((item.start + item.length for item in request.items), default=0)
    for length in (len(request.tokens) // 2, len(request.tokens) - 1):
        if last < length:
            yield replace(request, tokens=request.tokens[:length])
