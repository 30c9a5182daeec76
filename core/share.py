"""The sharing of one device's time between encode launches, which may take long, and steps, which are short."""

from __future__ import annotations

import math

from attrs import define, field

STEPS_PER_ENCODE = 0.25
"""The seconds that steps have the device for after each second of an encode launch, before the next launch may begin.
With more seconds, the first of many requests gets its text sooner. But each step then runs fewer sequences, and all
requests together take longer."""


@define(eq=False)
class TimeShare:
    """Decides when the next encode launch may begin while there are steps to run.

    The device runs one call after another, in the order in which they were sent. After an encode launch of t seconds
    the device belongs to the steps for ``weight * t`` seconds. So a running stream never waits for two launches in a
    row, and encodes get their share however many steps there are. Time that the steps do not use is not saved up. If
    there is no step, an encode launch need not wait.
    """

    weight: float = field(default=STEPS_PER_ENCODE, kw_only=True)
    _encode_sent: float = field(default=-math.inf, init=False)
    _last_end: float = field(default=-math.inf, init=False)
    _steps_until: float = field(default=-math.inf, init=False)

    def encode_sent(self, now: float) -> None:
        """Notes that an encode launch was sent. The launch begins when the call before it ends."""
        self._encode_sent = now

    def encode_ended(self, now: float) -> None:
        """Notes that the encode launch is over, and begins the steps' turn."""
        self._steps_until = now + self.weight * (now - max(self._encode_sent, self._last_end))
        self._last_end = now

    def step_ended(self, now: float) -> None:
        """Notes that a step is over."""
        self._last_end = now

    def steps_turn(self, now: float) -> bool:
        """True while an encode launch must give way to steps, if there are any."""
        return now < self._steps_until
