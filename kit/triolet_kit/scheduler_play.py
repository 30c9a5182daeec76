"""The clients and the device of a scheduler in one workload, and the judge of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from .findings import (
    ALWAYS_FREED,
    ENCODE_ONCE,
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    RAISES_NOTHING,
    Promise,
    Severity,
)
from .paged_device import (
    BALANCE,
    BEFORE_READY,
    EOS,
    GIVEN_AWAY,
    PREFIX_HITS,
    SHARED_WRITTEN,
    PagedDevice,
    Record,
    sampled,
)
from .wrong_adapter import WrongAdapter, as_texts, check_methods

STARVES = Promise(
    "nobody starves",
    Severity.HANGS,
    "A client waits until its own timeout, and nothing in the log says why.",
)
REFUSED = Promise(
    "what fits is not refused",
    Severity.HANGS,
    "A request that the engine could serve gets an error, or no answer at all.",
)
TERMINAL = Promise(
    "terminal once",
    Severity.HANGS,
    "A request that ends twice, too early or never leaves its client with half an answer, or the device with work for "
    "nobody.",
)
FREE_FOLLOWS = Promise(
    "free follows completion",
    Severity.CORRUPTS,
    "Whatever still reads the page beside the steps, a transfer or the repetition of a failed step, reads another "
    "request's keys and values.",
)

PROMISES = (
    GIVEN_AWAY,
    SHARED_WRITTEN,
    PREFIX_HITS,
    BEFORE_READY,
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    FREE_FOLLOWS,
    RAISES_NOTHING,
    BALANCE,
    STARVES,
    REFUSED,
    TERMINAL,
    ALWAYS_FREED,
    ENCODE_ONCE,
)
"""The promises of a `Scheduler`, the worst first."""

IDLE = 3  # calls of schedule() without a plan or a step in flight, after which nobody can be served any more


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The room of a scheduler. ``room`` and the sizes of items are in units of the encoder cache. A request can run
    alone if the pages suffice for its prompt and for all but the last token that it asks for, and ``room`` suffices for
    each item."""

    pages: int
    page_size: int
    max_step_tokens: int
    max_running: int
    room: int
    steps_in_flight: int


