"""``--watch``: what an engine does, as a picture in the terminal.

`WatchState` is fed by events and statistics and knows no terminal; `picture` makes of it what `rich` draws; `View`
draws that on standard error some times a second, and takes it away for every line that is written there.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import trio
from attrs import define, field

from ..actors.supervisor import EngineStatistics
from ..core import events
from ..core.log_lines import one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REFRESHES = 8  # a second
MOST_LANES = 20
RATE_SECONDS = 2.0  # what tokens a second are counted over

# stages of a request
QUEUED, ENCODING, READY = "queued", "encoding", "ready"
READING, WRITING, PREEMPTED, SUSPECTED = "reading", "writing", "preempted", "suspected"
# states of an encoder output
RESERVED, BEING_ENCODED, HELD, IDLE, FREEING = "reserved", "encoding", "held", "idle", "freeing"

_STYLES: Mapping[str, str] = {
    QUEUED: "dim",
    ENCODING: "yellow",
    READY: "blue",
    READING: "cyan",
    WRITING: "green",
    PREEMPTED: "magenta",
    SUSPECTED: "bold red",
}
_BAR = 32  # characters


# ---- what is known ---------------------------------------------------------------------------------------------------


@define(eq=False)
class Lane:
    """A request on its way. Times in seconds of the engine's clock."""

    request_id: str
    queued_at: float
    stage: str = QUEUED
    started_at: float = math.nan
    first_token_at: float = math.nan
    tokens: int = 0  # one for each good step since the first one; draft tokens that were right come on top

    def waited(self, now: float) -> float:
        """Seconds until its first start, or until now."""
        return (now if math.isnan(self.started_at) else self.started_at) - self.queued_at

    def rate(self, now: float) -> float:
        """Tokens a second after the first one; 0 where there is no second one."""
        seconds = now - self.first_token_at
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0


@define(eq=False)
class _Entry:
    size: int
    state: str = RESERVED
    readers: set[str] = field(factory=set)


