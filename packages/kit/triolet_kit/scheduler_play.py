"""The clients and the device of a scheduler in one workload, and the judge of the scheduler."""

from __future__ import annotations

from typing import Any, NoReturn

from .findings import (
    ALWAYS_FREED,
    ENCODE_ONCE,
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    RAISES_NOTHING,
    SPEAKS,
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
from .scheduler_values import (
    Chunk,
    Item,
    Limits,
    NewRequest,
    Step,
    checked,
    describe,
    describe_step,
    given_as,
    has_work,
)
from .scheduler_workloads import SchedulerDeclaration
from .search import Played
from .state_device import STATE_HITS, STATE_IN_USE, written
from .wrong_adapter import as_texts, check_methods

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
    SPEAKS,
    GIVEN_AWAY,
    SHARED_WRITTEN,
    PREFIX_HITS,
    STATE_IN_USE,
    STATE_HITS,
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

COLUMNS = ("what happens", "the scheduler", "encoder outputs")
COUNTED = (
    *("requests", "refused", "clients left", "storms"),
    *("steps", "steps beside another", "chunks", "tokens", "prefix hits", "preemptions", "encodings", "frees"),
)
OF_STATES = ("states kept", "state hits")
RULED_OUT = {
    "refused": "refuses",
    "clients left": "aborts",
    "storms": "fair",
    "encodings": "items",
    "frees": "items",
}
"""The statistics that stay zero if the declaration says no, and its argument."""
METHODS = ("add_request", "schedule", "update", "finish")
FEW = 20  # rows that show a wait
IDLE = 16  # turns without work or a step in flight, after which nobody can be served any more
SHOWN = 3  # of these in a history


def counted(declared: SchedulerDeclaration) -> tuple[str, ...]:
    """Returns the names of the statistics."""
    return COUNTED + (OF_STATES if declared.states else ())


def expected(declared: SchedulerDeclaration) -> tuple[str, ...]:
    """Returns the statistics that the declaration does not rule out."""
    alone = {"steps beside another"} if declared.steps_in_flight == 1 else set()
    ruled_out = {name for name, option in RULED_OUT.items() if not getattr(declared, option)}
    return tuple(name for name in counted(declared) if name not in alone | ruled_out)


class SchedulerPlay:
    """A player of the clients and the device.

    ``played`` is the record; ``None``: nobody reads it. If ``told``, the record has the history, with a row for each
    event: what the clients and the device do, what the scheduler does, and what is on the device then.
    """

    def __init__(
        self,
        scheduler: Any,
        limits: Limits,
        declared: SchedulerDeclaration,
        played: Played | None = None,
        *,
        told: bool = False,
    ) -> None:
        check_methods(scheduler, METHODS if declared.aborts else METHODS[:-1], "triolet_kit.Scheduler")
        self.scheduler = scheduler
        self.limits = limits
        self.declared, self.played = declared, played
        self.device = PagedDevice(limits.page_size, limits.room, declared.missed_free)
        self.flights: list[Step] = []
        self.live: dict[str, NewRequest] = {}  # requests that have not ended, by id
        self.left: set[str] = set()  # requests whose clients have left; a step in flight may still end each once
        self.seen: set[int] = set()  # pages, by the scheduler's own numbers
        self.seen_states: set[int] = set()
        self.known: dict[str, int] = {}  # tokens of each request, including those that steps in flight will sample
        self.reached: dict[str, int] = {}  # the most positions of each request that steps have run
        self.planned: dict[str, int] = {}  # the end of the last chunk of each request that was planned
        self.told = played.rows if played is not None and told else None
        self.stuck = 0  # steps in a row in which no request got further
        self.total = 0  # tokens of all requests

    def fail(self, promise: Promise, what: str, kind: str = "") -> NoReturn:
        """Raises `BrokenPromise`."""
        self.device.fail(promise, what, kind)

    def note(self, what: str, request: NewRequest | str = "") -> None:
        """Records an operation."""
        if self.played is not None:
            self.played.operations.append((what, request))

    def count(self, **counts: int) -> None:
        """Adds to the statistics, in which names have spaces for underlines."""
        if self.played is not None:
            for name, count in counts.items():
                self.played.statistics[name.replace("_", " ")] += count

    def tell(self, event: str, answer: str = "", note: str = "") -> None:
        """Adds a row to the history."""
        if self.told is not None:
            self.told.append((event, answer, note))

    # -- what happens ------------------------------------------------------------------------------------------------

    def ask(self, request: NewRequest) -> None:
        """Lets a client submit a request."""
        self.note("ask", request)
        if self.told is not None:
            self.tell(describe(request))
        taken = self.scheduler.add_request(request)
        self.count(requests=1, refused=taken is False)
        if taken is False:
            if self.told is not None:
                self.told[-1] = (describe(request), "refused", "")
            if self.fits(request, self.declared.headroom):
                self.fail(REFUSED, f"{request.id} is refused, and it fits the pages and the room when it runs alone")
            return
        if not self.fits(request):
            self.fail(STARVES, f"{request.id} can never fit, and is not refused: it would wait for ever", "too large")
        self.device.add(request)
        self.live[request.id] = request
        self.known[request.id] = len(request.tokens)
        self.reached[request.id] = 0
        self.total += len(request.tokens) + request.max_tokens

    def fits(self, request: NewRequest, headroom: int = 0) -> bool:
        """Returns whether the request could run alone, and leave ``headroom`` for further tokens."""
        pages = -(-(len(request.tokens) + request.max_tokens - 1 + headroom) // self.limits.page_size)
        return pages <= self.limits.pages and all(item.size <= self.limits.room for item in request.items)

    def most_tokens(self) -> int:
        """Returns how many tokens all pages hold, without those that the scheduler keeps free."""
        return self.limits.pages * self.limits.page_size - self.declared.headroom

    def finish(self, request_id: str) -> None:
        """Lets the client of a request leave; the request may have ended already."""
        self.note("leave", request_id)
        if not self.declared.aborts:
            return
        self.count(clients_left=request_id in self.live)
        self.tell(f"the client of {request_id} leaves" + ("" if request_id in self.live else ", after its end"))
        if self.live.pop(request_id, None) is not None:
            self.left.add(request_id)
        self.scheduler.finish(request_id)

    def plan(self) -> bool:
        """Plans the next step, if another step may be in flight. Returns whether the step has work to do."""
        self.note("plan")
        if len(self.flights) >= self.limits.steps_in_flight:
            return False
        self.tell("plan")
        step = checked(self.scheduler.schedule())
        if self.told is not None:
            self.told[-1] = ("plan", "nothing" if step is None else describe_step(step, self.planned), "")
        if step is None:
            return False
        self.count(steps=1, chunks=len(step.chunks), steps_beside_another=bool(self.flights))
        self.judge(step)
        if self.declared.states:
            self.count(states_kept=sum(len(chunk.keeps) for chunk in step.chunks))
            self.count(state_hits=sum(chunk.source is not None for chunk in step.chunks))
        self.planned |= {chunk.request: chunk.start + chunk.length for chunk in step.chunks}
        self.flights.append(step)
        return has_work(step)

    def run(self) -> bool:
        """Runs the oldest step, and updates the scheduler. Returns whether there was a step with work to do."""
        while self.declared.overlaps and self.plan():
            pass
        self.note("run")
        if not self.flights:
            return False
        step = self.flights.pop(0)
        self.tell("run")
        self.count_restarts(step)
        tokens = self.device.run(step)
        self.count(tokens=len(tokens), encodings=len(step.encodes), frees=len(step.frees))
        further = False
        for chunk in step.chunks:
            stop = chunk.start + chunk.length
            if chunk.request in self.live and self.reached[chunk.request] < stop <= self.most(chunk.request):
                self.reached[chunk.request], further = stop, True
        self.stuck = 0 if further else self.stuck + 1
        answer = self.scheduler.update(given_as(step), tokens)
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
        for request_id in tokens if not self.declared.discards else ():
            self.judge_end(request_id)
        return has_work(step)

    def count_restarts(self, step: Step) -> None:
        """Counts the chunks that begin elsewhere than where their request was."""
        for chunk in step.chunks:
            computed = self.device.records[chunk.request].verified
            self.count(prefix_hits=0 < chunk.start != computed, preemptions=computed > 0 and chunk.start != computed)

    def most(self, request_id: str) -> int:
        """Returns the most positions that a request can need."""
        request = self.live[request_id]
        return int(len(request.tokens) + request.max_tokens - 1)

    def end(self, request_id: str) -> None:
        """Notes that the scheduler reports the end of a request, and judges the report."""
        if request_id not in self.device.records:
            self.fail(TERMINAL, f"the scheduler says that {request_id} ends, which it was never given", "unknown")
        if request_id in self.left:
            self.left.remove(request_id)
            return
        if request_id not in self.live:
            self.fail(TERMINAL, f"the scheduler says that {request_id} ends, which has ended already", "ends twice")
        got = self.got(request_id)
        request = self.live.pop(request_id)
        if EOS not in got and len(got) < request.max_tokens:
            what = f"{request_id} ends with {len(got)} of {request.max_tokens} tokens, and without an end-of-text"
            self.fail(TERMINAL, what, "ends early")

    def got(self, request_id: str) -> list[int]:
        """Returns the tokens that a request has got so far."""
        tokens: list[int] = self.device.records[request_id].tokens
        return tokens[len(self.live[request_id].tokens) :]

    def judge_end(self, request_id: str, position: int | None = None) -> None:
        """Judges a request that the scheduler has not ended: the request must still lack tokens. If it may have lost
        some, it has those before the ``position`` that it feeds next.
        """
        if request_id not in self.live:
            return
        request = self.live[request_id]
        got, most = self.got(request_id), request.max_tokens
        if position is not None:
            got = got[: max(0, position + 1 - len(request.tokens))]
        if EOS in got:
            what = f"{request_id} has got the end-of-text ({EOS}), and the scheduler does not end it"
            self.fail(TERMINAL, what, "goes on after the end-of-text")
        if len(got) >= most:
            what = f"{request_id} has got {len(got)} of {most} tokens, and the scheduler does not end it"
            self.fail(TERMINAL, what, "goes on after its last token")

    # -- a plan ------------------------------------------------------------------------------------------------------

    def judge(self, step: Step) -> None:
        """Judges a step before it runs."""
        limits = self.limits
        tokens = sum(chunk.length for chunk in step.chunks)
        if tokens > limits.max_step_tokens:
            self.fail(BALANCE, f"a step feeds {tokens} tokens; at most {limits.max_step_tokens} fit", "tokens")
        if len(step.chunks) > limits.max_running:
            what = f"a step runs {len(step.chunks)} requests; there are {limits.max_running} places"
            self.fail(BALANCE, what, "places")
        names = [chunk.request for chunk in step.chunks]
        if len(set(names)) < len(names):
            self.fail(BALANCE, f"a step runs a request twice: {', '.join(sorted(names))}", "twice in a step")
        for chunk in step.chunks:
            self.judge_chunk(chunk)
        if self.declared.settled:
            self.judge_settled(step)

    def judge_chunk(self, chunk: Chunk) -> None:
        """Judges whether the request, the tokens and the pages of a chunk exist."""
        name, stop = chunk.request, chunk.start + chunk.length
        if name not in self.live:
            why = "has ended" if name in self.device.records else "is not known"
            self.fail(TERMINAL, f"a step runs {name}, which {why}", f"runs who {why}")
        if chunk.length < 1 or chunk.start < 0 or stop > self.known[name]:
            what = f"positions {chunk.start} to {stop - 1} of {name}, which has {self.known[name]} tokens"
            self.fail(BALANCE, f"a step feeds {what}", "positions")
        if self.declared.discards and not any(one.request == name for step in self.flights for one in step.chunks):
            self.judge_end(name, chunk.start)
        if len(chunk.pages) * self.limits.page_size < stop:
            self.fail(BALANCE, f"{name} has pages {chunk.pages} for {stop} positions", "too few pages")
        self.seen.update(chunk.pages)
        if len(self.seen) > self.limits.pages:
            what = f"there are {self.limits.pages} pages, and steps use {sorted(self.seen)}"
            self.fail(BALANCE, what, "too many pages")
        if self.limits.states:
            self.judge_states(chunk)
        if chunk.samples and stop < len(self.live[name].tokens):
            what = f"a token of {name} is sampled in the middle of its prompt, after position {stop - 1}"
            self.fail(BALANCE, what, "samples in the prompt")
        if chunk.samples and stop > self.most(name):
            most = self.live[name].max_tokens
            what = f"a step samples token {stop - self.most(name) + most} of {name}, which asks for {most}"
            self.fail(TERMINAL, what, "samples one too many")
        if chunk.samples and stop == self.known[name]:
            self.known[name] += 1

    def judge_states(self, chunk: Chunk) -> None:
        """Judges whether the states of a chunk exist, and whether it keeps what it reads."""
        name, stop = chunk.request, chunk.start + chunk.length
        if chunk.state is None:
            self.fail(SPEAKS, f"{name} runs, and its chunk names no state", "no state")
        self.seen_states.update(written(chunk))
        if len(self.seen_states) > self.limits.states:
            what = f"there are {self.limits.states} states, and steps use {sorted(self.seen_states)}"
            self.fail(BALANCE, what, "too many states")
        for position, state in chunk.keeps:
            if not chunk.start < position <= stop:
                what = f"{name} keeps state {state} of position {position}, and reads {chunk.start} to {stop - 1}"
                self.fail(BALANCE, what, "keeps what it does not read")

    def judge_settled(self, step: Step) -> None:
        """Judges whether another request's step in flight uses a page or a state that the step writes."""
        size = self.limits.page_size
        using = {page: chunk.request for flight in self.flights for chunk in flight.chunks for page in chunk.pages}
        for chunk in step.chunks:
            for page in chunk.pages[chunk.start // size :]:
                if using.get(page, chunk.request) != chunk.request:
                    what = f"{chunk.request} gets page {page}, which {using[page]} uses in a step in flight"
                    self.fail(FREE_FOLLOWS, what)
        flying = [chunk for flight in self.flights for chunk in flight.chunks]
        owners = {state: chunk.request for chunk in flying for state in (*written(chunk), chunk.source)}
        for chunk in step.chunks if self.limits.states else ():
            for state in written(chunk):
                if owners.get(state, chunk.request) != chunk.request:
                    what = f"{chunk.request} gets state {state}, which {owners[state]} uses in a step in flight"
                    self.fail(FREE_FOLLOWS, what, "a state")

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
            rows = len(self.told or ())
            idle = 0 if self.turn() else idle + 1
            if self.told is not None and idle > SHOWN:
                del self.told[rows:]
        return idle

    def storm(self) -> None:
        """Lets further clients submit small requests until the waiting ones have ended. The small requests are no more
        urgent than those.
        """
        victims, number, since = list(self.live), 0, len(self.told or ())
        if not victims:
            return
        self.count(storms=1)
        least = max(self.live[name].priority for name in victims)
        for _ in range(6 * self.total + 30):
            waiting = [name for name in victims if name in self.live]
            if not waiting:
                return
            if len(self.live) - len(waiting) < 2:
                self.ask(lasting(f"s{number}", min(4, self.most_tokens()), least))
                number += 1
            self.turn()
        what = f"{', '.join(waiting)} wait while {number} requests that came later are served"
        self.give_up(what, "is passed over", since)

    def serve_everybody(self) -> None:
        """Runs every request to its end, while nobody submits any more."""
        since, idle = len(self.told or ()), self.turn_until_idle()
        while self.flights:
            self.run()
        if self.live:
            how = "nothing is planned for them" if idle else f"{self.stuck} steps brought nobody further"
            kind = "nothing is planned" if idle else "no step helps"
            self.give_up(f"{', '.join(self.live)} never end, though nobody else asks: {how}", kind, since)

    def give_up(self, what: str, kind: str, since: int) -> NoReturn:
        """Fails the run, since requests wait for ever. If they can leave, looks for the cause first: pages or room were
        lost, or else the scheduler has forgotten the requests. Of the rows of the wait, which began with row ``since``,
        the history keeps a few.
        """
        if self.told is not None and len(self.told) > since + FEW:
            self.told[since + FEW :] = [("and so on", "", "")]
        if not self.declared.aborts:
            self.fail(STARVES, what, kind)
        for name in list(self.live):
            self.finish(name)
        while self.flights:
            self.run()
        if self.is_served(NewRequest(id="a little one", tokens=(5,), max_tokens=1)):
            self.look_for_leaks(what)
        self.fail(STARVES, what, kind)

    def look_for_leaks(self, before: str = "") -> None:
        """Looks for pages and room that were not given back when no request is left. For this, requests ask for all
        pages and for the whole room.
        """
        limits = self.limits
        tokens = (5,) * self.most_tokens()
        self.serve_alone(NewRequest(id="all pages", tokens=tokens, max_tokens=1), before)
        if limits.room:
            whole = Item("whole", limits.room, 0, 1)
            self.serve_alone(NewRequest(id="the whole room", tokens=(9, 5), max_tokens=1, items=(whole,)), before)
        if limits.states:
            self.serve_beside(before)

    def serve_beside(self, before: str) -> None:
        """Judges whether as many small requests run side by side as there are states, as far as places, step tokens and
        pages allow it: each needs a state.
        """
        limits, pages = self.limits, self.limits.pages
        most = min(limits.states, limits.max_running, limits.max_step_tokens)
        needs = [-(-(count + 3 + self.declared.headroom) // limits.page_size) for count in range(most + 1)]
        count = max(count for count in range(1, most + 1) if count * needs[count] <= pages or count == 1)
        for number in range(count):
            self.ask(lasting(f"beside{number}", min(count + 2, self.most_tokens()), 0))
        self.stuck = beside = 0
        while self.turn() or self.flights:
            beside = max(beside, sum(name in self.planned for name in self.live))
        if self.live or (count > 1 and beside < count):
            what = f"{count} small requests never run side by side, though nobody else is left: states are lost"
            self.fail(ALWAYS_FREED, f"{what} ({before})" if before else what, "states")

    def serve_alone(self, request: NewRequest, before: str) -> None:
        """Judges a request that needs everything while there is no other."""
        if not self.is_served(request):
            what = f"a request for {request.id} waits for ever, though nobody else is left: some are lost"
            self.fail(ALWAYS_FREED, f"{what} ({before})" if before else what, request.id)

    def is_served(self, request: NewRequest) -> bool:
        """Submits a request while there is no other. Returns whether the request ends."""
        self.stuck = 0
        self.ask(request)
        self.turn_until_idle()
        return not self.live


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
