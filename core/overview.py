"""What an engine's events have told so far: where each request is, and the bytes of the encoder cache by state."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from attrs import define, field

from . import events
from .log_lines import one_line

# stages of a request
QUEUED, ENCODING, READY = "queued", "encoding", "ready"
READING, DECODING, PREEMPTED, SUSPECTED = "reading", "decoding", "preempted", "suspected"

# states of an encoder output
RESERVED, BEING_ENCODED, HELD, IDLE, FREEING = "reserved", "encoding", "held", "idle", "freeing"
ABSENT = "absent"


@define(eq=False)
class RequestLine:
    """A request on its way. Times in seconds of the engine's clock."""

    request_id: str
    queued_at: float
    stage: str = QUEUED
    stage_at: float = math.nan  # when the stage began
    error: str = ""  # type and text of its failure
    started_at: float = math.nan
    first_token_at: float = math.nan
    tokens: int = 0  # one for each good step that sampled one; accepted draft tokens are not counted

    def waited(self, now: float) -> float:
        """Seconds until its first start, or until now."""
        return (now if math.isnan(self.started_at) else self.started_at) - self.queued_at

    def rate(self, now: float) -> float:
        """Tokens a second after the first token; 0 where there is no second token."""
        seconds = now - self.first_token_at
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0


@define(eq=False)
class CacheEntry:
    """An encoder output. ``size`` in bytes, times in seconds of the engine's clock."""

    key: str
    size: int
    state: str
    state_at: float  # when the state began
    readers: set[str] = field(factory=set)


Change: TypeAlias = RequestLine | CacheEntry


