"""The clients and the device of a step engine, and the judge of its cache manager. `triolet_kit.steps` says
what the cache must do.

The device runs the steps in their order, and in each step first the frees, then the encodings, then the reads. So
except for encodings that fail, the contents of the device after a step are known when the step is planned. It is judged
then.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from .findings import (
    ALWAYS_FREED,
    ENCODE_ONCE,
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    RAISES_NOTHING,
    SPEAKS,
    BrokenPromise,
    Promise,
    Severity,
)
from .search import Played
from .step_declaration import StepDeclaration
from .wrong_adapter import as_texts, check_methods

PATIENCE = 8  # steps in a row without progress, after which a wait counts as a wait for ever
PLENTY = 4  # times the room, so that several requests can use the same room in one step
ANSWERS = {"hit", "encode", "later", "never"}
LAST, LATE, EVERYTHING = "last", "late", "everything"
COLUMNS = ("step", "what happens", "answer", "frees", "encodes", "then on the device")
COUNTED = (
    *("steps", "hit", "encode", "later", "never"),
    *("preemptions", "frees", "failures", "releases", "ends", "resets", "closes"),
)

RULED_OUT = {
    "never": "refuses",
    "preemptions": "preempts_within_step",
    "failures": "may_fail_after_plan",
    "resets": "resets",
    "closes": "closes",
}
"""The statistics that stay zero if the declaration says no, and its argument."""

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
    SPEAKS,
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


class Hold:
    """A request's hold of a key, with the step that began the hold and the latest step that reads the key."""

    def __init__(self, step: int) -> None:
        self.since = self.read_in = step