@define(eq=False)
class WatchState:
    """What the events of an engine have told so far: an observer for `EngineConfig`. Each event costs the same, however
    many requests there are, but for a step's, which costs as much as it runs requests."""

    waiting: dict[str, Lane] = field(factory=dict, init=False)
    running: dict[str, Lane] = field(factory=dict, init=False)
    ended: Counter[str] = field(factory=Counter, init=False)  # requests by outcome
    bytes_in: Counter[str] = field(factory=Counter, init=False)  # of the encoder cache, by state
    failures: int = field(default=0, init=False)
    last_failure: str = field(default="", init=False)
    _entries: dict[str, _Entry] = field(factory=dict, init=False)
    _wanted: dict[str, dict[str, str]] = field(factory=dict, init=False)  # request by holder, by key
    _steps: dict[int, tuple[str, ...]] = field(factory=dict, init=False)  # in flight
    _samples: deque[tuple[float, int, int]] = field(factory=deque, init=False)  # time, tokens, steps

    def __call__(self, event: events.Event) -> None:
        """The next event."""
        take = _TAKES.get(type(event))
        if take is not None:
            take(self, event)

    def sample(self, now: float, statistics: EngineStatistics) -> None:
        """Counters as they are now, for the rates."""
        done = statistics.requests
        self._samples.append((now, done.tokens_committed, done.steps))
        while now - self._samples[0][0] > RATE_SECONDS and len(self._samples) > 2:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """Tokens and steps a second, of late."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (begin, *old), (end, *new) = self._samples[0], self._samples[-1]
        seconds = end - begin
        tokens, steps = ((after - before) / seconds if seconds else 0.0 for before, after in zip(old, new, strict=True))
        return tokens, steps

    def first_lanes(self, most: int) -> list[Lane]:
        """Those that run come first, in the order they started."""
        return list(itertools.islice(itertools.chain(self.running.values(), self.waiting.values()), most))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _lane(self, request_id: str) -> Lane | None:
        return self.running.get(request_id) or self.waiting.get(request_id)

    def _queued(self, event: events.RequestQueued) -> None:
        self.waiting[event.request_id] = Lane(event.request_id, event.time)

    def _wait_over(self, event: events.EncoderWaitOver) -> None:
        lane = self.waiting.get(event.request_id)
        if lane is not None and lane.stage in (QUEUED, ENCODING):
            lane.stage = READY

    def _started(self, event: events.RequestStarted) -> None:
        self._run(event.request_id, event.time)

    def _run(self, request_id: str, now: float) -> None:
        lane = self.waiting.pop(request_id, None)
        if lane is None:
            return
        self.running[request_id] = lane
        lane.stage = READING
        if math.isnan(lane.started_at):
            lane.started_at = now

    def _first_token(self, event: events.FirstToken) -> None:
        lane = self._lane(event.request_id)
        if lane is not None:
            lane.stage, lane.first_token_at, lane.tokens = WRITING, event.time, max(1, lane.tokens)

    def _back(self, request_id: str, stage: str) -> None:
        lane = self.running.pop(request_id, None) or self.waiting.get(request_id)
        if lane is not None:
            lane.stage = stage
            self.waiting[request_id] = lane

    def _preempted(self, event: events.RequestPreempted) -> None:
        self._back(event.request_id, PREEMPTED)

    def _suspected(self, event: events.RequestSuspected) -> None:
        self._back(event.request_id, SUSPECTED)

    def _retried(self, event: events.StepRetried) -> None:
        for request_id in event.request_ids:
            if request_id in self.running:
                self._back(request_id, QUEUED)

    def _request_ended(self, event: events.RequestEnded) -> None:
        lane = self.running.pop(event.request_id, None) or self.waiting.pop(event.request_id, None)
        if lane is not None:
            self.ended[event.outcome] += 1

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step_begun(self, event: events.StepBegun) -> None:
        self._steps[event.step_id] = event.request_ids
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
            lane = self.running.get(request_id)
            if lane is not None and not math.isnan(lane.first_token_at):
                lane.tokens += 1
                lane.stage = WRITING

    def _steps_lost(self, _: events.StepsLost) -> None:
        self._steps.clear()
        for request_id in list(self.running):
            self._back(request_id, QUEUED)

    def _fail(self, what: str) -> None:
        self.failures += 1
        self.last_failure = one_line(what)

    def _restarting(self, event: events.RunnerRestarting) -> None:
        self._fail(f"restart {event.generation}: {event.error}")

    def _actor_failed(self, event: events.ActorFailed) -> None:
        self._fail(f"{event.actor}: {event.error}")

    # -- encoder outputs ---------------------------------------------------------------------------------------------

    def _move(self, key: str, state: str) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        self.bytes_in[entry.state] -= entry.size
        self.bytes_in[state] += entry.size
        entry.state = state

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
        self._drop((event.key,))
        self._entries[event.key] = _Entry(event.size)
        self.bytes_in[RESERVED] += event.size

    def _dispatched(self, event: events.EncodeDispatched) -> None:
        for key in event.keys:
            self._move(key, BEING_ENCODED)
            for request_id in self._wanted.get(key, {}).values():
                lane = self.waiting.get(request_id)
                if lane is not None and lane.stage == QUEUED:
                    lane.stage = ENCODING

    def _encoded(self, event: events.EncodeDone) -> None:
        for key in event.keys:
            self._move(key, IDLE)

    def _broke(self, event: events.EncodeBroke) -> None:
        self._fail(f"encode of {len(event.keys)}: {event.error}")
        for key in event.keys:
            self._move(key, RESERVED)

    def _held(self, event: events.EntryHeld) -> None:
        self._not_wanted(event.key, event.holder)
        entry = self._entries.get(event.key)
        if entry is not None:
            entry.readers.add(event.holder)
            self._move(event.key, HELD)

    def _released(self, event: events.EntryReleased | events.EntryTakenBack) -> None:
        self._not_wanted(event.key, event.holder)
        entry = self._entries.get(event.key)
        if entry is None or event.holder not in entry.readers:
            return
        entry.readers.discard(event.holder)
        if not entry.readers:
            self._move(event.key, IDLE)

    def _free_sent(self, event: events.FreeSent) -> None:
        for key in event.keys:
            self._move(key, FREEING)

    def _freed(self, event: events.EntryFreed) -> None:
        self._drop(event.keys)

    def _dropped(self, event: events.EntryDropped) -> None:
        self._drop((event.key,))

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.bytes_in[entry.state] -= entry.size

    def _outputs_lost(self, _: events.OutputsLost) -> None:
        for key, entry in self._entries.items():
            entry.readers.clear()
            self._move(key, RESERVED)


_TAKES: Mapping[type[events.Event], Callable[[WatchState, Any], None]] = {
    events.RequestQueued: WatchState._queued,
    events.EncoderWaitOver: WatchState._wait_over,
    events.RequestStarted: WatchState._started,
    events.FirstToken: WatchState._first_token,
    events.RequestPreempted: WatchState._preempted,
    events.RequestSuspected: WatchState._suspected,
    events.RequestEnded: WatchState._request_ended,
    events.StepBegun: WatchState._step_begun,
    events.StepEnded: WatchState._step_ended,
    events.StepRetried: WatchState._retried,
    events.StepsLost: WatchState._steps_lost,
    events.RunnerRestarting: WatchState._restarting,
    events.ActorFailed: WatchState._actor_failed,
    events.EntryAcquired: WatchState._entry_acquired,
    events.EntryRefused: WatchState._refused,
    events.EntryReserved: WatchState._reserved,
    events.EntryHeld: WatchState._held,
    events.EntryReleased: WatchState._released,
    events.EntryTakenBack: WatchState._released,
    events.EntryDropped: WatchState._dropped,
    events.EncodeDispatched: WatchState._dispatched,
    events.EncodeDone: WatchState._encoded,
    events.EncodeBroke: WatchState._broke,
    events.FreeSent: WatchState._free_sent,
    events.EntryFreed: WatchState._freed,
    events.OutputsLost: WatchState._outputs_lost,
}


# ---- what is drawn ---------------------------------------------------------------------------------------------------

Part: TypeAlias = tuple[str, float, str]  # name, amount, colour


def picture(
    state: WatchState, statistics: EngineStatistics | None, now: float, *, title: str, most_lanes: int
) -> RenderableType:
    """What `rich` draws: the engine's figures, then a line for each of the first ``most_lanes`` requests."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    parts: list[RenderableType] = [Rule(Text(title, style="bold"), align="left", style="dim")]
    if statistics is None:
        parts.append(Text(" opening the model ...", style="dim"))
        return Group(*parts)
    parts.append(_figures(state, statistics))
    if state.running or state.waiting:
        parts.append(Text())
        parts.append(_lanes(state, now, most_lanes, drafts=statistics.requests.tokens_accepted > 0))
    hidden = len(state.running) + len(state.waiting) - most_lanes
    if hidden > 0:
        parts.append(Text(f" +{hidden} more", style="dim"))
    if state.last_failure:
        failure = Text(f" last failure  {state.last_failure}", style="red", no_wrap=True, overflow="ellipsis")
        parts.append(failure)
    return Group(*parts)


