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
    """An order of a caller, and to the runner."""

    SLEEP = "sleep"
    WAKE = "wake"

    @property
    def other(self) -> Order:
        """The order that undoes this one."""
        return Order.WAKE if self is Order.SLEEP else Order.SLEEP


_UNDER_WAY = {Power.FALLING_ASLEEP: Order.SLEEP, Power.WAKING: Order.WAKE}


@define(eq=False)
class PowerState:
    """The present state and the wished state. Methods record changes of both; `next_order` returns what the runner must
    do.
    """

    power: Power = field(default=Power.AWAKE, init=False)
    _wants_sleep: bool = field(default=False, init=False)
    _ordered: bool = field(default=False, init=False)  # the present or wanted sleep was ordered

    # -- wishes ------------------------------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """Notes that the caller wants the engine asleep, or awake, until the next order."""
        self._wants_sleep = order is Order.SLEEP
        self._ordered = self._ordered or self._wants_sleep

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

    def failed(self, order: Order) -> None:
        """Notes that the runner could not give the device back, or could not take it. The next wish tries again."""
        self._wants_sleep = order is Order.WAKE
        self._ordered = self._ordered and self._wants_sleep
        self.power = Power.ASLEEP if self._wants_sleep else Power.AWAKE

    def woke(self) -> None:
        """Notes that the runner took the device again."""
        self.power = Power.AWAKE
        self._ordered = self._wants_sleep and self._ordered

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
    def under_way(self) -> Order | None:
        """The order that the runner carries out now; ``None``: the engine is as the last one wanted it."""
        return _UNDER_WAY.get(self.power)

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
