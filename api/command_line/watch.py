"""``--watch``: what an engine does, as a picture in the terminal.

The engine's events feed an `Overview`, which knows no terminal. `picture` turns the overview into a picture for `rich`.
`View` draws the picture on standard error some times a second, and removes it before each line that is written there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import trio
from attrs import define, field

from ...actors.statistics import EngineStatistics
from ...core import overview
from ...core.overview import Overview

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REFRESHES = 8  # a second
MOST_LINES = 20
RATE_SECONDS = 2.0  # tokens a second are counted over this time

_STAGES: Mapping[str, str] = {
    overview.QUEUED: "dim",
    overview.ENCODING: "yellow",
    overview.READY: "blue",
    overview.READING: "cyan",
    overview.DECODING: "green",
    overview.PREEMPTED: "magenta",
    overview.SUSPECTED: "bold red",
}
_ENTRIES: Mapping[str, str] = {
    overview.HELD: "green",
    overview.BEING_ENCODED: "yellow",
    overview.RESERVED: "magenta",
    overview.IDLE: "blue",
    overview.FREEING: "red",
}
_BAR = 32  # characters

Part: TypeAlias = tuple[str, float, str]  # name, amount, colour


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def picture(
    state: Overview,
    statistics: EngineStatistics | None,
    now: float,
    *,
    title: str,
    most_lines: int,
    rates: tuple[float, float] = (0.0, 0.0),
) -> RenderableType:
    """The picture for `rich`: the engine's figures, then a line for each of the first ``most_lines`` requests.
    ``rates``: tokens and steps a second."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    rule = Rule(Text(title, style="bold"), align="left", style="dim")
    if statistics is None:
        return Group(rule, Text(" opening the model ...", style="dim"))
    parts: list[RenderableType] = [rule, *_figures(state, statistics, rates)]
    count = len(state.running) + len(state.waiting)
    if count:
        drafts = statistics.requests.tokens_accepted > 0
        parts += [Text(), _lines(state, now, most_lines, drafts=drafts)]
    if count > most_lines:
        parts.append(Text(f" +{count - most_lines} more", style="dim"))
    if state.last_failure:
        parts.append(Text(f" last failure  {state.last_failure}", style="red", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _figures(state: Overview, statistics: EngineStatistics, rates: tuple[float, float]) -> Iterator[Text]:
    requests, cache = statistics.requests, statistics.encoder_cache
    styles = {"finished": "", "failed": "red", "aborted": "magenta"}
    ended = [(name, state.ended[name], style) for name, style in styles.items()]
    yield _row(
        "requests", [("running", len(state.running), "green"), ("waiting", len(state.waiting), "yellow"), *ended]
    )
    speed = [("tokens/s", rates[0], "bold"), ("steps/s", rates[1], ""), ("steps", requests.steps, "")]
    yield _row("speed", [*speed, ("failures", state.failures, "red")])
    if requests.pages:
        cached, used = requests.pages_cached, requests.pages - requests.pages_free
        yield _row("pages", [("used", used, "green"), ("cached", cached, "blue")], requests.pages)
    if requests.cross_slots:
        idle, used = requests.cross_slots_idle, requests.cross_slots_used
        yield _row("cross slots", [("used", used, "green"), ("idle", idle, "blue")], requests.cross_slots)
    if cache.entries or cache.encoded:
        held = [(name, state.bytes_in[name], colour) for name, colour in _ENTRIES.items()]
        yield _row("encoder cache", held, cache.capacity, lambda count: f"{count / 2**20:.1f} MiB")


def _row(
    title: str, parts: Sequence[Part], total: float = 0.0, shown: Callable[[float], str] = "{:,.0f}".format
) -> Text:
    """A line of ``parts``. With a ``total``, the line also has a bar with the share of each. A share above 0 has at
    least one character, and the rest of the bar is free.
    """
    from rich.text import Text

    row, left = Text(f" {title:<15}", style="dim", no_wrap=True, overflow="ellipsis"), _BAR
    if total:
        for _, amount, colour in parts:
            share = min(left, math.ceil(amount / total * _BAR))
            row.append("█" * share, style=f"not dim {colour}")
            left -= share
        row.append("·" * left + "  ", style="bright_black")
        parts = [*(part for part in parts if part[1]), ("free", total - sum(part[1] for part in parts), "")]
    for name, amount, colour in parts:
        row.append(shown(amount), style=f"not dim {colour}" if amount else "").append(f" {name}   ")
    return row


def _lines(state: Overview, now: float, most: int, *, drafts: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 1), header_style="dim", pad_edge=False)
    table.add_column(" request", no_wrap=True, max_width=40, overflow="ellipsis")
    table.add_column("stage", no_wrap=True)
    for name in ("waited", "tokens at least" if drafts else "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in state.first_lines(most):
        rate = line.rate(now)
        table.add_row(
            Text(f" {line.request_id}"),
            Text(line.stage, style=_STAGES[line.stage]),
            f"{line.waited(now):.1f} s",
            str(line.tokens or ""),
            f"{rate:.1f}" if rate else "",
        )
    return table


# ---- where it is drawn -----------------------------------------------------------------------------------------------


@define(eq=False)
class View:
    """The picture at the bottom of a terminal. The view removes the picture before a line is written, and draws it
    again at the next refresh. At the end the terminal is as it was before.
    """

    console: Console
    title: str
    state: Overview = field(factory=Overview)
    _statistics: Callable[[], EngineStatistics] | None = field(default=None, init=False)
    _samples: deque[tuple[float, int, int]] = field(factory=deque, init=False)  # time, tokens, steps
    _live: Any = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    async def run(self) -> None:
        """Draws until cancelled."""
        try:
            while True:
                self.refresh()
                await trio.sleep(1 / REFRESHES)
        finally:
            self.close()

    @contextmanager
    def of(self, engine: Any) -> Iterator[None]:
        """Shows ``engine`` during the block, while the engine is open."""
        model = engine.model
        name = model.name.rstrip("/").rpartition("/")[2]
        self.title = f"{self.title} · {name} on {model.device}, {model.dtype}"
        self._statistics = engine.statistics
        try:
            yield
        finally:
            self._statistics = None
            self.close()  # the engine's teardown may log

    def refresh(self) -> None:
        """Draws the present picture."""
        if self._closed:
            return
        from rich.live import Live

        now, statistics = trio.current_time(), None if self._statistics is None else self._statistics()
        rates = (0.0, 0.0) if statistics is None else self._rates(now, statistics)
        most = max(1, min(MOST_LINES, self.console.size.height - 11))
        drawn = picture(self.state, statistics, now, title=self.title, most_lines=most, rates=rates)
        if self._live is None:
            options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
            self._live = Live(console=self.console, transient=True, **options)
            self._live.start()
        self._live.update(drawn, refresh=True)

    def _rates(self, now: float, statistics: EngineStatistics) -> tuple[float, float]:
        """Tokens and steps a second, over the last `RATE_SECONDS`."""
        done = statistics.requests
        self._samples.append((now, done.tokens_committed, done.steps))
        while now - self._samples[0][0] > RATE_SECONDS and len(self._samples) > 2:
            self._samples.popleft()
        begin, tokens, steps = self._samples[0]
        seconds = now - begin or math.inf
        return (done.tokens_committed - tokens) / seconds, (done.steps - steps) / seconds

    def clear(self) -> None:
        """Removes the picture, to make room for a line. The cursor is then where the picture began."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def close(self) -> None:
        """Removes the picture for good."""
        self._closed = True
        self.clear()
