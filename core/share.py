"""How two lanes share one device by time: encode launches that may take long, and steps that are short and many."""

from __future__ import annotations

import math

from attrs import define, field

STEPS_PER_ENCODE = 0.5
"""Seconds of the device that steps have after each second of an encode launch, before the next one may begin. With more
the first of many has its text sooner, but steps run with few sequences each: all of them together take longer."""


@define(eq=False)
class TimeShare:
    """Says when the next encode launch may begin while there are steps to run.

    The device runs one call after another, in the order in which they were sent to it. After an encode launch of t
    seconds it belongs to the steps for ``weight * t`` seconds, so that a running stream never waits for two launches in
    a row, and encodes have their share however many steps there are. Time that the steps leave unused is gone: nothing
    is banked, and where there is no step an encode launch need not ask.
    """

    weight: float = field(default=STEPS_PER_ENCODE, kw_only=True)
    _encode_sent: float = field(default=-math.inf, init=False)
    _last_end: float = field(default=-math.inf, init=False)
    _steps_until: float = field(default=-math.inf, init=False)

    def encode_sent(self, now: float) -> None:
        """An encode launch was queued; it begins when the call before it ends."""
        self._encode_sent = now

    def encode_ended(self, now: float) -> None:
        """The encode launch is over, and the turn is the steps'."""
        self._steps_until = now + self.weight * (now - max(self._encode_sent, self._last_end))
        self._last_end = now

    def step_ended(self, now: float) -> None:
        """A step is over."""
        self._last_end = now

    def steps_turn(self, now: float) -> bool:
        """True while an encode launch must give way to steps, if there are any."""
        return now < self._steps_until
