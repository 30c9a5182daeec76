"""The limit on restarts of a crashed runner: the restart intensity of Erlang/OTP, with a growing pause."""

from __future__ import annotations

from collections import deque

from attrs import define, field


@define(eq=False)
class RestartPolicy:
    """A policy of at most ``most`` restarts within any ``period`` seconds. The first restart is immediate. Each further
    restart within the period waits twice as long as the one before, from ``pause`` to ``longest`` seconds. The pauses
    are short, since the end of the engine waits for them too.
    """

    most: int
    period: float
    pause: float = 0.1
    longest: float = 5.0
    _restarts: deque[float] = field(factory=deque, init=False)

    def try_restart(self, now: float) -> float | None:
        """Returns the pause before this restart, in seconds, and counts the restart from ``now`` on; ``None``: the
        restart would exceed the limit."""
        while self._restarts and self._restarts[0] <= now - self.period:
            self._restarts.popleft()
        before = len(self._restarts)
        if before >= self.most:
            return None
        self._restarts.append(now)
        if before == 0:
            return 0.0
        return min(self.pause * 2.0 ** min(before - 1, 32), self.longest)  # 32: keeps the power a finite float
