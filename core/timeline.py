"""Conversion of events to records of Chrome's Trace Event Format, which ui.perfetto.dev and chrome://tracing display.

A record is a JSON object. Its phase ``ph`` is one of these: ``B`` and ``E``, the begin and the end of a slice; ``C``, a
counter; ``i``, an instant; ``M``, the name of a process or track. Slices nest within their track. ``ts`` is in
microseconds since the first event. A "process" is a group of tracks here. The engine's group has tracks for steps,
encode batches and notes. The other group has one track for each request.

Source: "Trace Event Format", Google, JSON Array Format.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import asdict, define, field

from . import events
from .log_lines import one_line
from .overview import BEING_ENCODED, FREEING, HELD, IDLE, RESERVED, Change, Overview, RequestLine

Record: TypeAlias = dict[str, Any]

_ENGINE, _REQUESTS = 1, 2  # processes
_STEPS, _ENCODES, _NOTES, _FIRST_REQUEST = 11, 12, 13, 100  # tracks; no two processes have the same
_STATES = (HELD, BEING_ENCODED, RESERVED, IDLE, FREEING)


@define(eq=False)
class _Track:
    """One track. It counts its open slices, so that each slice gets exactly one end."""

    process: int
    track: int
    out: list[Record]
    open: int = field(default=0, init=False)

    def begin(self, ts: float, name: str, **args: object) -> None:
        self.open += 1
        self.out.append({"ph": "B", "name": name, "pid": self.process, "tid": self.track, "ts": ts, "args": args})

    def end(self, ts: float, **args: object) -> None:
        if self.open:
            self.open -= 1
            self.out.append({"ph": "E", "pid": self.process, "tid": self.track, "ts": ts, "args": args})

    def end_all(self, ts: float, **args: object) -> None:
        while self.open:
            self.end(ts, **(args if self.open == 1 else {}))


@define(eq=False)
class Timeline:
    """Converts the events of one engine to records, one event after another, in their order.

    The device runs one step while the next step waits already. So the slice of a step begins when the step is sent, or
    when the step before it ends, whichever is later.
    """

    _out: list[Record] = field(factory=list, init=False)
    _overview: Overview = field(init=False)
    _requests: dict[str, _Track] = field(factory=dict, init=False)  # requests that have not ended
    _seen: int = field(default=0, init=False)  # number of requests so far
    _steps: deque[events.StepBegun] = field(factory=deque, init=False)  # in flight; the first one runs
    _tracks: dict[int, _Track] = field(init=False)  # the engine's own
    _first: float = field(default=math.nan, init=False)
    _ts: float = field(default=0.0, init=False)
    _pages: int = field(default=0, init=False)
    _told: dict[str, Record] = field(factory=dict, init=False)  # the latest values of each counter

    def __attrs_post_init__(self) -> None:
        self._overview = Overview(self._changed)
        self._tracks = {track: _Track(_ENGINE, track, self._out) for track in (_STEPS, _ENCODES, _NOTES)}
        for process, name in ((_ENGINE, "engine"), (_REQUESTS, "requests")):
            self._name("process", process, None, name)
        for track, name in ((_STEPS, "steps"), (_ENCODES, "encode batches"), (_NOTES, "notes")):
            self._name("thread", _ENGINE, track, name)

    def take(self, event: events.Event) -> list[Record]:
        """Returns the records that ``event`` adds. Time never runs backwards: an event without a time gets the time of
        the event before it."""
        if math.isnan(self._first):
            self._first = event.time
        if event.time - self._first > self._ts / 1e6:
            self._ts = round((event.time - self._first) * 1e6, 3)
        self._draw(event)
        self._overview(event)  # after `_draw`, which adds the track of a new request and removes that of an ended one
        self._count()
        return self._take()

    def end(self) -> list[Record]:
        """Returns the ends of all slices that are still open, since no more events come."""
        for track in (*self._requests.values(), *self._tracks.values()):
            track.end_all(self._ts, cut_off=True)
        return self._take()

    def _take(self) -> list[Record]:
        out = self._out[:]
        self._out.clear()
        return out

    def _name(self, kind: str, process: int, track: int | None, name: str) -> None:
        of: Record = {"pid": process} | ({} if track is None else {"tid": track})
        self._out.append({"ph": "M", "name": f"{kind}_name", **of, "args": {"name": name}})
        self._out.append({"ph": "M", "name": f"{kind}_sort_index", **of, "args": {"sort_index": track or process}})

    def _draw(self, event: events.Event) -> None:
        steps, encodes = self._tracks[_STEPS], self._tracks[_ENCODES]
        match event:
            case events.RequestQueued(request_id):
                self._request_queued(request_id)
            case events.RequestEnded():
                self._request_ended(event)
            case events.StepBegun():
                self._pages = event.pages_used
                self._steps.append(event)
                if len(self._steps) == 1:
                    self._run_first_step()
            case events.StepEnded():
                self._step_ended(event)
            case events.StepsLost():
                self._steps.clear()
                steps.end_all(self._ts, lost=True)
            case events.EncodeDispatched(keys, embeddings):
                encodes.end_all(self._ts, cut_off=True)
                shown = [key[:12] for key in keys]
                encodes.begin(self._ts, "encode", items=len(keys), embeddings=embeddings, keys=shown)
            case events.EncodeDone():
                encodes.end(self._ts, ok=True)
            case events.EncodeBroke():
                encodes.end(self._ts, ok=False, error=one_line(event.error))
            case events.OutputsLost():
                encodes.end_all(self._ts, lost=True)
        if event.note:
            fields = asdict(event, filter=lambda field, _: field.name not in ("time", "keys"))
            args = {name: one_line(value) if name == "error" else value for name, value in fields.items()}
            note = {"ph": "i", "s": "p", "name": event.note, "pid": _ENGINE, "tid": _NOTES, "ts": self._ts}
            self._out.append({**note, "args": args})

    # -- requests ----------------------------------------------------------------------------------------------------

    def _request_queued(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests.pop(request_id).end_all(self._ts, cut_off=True)
        track = self._requests[request_id] = _Track(_REQUESTS, _FIRST_REQUEST + self._seen, self._out)
        self._seen += 1
        self._name("thread", _REQUESTS, track.track, request_id)
        track.begin(self._ts, "request", id=request_id)

    def _changed(self, change: Change) -> None:
        """Draws the stage that a request enters. The last stage is the outcome, which is drawn with the end of the
        request."""
        if not isinstance(change, RequestLine) or change.request_id not in self._requests:
            return
        track = self._requests[change.request_id]
        if track.open > 1:
            track.end(self._ts)
        track.begin(self._ts, change.stage)

    def _request_ended(self, event: events.RequestEnded) -> None:
        track = self._requests.pop(event.request_id, None)
        if track is not None:
            failed = {"error": one_line(event.error)} if event.error else {}
            track.end_all(self._ts, outcome=event.outcome, **failed)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _run_first_step(self) -> None:
        step = self._steps[0]
        self._tracks[_STEPS].begin(
            self._ts, "step", id=step.step_id, tokens=step.tokens, requests=list(step.request_ids)
        )

    def _step_ended(self, event: events.StepEnded) -> None:
        told = {} if event.ok else {"skipped": event.skipped, "error": one_line(event.error)}
        while self._steps and self._steps[0].step_id <= event.step_id:
            self._steps.popleft()
            self._tracks[_STEPS].end(self._ts, ok=event.ok, **told)
            if self._steps:
                self._run_first_step()

    # -- counters ----------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Adds records for the counters that have changed."""
        known = self._overview
        if not known.running and not known.waiting and not self._steps:
            self._pages = 0
        self._counter("requests", running=len(known.running), waiting=len(known.waiting))
        self._counter("encoder cache bytes", **{state: known.bytes_in[state] for state in _STATES})
        self._counter("pages", used=self._pages)

    def _counter(self, name: str, **values: int) -> None:
        if self._told.get(name) != values:
            self._told[name] = values
            self._out.append({"ph": "C", "name": name, "pid": _ENGINE, "ts": self._ts, "args": values})


def timeline_of(trace: Sequence[events.Event]) -> list[Record]:
    """Returns all records of ``trace``, in order."""
    timeline = Timeline()
    return [record for event in trace for record in timeline.take(event)] + timeline.end()