@define(eq=False)
class Overview:
    """An observer for `EngineConfig`. The cost of an event does not grow with the requests, but that of a step's event
    grows with the requests of the step.

    Args:
        changed: hears of each line whose stage is new, and of each entry whose state is new. The last stage of a line
            is the request's outcome, the last state of an entry `ABSENT`.
    """

    changed: Callable[[Change], None] | None = None
    waiting: dict[str, RequestLine] = field(factory=dict, init=False)
    running: dict[str, RequestLine] = field(factory=dict, init=False)
    ended: Counter[str] = field(factory=Counter, init=False)  # requests by outcome
    bytes_in: Counter[str] = field(factory=Counter, init=False)  # of the encoder cache, by state
    failures: int = field(default=0, init=False)
    last_failure: str = field(default="", init=False)
    _entries: dict[str, CacheEntry] = field(factory=dict, init=False)
    _wanted: dict[str, dict[str, str]] = field(factory=dict, init=False)  # request by holder, by key
    _steps: dict[int, tuple[str, ...]] = field(factory=dict, init=False)  # in flight: who samples

    def __call__(self, event: events.Event) -> None:
        """Takes the next event."""
        take = _TAKES.get(type(event))
        if take is not None:
            take(self, event)

    def first_lines(self, most: int) -> list[RequestLine]:
        """The first lines. Running ones come first, in the order of their starts."""
        return list(itertools.islice(itertools.chain(self.running.values(), self.waiting.values()), most))

    def entries(self) -> Iterable[CacheEntry]:
        """The encoder outputs, in the order of their reservations."""
        return self._entries.values()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _enter(self, line: RequestLine, stage: str, now: float) -> None:
        if line.stage != stage:
            self._tell_line(line, stage, now)

    def _tell_line(self, line: RequestLine, stage: str, now: float) -> None:
        line.stage, line.stage_at = stage, now
        if self.changed is not None:
            self.changed(line)

    def _line(self, request_id: str) -> RequestLine | None:
        return self.running.get(request_id) or self.waiting.get(request_id)

    def _queued(self, event: events.RequestQueued) -> None:
        line = self.waiting[event.request_id] = RequestLine(event.request_id, event.time)
        self._tell_line(line, QUEUED, event.time)

    def _wait_over(self, event: events.EncoderWaitOver) -> None:
        line = self.waiting.get(event.request_id)
        if line is not None and line.stage in (QUEUED, ENCODING):
            self._enter(line, READY, event.time)

    def _started(self, event: events.RequestStarted) -> None:
        self._run(event.request_id, event.time)

    def _run(self, request_id: str, now: float) -> None:
        line = self.waiting.pop(request_id, None)
        if line is None:
            return
        self.running[request_id] = line
        if math.isnan(line.started_at):
            line.started_at = now
        self._enter(line, READING, now)

    def _first_token(self, event: events.FirstToken) -> None:
        line = self._line(event.request_id)
        if line is not None:
            self._decode(line, event.time)

    def _decode(self, line: RequestLine, now: float) -> None:
        if math.isnan(line.first_token_at):
            line.first_token_at = now
        self._enter(line, DECODING, now)

    def _back(self, request_id: str, stage: str, now: float) -> None:
        line = self.running.pop(request_id, None) or self.waiting.get(request_id)
        if line is not None:
            self.waiting[request_id] = line
            self._enter(line, stage, now)

    def _preempted(self, event: events.RequestPreempted) -> None:
        self._back(event.request_id, PREEMPTED, event.time)

    def _suspected(self, event: events.RequestSuspected) -> None:
        self._back(event.request_id, SUSPECTED, event.time)

    def _retried(self, event: events.StepRetried) -> None:
        for request_id in event.request_ids:
            if request_id in self.running:
                self._back(request_id, QUEUED, event.time)

    def _request_ended(self, event: events.RequestEnded) -> None:
        line = self.running.pop(event.request_id, None) or self.waiting.pop(event.request_id, None)
        if line is not None:
            self.ended[event.outcome] += 1
            line.error = event.error
            self._enter(line, event.outcome, event.time)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step_begun(self, event: events.StepBegun) -> None:
        self._steps[event.step_id] = event.samples
        for request_id in event.request_ids:
            if request_id in self.waiting:
                self._run(request_id, event.time)

    def _step_ended(self, event: events.StepEnded) -> None:
        request_ids = self._steps.pop(event.step_id, ())
        if not event.ok:
            if not event.skipped:
                self._fail(f"step {event.step_id}: {event.error}")
            return
        for request_id in request_ids:
            line = self.running.get(request_id)
            if line is not None:
                line.tokens += 1
                self._decode(line, event.time)

    def _steps_lost(self, event: events.StepsLost) -> None:
        self._steps.clear()
        for request_id in list(self.running):
            self._back(request_id, QUEUED, event.time)

    def _fail(self, what: str) -> None:
        self.failures += 1
        self.last_failure = one_line(what)

    def _restarting(self, event: events.RunnerRestarting) -> None:
        self._fail(f"restart {event.generation}: {event.error}")

    def _actor_failed(self, event: events.ActorFailed) -> None:
        self._fail(f"{event.actor}: {event.error}")

    def _stage_reached(self, event: events.StageReached) -> None:
        """An engine that failed may leave without a word about what it had."""
        if event.stage == "channels closed":
            self._drop(tuple(self._entries), event.time)
            self._wanted.clear()
            self._steps.clear()

    # -- encoder outputs ---------------------------------------------------------------------------------------------

    def _move(self, key: str, state: str, now: float) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.state == state:
            return
        self.bytes_in[entry.state] -= entry.size
        self.bytes_in[state] += entry.size
        self._tell_entry(entry, state, now)

    def _tell_entry(self, entry: CacheEntry, state: str, now: float) -> None:
        entry.state, entry.state_at = state, now
        if self.changed is not None:
            self.changed(entry)

    def _entry_acquired(self, event: events.EntryAcquired) -> None:
        request_id = event.holder.rpartition("/")[0]
        self._wanted.setdefault(event.key, {})[event.holder] = request_id

    def _not_wanted(self, key: str, holder: str) -> None:
        holders = self._wanted.get(key, {})
        holders.pop(holder, None)
        if not holders:
            self._wanted.pop(key, None)

    def _refused(self, event: events.EntryRefused) -> None:
        self._not_wanted(event.key, event.holder)

    def _reserved(self, event: events.EntryReserved) -> None:
        self._drop((event.key,), event.time)
        entry = self._entries[event.key] = CacheEntry(event.key, event.size, RESERVED, event.time)
        self.bytes_in[RESERVED] += event.size
        self._tell_entry(entry, RESERVED, event.time)

    def _dispatched(self, event: events.EncodeDispatched | events.BorrowSent) -> None:
        """What is borrowed counts as being encoded, for those who look."""
        for key in event.keys:
            self._move(key, BEING_ENCODED, event.time)
            for request_id in self._wanted.get(key, {}).values():
                line = self.waiting.get(request_id)
                if line is not None and line.stage == QUEUED:
                    self._enter(line, ENCODING, event.time)

    def _encoded(self, event: events.EncodeDone | events.BorrowDone) -> None:
        for key in event.keys:
            self._move(key, IDLE, event.time)

    def _broke(self, event: events.EncodeBroke) -> None:
        self._fail(f"encode of {len(event.keys)}: {event.error}")
        for key in event.keys:
            self._move(key, RESERVED, event.time)

    def _not_lent(self, event: events.BorrowBroke) -> None:
        for key in event.keys:
            self._move(key, RESERVED, event.time)

    def _held(self, event: events.EntryHeld) -> None:
        self._not_wanted(event.key, event.holder)
        entry = self._entries.get(event.key)
        if entry is not None:
            entry.readers.add(event.holder)
            self._move(event.key, HELD, event.time)

    def _released(self, event: events.EntryReleased | events.EntryTakenBack) -> None:
        self._not_wanted(event.key, event.holder)
        entry = self._entries.get(event.key)
        if entry is None or event.holder not in entry.readers:
            return
        entry.readers.discard(event.holder)
        if not entry.readers:
            self._move(event.key, IDLE, event.time)

    def _free_sent(self, event: events.FreeSent) -> None:
        for key in event.keys:
            self._move(key, FREEING, event.time)

    def _freed(self, event: events.EntryFreed) -> None:
        self._drop(event.keys, event.time)

    def _dropped(self, event: events.EntryDropped) -> None:
        self._drop((event.key,), event.time)

    def _drop(self, keys: Iterable[str], now: float) -> None:
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.bytes_in[entry.state] -= entry.size
                self._tell_entry(entry, ABSENT, now)

    def _outputs_lost(self, event: events.OutputsLost) -> None:
        for key, entry in self._entries.items():
            entry.readers.clear()
            self._move(key, RESERVED, event.time)


