"""The clients and the device of a step engine, and the judge of its cache manager. `triolet_kit.steps` says
what the cache must do.

The device runs the steps in their order, and in each step first the frees, then the encodings, then the reads. So
except for encodings that fail, the contents of the device after a step are known when the step is planned. It is judged
then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen, validators

from .findings import (
    ALWAYS_FREED,
    ENCODE_ONCE,
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    RAISES_NOTHING,
    BrokenPromise,
    Promise,
    Severity,
    Table,
)
from .wrong_adapter import WrongAdapter, as_texts, check_methods

PATIENCE = 8  # steps in a row without progress, after which a wait counts as a wait for ever
PLENTY = 4  # times the room, so that several requests can use the same room in one step
ANSWERS = {"hit", "encode", "later", "never"}
LAST, LATE, EVERYTHING = "last", "late", "everything"
COLUMNS = ("step", "what happens", "answer", "frees", "encodes", "then on the device")

ROOM_IS_KEPT = Promise(
    "room is kept",
    Severity.CRASHES,
    "The device holds more than the books say: it runs out of memory under load, long after the cause.",
)
EVERY_ASK_ANSWERED = Promise(
    "every acquire is answered",
    Severity.HANGS,
    "A request waits for ever, and its client with it; under load the whole queue waits with it.",
)
FREES_HIT = Promise(
    "frees hit",
    Severity.LEAKS,
    "The free came before the output: it misses, and the output that comes later is in no book any more.",
)
BUDGET_IS_KEPT = Promise(
    "budget is kept",
    Severity.WASTES,
    "The step takes longer than planned, for everybody in it, and its activations may not fit.",
)

PROMISES = (
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    ROOM_IS_KEPT,
    RAISES_NOTHING,
    EVERY_ASK_ANSWERED,
    ALWAYS_FREED,
    FREES_HIT,
    ENCODE_ONCE,
    BUDGET_IS_KEPT,
)
"""The promises of a `StepCache`, the worst first."""


@frozen(kw_only=True)
class StepDeclaration:
    """The ways in which an engine differs from the kit's assumptions. Each argument turns off one action or one check
    of the kit; all other promises stay.

    Args:
        closes: the cache has ``close``. False: the manager is never closed while the process lives.
        resets: the cache has ``reset``, for engines that empty the encoder cache when weights change.
        shared: requests share the entries of equal keys. False: each request has entries of its own, as in the
            cross-attention of encoder-decoders. No two requests ask for one key then.
        missed_free: a free of a key that is not on the device is a ``"fault"``, or ``"harmless"`` if the runner ignores
            it. Outputs that such a free fails to remove are still found.
        may_fail_after_plan: planned encodings may fail. False: a failed encoding ends the engine.
        refuses: the cache answers ``"never"`` if an output is larger than the room. False: the engine refuses such
            requests before they reach the cache manager, so the kit does not make any.
        evicts_within_step: the encodings of a step may use the room that its frees give back. False: the device frees
            after the encodings and reads, so that only the next step can use this room.
        budgets: the engine has a budget of encoder compute for each step. False: the budget is always four times the
            room.
        repeats: ``release`` and ``finish`` are called again for what was given back already, as a step loop does.
            False: they are called once, and only if something is held.
        steps_in_flight: the most steps that are planned and have not run. 1: the engine plans a step after the last one
            has run.
    """

    closes: bool = True
    resets: bool = False
    shared: bool = True
    missed_free: str = field(default="fault", validator=validators.in_(("fault", "harmless")))
    may_fail_after_plan: bool = True
    refuses: bool = True
    evicts_within_step: bool = True
    budgets: bool = True
    repeats: bool = True
    steps_in_flight: int = field(default=2, validator=validators.in_((1, 2)))


class Hold:
    """A request's hold of a key, with the step that began the hold and the latest step that reads the key."""

    def __init__(self, step: int) -> None:
        self.since = self.read_in = step


