"""Traces in Chrome's format are well-formed, whatever happened: on traces of simulated engines, on events that no
engine emits, and wherever the events end. And they tell what the events told."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import trio
from attrs import evolve, fields
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet import EngineConfig
from triolet.core import events as e
from triolet.core.errors import InvalidRequest
from triolet.core.event_lines import event_of, line_of, read_events
from triolet.core.timeline import Record, Timeline, timeline_of
from triolet_testing import SCENARIOS, Fault, FaultKind, scenarios, schedules, simulate
from triolet_testing.faults import ACTORS, OCCASIONS
from triolet_testing.sim import sim_engine
from triolet_testing.trio_tools import Uniform
from triolet_testing.trio_tools.schedules import Schedule

from ..actors.shared import ask

PHASES: Mapping[str, set[str]] = {  # what the documented format asks of each phase that we use
    "B": {"name", "pid", "tid", "ts"},
    "E": {"pid", "tid", "ts"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "M": {"name", "pid", "args"},
}
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
METADATA |= {"thread_sort_index": "sort_index"}


def check_format(records: Sequence[Record]) -> None:
    """What "Trace Event Format" says of a JSON array, and what its viewers assume."""
    json.dumps(records, allow_nan=False)
    names = {record["pid"]: record["args"]["name"] for record in records if record.get("name") == "process_name"}
    opened: dict[int, list[Record]] = defaultdict(list)
    process_of: dict[int, int] = {}
    latest = 0.0
    for record in records:
        assert PHASES[record["ph"]] <= record.keys(), record
        assert all(isinstance(record[name], int) for name in ("pid", "tid") if name in record)
        if "tid" in record:
            assert process_of.setdefault(record["tid"], record["pid"]) == record["pid"]
        if record["ph"] == "M":
            assert METADATA[record["name"]] in record["args"]
            continue
        assert latest <= record["ts"] < math.inf, "timestamps run backwards"
        latest = record["ts"]
        match record["ph"]:
            case "B":
                opened[record["tid"]].append(record)
                nested = 2 if names[record["pid"]] == "requests" else 1  # a request and its stage
                assert len(opened[record["tid"]]) <= nested, "a slice within another one that should have ended"
            case "E":
                assert opened[record["tid"]].pop()["ts"] <= latest
            case "C":
                assert record["args"]
                assert all(isinstance(value, int) for value in record["args"].values())
            case "i":
                assert record["s"] in ("g", "p", "t")
    assert not any(opened.values()), "a slice without an end"
    named = {record["tid"] for record in records if record["name" if "name" in record else "ph"] == "thread_name"}
    assert opened.keys() <= named


def slices(records: Iterable[Record]) -> list[tuple[str, Record, Record]]:
    """Each with its name, its begin and its end."""
    opened: dict[int, list[Record]] = defaultdict(list)
    found = []
    for record in records:
        if record["ph"] == "B":
            opened[record["tid"]].append(record)
        elif record["ph"] == "E":
            begin = opened[record["tid"]].pop()
            found.append((begin["name"], begin, record))
    return found


def check_tale(trace: Sequence[e.Event], records: Sequence[Record]) -> None:
    """Every request has its slice, which ends as the request did; its stages fill it; each step and batch has one."""
    names = {record["tid"]: record["args"]["name"] for record in records if record.get("name") == "thread_name"}
    found = slices(records)
    ends = {event.request_id: event.outcome for event in trace if isinstance(event, e.RequestEnded)}
    queued = [event.request_id for event in trace if isinstance(event, e.RequestQueued)]
    told = {names[begin["tid"]]: end["args"].get("outcome") for name, begin, end in found if name == "request"}
    assert told == {request_id: ends.get(request_id) for request_id in queued}
    for name, begin, end in found:
        if name == "request":
            inner = [
                (one["ts"], other["ts"]) for kind, one, other in found if one["tid"] == begin["tid"] and kind != name
            ]
            edges = [begin["ts"], *(edge for pair in inner for edge in pair), end["ts"]]
            assert edges == sorted(edges)
            assert edges[::2] == edges[1::2], "stages leave a gap"
    counts = Counter(name for name, _, _ in found)
    assert counts["encode"] == sum(isinstance(event, e.EncodeDispatched) for event in trace)
    done = [event.step_id for event in trace if isinstance(event, e.StepEnded)]
    steps = [begin["args"]["id"] for name, begin, end in found if name == "step" and "ok" in end["args"]]
    assert steps == done


def check(trace: Sequence[e.Event]) -> list[Record]:
    records = timeline_of(trace)
    check_format(records)
    check_tale(trace, records)
    return records


# -- traces of simulated engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_trace_of_every_scenario_is_well_formed_and_tells_all(name: str) -> None:
    trace = simulate(SCENARIOS[name], Uniform(3)).trace
    records = check(trace)
    assert records[-1]["ph"] != "E", "something was still open at the end of the engine"
    counters = {record["name"]: record["args"] for record in records if record["ph"] == "C"}
    assert {name: set(values.values()) for name, values in counters.items()} == {
        "requests": {0},
        "encoder cache bytes": {0},
        "pages": {0},
    }


@pytest.mark.parametrize("kind", FaultKind)
def test_the_trace_of_every_kind_of_fault_is_well_formed_and_tells_all(kind: FaultKind) -> None:
    met, scenario = 0, SCENARIOS["adapters" if kind is FaultKind.ADAPTER_FAILS else "plain"]
    for step in (1, 3, 10, 40):
        task = OCCASIONS.get(kind, "triolet scheduler" if kind is FaultKind.CRASH else "main")
        tasks = [*ACTORS] if kind is FaultKind.CRASH else [task]
        for one in tasks:
            try:
                outcome = simulate(scenario, Uniform(step), Fault(kind, one, step))
            except ValueError:  # there is no such task
                continue
            met += outcome.met
            check(outcome.trace)
    assert met or kind in (FaultKind.SLEEP_FAILS, FaultKind.WAKE_FAILS)


@settings(max_examples=40)
@given(scenario=scenarios(), schedule=schedules(), cut=st.floats(0, 1))
def test_wherever_the_events_end_every_slice_has_its_end(scenario: Any, schedule: Schedule, cut: float) -> None:
    """As in the log of a process that died."""
    trace = simulate(scenario, schedule).trace
    check(trace)
    check_format(timeline_of(trace[: round(cut * len(trace))]))


# -- events that no engine emits -------------------------------------------------------------------------------------

NAMES = st.sampled_from("abc")
VALUES = {
    "str": NAMES,
    "int": st.integers(0, 3),
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(NAMES, max_size=2).map(tuple),
    "tuple[int, ...]": st.lists(st.integers(0, 3), max_size=2).map(tuple),
    "float": st.floats(0, 9) | st.just(math.nan),
}
ROOTS = (e.Event, e.OfRequest, e.OfHolder, e.OfKeys)
KINDS = [one for one in vars(e).values() if isinstance(one, type) and issubclass(one, e.Event) and one not in ROOTS]
SLICED = [  # those that begin and end slices
    *(e.RequestQueued, e.RequestEnded, e.RequestStarted, e.StepBegun, e.StepEnded, e.StepsLost),
    *(e.EncodeDispatched, e.EncodeDone, e.EncodeBroke, e.OutputsLost),
]


def of(kinds: Sequence[type[e.Event]]) -> st.SearchStrategy[e.Event]:
    return st.one_of([st.builds(kind, **{one.name: VALUES[str(one.type)] for one in fields(kind)}) for kind in kinds])


@given(st.lists(of(SLICED), max_size=30) | st.lists(of(KINDS), max_size=30))
def test_whatever_events_come_in_whatever_order_the_trace_is_well_formed(trace: list[e.Event]) -> None:
    check_format(timeline_of(trace))


def test_a_record_is_told_with_its_event_and_not_later() -> None:
    """A trace is written while the engine runs."""
    trace = simulate(SCENARIOS["plain"], Uniform(3)).trace
    timeline = Timeline()
    seen = [timeline.take(event) for event in trace]
    assert [record for some in seen for record in some] + timeline.end() == timeline_of(trace)
    (queued,) = [some for event, some in zip(trace, seen, strict=True) if event == first(trace, e.RequestQueued)]
    assert [record["name"] for record in queued if record["ph"] == "B"] == ["request", "queued"]


def first(trace: Sequence[e.Event], kind: type[e.Event]) -> e.Event:
    return next(event for event in trace if isinstance(event, kind))


# -- what is told ----------------------------------------------------------------------------------------------------


def test_a_step_begins_when_the_one_before_it_ends() -> None:
    """Two are in flight, and the device runs one at a time."""
    trace = [
        e.StepBegun(0, ("r",), (), (), 5, pages_used=2, time=10.0),
        e.StepBegun(1, ("r",), (), (), 1, pages_used=2, time=10.5),
        e.StepEnded(0, ok=True, time=11.0),
        e.StepEnded(1, ok=False, error="RuntimeError: bo\nom", time=13.0),
    ]
    records = timeline_of(trace)
    found = [(begin["ts"], end["ts"], begin["args"], end["args"]) for _, begin, end in slices(records)]
    assert found == [
        (0.0, 1e6, {"id": 0, "tokens": 5, "requests": ["r"]}, {"ok": True}),
        (
            1e6,
            3e6,
            {"id": 1, "tokens": 1, "requests": ["r"]},
            {"ok": False, "skipped": False, "error": "RuntimeError: bo om"},
        ),
    ]
    assert [record["name"] for record in records if record["ph"] == "i"] == ["step failed"]


def test_the_stages_of_a_request_are_those_of_the_live_view() -> None:
    trace = [
        e.RequestQueued("r", time=0.0),
        e.EntryAcquired("k", "r/0", time=0.0),
        e.EntryReserved("k", 8, time=1.0),
        e.EncodeDispatched(("k",), 1, time=1.0),
        e.EncodeDone(("k",), time=2.0),
        e.EntryHeld("k", "r/0", time=2.0),
        e.EncoderWaitOver("r", time=2.0),
        e.RequestStarted("r", 3, time=3.0),
        e.StepBegun(0, ("r",), ("k",), ("r/0",), 1, ("r",), pages_used=3, time=3.0),
        e.StepEnded(0, ok=True, time=4.0),
        e.FirstToken("r", time=4.0),
        e.RequestEnded("r", "failed", "PoisonRequest: x", time=6.0),
    ]
    records = check(trace)
    stages = {name: (begin["ts"] / 1e6, end["ts"] / 1e6) for name, begin, end in slices(records)}
    assert stages == {
        "queued": (0, 1),
        "encoding": (1, 2),
        "encode": (1, 2),
        "ready": (2, 3),
        "reading": (3, 4),
        "step": (3, 4),
        "decoding": (4, 6),
        "request": (0, 6),
    }
    (end,) = [end["args"] for name, _, end in slices(records) if name == "request"]
    assert end == {"outcome": "failed", "error": "PoisonRequest: x"}
    pages = [(record["ts"] / 1e6, record["args"]["used"]) for record in records if record.get("name") == "pages"]
    assert pages == [(0, 0), (3, 3), (6, 0)]


async def test_the_pages_that_are_told_are_those_of_the_planner(autojump_clock: Any) -> None:
    def observe(event: e.Event) -> None:
        if isinstance(event, e.StepBegun):
            requests = engine.statistics().requests
            told.append((event.pages_used, requests.pages - requests.pages_free))

    told: list[tuple[int, int]] = []
    async with sim_engine(config=EngineConfig(observer=observe)) as engine, trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, engine, number)
    assert all(used == known for used, known in told)
    assert max(told) > (1, 1)


# -- lines of an event log -------------------------------------------------------------------------------------------


@given(of(KINDS))
def test_an_event_is_read_from_its_line_as_it_was(event: e.Event) -> None:
    read = event_of(line_of(event))
    assert read == event
    assert type(read) is type(event)
    assert read.time == event.time or (math.isnan(read.time) and math.isnan(event.time))


@settings(max_examples=100)
@given(st.text(max_size=20) | st.lists(st.none() | st.integers(), max_size=3).map(json.dumps))
def test_a_line_that_is_no_event_is_told(line: str) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: lines that triolet\.EventLog writes"):
        event_of(line)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "'' is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"event": "Nonsense"}', "is not an event of this version"),
        ('{"event": ["RequestQueued"]}', "is not an event of this version"),
        ('{"event": "RequestQueued"}', "the event RequestQueued lacks request_id, or has a wrong type of value there"),
        ('{"event": "RequestQueued", "request_id": 5}', "lacks request_id, or has a wrong type"),
        ('{"event": "RequestQueued", "request_id": "r", "more": 1}', "lacks more, or has a wrong type"),
        ('{"event": "RequestQueued", "request_id": "r", "time": Infinity}', "lacks time, or has a wrong type"),
        ('{"event": "StepEnded", "step_id": true, "ok": 1}', "lacks step_id, ok, or has a wrong type"),
    ],
)
def test_what_is_wrong_in_a_line_is_told(line: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        event_of(line)


def test_a_log_of_two_engines_is_told_by_its_line() -> None:
    trace = [e.RequestQueued("r", time=5.0), e.RequestQueued("s"), e.RequestQueued("t", time=4.0)]
    with pytest.raises(
        InvalidRequest, match="line 3 is earlier than the line before it: the log has events of several"
    ):
        list(read_events(map(line_of, trace)))


def test_an_older_log_without_a_newer_field_is_read() -> None:
    event = e.StepBegun(1, (), (), (), 2, time=3.0)
    line = json.loads(line_of(evolve(event, pages_used=9)))
    del line["pages_used"]
    assert event_of(json.dumps(line)) == event


def test_what_a_restart_loses_ends_when_it_is_lost() -> None:
    trace = [
        e.EncodeDispatched(("k",), 1, time=0.0),
        e.StepBegun(0, (), (), (), 1, time=0.0),
        e.StepBegun(1, (), (), (), 1, time=1.0),
        e.RunnerRestarting(1, "RuntimeError: boom", time=2.0),
        e.OutputsLost(1, time=3.0),
        e.StepsLost(1, time=4.0),
        e.StepBegun(2, (), (), (), 1, time=5.0),
        e.StepEnded(2, ok=True, time=6.0),
    ]
    records = timeline_of(trace)
    found = [(name, begin["ts"] / 1e6, end["ts"] / 1e6, end["args"]) for name, begin, end in slices(records)]
    assert found == [("encode", 0, 3, {"lost": True}), ("step", 0, 4, {"lost": True}), ("step", 5, 6, {"ok": True})]
    notes = [record["name"] for record in records if record["ph"] == "i"]
    assert notes == ["runner restarts", "encoder outputs lost", "steps lost"]
