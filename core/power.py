"""When the device is given back for a while: sleeping and waking, by order or for want of work, as a pure machine.

::

      +--------+  it could not be given back
      v        |
    AWAKE -> FALLING_ASLEEP -> ASLEEP -> WAKING -> AWAKE
                                 ^          |
                                 +----------+  it could not be taken

What is wanted and what is so are two things, since either takes its time: the last wish counts. A sleep that was
ordered ends by an order; one for want of work ends with the next work.
"""

from __future__ import annotations

import enum

from attrs import define, field


class Power(enum.Enum):
    """What is so."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class Order(enum.Enum):
    """What the runner is to do next."""

    SLEEP = "sleep"
    WAKE = "wake"


@define(eq=False)
class PowerState:
    """Facts and wishes come in; `next_order` says what the runner is to be told."""

    power: Power = field(default=Power.AWAKE, init=False)
    _wants_sleep: bool = field(default=False, init=False)
    _ordered: bool = field(default=False, init=False)  # the sleep that is, or is wanted, was ordered

    # -- wishes ------------------------------------------------------------------------------------------------------

    def order_sleep(self) -> None:
        """Somebody wants it asleep, until somebody wants it awake."""
        self._wants_sleep = self._ordered = True

    def order_wake(self) -> None:
        """Somebody wants it awake."""
        self._wants_sleep = False

    def doze(self) -> None:
        """There has been nothing to do for a while."""
        self._wants_sleep = True

    def work_came(self) -> None:
        """There is something to do: no reason to doze."""
        if not self._ordered:
            self._wants_sleep = False

    # -- facts -------------------------------------------------------------------------------------------------------

    def slept(self) -> None:
        """The device was given back."""
        self.power = Power.ASLEEP

    def sleep_failed(self) -> None:
        """The device could not be given back; it is tried again at the next wish."""
        self.power = Power.AWAKE
        self._wants_sleep = self._ordered = False

    def woke(self) -> None:
        """The device was taken again."""
        self.power = Power.AWAKE
        self._ordered = self._wants_sleep and self._ordered

    def wake_failed(self) -> None:
        """The device could not be taken; it is tried again at the next wish."""
        self.power = Power.ASLEEP
        self._wants_sleep = True

    # -- answers -----------------------------------------------------------------------------------------------------

    def next_order(self) -> Order | None:
        """What the runner is to be told now, if anything; it counts as told."""
        if self.power is Power.AWAKE and self._wants_sleep:
            self.power = Power.FALLING_ASLEEP
            return Order.SLEEP
        if self.power is Power.ASLEEP and not self._wants_sleep:
            self.power = Power.WAKING
            return Order.WAKE
        return None

    @property
    def may_work(self) -> bool:
        """Whether the device may be given something to do."""
        return self.power is Power.AWAKE

    @property
    def will_wake(self) -> bool:
        """Whether it is awake, or will be without a further wish."""
        return not self._wants_sleep

    @property
    def ordered(self) -> bool:
        """Whether it sleeps, or is to sleep, until somebody wakes it; also while it wakes, which may fail."""
        return self._ordered