@dataclass(frozen=True)
class Item:
    """An image, or audio: ``length`` positions from ``start`` on read its encoder output. Items with equal keys have
    equal content and size. A request may have one item twice."""

    key: str
    size: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A request of a client. ``max_tokens`` is how many tokens it asks for; `EOS` ends it earlier. The smallest
    ``priority`` is served first."""

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    items: tuple[Item, ...] = ()
    priority: int = 0


class SchedulerPlay:
    """A player of the clients and the device. ``settled``: the scheduler must give a page to another request only after
    the steps that use the page are done. ``told`` is the history, a row for each event, with the contents of the device
    after it; ``None``: nobody reads the history.
    """

    def __init__(self, scheduler: Any, limits: Any, settled: bool = False, missed_free: str = "fault") -> None:
        check_methods(scheduler, ("add_request", "schedule", "update", "finish"), "triolet_kit.Scheduler")
        self.scheduler = scheduler
        self.limits = limits
        self.settled = settled
        self.device = PagedDevice(limits.page_size, limits.room, missed_free)
        self.flights: list[Any] = []
        self.live: dict[str, Any] = {}  # requests that have not ended, by id
        self.left: set[str] = set()  # requests whose clients have left; a step in flight may still end each once
        self.seen: set[int] = set()  # pages, by the scheduler's own numbers
        self.known: dict[str, int] = {}  # tokens of each request, including those that steps in flight will sample
        self.reached: dict[str, int] = {}  # the most positions of each request that steps have run
        self.told: list[tuple[str, str, str]] | None = None
        self.stuck = 0  # steps in a row in which no request got further
        self.total = 0  # tokens of all requests

    def fail(self, promise: Promise, what: str) -> NoReturn:
        """Raises `BrokenPromise`."""
        self.device.fail(promise, what)

    def tell(self, event: str, answer: str = "", note: str = "") -> None:
        """Adds a row to the history."""
        if self.told is not None:
            self.told.append((event, answer, note))

    # -- what happens ------------------------------------------------------------------------------------------------

    def ask(self, request: Any) -> None:
        """Lets a client submit a request."""
        fits = self.fits(request)
        taken = self.scheduler.add_request(request)
        if self.told is not None:
            self.tell(describe(request), "refused" if taken is False else "")
        if taken is False:
            if fits:
                self.fail(REFUSED, f"{request.id} is refused, and it fits the pages and the room when it runs alone")
            return
        if not fits:
            self.fail(STARVES, f"{request.id} can never fit, and is not refused: it would wait for ever")
        self.device.add(request)
        self.live[request.id] = request
        self.known[request.id] = len(request.tokens)
        self.reached[request.id] = 0
        self.total += len(request.tokens) + request.max_tokens

    def fits(self, request: Any) -> bool:
        """Returns whether the request could run alone."""
        pages = -(-(len(request.tokens) + request.max_tokens - 1) // self.limits.page_size)
        return pages <= self.limits.pages and all(item.size <= self.limits.room for item in request.items)

    def finish(self, request_id: str) -> None:
        """Lets the client of a request leave; the request may have ended already."""
        self.tell(f"the client of {request_id} leaves" + ("" if request_id in self.live else ", after its end"))
        if self.live.pop(request_id, None) is not None:
            self.left.add(request_id)
        self.scheduler.finish(request_id)

    def plan(self) -> bool:
        """Plans the next step, if another step may be in flight. Returns whether the step has work to do."""
        if len(self.flights) >= self.limits.steps_in_flight:
            return False
        step = checked(self.scheduler.schedule())
        if self.told is not None:
            self.tell("plan", "nothing" if step is None else describe_step(step))
        if step is None:
            return False
        self.judge(step)
        self.flights.append(step)
        return has_work(step)

    def run(self) -> bool:
        """Runs the oldest step, and updates the scheduler. Returns whether there was a step with work to do."""
        if not self.flights:
            return False
        step = self.flights.pop(0)
        self.tell("run")
        tokens = self.device.run(step)
        further = False
        for chunk in step.chunks:
            stop = chunk.start + chunk.length
            if chunk.request in self.live and self.reached[chunk.request] < stop <= self.most(chunk.request):
                self.reached[chunk.request], further = stop, True
        self.stuck = 0 if further else self.stuck + 1
        answer = self.scheduler.update(step, tokens)
        ended = () if answer is None else tuple(as_texts(answer, "what update returned"))
        if self.told is not None:
            got = "".join(f", {request} gets {token}" for request, token in tokens.items())
            self.told[-1] = (
                f"run{got}",
                f"{', '.join(ended)} ended" if ended else "",
                " ".join(sorted(self.device.outputs)),
            )
        for request_id in ended:
            self.end(request_id)
        for request_id in tokens:
            self.judge_end(request_id)
        return has_work(step)

    def most(self, request_id: str) -> int:
        """Returns the most positions that a request can need."""
        request = self.live[request_id]
        return int(len(request.tokens) + request.max_tokens - 1)

    def end(self, request_id: str) -> None:
        """Notes that the scheduler reports the end of a request, and judges the report."""
        if request_id not in self.device.records:
            self.fail(TERMINAL, f"{request_id} is said to end, and it is not known")
        if request_id in self.left:
            self.left.remove(request_id)
            return
        if request_id not in self.live:
            self.fail(TERMINAL, f"{request_id} is said to end, and it has ended already")
        got = self.got(request_id)
        request = self.live.pop(request_id)
        if EOS not in got and len(got) < request.max_tokens:
            self.fail(TERMINAL, f"{request_id} ends with {len(got)} of {request.max_tokens} tokens, and no end-of-text")

    def got(self, request_id: str) -> list[int]:
        """Returns the tokens that a request has got so far."""
        tokens: list[int] = self.device.records[request_id].tokens
        return tokens[len(self.live[request_id].tokens) :]

    def judge_end(self, request_id: str) -> None:
        """Judges a request that the scheduler has not ended: the request must still lack tokens."""
        if request_id not in self.live:
            return
        got, most = self.got(request_id), self.live[request_id].max_tokens
        if EOS in got:
            self.fail(TERMINAL, f"{request_id} has got the end-of-text ({EOS}), and is not said to end")
        if len(got) >= most:
            self.fail(TERMINAL, f"{request_id} has got {len(got)} of {most} tokens, and is not said to end")

    # -- a plan ------------------------------------------------------------------------------------------------------

    def judge(self, step: Any) -> None:
        """Judges a step before it runs."""
        limits = self.limits
        tokens = sum(chunk.length for chunk in step.chunks)
        if tokens > limits.max_step_tokens:
            self.fail(BALANCE, f"a step feeds {tokens} tokens; at most {limits.max_step_tokens} fit")
        if len(step.chunks) > limits.max_running:
            self.fail(BALANCE, f"a step runs {len(step.chunks)} requests; there are {limits.max_running} places")
        names = [chunk.request for chunk in step.chunks]
        if len(set(names)) < len(names):
            self.fail(BALANCE, f"a step runs a request twice: {', '.join(sorted(names))}")
        for chunk in step.chunks:
            self.judge_chunk(chunk)
        if self.settled:
            self.judge_settled(step)

    def judge_chunk(self, chunk: Any) -> None:
        """Judges whether the request, the tokens and the pages of a chunk exist."""
        name, stop = chunk.request, chunk.start + chunk.length
        if name not in self.live:
            why = "has ended" if name in self.device.records else "is not known"
            self.fail(TERMINAL, f"a step runs {name}, which {why}")
        if chunk.length < 1 or chunk.start < 0 or stop > self.known[name]:
            what = f"positions {chunk.start} to {stop - 1} of {name}, which has {self.known[name]} tokens"
            self.fail(BALANCE, f"a step feeds {what}")
        if len(chunk.pages) * self.limits.page_size < stop:
            self.fail(BALANCE, f"{name} has pages {chunk.pages} for {stop} positions")
        self.seen.update(chunk.pages)
        if len(self.seen) > self.limits.pages:
            self.fail(BALANCE, f"there are {self.limits.pages} pages, and steps use {sorted(self.seen)}")
        if chunk.samples and stop < len(self.live[name].tokens):
            self.fail(BALANCE, f"a token of {name} is sampled in the middle of its prompt, after position {stop - 1}")
        if chunk.samples and stop > self.most(name):
            most = self.live[name].max_tokens
            self.fail(
                TERMINAL, f"a step samples token {stop - self.most(name) + most} of {name}, which asks for {most}"
            )
        if chunk.samples and stop == self.known[name]:
            self.known[name] += 1

    def judge_settled(self, step: Any) -> None:
        """Judges whether another request's step in flight uses a page that the step writes."""
        size = self.limits.page_size
        using = {page: chunk.request for flight in self.flights for chunk in flight.chunks for page in chunk.pages}
        for chunk in step.chunks:
            for page in chunk.pages[chunk.start // size :]:
                if using.get(page, chunk.request) != chunk.request:
                    what = f"{chunk.request} gets page {page}, which {using[page]} uses in a step in flight"
                    self.fail(FREE_FOLLOWS, what)

    # -- the end -----------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Takes one turn of the step loop: plans as many steps as may be in flight, and runs the oldest one."""
        while self.plan():
            pass
        return self.run()

    def turn_until_idle(self) -> int:
        """Takes turns until every request has ended, or no request makes progress. Returns how many of the last turns
        did nothing.
        """
        idle = 0
        while self.live and idle < IDLE and self.stuck < 4 * self.total + 50:
            idle = 0 if self.turn() else idle + 1
        return idle

    def storm(self) -> None:
        """Lets further clients submit small requests until the waiting ones have ended. The small requests are no more
        urgent than those.
        """
        victims, number = list(self.live), 0
        if not victims:
            return
        least = max(self.live[name].priority for name in victims)
        for _ in range(6 * self.total + 30):
            waiting = [name for name in victims if name in self.live]
            if not waiting:
                return
            if len(self.live) - len(waiting) < 2:
                self.ask(lasting(f"s{number}", min(4, self.limits.pages * self.limits.page_size), least))
                number += 1
            self.turn()
        self.give_up(f"{', '.join(waiting)} wait while {number} requests that came later are served")

    def serve_everybody(self) -> None:
        """Runs every request to its end, while nobody submits any more."""
        idle = self.turn_until_idle()
        while self.flights:
            self.run()
        if self.live:
            how = "nothing is planned for them" if idle else f"{self.stuck} steps brought nobody further"
            self.give_up(f"{', '.join(self.live)} never end, though nobody else asks: {how}")

    def give_up(self, what: str) -> NoReturn:
        """Fails the run, since requests wait for ever. Looks for the cause first: pages or room were lost, or else the
        scheduler has forgotten the requests.
        """
        for name in list(self.live):
            self.finish(name)
        while self.flights:
            self.run()
        if self.is_served(NewRequest(id="a little one", tokens=(5,), max_tokens=1)):
            self.look_for_leaks(what)
        self.fail(STARVES, what)

    def look_for_leaks(self, before: str = "") -> None:
        """Looks for pages and room that were not given back when no request is left. For this, requests ask for all
        pages and for the whole room.
        """
        limits = self.limits
        tokens = (5,) * (limits.pages * limits.page_size)
        self.serve_alone(NewRequest(id="all pages", tokens=tokens, max_tokens=1), before)
        if limits.room:
            whole = Item("whole", limits.room, 0, 1)
            self.serve_alone(NewRequest(id="the whole room", tokens=(9, 5), max_tokens=1, items=(whole,)), before)

    def serve_alone(self, request: Any, before: str) -> None:
        """Judges a request that needs everything while there is no other."""
        if not self.is_served(request):
            what = f"a request for {request.id} waits for ever, though nobody else is left: some are lost"
            self.fail(ALWAYS_FREED, f"{what} ({before})" if before else what)

    def is_served(self, request: Any) -> bool:
        """Submits a request while there is no other. Returns whether the request ends."""
        self.stuck = 0
        self.ask(request)
        self.turn_until_idle()
        return not self.live


def checked(step: Any) -> Any:
    """Checks that the scheduler has planned a step, or nothing.

    Raises:
        WrongAdapter: the scheduler has planned something else.
    """
    if step is None:
        return None
    if not all(hasattr(step, name) for name in ("chunks", "encodes", "frees")):
        raise WrongAdapter(f"schedule returned {step!r}; allowed: None, or a step with chunks, encodes and frees")
    for chunk in step.chunks:
        if not all(hasattr(chunk, name) for name in ("request", "start", "length", "pages", "samples")):
            told = f"schedule returned the chunk {chunk!r}"
            raise WrongAdapter(f"{told}; allowed: chunks with request, start, length, pages and samples")
    as_texts(step.encodes, "what a step encodes")
    as_texts(step.frees, "what a step frees")
    return step


def lasting(name: str, steps: int, priority: int) -> NewRequest:
    """Makes a request for ``steps`` tokens, which no end-of-text ends earlier."""
    for first in range(3, 1000):
        request = NewRequest(id=name, tokens=(first,), max_tokens=steps, priority=priority)
        record = Record(request)
        for position in range(1, steps):
            record.tokens.append(sampled(record.upto(position)[-1]))
        if EOS not in record.tokens:
            return request
    raise AssertionError("no request lasts so long")


def describe(request: Any) -> str:
    """Returns the client's request in words."""
    items = "".join(f", {item.key} of size {item.size} at {item.start}" for item in request.items)
    priority = f", priority {request.priority}" if request.priority else ""
    tokens = " ".join(map(str, request.tokens))
    return f"{request.id} asks for {request.max_tokens} after {tokens}{items}{priority}"


def has_work(step: Any) -> bool:
    """Returns whether a step does anything."""
    return bool(step.chunks or step.frees or step.encodes)


def describe_step(step: Any) -> str:
    """Returns the work of a step in words."""
    if not has_work(step):
        return "a step without work"
    told = [f"frees {', '.join(step.frees)}"] if step.frees else []
    told += [f"encodes {', '.join(step.encodes)}"] if step.encodes else []
    for chunk in step.chunks:
        samples = " and samples" if chunk.samples else ""
        pages = " ".join(map(str, chunk.pages))
        told.append(f"{chunk.request}: {chunk.start}-{chunk.start + chunk.length - 1} in pages {pages}{samples}")
    return "; ".join(told)
