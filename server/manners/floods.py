"""`Flood`: what happens too often to be told each time."""

from __future__ import annotations

import math

from attrs import define, field


@define
class Flood:
    """Counts things of one kind: one line in ``seconds`` tells of all that came since the last."""

    seconds: float = 60.0
    _untold: int = field(default=0, init=False)
    _next: float = field(default=-math.inf, init=False)

    def came(self, now: float) -> int:
        """One more came at ``now``. How many are to be told of, this one among them; 0: none yet."""
        self._untold += 1
        if now < self._next:
            return 0
        told, self._untold, self._next = self._untold, 0, now + self.seconds
        return told