def _figures(state: WatchState, statistics: EngineStatistics) -> RenderableType:
    from rich.table import Table

    requests, cache = statistics.requests, statistics.encoder_cache
    grid = Table.grid(padding=(0, 2))
    for style in ("dim", "", ""):
        grid.add_column(style=style, no_wrap=True)
    tokens, steps = state.rates()
    counts = [("running", len(state.running), "green"), ("waiting", len(state.waiting), "yellow")]
    counts += [(name, state.ended[name], "red" if name == "failed" else "") for name in ("finished", "failed")]
    counts += [("aborted", state.ended["aborted"], "magenta")]
    grid.add_row(" requests", *_counted(counts))
    speed = [("tokens/s", round(tokens), "bold"), ("steps/s", round(steps), ""), ("steps", requests.steps, "")]
    grid.add_row(" speed", *_counted([*speed, ("failures", state.failures, "red")]))
    if requests.pages:
        cached, used = requests.pages_cached, requests.pages - requests.pages_free
        free = requests.pages_free - cached
        pages = [("used", used, "green"), ("cached", cached, "blue"), ("free", free, "bright_black")]
        grid.add_row(" pages", _bar(pages, requests.pages), _legend(pages, str))
    if requests.cross_slots:
        idle, slots = requests.cross_slots_idle, requests.cross_slots
        used = requests.cross_slots_used
        places = [("used", used, "green"), ("idle", idle, "blue"), ("free", slots - used - idle, "bright_black")]
        grid.add_row(" cross slots", _bar(places, slots), _legend(places, str))
    if cache.entries or cache.encoded:
        colours = {HELD: "green", BEING_ENCODED: "yellow", RESERVED: "magenta", IDLE: "blue", FREEING: "red"}
        held = [(name, state.bytes_in[name], colour) for name, colour in colours.items()]
        free_bytes = [("free", cache.capacity - sum(state.bytes_in.values()), "bright_black")]
        grid.add_row(" encoder cache", _bar([*held, *free_bytes], cache.capacity), _legend(held, _mebibytes))
    return grid