class StepGame:
    """A game with one cache, recorded in ``played``. Operations that are impossible now (such as the end of a step that
    was not planned) are skipped.
    """

    def __init__(
        self, cache: Any, room: int, sizes: dict[str, int], declared: StepDeclaration, played: Played | None = None
    ) -> None:
        self.played = played or Played(COLUMNS, COUNTED)
        _check_methods(cache, declared)
        self.cache, self.room, self.sizes, self.declared = cache, room, sizes, declared
        self.plenty = PLENTY * room  # a budget that is always enough
        self.steps = self.steps_run = 0
        self.in_flight: deque[list[str]] = deque()  # the encodings of each step
        self.device: dict[str, int] = {}  # each key with the step that encoded it, once all steps have run
        self.holds: dict[tuple[str, str], Hold] = {}
        self.waiting: dict[tuple[str, str], None] = {}
        self.released: set[tuple[str, str]] = set()  # by requests that have not ended
        self.known: set[str] = set()  # requests that have ever asked
        self.causes: dict[str, str] = {}  # what happened to a key last, since it was encoded
        self.closed = False
        self.rows, self.counts = self.played.rows, self.played.statistics

    # -- what the engine does ----------------------------------------------------------------------------------------

    def plan(self, wanted: list[tuple[str, ...]], budget: int | None = None) -> None:
        """Plans a step of ``("ask", request, key)`` and ``("preempt", request)``. By default the budget is plenty."""
        self.played.operations.append(("plan", (wanted,) if budget is None else (wanted, budget)))
        budget = self.plenty if budget is None else budget
        if len(self.in_flight) >= self.declared.steps_in_flight:
            return
        calls, told, before = self.possible(wanted), len(self.rows), dict(self.device)
        self.steps += 1
        self.tell_plan(calls, budget)
        answers, frees, encodes = self.planned(calls, budget)
        self.carry_out(frees, encodes)
        self.counts["steps"] += 1
        self.counts["frees"] += len(frees)
        del self.rows[told:]
        self.tell_plan(calls, budget, answers, frees, encodes)
        preempts = any(call[0] == "preempt" for call in calls)
        complaints = self.obey(calls, answers)
        self.judge_step(frees, encodes, before)
        if sum(self.sizes[key] for key in encodes) > budget:
            what = f"step {self.steps} encodes {' '.join(encodes)}: more than its budget of {budget}"
            self.broken(BUDGET_IS_KEPT, what, "in a step with a preemption" if preempts else "")
        for what, kind in complaints:
            self.broken(EVERY_ASK_ANSWERED, what, kind)
        if not preempts:
            self.judge_agreement(calls, answers, frees, [key for key in encodes if key not in before])
        self.causes |= dict.fromkeys((key for key in frees if key in before), "its free")
        self.causes = {key: cause for key, cause in self.causes.items() if key not in encodes}
        self.in_flight.append(encodes)

    def executed(self, failed: list[str] | tuple[str, ...] = ()) -> None:
        """Ends the oldest planned step. Its ``failed`` encodings fail, except those whose outputs a later step has
        freed.
        """
        self.played.operations.append(("executed", (failed,) if failed else ()))
        if not self.in_flight:
            return
        encodes = self.in_flight.popleft()
        self.steps_run += 1
        lost = [key for key in dict.fromkeys(failed) if key in encodes and self.device.get(key) == self.steps_run]
        for key in lost:
            del self.device[key]
            self.holds = {hold: since for hold, since in self.holds.items() if hold[1] != key}
            self.causes[key] = "a failure"
            self.counts["failures"] += 1
        fails = f"; {' '.join(lost)} failed, and its holds are over" if lost else ""
        self.tell(f"step {self.steps_run} has run{fails}")
        self.cache.executed(lost)

    def release(self, request: str, key: str) -> None:
        """Releases ``key`` for ``request``, which has read it and goes on. If ``declared.repeats``, a later call
        releases it again.
        """
        self.played.operations.append(("release", (request, key)))
        hold = self.holds.get((request, key))
        if hold is None:
            if self.declared.repeats and (request, key) in self.released:
                self.tell(f"{request} releases {key} again")
                self.cache.release(request, key)
        elif hold.read_in <= self.steps_run:
            del self.holds[request, key]
            self.released.add((request, key))
            self.causes[key] = "a release"
            self.counts["releases"] += 1
            self.tell(f"{request} releases {key}")
            self.cache.release(request, key)

    def finish(self, request: str) -> None:
        """Ends ``request``, which may also be an abort, or a preemption between two steps."""
        self.played.operations.append(("finish", (request,)))
        there = self.is_there(request)
        if there or (self.declared.repeats and request in self.known):
            self.forget(request, "a release")
            self.counts["ends"] += 1
            self.tell(f"{request} ends" if there else f"{request}, which holds nothing, ends")
            self.cache.finish(request)

    def reset(self) -> None:
        """Empties the device and the books between two steps. Requests go on and ask anew."""
        if not self.declared.resets or self.in_flight:
            return
        for request in self.all_there():
            if self.declared.repeats:
                self.forget(request, "a reset")
            else:
                self.finish(request)
        self.played.operations.append(("reset", ()))
        self.device.clear()
        self.causes = dict.fromkeys(self.sizes, "a reset")
        self.counts["resets"] += 1
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
            kind = "waits for ever for the whole room" if waiting == [(LAST, EVERYTHING)] else "waits for ever"
            self.broken(EVERY_ASK_ANSWERED, f"{who}: a wait for ever, though nobody holds anything", kind)

    def run_all(self, failed: list[str] | tuple[str, ...] = ()) -> None:
        while self.in_flight:
            self.executed(failed)

    def close(self, failed: list[str] | tuple[str, ...] = ()) -> None:
        """Ends all requests and closes the cache while planned steps run. Their ``failed`` encodings fail. Then empty
        steps carry the frees to the device.
        """
        self.shut()
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
            what = f"{' '.join(self.device)} on the device after close, and no step frees it"
            cause = self.causes.get(next(iter(self.device)))
            self.broken(ALWAYS_FREED, what, "" if cause in {None, "a release"} else f"after {cause}")

    def shut(self) -> None:
        """Ends all requests, and closes the cache if it has a close. Nobody asks from then on."""
        for request in self.all_there():
            self.finish(request)
        self.played.operations.append(("shut", ()))
        if self.declared.closes and not self.closed:
            self.closed = True
            self.counts["closes"] += 1
            self.tell("close")
            self.cache.close()

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
            there, reads = key in self.device, hold.read_in == self.steps
            may_read = reads or not self.declared.reads_in_own_step
            if (
                may_read
                and key in frees
                and (key in before or key in encodes)
                and (hold.since < self.steps or not there)
            ):
                self.broken(NO_FREE_WHILE_HELD, f"{step} frees {key}, which {request} may read", self.after(key))
            if reads and not there:
                kind = "freed in the step that reads" if key in frees else self.after(key, "never encoded")
                self.broken(NO_PHANTOM, f"{step} reads {key} for {request}, but it is not on the device", kind)
        could_be_freed = before if self.declared.evicts_within_step else {*before, *encodes}
        missed = [key for at, key in enumerate(frees) if key not in could_be_freed or key in frees[:at]]
        peak = self.device if self.declared.evicts_within_step else {**before, **self.device}
        taken = sum(self.sizes[key] for key in peak)
        if taken > self.room:
            what = f"{step} has {' '.join(peak)} on the device: {taken} in a room of {self.room}"
            self.broken(ROOM_IS_KEPT, what, "a free misses" if missed else "")
        if missed and self.declared.missed_free == "fault":
            kind = "freed twice in a step" if frees.count(missed[0]) > 1 else self.after(missed[0], "never encoded")
            self.broken(FREES_HIT, f"{step} frees {missed[0]}, which is not on the device", kind)
        stays = {key for key in before if key not in frees or not self.declared.evicts_within_step}
        twice = [key for at, key in enumerate(encodes) if key in stays or key in encodes[:at]]
        if twice:
            kind = self.after(twice[0]) if twice[0] in stays else "encoded twice in a step"
            self.broken(ENCODE_ONCE, f"{step} encodes {twice[0]}, which is on the device, or on its way there", kind)

    def judge_agreement(
        self, calls: list[tuple[Any, ...]], answers: list[str], frees: list[str], encodes: list[str]
    ) -> None:
        """Judges whether answers and encodings agree. The step has no preemption, which would take back encodings and
        the frees that made room for them.
        """
        told: dict[str, set[str]] = {}
        for (_, _, key, _), answer in zip(calls, answers, strict=True):
            told.setdefault(key, set()).add(answer)
        for key, words in told.items():
            if "encode" in words and key not in encodes and key not in frees:
                what = f"plan answered 'encode' for {key}, and this step does not: allowed is 'hit'"
                self.broken(SPEAKS, what, "encode for hit")
            if "hit" in words and "encode" not in words and key in encodes:
                what = f"plan answered 'hit' for {key}, which this step encodes: to the first who asks, 'encode'"
                self.broken(SPEAKS, what, "hit for encode")

    def after(self, key: str, otherwise: str = "") -> str:
        """Returns what happened to ``key`` last, as the kind of a broken promise."""
        return f"after {self.causes[key]}" if key in self.causes else otherwise

    def broken(self, promise: Promise, what: str, kind: str = "") -> None:
        raise BrokenPromise(promise, what, kind=kind)

    # -- books -------------------------------------------------------------------------------------------------------

    def possible(self, wanted: list[tuple[str, ...]]) -> list[tuple[Any, ...]]:
        """Adds the sizes to ``wanted``, and drops what no request can do. A preempted request asks for nothing more in
        this step, and only a request that holds, waits or has asked can be preempted.
        """
        if self.closed:
            return []
        calls: list[tuple[Any, ...]] = []
        gone: set[str] = set()
        for word, request, *keys in wanted:
            if request in gone:
                continue
            if word == "ask":
                if not (self.declared.reads_in_own_step and (request, keys[0]) in self.holds):
                    calls.append((word, request, keys[0], self.sizes[keys[0]]))
            elif self.is_there(request) or any(call[1] == request for call in calls):
                calls.append((word, request))
                gone.add(request)
        return calls

    def planned(self, calls: list[tuple[Any, ...]], budget: int) -> tuple[list[str], list[str], list[str]]:
        """Asks the cache for its plan, and checks the form of its answer."""
        plan = self.cache.plan(list(calls), budget)
        if not isinstance(plan, tuple | list) or len(plan) != 3:
            what = f"plan returned {plan!r}; allowed: a tuple of answers, frees and encodes"
            self.broken(SPEAKS, what, "no plan")
        parts = zip(("answers", "frees", "encodes"), plan, strict=True)
        answers, frees, encodes = (as_texts(part, f"what plan {name}") for name, part in parts)
        asked = [call for call in calls if call[0] == "ask"]
        if len(answers) != len(asked) or not set(answers) <= ANSWERS:
            what = f"plan answered {answers!r} to {asked!r}; allowed: one of {sorted(ANSWERS)} for each"
            self.broken(SPEAKS, what, "answers")
        unknown = [key for key in (*frees, *encodes) if key not in self.sizes]
        if unknown:
            what = f"plan frees or encodes {unknown!r}; allowed: keys that were asked for"
            self.broken(SPEAKS, what, "unknown keys")
        return answers, frees, encodes

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
                self.forget(request, "a preemption")
                self.counts["preemptions"] += 1
                continue
            answer = next(told)
            self.known.add(request)
            self.counts[answer] += 1
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

    def forget(self, request: str, cause: str) -> None:
        self.causes |= {key: cause for holder, key in (*self.holds, *self.waiting) if holder == request}
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
        self,
        calls: list[tuple[Any, ...]],
        budget: int,
        answers: list[str] | None = None,
        frees: list[str] | tuple[str, ...] = (),
        encodes: list[str] | tuple[str, ...] = (),
    ) -> None:
        """Adds a row for each ask. Once there are ``answers``, the last row also shows what the device does, and what
        it holds after the step.
        """
        told = iter(answers or ())
        rows = [
            (f"{call[1]} asks for {call[2]} ({call[3]})", next(told, ""))
            if call[0] == "ask"
            else (f"{call[1]} is preempted", "")
            for call in calls
        ] or [("nobody asks", "")]
        step = str(self.steps) if budget == self.plenty else f"{self.steps}, budget {budget}"
        end = ("", "", "") if answers is None else (" ".join(frees), " ".join(encodes), " ".join(self.device) or "-")
        for number, row in enumerate(rows, 1):
            self.rows.append((step if number == 1 else "", *row, *(end if number == len(rows) else ("", "", ""))))


def _check_methods(cache: object, declared: StepDeclaration) -> None:
    protocol = "triolet_kit.steps.StepCache"
    check_methods(cache, ("plan", "executed", "release", "finish"), protocol)
    for name, has in (("close", declared.closes), ("reset", declared.resets)):
        if has:
            check_methods(cache, (name,), f"{protocol}, or declare {name}s=False")
