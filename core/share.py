"""The sharing of one device's time between encode launches, which may take long, and steps, which are short."""

from __future__ import annotations

import math

from attrs import define, field

STEPS_PER_ENCODE = 0.5
"""Seconds of the device that steps have after each second of an encode launch, before the next launch may begin. With
more, the first of many requests has its text sooner, but steps run few sequences each: all requests take longer."""


@define(eq=False)
class TimeShare:
    """Says when the next encode launch may begin while there are steps to run.

    The device runs one call after another, in the order in which they were sent. After an encode launch of t seconds
    the device belongs to the steps for ``weight * t`` seconds. So a running stream never waits for two launches in a
    row, and encodes have their share however many steps there are. Time that the steps leave unused is not saved up.
    Where there is no step, an encode launch need not ask.
    """

    weight: float = field(default=STEPS_PER_ENCODE, kw_only=True)
    _encode_sent: float = field(default=-math.inf, init=False)
    _last_end: float = field(default=-math.inf, init=False)
    _steps_until: float = field(default=-math.inf, init=False)

    def encode_sent(self, now: float) -> None:
        """An encode launch was sent; it begins when the call before it ends."""
        self._encode_sent = now

    def encode_ended(self, now: float) -> None:
        """The encode launch is over: the steps' turn begins."""
        self._steps_until = now + self.weight * (now - max(self._encode_sent, self._last_end))
        self._last_end = now

    def step_ended(self, now: float) -> None:
        """A step is over."""
        self._last_end = now

    def steps_turn(self, now: float) -> bool:
        """True while an encode launch must give way to steps, if there are any."""
        return now < self._steps_until