def _counted(counts: Sequence[tuple[str, int, str]]) -> tuple[Text, Text]:
    """Figures for the two columns: the first two, and the rest."""
    from rich.text import Text

    told = []
    for part in (counts[:2], counts[2:]):
        text = Text()
        for name, count, style in part:
            text.append(f"{count:,}", style=style if count else "dim").append(f" {name}   ", style="dim")
        told.append(text)
    return told[0], told[1]


def _bar(parts: Sequence[Part], total: float) -> Text:
    """The shares of ``total``; what there is at all has one character at least."""
    from rich.text import Text

    bar, left = Text(), _BAR
    for name, amount, colour in parts:
        last = name == "free"
        share = left if last else min(left, math.ceil(max(amount, 0) / total * _BAR))
        bar.append(("·" if last else "█") * share, style=colour)
        left -= share
    return bar


def _legend(parts: Sequence[Part], shown: Callable[[float], str]) -> Text:
    from rich.text import Text

    legend = Text()
    for name, amount, colour in parts:
        if amount:
            legend.append(shown(amount), style=colour).append(f" {name}   ", style="dim")
    return legend


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _lanes(state: WatchState, now: float, most: int, *, drafts: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim", pad_edge=False)
    table.add_column(" request", no_wrap=True, max_width=40, overflow="ellipsis")
    table.add_column("stage", no_wrap=True)
    for name in ("waited", "tokens at least" if drafts else "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for lane in state.first_lanes(most):
        rate = lane.rate(now)
        table.add_row(
            Text(f" {lane.request_id}"),
            Text(lane.stage, style=_STYLES[lane.stage]),
            f"{lane.waited(now):.1f} s",
            str(lane.tokens or ""),
            f"{rate:.1f}" if rate else "",
        )
    return table


# ---- where it is drawn -----------------------------------------------------------------------------------------------


@define(eq=False)
class View:
    """The picture at the bottom of a terminal. It is taken away before a line is written there, and comes back with the
    next refresh; at the end the terminal is as it was."""

    console: Console
    title: str
    state: WatchState = field(factory=WatchState)
    _statistics: Callable[[], EngineStatistics] | None = field(default=None, init=False)
    _live: Any = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    async def run(self) -> None:
        """Draws until it is cancelled."""
        try:
            while True:
                self.refresh()
                await trio.sleep(1 / REFRESHES)
        finally:
            self.close()

    @contextmanager
    def of(self, engine: Any) -> Iterator[None]:
        """The engine is open, for the time of the block."""
        model = engine.model
        name = model.name.rstrip("/").rpartition("/")[2]
        self.title = f"{self.title} · {name} on {model.device}, {model.dtype}"
        self._statistics = engine.statistics
        try:
            yield
        finally:
            self._statistics = None
            self.close()  # its teardown may log, and there is nothing to see

    def refresh(self) -> None:
        """Draws the picture of now."""
        if self._closed:
            return
        now, statistics = trio.current_time(), None if self._statistics is None else self._statistics()
        if statistics is not None:
            self.state.sample(now, statistics)
        most = max(1, min(MOST_LANES, self.console.size.height - 11))
        drawn = picture(self.state, statistics, now, title=self.title, most_lanes=most)
        if self._live is None:
            self._live = self._new_live()
            self._live.start()
        self._live.update(drawn, refresh=True)

    def _new_live(self) -> Any:
        from rich.live import Live

        return Live(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def clear(self) -> None:
        """Makes room for a line; the cursor is where it was before the picture."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def close(self) -> None:
        """For good."""
        self._closed = True
        self.clear()