class StepGame:
    """A game with one cache. Operations that are impossible now (such as the end of a step that was not planned) are
    skipped."""

    def __init__(self, cache: Any, room: int, sizes: Mapping[str, int], declared: StepDeclaration) -> None:
        _check_methods(cache, declared)
        self.cache, self.room, self.sizes, self.declared = cache, room, dict(sizes), declared
        self.plenty = PLENTY * room  # a budget that is always enough
        self.steps = self.steps_run = 0
        self.in_flight: deque[list[str]] = deque()  # the encodings of each step
        self.device: dict[str, int] = {}  # each key with the step that encoded it, once all steps have run
        self.holds: dict[tuple[str, str], Hold] = {}
        self.waiting: dict[tuple[str, str], None] = {}
        self.released: set[tuple[str, str]] = set()  # by requests that have not ended
        self.known: set[str] = set()  # requests that have ever asked
        self.rows: list[tuple[str, ...]] = []  # the rows of the history

    # -- what the engine does ----------------------------------------------------------------------------------------

    def plan(self, wanted: list[tuple[str, ...]], budget: int | None = None) -> None:
        """Plans a step of ``("ask", request, key)`` and ``("preempt", request)``. By default the budget is plenty."""
        budget = self.plenty if budget is None else budget
        if len(self.in_flight) >= self.declared.steps_in_flight:
            return
        calls = self.possible(wanted)
        answers, frees, encodes = self.planned(calls, budget)
        self.steps += 1
        before = dict(self.device)
        self.carry_out(frees, encodes)
        self.tell_plan(calls, answers, frees, encodes, budget)
        complaints = self.obey(calls, answers)
        self.judge_step(frees, encodes, before)
        self.judge_budget(encodes, budget)
        for what, kind in complaints:
            self.broken(EVERY_ASK_ANSWERED, what, kind)
        self.in_flight.append(encodes)

    def executed(self, failed: list[str] | tuple[str, ...] = ()) -> None:
        """Ends the oldest planned step. Its ``failed`` encodings fail, except those whose outputs a later step has
        freed.
        """
        if not self.in_flight:
            return
        encodes = self.in_flight.popleft()
        self.steps_run += 1
        lost = [key for key in dict.fromkeys(failed) if key in encodes and self.device.get(key) == self.steps_run]
        for key in lost:
            del self.device[key]
            self.holds = {hold: since for hold, since in self.holds.items() if hold[1] != key}
        fails = f"; {' '.join(lost)} failed, and its holds are over" if lost else ""
        self.tell(f"step {self.steps_run} has run{fails}")
        self.cache.executed(lost)

    def release(self, request: str, key: str) -> None:
        """Releases ``key`` for ``request``, which has read it and goes on. If ``declared.repeats``, a later call
        releases it again.
        """
        hold = self.holds.get((request, key))
        if hold is None:
            if self.declared.repeats and (request, key) in self.released:
                self.tell(f"{request} releases {key} again")
                self.cache.release(request, key)
        elif hold.read_in <= self.steps_run:
            del self.holds[request, key]
            self.released.add((request, key))
            self.tell(f"{request} releases {key}")
            self.cache.release(request, key)

    def finish(self, request: str) -> None:
        """Ends ``request``, which may also be an abort, or a preemption between two steps."""
        there = self.is_there(request)
        if there or (self.declared.repeats and request in self.known):
            self.forget(request)
            self.tell(f"{request} ends" if there else f"{request}, which holds nothing, ends")
            self.cache.finish(request)

    def reset(self) -> None:
        """Empties the device and the books between two steps. Requests go on and ask anew."""
        if not self.declared.resets or self.in_flight:
            return
        for request in self.all_there():
            if self.declared.repeats:
                self.forget(request)
            else:
                self.finish(request)
        self.device.clear()
        self.tell("the device is emptied: reset")
        self.cache.reset()

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends the workload in a way that is fair to the cache: all steps run, all holders release, and waiting
        requests ask until they are served.

        Before each release one request asks for the whole room, and another one for the oldest output. The request for
        the whole room must be served once no other holds anything. While it holds the room, others ask for the
        remaining keys. At last requests ask for each key once more, and then for all keys at once.
        """
        self.run_all()
        self.sizes[EVERYTHING] = self.room
        for request, key in list(self.holds):
            oldest = next(iter(self.device), None)
            late = [("ask", LATE, oldest)] if oldest is not None and self.declared.shared else []
            self.plan([("ask", LAST, EVERYTHING), *late])
            self.run_all()
            self.release(request, key)
        self.finish(LATE)
        self.serve(list(self.waiting))
        keys = [key for key in self.sizes if key != EVERYTHING and self.sizes[key] <= self.room]
        self.serve([(LAST, EVERYTHING)], beside=[("ask", self.other(key), key) for key in keys])
        self.serve(list(self.waiting))
        for key in keys:
            self.serve([(self.other(key), key)])
        self.serve([(self.other(key), key) for key in keys])
        self.close()

    def serve(self, waiting: list[tuple[str, str]], beside: list[tuple[str, ...]] | None = None) -> None:
        """Lets each of the ``waiting`` requests ask in every step until it is served, and then release. The requests
        ``beside`` ask while it holds.
        """
        patience = PATIENCE
        while waiting and patience:
            device, told = list(self.device), len(self.rows)
            self.plan([("ask", request, key) for request, key in waiting])
            self.run_all()
            served = [hold for hold in waiting if hold in self.holds]
            if served and beside:
                self.plan(beside)
                self.run_all()
            for request, key in served:
                self.release(request, key)
            waiting = [hold for hold in waiting if hold not in served]
            patience = PATIENCE if served or device != list(self.device) else patience - 1
            if patience < PATIENCE - 1:
                del self.rows[told:]  # the rows are the same as those of the step before
        if waiting:
            who = " and ".join(f"{request} for {key}" for request, key in waiting)
            self.broken(EVERY_ASK_ANSWERED, f"{who}: a wait for ever, though nobody holds anything", "waits for ever")

    def run_all(self, failed: list[str] | tuple[str, ...] = ()) -> None:
        while self.in_flight:
            self.executed(failed)

    def close(self, failed: list[str] | tuple[str, ...] = ()) -> None:
        """Ends all requests and closes the cache while planned steps run. Their ``failed`` encodings fail. Then empty
        steps carry the frees to the device.
        """
        for request in self.all_there():
            self.finish(request)
        if self.declared.closes:
            self.tell("close")
            self.cache.close()
        self.run_all(failed)
        patience = PATIENCE if self.declared.closes else 0
        while self.device and patience:
            there, told = len(self.device), len(self.rows)
            self.plan([])
            self.run_all()
            patience = PATIENCE if len(self.device) < there else patience - 1
            if patience < PATIENCE - 1:
                del self.rows[told:]
        if self.device and self.declared.closes:
            self.broken(ALWAYS_FREED, f"{' '.join(self.device)} on the device after close, and no step frees it")

    # -- judgement ---------------------------------------------------------------------------------------------------

    def judge_answer(self, hold: tuple[str, str], size: int, answer: str) -> list[tuple[str, str]]:
        """Returns what is wrong with an answer, and the kind of each fault. The contents of the device are not judged
        here.
        """
        request, key = hold
        if answer == "later" and hold in self.holds:
            return [(f"{request} is to wait for {key}, which it holds", "waits for its own")]
        if answer == "later" and size > self.room:
            return [(f"{request} is to wait for {key}, which can never fit", "waits in vain")]
        if answer == "never" and size <= self.room:
            return [(f"{request} is refused {key}, which can fit", "is refused")]
        return []

    def judge_step(self, frees: list[str], encodes: list[str], before: dict[str, int]) -> None:
        """Judges the effects of a step on the device. The worst are judged first."""
        step = f"step {self.steps}"
        for (request, key), hold in self.holds.items():
            there = key in self.device
            if key in frees and (key in before or key in encodes) and (hold.since < self.steps or not there):
                self.broken(NO_FREE_WHILE_HELD, f"{step} frees {key}, which {request} may read")
            if hold.read_in == self.steps and not there:
                self.broken(NO_PHANTOM, f"{step} reads {key} for {request}, but it is not on the device")
        peak = self.device if self.declared.evicts_within_step else {**before, **self.device}
        taken = sum(self.sizes[key] for key in peak)
        if taken > self.room:
            self.broken(ROOM_IS_KEPT, f"{step} has {' '.join(peak)} on the device: {taken} in a room of {self.room}")
        could_be_freed = before if self.declared.evicts_within_step else {*before, *encodes}
        missed = [key for at, key in enumerate(frees) if key not in could_be_freed or key in frees[:at]]
        if missed and self.declared.missed_free == "fault":
            self.broken(FREES_HIT, f"{step} frees {missed[0]}, which is not on the device")
        stays = {key for key in before if key not in frees or not self.declared.evicts_within_step}
        twice = [key for at, key in enumerate(encodes) if key in stays or key in encodes[:at]]
        if twice:
            self.broken(ENCODE_ONCE, f"{step} encodes {twice[0]}, which is on the device, or on its way there")

    def judge_budget(self, encodes: list[str], budget: int) -> None:
        if sum(self.sizes[key] for key in encodes) > budget:
            told = f"step {self.steps} encodes {' '.join(encodes)}: more than its budget of {budget}"
            self.broken(BUDGET_IS_KEPT, told)

    def broken(self, promise: Promise, what: str, kind: str = "") -> None:
        raise BrokenPromise(promise, what, Table(COLUMNS, self.rows), kind)

    # -- books -------------------------------------------------------------------------------------------------------

    def possible(self, wanted: list[tuple[str, ...]]) -> list[tuple[Any, ...]]:
        """Adds the sizes to ``wanted``, and drops what no request can do. A preempted request asks for nothing more in
        this step, and only a request that holds, waits or has asked can be preempted.
        """
        calls: list[tuple[Any, ...]] = []
        gone: set[str] = set()
        for word, request, *keys in wanted:
            if request in gone:
                continue
            if word == "ask":
                calls.append((word, request, keys[0], self.sizes[keys[0]]))
            elif self.is_there(request) or any(call[1] == request for call in calls):
                calls.append((word, request))
                gone.add(request)
        return calls

    def planned(self, calls: list[tuple[Any, ...]], budget: int) -> tuple[list[str], list[str], list[str]]:
        """Asks the cache for its plan.

        Raises:
            WrongAdapter: the answer is not a plan.
        """
        plan = self.cache.plan(list(calls), budget)
        if not isinstance(plan, tuple | list) or len(plan) != 3:
            raise WrongAdapter(f"plan returned {plan!r}; allowed: a tuple of answers, frees and encodes")
        parts = zip(("answers", "frees", "encodes"), plan, strict=True)
        answers, frees, encodes = (as_texts(part, f"what plan {name}") for name, part in parts)
        asked = [call for call in calls if call[0] == "ask"]
        if len(answers) != len(asked) or not set(answers) <= ANSWERS:
            raise WrongAdapter(f"plan answered {answers!r} to {asked!r}; allowed: one of {sorted(ANSWERS)} for each")
        unknown = [key for key in (*frees, *encodes) if key not in self.sizes]
        if unknown:
            raise WrongAdapter(f"plan frees or encodes {unknown!r}; allowed: keys that were asked for")
        self.check_answers(asked, answers, frees, encodes)
        return answers, frees, encodes

    def check_answers(
        self, asked: list[tuple[Any, ...]], answers: list[str], frees: list[str], encodes: list[str]
    ) -> None:
        """Checks that answers and encodings agree. `judge_step` judges hits of keys that are not on the device.

        Raises:
            WrongAdapter: answers and encodings do not agree.
        """
        told: dict[str, set[str]] = {}
        for (_, _, key, _), answer in zip(asked, answers, strict=True):
            told.setdefault(key, set()).add(answer)
        for key, words in told.items():
            if "encode" in words and key not in encodes and key in self.device and key not in frees:
                raise WrongAdapter(f"plan answered 'encode' for {key}, and this step does not: allowed is 'hit'")
            if "hit" in words and "encode" not in words and key in encodes and key not in self.device:
                raise WrongAdapter(
                    f"plan answered 'hit' for {key}, which this step encodes: to the first who asks, 'encode'"
                )

    def carry_out(self, frees: list[str], encodes: list[str]) -> None:
        """Notes which keys the device will hold once the step has run."""
        stays = {key: step for key, step in self.device.items() if key not in frees}
        later = [] if self.declared.evicts_within_step else frees
        self.device = {**stays, **{key: self.steps for key in encodes if key not in later}}

    def obey(self, calls: list[tuple[Any, ...]], answers: list[str]) -> list[tuple[str, str]]:
        """Notes the answers in the books. Returns what is wrong with them."""
        told, complaints = iter(answers), []
        for word, request, *item in calls:
            if word == "preempt":
                self.forget(request)
                continue
            answer = next(told)
            self.known.add(request)
            complaints += self.judge_answer((request, item[0]), item[1], answer)
            self.take_answer((request, item[0]), answer)
        return complaints

    def take_answer(self, hold: tuple[str, str], answer: str) -> None:
        self.waiting.pop(hold, None)
        if answer == "later":
            self.waiting[hold] = None
        elif answer != "never":
            self.holds.setdefault(hold, Hold(self.steps)).read_in = self.steps
        self.released.discard(hold)

    def is_there(self, request: str) -> bool:
        return any(request == holder for holder, _ in (*self.holds, *self.waiting))

    def all_there(self) -> list[str]:
        return list(dict.fromkeys(request for request, _ in (*self.holds, *self.waiting)))

    def forget(self, request: str) -> None:
        self.holds = {hold: since for hold, since in self.holds.items() if hold[0] != request}
        self.waiting = {hold: None for hold in self.waiting if hold[0] != request}
        self.released = {hold for hold in self.released if hold[0] != request}

    def other(self, key: str) -> str:
        """Returns the request that asks for ``key`` at the end. If requests do not share entries, it is the owner of
        the key.
        """
        return LATE if self.declared.shared else key.partition(".")[0]

    # -- the history -------------------------------------------------------------------------------------------------

    def tell(self, event: str) -> None:
        self.rows.append(("", event, "", "", "", ""))

    def tell_plan(
        self, calls: list[tuple[Any, ...]], answers: list[str], frees: list[str], encodes: list[str], budget: int
    ) -> None:
        """Adds a row for each ask. The last row also shows what the device does, and what it holds after the step."""
        told = iter(answers)
        rows = [
            (f"{call[1]} asks for {call[2]} ({call[3]})", next(told))
            if call[0] == "ask"
            else (f"{call[1]} is preempted", "")
            for call in calls
        ] or [("nobody asks", "")]
        step = str(self.steps) if budget == self.plenty else f"{self.steps}, budget {budget}"
        for number, row in enumerate(rows, 1):
            last = number == len(rows)
            end = (" ".join(frees), " ".join(encodes), " ".join(self.device) or "-") if last else ("", "", "")
            self.rows.append((step if number == 1 else "", *row, *end))


def _check_methods(cache: object, declared: StepDeclaration) -> None:
    protocol = "triolet_kit.steps.StepCache"
    check_methods(cache, ("plan", "executed", "release", "finish"), protocol)
    for name, has in (("close", declared.closes), ("reset", declared.resets)):
        if has:
            check_methods(cache, (name,), f"{protocol}, or declare {name}s=False")