_TAKES: Mapping[type[events.Event], Callable[[Overview, Any], None]] = {
    events.RequestQueued: Overview._queued,
    events.EncoderWaitOver: Overview._wait_over,
    events.RequestStarted: Overview._started,
    events.FirstToken: Overview._first_token,
    events.RequestPreempted: Overview._preempted,
    events.RequestSuspected: Overview._suspected,
    events.RequestEnded: Overview._request_ended,
    events.StepBegun: Overview._step_begun,
    events.StepEnded: Overview._step_ended,
    events.StepRetried: Overview._retried,
    events.StepsLost: Overview._steps_lost,
    events.RunnerRestarting: Overview._restarting,
    events.ActorFailed: Overview._actor_failed,
    events.StageReached: Overview._stage_reached,
    events.EntryAcquired: Overview._entry_acquired,
    events.EntryRefused: Overview._refused,
    events.EntryReserved: Overview._reserved,
    events.EntryHeld: Overview._held,
    events.EntryReleased: Overview._released,
    events.EntryTakenBack: Overview._released,
    events.EntryDropped: Overview._dropped,
    events.EncodeDispatched: Overview._dispatched,
    events.EncodeDone: Overview._encoded,
    events.EncodeBroke: Overview._broke,
    events.BorrowSent: Overview._dispatched,
    events.BorrowDone: Overview._encoded,
    events.BorrowBroke: Overview._not_lent,
    events.FreeSent: Overview._free_sent,
    events.EntryFreed: Overview._freed,
    events.OutputsLost: Overview._outputs_lost,
}
