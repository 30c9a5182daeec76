"""The state of an engine, derived from its events: the stage of each request, and the bytes of the encoder cache by
state."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from attrs import define, field

from . import events
from .log_lines import one_line

# stages of a request
QUEUED, ENCODING, READY = "queued", "encoding", "ready"
READING, DECODING, PREEMPTED, SUSPECTED = "reading", "decoding", "preempted", "suspected"

# states of an encoder output
RESERVED, BEING_ENCODED, HELD, IDLE, FREEING = "reserved", "encoding", "held", "idle", "freeing"
ABSENT = "absent"

RECENT = 128  # requests that have ended, and are remembered


@define(eq=False)
class RequestLine:
    """A request and its stage. Times are in seconds of the engine's clock."""

    request_id: str
    stage: str = ""
    stage_at: float = math.nan  # the time when the stage began
    error: str = ""  # type and text of the request's failure
    tokens: int = 0  # one for each good step that sampled; accepted draft tokens do not count
    stages: deque[tuple[str, float]] = field(factory=lambda: deque(maxlen=64))  # the last, with the times they began


@define(eq=False)
class CacheEntry:
    """An encoder output in the encoder cache. ``size`` is in bytes, times are in seconds of the engine's clock."""

    key: str
    size: int
    state: str = ABSENT
    state_at: float = math.nan  # the time when the state began
    readers: set[str] = field(factory=set)


Change: TypeAlias = RequestLine | CacheEntry


