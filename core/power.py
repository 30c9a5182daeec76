"""The power state of an engine, which gives the device back and takes it again: it sleeps and wakes by order, or when
it is idle. Pure.

::

      +--------+  it could not be given back
      v        |
    AWAKE -> FALLING_ASLEEP -> ASLEEP -> WAKING -> AWAKE
                                 ^          |
                                 +----------+  it could not be taken

Falling asleep and waking take time, so the wish is kept apart from the state; the last wish counts. An ordered sleep
ends by an order, a sleep for want of work with the next work.
"""

from __future__ import annotations

import enum

from attrs import define, field


class Power(enum.Enum):
    """The device's state."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class Order(enum.Enum):
    """An order to the runner."""

    SLEEP = "sleep"
    WAKE = "wake"


@define(eq=False)
class PowerState:
    """Facts and wishes come in; `next_order` says what the runner must do."""

    power: Power = field(default=Power.AWAKE, init=False)
    _wants_sleep: bool = field(default=False, init=False)
    _ordered: bool = field(default=False, init=False)  # the present or wanted sleep was ordered

    # -- wishes ------------------------------------------------------------------------------------------------------

    def order_sleep(self) -> None:
        """The caller wants the engine asleep, until `order_wake`."""
        self._wants_sleep = self._ordered = True

    def order_wake(self) -> None:
        """The caller wants the engine awake."""
        self._wants_sleep = False

    def doze(self) -> None:
        """There has been no work for a while."""
        self._wants_sleep = True

    def work_came(self) -> None:
        """There is work: a sleep for want of work ends."""
        if not self._ordered:
            self._wants_sleep = False

    # -- facts -------------------------------------------------------------------------------------------------------

    def slept(self) -> None:
        """The runner gave the device back."""
        self.power = Power.ASLEEP

    def sleep_failed(self) -> None:
        """The runner could not give the device back. The next wish to sleep tries again."""
        self.power = Power.AWAKE
        self._wants_sleep = self._ordered = False

    def woke(self) -> None:
        """The runner took the device again."""
        self.power = Power.AWAKE
        self._ordered = self._wants_sleep and self._ordered

    def wake_failed(self) -> None:
        """The runner could not take the device. The next wish to wake tries again."""
        self.power = Power.ASLEEP
        self._wants_sleep = True

    # -- answers -----------------------------------------------------------------------------------------------------

    def next_order(self) -> Order | None:
        """The order to send to the runner now; ``None``: there is none. It counts as sent."""
        if self.power is Power.AWAKE and self._wants_sleep:
            self.power = Power.FALLING_ASLEEP
            return Order.SLEEP
        if self.power is Power.ASLEEP and not self._wants_sleep:
            self.power = Power.WAKING
            return Order.WAKE
        return None

    @property
    def may_work(self) -> bool:
        """True if the device may be given work."""
        return self.power is Power.AWAKE

    @property
    def will_wake(self) -> bool:
        """True if the engine is awake, or will be without a further wish."""
        return not self._wants_sleep

    @property
    def ordered(self) -> bool:
        """True if a sleep was ordered that no finished wake has ended; also while it wakes, which may fail."""
        return self._ordered
