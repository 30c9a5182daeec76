"""The power state of an engine. An engine gives its device back and takes it again, by order or when it is idle. Pure.

::

      +--------+  it could not be given back
      v        |
    AWAKE -> FALLING_ASLEEP -> ASLEEP -> WAKING -> AWAKE
                                 ^          |
                                 +----------+  it could not be taken

Falling asleep and waking take time, so the wished state is kept beside the present one. The last wish counts. A sleep
that was ordered ends by an order to wake. A sleep for lack of work ends when work comes.
"""

from __future__ import annotations

import enum

from attrs import define, field


class Power(enum.Enum):
    """The state of the engine's device."""

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
    """The present state and the wished state. Methods record changes of both; `next_order` returns what the runner must
    do.
    """

    power: Power = field(default=Power.AWAKE, init=False)
    _wants_sleep: bool = field(default=False, init=False)
    _ordered: bool = field(default=False, init=False)  # the present or wanted sleep was ordered

    # -- wishes ------------------------------------------------------------------------------------------------------

    def order_sleep(self) -> None:
        """Notes that the caller wants the engine asleep, until `order_wake`."""
        self._wants_sleep = self._ordered = True

    def order_wake(self) -> None:
        """Notes that the caller wants the engine awake."""
        self._wants_sleep = False

    def doze(self) -> None:
        """Notes that there has been no work for a while, so that the engine is to sleep."""
        self._wants_sleep = True

    def work_came(self) -> None:
        """Notes that there is work. A sleep for lack of work ends."""
        if not self._ordered:
            self._wants_sleep = False

    # -- facts -------------------------------------------------------------------------------------------------------

    def slept(self) -> None:
        """Notes that the runner gave the device back."""
        self.power = Power.ASLEEP

    def sleep_failed(self) -> None:
        """Notes that the runner could not give the device back. The next wish to sleep tries again."""
        self.power = Power.AWAKE
        self._wants_sleep = self._ordered = False

    def woke(self) -> None:
        """Notes that the runner took the device again."""
        self.power = Power.AWAKE
        self._ordered = self._wants_sleep and self._ordered

    def wake_failed(self) -> None:
        """Notes that the runner could not take the device. The next wish to wake tries again."""
        self.power = Power.ASLEEP
        self._wants_sleep = True

    # -- answers -----------------------------------------------------------------------------------------------------

    def next_order(self) -> Order | None:
        """Returns the order to send to the runner now; ``None``: no order is due. An order counts as sent when it is
        returned."""
        if self.power is Power.AWAKE and self._wants_sleep:
            self.power = Power.FALLING_ASLEEP
            return Order.SLEEP
        if self.power is Power.ASLEEP and not self._wants_sleep:
            self.power = Power.WAKING
            return Order.WAKE
        return None

    @property
    def may_work(self) -> bool:
        """True if work may be sent to the device."""
        return self.power is Power.AWAKE

    @property
    def will_wake(self) -> bool:
        """True if the engine is awake, or will be awake without a further wish."""
        return not self._wants_sleep

    @property
    def ordered(self) -> bool:
        """True from the order to sleep until a wake has succeeded, or the sleep has failed. True also while the engine
        wakes, since waking may fail."""
        return self._ordered