@define(eq=False)
class Overview:
    """An observer for `EngineConfig`. The cost of a step's event grows with the requests in the step. The cost of other
    events does not grow with the requests.

    Args:
        changed: a function that is called with each line when its stage changes, and with each entry when its state
            changes. The last stage of a line is the request's outcome. The last state of an entry is `ABSENT`.
    """

    changed: Callable[[Change], None] | None = None
    waiting: dict[str, RequestLine] = field(factory=dict, init=False)
    running: dict[str, RequestLine] = field(factory=dict, init=False)
    ended: Counter[str] = field(factory=Counter, init=False)  # requests by outcome
    recent: deque[RequestLine] = field(factory=lambda: deque(maxlen=RECENT), init=False)  # that have ended
    bytes_in: Counter[str] = field(factory=Counter, init=False)  # bytes of the encoder cache, by state
    failures: int = field(default=0, init=False)
    last_failure: str = field(default="", init=False)
    _entries: dict[str, CacheEntry] = field(factory=dict, init=False)
    _wanted: dict[str, dict[str, str]] = field(factory=dict, init=False)  # for each key: request by holder
    _steps: dict[int, tuple[str, ...]] = field(factory=dict, init=False)  # in flight: the requests that sample

    def __call__(self, event: events.Event) -> None:
        """Processes the next event."""
        match event:
            case events.OfRequest():
                self._take_request(event)
            case events.OfKey():
                self._take_entry(event)
            case events.OfKeys():
                self._take_batch(event)
            case _:
                self._take_engine(event)

    def entries(self) -> Iterable[CacheEntry]:
        """Returns the encoder outputs, in the order of their reservations."""
        return self._entries.values()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _take_request(self, event: events.OfRequest) -> None:
        request_id, now = event.request_id, event.time
        line = self.running.get(request_id) or self.waiting.get(request_id)
        match event:
            case events.RequestQueued():
                line = self.waiting[request_id] = RequestLine(request_id)
                self._enter(line, QUEUED, now)
            case events.EncoderWaitOver() if line is not None and line.stage in (QUEUED, ENCODING):
                self._enter(line, READY, now)
            case events.RequestStarted():
                self._run(request_id, now)
            case events.FirstToken() if line is not None:
                self._enter(line, DECODING, now)
            case events.RequestPreempted():
                self._back(request_id, PREEMPTED, now)
            case events.RequestSuspected():
                self._back(request_id, SUSPECTED, now)
            case events.RequestEnded() if line is not None:
                (self.running if request_id in self.running else self.waiting).pop(request_id)
                self.ended[event.outcome] += 1
                line.error = event.error
                self.recent.append(line)
                self._enter(line, event.outcome, now)

    def _enter(self, line: RequestLine, stage: str, now: float) -> None:
        if line.stage != stage:
            line.stage, line.stage_at = stage, now
            line.stages.append((stage, now))
            if self.changed is not None:
                self.changed(line)

    def _run(self, request_id: str, now: float) -> None:
        line = self.waiting.pop(request_id, None)
        if line is not None:
            self.running[request_id] = line
            self._enter(line, READING, now)

    def _back(self, request_id: str, stage: str, now: float) -> None:
        line = self.running.pop(request_id, None) or self.waiting.get(request_id)
        if line is not None:
            self.waiting[request_id] = line
            self._enter(line, stage, now)

    # -- the engine --------------------------------------------------------------------------------------------------

    def _take_engine(self, event: events.Event) -> None:
        match event:
            case events.StepBegun():
                self._steps[event.step_id] = event.samples
                for request_id in event.request_ids:
                    self._run(request_id, event.time)
            case events.StepEnded(step_id, ok):
                for request_id in self._steps.pop(step_id, ()):
                    line = self.running.get(request_id)
                    if ok and line is not None:
                        line.tokens += 1
                        self._enter(line, DECODING, event.time)
                if not ok and not event.skipped:
                    self._fail(f"step {step_id}: {event.error}")
            case events.StepRetried():
                for request_id in event.request_ids:
                    if request_id in self.running:
                        self._back(request_id, QUEUED, event.time)
            case events.StepsLost():
                self._steps.clear()
                for request_id in list(self.running):
                    self._back(request_id, QUEUED, event.time)
            case events.OutputsLost():
                for entry in self._entries.values():
                    entry.readers.clear()
                self._move(self._entries, RESERVED, event.time)
            case events.RunnerRestarting():
                self._fail(f"restart {event.generation}: {event.error}")
            case events.ActorFailed():
                self._fail(f"{event.actor}: {event.error}")
            case events.StageReached("channels closed"):  # an engine that failed may not have freed its entries
                self._drop(tuple(self._entries), event.time)
                self._wanted.clear()
                self._steps.clear()

    def _fail(self, what: str) -> None:
        self.failures += 1
        self.last_failure = one_line(what)

    # -- encoder outputs ---------------------------------------------------------------------------------------------

    def _take_entry(self, event: events.OfKey) -> None:
        key, entry = event.key, self._entries.get(event.key)
        match event:
            case events.EntryAcquired(_, holder):
                self._wanted.setdefault(key, {})[holder] = holder.rpartition("/")[0]
            case events.EntryRefused(_, holder):
                self._not_wanted(key, holder)
            case events.EntryReserved(_, size):
                self._entries[key] = CacheEntry(key, size)
                self._move((key,), RESERVED, event.time)
            case events.EntryHeld(_, holder):
                self._not_wanted(key, holder)
                if entry is not None:
                    entry.readers.add(holder)
                    self._move((key,), HELD, event.time)
            case events.EntryReleased(_, holder) | events.EntryTakenBack(_, holder):
                self._not_wanted(key, holder)
                if entry is not None and holder in entry.readers:
                    entry.readers.discard(holder)
                    self._move(() if entry.readers else (key,), IDLE, event.time)
            case events.EntryDropped():
                self._drop((key,), event.time)

    def _take_batch(self, event: events.OfKeys) -> None:
        match event:
            case events.EncodeDispatched():
                self._move(event.keys, BEING_ENCODED, event.time)
                for request_id in [one for key in event.keys for one in self._wanted.get(key, {}).values()]:
                    line = self.waiting.get(request_id)
                    if line is not None and line.stage == QUEUED:
                        self._enter(line, ENCODING, event.time)
            case events.EncodeDone():
                self._move(event.keys, IDLE, event.time)
            case events.EncodeBroke():
                self._fail(f"encode of {len(event.keys)}: {event.error}")
                self._move(event.keys, RESERVED, event.time)
            case events.FreeSent():
                self._move(event.keys, FREEING, event.time)
            case events.EntryFreed():
                self._drop(event.keys, event.time)

    def _move(self, keys: Iterable[str], state: str, now: float) -> None:
        for entry in [self._entries[key] for key in keys if key in self._entries]:
            if entry.state != state:
                self.bytes_in[entry.state] -= entry.size
                self.bytes_in[state] += entry.size
                del self.bytes_in[ABSENT]
                entry.state, entry.state_at = state, now
                if self.changed is not None:
                    self.changed(entry)

    def _not_wanted(self, key: str, holder: str) -> None:
        holders = self._wanted.get(key, {})
        holders.pop(holder, None)
        if not holders:
            self._wanted.pop(key, None)

    def _drop(self, keys: Iterable[str], now: float) -> None:
        self._move(keys, ABSENT, now)
        for key in keys:
            self._entries.pop(key, None)
