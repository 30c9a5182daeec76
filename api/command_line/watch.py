"""``--watch``: what an engine does, as a picture in the terminal.

`WatchState` is fed by events and statistics and knows no terminal; `picture` makes of it what `rich` draws; `View`
draws the picture on standard error some times a second, and takes it away for every line that is written there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import trio
from attrs import define, field

from ...actors.statistics import EngineStatistics
from ...core.overview import (
    BEING_ENCODED,
    DECODING,
    ENCODING,
    FREEING,
    HELD,
    IDLE,
    PREEMPTED,
    QUEUED,
    READING,
    READY,
    RESERVED,
    SUSPECTED,
)
from .watch_state import WatchState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REFRESHES = 8  # a second
MOST_LINES = 20

_STYLES: Mapping[str, str] = {
    QUEUED: "dim",
    ENCODING: "yellow",
    READY: "blue",
    READING: "cyan",
    DECODING: "green",
    PREEMPTED: "magenta",
    SUSPECTED: "bold red",
}
_BAR = 32  # characters


# ---- what is drawn ---------------------------------------------------------------------------------------------------

Part: TypeAlias = tuple[str, float, str]  # name, amount, colour


def picture(
    state: WatchState, statistics: EngineStatistics | None, now: float, *, title: str, most_lines: int
) -> RenderableType:
    """The picture for `rich`: the engine's figures, then a line for each of the first ``most_lines`` requests."""
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
        parts.append(_lines(state, now, most_lines, drafts=statistics.requests.tokens_accepted > 0))
    hidden = len(state.running) + len(state.waiting) - most_lines
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
    """Figures for the two columns: the first two, and the others."""
    from rich.text import Text

    texts = []
    for part in (counts[:2], counts[2:]):
        text = Text()
        for name, count, style in part:
            text.append(f"{count:,}", style=style if count else "dim").append(f" {name}   ", style="dim")
        texts.append(text)
    return texts[0], texts[1]


def _bar(parts: Sequence[Part], total: float) -> Text:
    """A bar of the shares of ``total``. A share above 0 has at least one character."""
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


def _lines(state: WatchState, now: float, most: int, *, drafts: bool) -> RenderableType:
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
            Text(line.stage, style=_STYLES[line.stage]),
            f"{line.waited(now):.1f} s",
            str(line.tokens or ""),
            f"{rate:.1f}" if rate else "",
        )
    return table


# ---- where it is drawn -----------------------------------------------------------------------------------------------


@define(eq=False)
class View:
    """The picture at the bottom of a terminal. The view takes the picture away before a line is written, and draws it
    again at the next refresh. At the end the terminal is as it was."""

    console: Console
    title: str
    state: WatchState = field(factory=WatchState)
    _statistics: Callable[[], EngineStatistics] | None = field(default=None, init=False)
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
        """Shows ``engine``, which is open for the time of the block."""
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
        now, statistics = trio.current_time(), None if self._statistics is None else self._statistics()
        if statistics is not None:
            self.state.sample(now, statistics)
        most = max(1, min(MOST_LINES, self.console.size.height - 11))
        drawn = picture(self.state, statistics, now, title=self.title, most_lines=most)
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
        """Removes it for good."""
        self._closed = True
        self.clear()
