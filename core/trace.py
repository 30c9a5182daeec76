"""`TraceChecker`: checks the engine's promises on its events while it runs, in tests and in production alike.

Each invariant has a name (`INVARIANTS`). An event that breaks an invariant raises `InvariantViolation` with the name
and the history that shows the violation. The history has the events of the entries and requests concerned, or the
latest events if those are gone.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable
from typing import NoReturn

from attrs import define, field

from . import events
from .errors import InvariantViolation
from .trace_states import StateBooks

INVARIANTS = (
    NO_FREE_WHILE_HELD := "no free while held",
    NO_USE_BEFORE_READY := "no use before ready",
    NO_PHANTOM := "no phantom",
    ALWAYS_FREED := "always freed eventually",
    EVERY_ACQUIRE_ANSWERED := "every acquire is answered",
    BOOKS_BALANCE := "books balance",
    ENCODE_ONCE := "encode once",
    TERMINAL_ONCE := "terminal once",
    STAGES_IN_ORDER := "stages in order",
    FREE_FOLLOWS_COMPLETION := "free follows completion",
    STEPS_IN_ORDER := "steps in order",
    NO_PREEMPTION_IN_VAIN := "no preemption in vain",
    NO_STEP_IN_VAIN := "no step in vain",
    NO_STATE_SHARED := "no state shared",
    ORDERED_TEARDOWN := "ordered teardown",
)
TEARDOWN = (
    "intake closed",
    "scheduler stopped",
    "encoder cache stopped",
    "device released",
    "runner stopped",
    "channels closed",
)
HISTORY = 32  # events kept for one entry or request, since an entry may be hit for ever


class _Life(enum.Enum):
    ABSENT = "absent"
    RESERVED = "reserved"
    ENCODING = "being encoded"
    RESIDENT = "resident"
    FREEING = "being freed"


@define(eq=False)
class _Entry:
    size: int
    life: _Life = _Life.RESERVED
    readers: set[str] = field(factory=set)


@define(eq=False)
class _Acquire:
    key: str
    log: list[tuple[int, events.Event]]
    granted: bool = False


_MOVES: dict[type[events.Event], tuple[_Life, _Life, str]] = {  # from, to, and the invariant that is broken otherwise
    events.EncodeDispatched: (_Life.RESERVED, _Life.ENCODING, ENCODE_ONCE),
    events.EncodeRetried: (_Life.RESERVED, _Life.RESERVED, ENCODE_ONCE),
    events.EncodeDone: (_Life.ENCODING, _Life.RESIDENT, ENCODE_ONCE),
    events.EncodeBroke: (_Life.ENCODING, _Life.RESERVED, ENCODE_ONCE),  # each entry is dispatched again, or dropped
    events.EntryDropped: (_Life.RESERVED, _Life.ABSENT, BOOKS_BALANCE),
    events.FreeSent: (_Life.RESIDENT, _Life.FREEING, BOOKS_BALANCE),
    events.EntryFreed: (_Life.FREEING, _Life.ABSENT, BOOKS_BALANCE),
}


class _Place(enum.Enum):
    """The place of a request. A request may go on or start again after a failed step or a restart."""

    WAITING = "waiting"
    RUNNING = "running"
    EITHER = "waiting or running"


@define(eq=False)
class _Progress:
    place: _Place = _Place.WAITING
    started: bool = False
    first_token: bool = False
    failed: bool = False  # the last step of the request failed
    unread: int = 0  # tokens that it may still be fed without getting one
    steps: int = 0
    gave_way: tuple[str, _Progress, int] | None = None  # whom it was preempted for, and how many steps that one had had


@define(eq=False)
class TraceChecker:
    """Checks the invariants. Call the checker with every event, in order, and call `end` when the engine's block is
    over.

    Args:
        capacity: the size of the encoder cache in bytes; ``None``: "books balance" does not check an upper bound.
        steps_in_flight: the largest number of steps that are dispatched and not answered.

    Raises (from ``checker(event)`` and `end`):
        InvariantViolation: see `InvariantViolation.invariant` and `InvariantViolation.history`.

    After an actor has failed (`ActorFailed`) or a stage was cut off, actors may omit answers and frees. From then on
    only "terminal once" and the order of the teardown are checked.
    """

    capacity: int | None = None
    steps_in_flight: int | None = None
    taken: int = field(default=0, init=False)
    _entries: dict[str, _Entry] = field(factory=dict, init=False)
    _acquires: dict[str, _Acquire] = field(factory=dict, init=False)  # by holder
    _acquired_by: Counter[str] = field(factory=Counter, init=False)  # acquires that have not ended, by key
    _requests: dict[str, _Progress] = field(factory=dict, init=False)  # accepted, not ended
    _starts_told: bool = field(default=False, init=False)
    _left: bool = field(default=False, init=False)  # a sequence that the runner was not told to forget, perhaps
    _flights: deque[events.StepBegun] = field(factory=deque, init=False)
    _states: StateBooks = field(factory=StateBooks, init=False)
    _stages: list[str] = field(factory=list, init=False)
    _opened: bool = field(default=False, init=False)
    generation: int = field(default=0, init=False)  # the runner's, as the encoder cache knows it
    _steps_generation: int = field(default=0, init=False)
    orderly: bool = field(default=True, init=False)  # no actor has failed, nothing was cut off
    _told: int = field(default=0, init=False)
    _logs: dict[str, deque[tuple[int, events.Event]]] = field(factory=dict, init=False)  # by key or request id
    _recent: deque[tuple[int, events.Event]] = field(factory=lambda: deque(maxlen=HISTORY), init=False)

    def __call__(self, event: events.Event) -> None:
        """Checks the next event."""
        self._told += 1
        self._recent.append((self._told, event))
        match event:
            case events.RequestQueued():
                self._accepted(event)
            case events.RequestEnded():
                self._ended(event)
            case events.StageReached():
                self._stage(event)
            case events.ActorFailed():
                self._disorder()
            case events.OfRequest() if self.orderly:
                self._check_request(event)
            case events.OfKey() if self.orderly:
                self._check_entry(event)
            case events.OfKeys() if self.orderly:
                self._check_batch(event)
            case _ if self.orderly:
                self._check_runner(event)

    def end(self) -> None:
        """Checks at the end of the engine's block that everything was given back."""
        if self._requests:
            self._fail(TERMINAL_ONCE, f"requests that never ended: {sorted(self._requests)}", self._requests)
        missing = [stage for stage in TEARDOWN if stage not in self._stages]
        if not self.orderly:  # a device that hangs cannot be released
            missing = [stage for stage in missing if stage != "device released"]
        if self._opened and missing:
            self._fail(ORDERED_TEARDOWN, f"the teardown went through {self._stages}; it never reached {missing}")
        if self.orderly:
            self._check_nothing_is_left()

    @property
    def resident(self) -> frozenset[str]:
        """The keys of the outputs that must be on the device now."""
        return frozenset(key for key, entry in self._entries.items() if entry.life is _Life.RESIDENT)

    @property
    def on_device(self) -> frozenset[str]:
        """The keys of the outputs that may be on the device now: resident, being encoded or being freed."""
        return frozenset(key for key, entry in self._entries.items() if entry.life is not _Life.RESERVED)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _accepted(self, event: events.RequestQueued) -> None:
        self._log(event, event.request_id)
        if event.request_id in self._requests:
            self._fail(TERMINAL_ONCE, f"request {event.request_id} was accepted twice", [event.request_id])
        if "scheduler stopped" in self._stages:
            self._fail(ORDERED_TEARDOWN, f"request {event.request_id} was accepted by a scheduler that has stopped")
        self._requests[event.request_id] = _Progress()

    def _ended(self, event: events.RequestEnded) -> None:
        self._log(event, event.request_id)
        if event.request_id not in self._requests:
            self._fail(TERMINAL_ONCE, f"request {event.request_id} ended, but is not running", [event.request_id])
        self._left |= self._requests.pop(event.request_id).started
        self._states.drop(event.request_id)
        del self._logs[event.request_id]

    def _progress(self, event: events.Event, request_id: str) -> _Progress:
        """Returns the progress of the event's request, which must not have ended."""
        self._log(event, request_id)
        progress = self._requests.get(request_id)
        if progress is None:
            what = f"{type(event).__name__} names request {request_id}, which was not queued or has ended"
            self._fail(TERMINAL_ONCE, what, [request_id])
        return progress

    def _check_request(self, event: events.OfRequest) -> None:
        progress = self._progress(event, event.request_id)
        wrong = ""
        match event:
            case events.RequestStarted():
                wrong = "is started while it runs" if progress.place is _Place.RUNNING else ""
                progress.place, progress.started, progress.failed = _Place.RUNNING, True, False
                progress.unread, self._starts_told = event.tokens, True
                self._check_turn(event, progress)
            case events.FirstToken():
                wrong = "" if progress.started else "has a token, and was never started"
                wrong = "has a second first token" if progress.first_token else wrong
                progress.first_token = True
            case events.RequestPreempted():
                wrong = "is preempted while it waits" if progress.place is _Place.WAITING else ""
                progress.place, self._left = _Place.WAITING, True
                self._states.drop(event.request_id)
                other = self._progress(event, event.to)
                progress.gave_way = event.to, other, other.steps
            case events.RequestSuspected() if not progress.failed:
                wrong = "is suspected, and no step of it has failed since it started"
        if wrong:
            self._fail(STAGES_IN_ORDER, f"{event.request_id} {wrong}", [event.request_id])

    def _check_turn(self, event: events.RequestStarted, progress: _Progress) -> None:
        """Fails if the request was preempted for another one that has neither run since nor ended."""
        if progress.gave_way is not None:
            to, other, steps = progress.gave_way
            if self._requests.get(to) is other and other.steps == steps:
                what = f"{event.request_id} starts again before {to}, for which it was preempted"
                self._fail(NO_PREEMPTION_IN_VAIN, what, [event.request_id, to])
        progress.gave_way = None

    # -- entries -----------------------------------------------------------------------------------------------------

    def _check_entry(self, event: events.OfKey) -> None:
        self._log(event, event.key)
        match event:
            case events.EntryAcquired():
                self._acquired(event)
            case events.EntryRefused():
                self._refused(event)
            case events.EntryReserved():
                self._reserved(event)
            case events.EntryHeld():
                self._held(event)
            case events.EntryReleased():
                self._released(event)
            case events.EntryTakenBack(key, holder):
                self._fail(ALWAYS_FREED, f"{holder} never gave {key} back", [key])
            case events.EntryDropped(key):
                self._move(event, key)

    def _check_batch(self, event: events.OfKeys) -> None:
        for key in event.keys:
            self._log(event, key)
            self._move(event, key)
            if isinstance(event, events.FreeSent):
                readers = self._entries[key].readers
                if readers:
                    self._fail(NO_FREE_WHILE_HELD, f"{key} is to be freed while {sorted(readers)} may read it", [key])
                self._check_no_step_reads(key, None, f"{key} is to be freed")

    def _acquired(self, event: events.EntryAcquired) -> None:
        if event.holder in self._acquires:
            self._fail(EVERY_ACQUIRE_ANSWERED, f"{event.holder} acquires while an acquire of it is open", [event.key])
        self._acquires[event.holder] = _Acquire(event.key, [(self._told, event)])
        self._acquired_by[event.key] += 1

    def _refused(self, event: events.EntryRefused) -> None:
        acquire = self._end_acquire(event.holder, event.key)
        if acquire is None or acquire.granted:
            self._fail(EVERY_ACQUIRE_ANSWERED, f"{event.holder} is refused what it did not wait for", [event.key])
        self._forget(event.key)

    def _end_acquire(self, holder: str, key: str) -> _Acquire | None:
        acquire = self._acquires.get(holder)
        if acquire is None or acquire.key != key:
            return None
        del self._acquires[holder]
        self._acquired_by[key] -= 1
        return acquire

    def _reserved(self, event: events.EntryReserved) -> None:
        if event.key in self._entries:
            self._fail(ENCODE_ONCE, f"{event.key} is reserved while it is {self._life(event.key)}", [event.key])
        if not self._acquired_by[event.key]:
            self._fail(EVERY_ACQUIRE_ANSWERED, f"{event.key} is reserved, and nobody acquires it", [event.key])
        if event.size <= 0:
            self._fail(BOOKS_BALANCE, f"{event.key} is reserved with {event.size} bytes", [event.key])
        self._entries[event.key] = _Entry(event.size)
        self.taken += event.size
        if self.capacity is not None and self.taken > self.capacity:
            self._fail(BOOKS_BALANCE, f"{self.taken} bytes are taken of {self.capacity}", self._entries)

    def _held(self, event: events.EntryHeld) -> None:
        entry, acquire = self._entries.get(event.key), self._acquires.get(event.holder)
        if acquire is None or acquire.key != event.key or acquire.granted:
            self._fail(EVERY_ACQUIRE_ANSWERED, f"{event.holder} is given what it did not wait for", [event.key])
        if entry is None or entry.life is not _Life.RESIDENT:
            what = f"{event.key} is offered to {event.holder} while it is {self._life(event.key)}"
            self._fail(NO_PHANTOM, what, [event.key])
        acquire.granted = True
        acquire.log.append((self._told, event))
        entry.readers.add(event.holder)

    def _released(self, event: events.EntryReleased) -> None:
        acquire = self._end_acquire(event.holder, event.key)
        if acquire is None:
            self._fail(EVERY_ACQUIRE_ANSWERED, f"{event.holder} gives back what it has not", [event.key])
        entry = self._entries.get(event.key)
        if acquire.granted and entry is not None:
            entry.readers.discard(event.holder)
            self._check_no_step_reads(event.key, event.holder, f"{event.holder} gave {event.key} back")
        self._forget(event.key)

    def _move(self, event: events.OfKey | events.OfKeys, key: str) -> None:
        old, new, invariant = _MOVES[type(event)]
        entry = self._entries.get(key)
        if entry is None or entry.life is not old:
            self._fail(invariant, f"{key} should become {new.value}, but it is {self._life(key)}", [key])
        entry.life = new
        if new is _Life.ABSENT:
            del self._entries[key]
            self.taken -= entry.size
            self._forget(key)

    def _life(self, key: str) -> str:
        return (self._entries[key].life if key in self._entries else _Life.ABSENT).value

    # -- steps -------------------------------------------------------------------------------------------------------

    def _check_runner(self, event: events.Event) -> None:
        match event:
            case events.StepBegun():
                self._step_begun(event)
            case events.StepEnded():
                self._step_ended(event)
            case events.StepRetried(step_id, request_ids):
                for request_id in request_ids:
                    if self._progress(event, request_id).place is _Place.RUNNING:
                        what = f"{request_id} is to start again for step {step_id}, and no step of it has failed"
                        self._fail(STAGES_IN_ORDER, what, [request_id])
            case events.OutputsLost():
                self._outputs_lost(event)
            case events.StepsLost():
                self._unsettle(self._requests, failed=False)
                self._flights.clear()
                self._left = False
                self._steps_generation = event.generation

    def _step_begun(self, event: events.StepBegun) -> None:
        if self.steps_in_flight is not None and len(self._flights) >= self.steps_in_flight:
            self._fail(STEPS_IN_ORDER, f"step {event.step_id} is the {len(self._flights) + 1}th in flight")
        if not event.request_ids and (self._flights or not self._left):
            self._fail(NO_STEP_IN_VAIN, f"step {event.step_id} is empty, and nobody has left since the last empty one")
        self._left &= bool(event.request_ids)
        if wrong := self._states.begun(event, self._flights):
            self._fail(NO_STATE_SHARED, f"step {event.step_id} {wrong}", event.request_ids)
        self._flights.append(event)
        samples = frozenset(event.samples)
        for request_id in event.request_ids:
            progress = self._requests.get(request_id)
            if progress is None:
                self._fail(TERMINAL_ONCE, f"step {event.step_id} runs {request_id}, which has ended", [request_id])
            if self._starts_told and progress.place is _Place.WAITING:
                self._fail(STAGES_IN_ORDER, f"step {event.step_id} runs {request_id}, which waits", [request_id])
            progress.steps += 1
            progress.unread -= request_id not in samples
            if self._starts_told and progress.unread < 0:
                what = f"step {event.step_id} gives {request_id} no token, and has nothing left to feed it"
                self._fail(NO_STEP_IN_VAIN, what, [request_id])
        if self._steps_generation != self.generation:
            return  # the scheduler does not know of the restart yet, and the runner will drop the step
        for key, reader in zip(event.reads, event.readers, strict=True):
            self._log(event, key)
            entry = self._entries.get(key)
            if entry is None or entry.life is not _Life.RESIDENT or reader not in entry.readers:
                held = "" if entry is None else f", held by {sorted(entry.readers)}"
                what = f"step {event.step_id} reads {key} for {reader}; it is {self._life(key)}{held}"
                self._fail(NO_USE_BEFORE_READY, what, [key])

    def _step_ended(self, event: events.StepEnded) -> None:
        if not self._flights or self._flights[0].step_id != event.step_id:
            waiting = [flight.step_id for flight in self._flights]
            self._fail(STEPS_IN_ORDER, f"step {event.step_id} ended, but in flight are {waiting}")
        flight = self._flights.popleft()
        for key in flight.reads:
            self._log(event, key)
        if not event.ok:
            self._left = True
            self._unsettle(flight.request_ids, failed=True)

    def _unsettle(self, request_ids: Iterable[str], *, failed: bool) -> None:
        """Notes that the requests may start again without a `RequestPreempted`."""
        for request_id in request_ids:
            progress = self._requests.get(request_id)
            if progress is not None:
                progress.failed = progress.failed or failed
                progress.place = _Place.EITHER
                self._states.drop(request_id)

    def _check_no_step_reads(self, key: str, reader: str | None, what: str) -> None:
        """Fails if a step in flight reads ``key`` for ``reader``, or for any holder if ``reader`` is ``None``."""
        for flight in self._flights:
            if any(key == read and reader in (by, None) for read, by in zip(flight.reads, flight.readers, strict=True)):
                self._fail(FREE_FOLLOWS_COMPLETION, f"{what} while step {flight.step_id} reads it", [key])

    # -- restart -----------------------------------------------------------------------------------------------------

    def _outputs_lost(self, event: events.OutputsLost) -> None:
        for key, entry in self._entries.items():
            self._log(event, key)
            entry.life = _Life.RESERVED
            entry.readers.clear()
        for acquire in self._acquires.values():
            acquire.granted = False
        self.generation = event.generation

    # -- the end -----------------------------------------------------------------------------------------------------

    def _stage(self, event: events.StageReached) -> None:
        if event.stage.endswith("cut off") or event.stage == "device call abandoned":
            self._disorder()
        self._opened = self._opened or event.stage == "accepting"
        if not self._opened or event.stage not in TEARDOWN:
            return  # the teardown of a failed start has only some of the stages
        if event.stage == "device released" and not self.orderly:
            return  # a runner that failed gives the device back at once
        later = [stage for stage in self._stages if TEARDOWN.index(stage) >= TEARDOWN.index(event.stage)]
        if later:
            self._fail(ORDERED_TEARDOWN, f"{event.stage!r} comes after {later[0]!r}")
        self._stages.append(event.stage)
        if event.stage == "scheduler stopped" and self._requests:
            self._fail(TERMINAL_ONCE, f"the scheduler stopped with {sorted(self._requests)} running", self._requests)
        if event.stage == "scheduler stopped" and self._flights:
            waiting = [flight.step_id for flight in self._flights]
            self._fail(STEPS_IN_ORDER, f"the scheduler stopped, and steps {waiting} were not answered")
        if event.stage == "encoder cache stopped" and self.orderly:
            self._check_nothing_is_left()

    def _disorder(self) -> None:
        self.orderly = False
        self._stages = [stage for stage in self._stages if stage != "device released"]
        self.taken = 0
        for state in (self._entries, self._acquires, self._acquired_by, self._flights):
            state.clear()
        self._states = StateBooks()

    def _check_nothing_is_left(self) -> None:
        if self._acquires:
            keys = {acquire.key for acquire in self._acquires.values()}
            self._fail(EVERY_ACQUIRE_ANSWERED, f"acquires that never ended: {sorted(self._acquires)}", keys)
        if self._entries:
            self._fail(ALWAYS_FREED, f"entries that were never freed: {sorted(self._entries)}", self._entries)

    # -- history -----------------------------------------------------------------------------------------------------

    def _log(self, event: events.Event, subject: str) -> None:
        log = self._logs.get(subject)
        if log is None:
            log = self._logs[subject] = deque(maxlen=HISTORY)
        log.append((self._told, event))

    def _forget(self, key: str) -> None:
        if key not in self._entries and not self._acquired_by[key]:
            self._logs.pop(key, None)
            del self._acquired_by[key]

    def _fail(self, invariant: str, what: str, subjects: Iterable[str] = ()) -> NoReturn:
        subjects = set(subjects)
        told = dict(entry for subject in subjects for entry in self._logs.get(subject, ()))
        for acquire in self._acquires.values():  # their logs hold events that the bounded logs have lost
            if acquire.key in subjects:
                told.update(acquire.log)
        if not told:
            told = dict(self._recent)
        told[self._told] = self._recent[-1][1]
        raise InvariantViolation(invariant, what, tuple(told[number] for number in sorted(told)))
