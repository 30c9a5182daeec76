"""The state of an engine that ``--watch`` shows: `WatchState`, fed by the engine's events. It knows no terminal."""

from __future__ import annotations

from collections import deque

from attrs import define, field

from ...actors.statistics import EngineStatistics
from ...core.overview import Overview

RATE_SECONDS = 2.0  # tokens a second are counted over this time


@define(eq=False)
class WatchState(Overview):
    """The state that an engine's events have given so far, and how fast it is of late."""

    _samples: deque[tuple[float, int, int]] = field(factory=deque, init=False)  # time, tokens, steps

    def sample(self, now: float, statistics: EngineStatistics) -> None:
        """Takes the present counters, for the rates."""
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
