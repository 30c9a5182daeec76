"""One replica: the ledger of encoder outputs, a device that does one thing at a time, and places for what decodes.

What happens between two changes is not played step by step: a batch that stays the same for forty steps is one event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from attrs import define, field, frozen

from ...actors.worker import Job
from ...core.batch_size import BatchSize
from ...core.ledger import EncoderLedger
from ...core.ledger_values import Decisions
from ...core.share import STEPS_PER_ENCODE
from ..sim import SECONDS


@frozen(kw_only=True)
class Costs:
    """Seconds of the device, and the sizes of a replica. ``outputs``: encoder outputs that its cache holds."""

    encode: float = SECONDS[Job.ENCODE]
    step: float = SECONDS[Job.STEP]
    places: int = 16
    outputs: int = 64


@define(eq=False)
class Asked:
    """A request: its content, and how many tokens it will have. ``ended``: when it has."""

    number: int
    key: str
    tokens: int
    arrived: float
    ended: float = math.nan
    replica: str = ""
    times: int = 0  # it was sent; more than once where replicas died
    left: int = 0  # tokens to come


@define(eq=False)
class Replica:
    """``wake`` is called with the time at which `advance` wants to be called next, whenever that changes."""

    name: str
    costs: Costs
    wake: Callable[[Replica, float], None] = field(repr=False)
    ledger: EncoderLedger = field(init=False)
    encodes: int = field(default=0, init=False)
    busy: float = field(default=0.0, init=False)  # seconds of the device
    turn: int = field(default=0, init=False)  # the wake-up that counts; those of before are stale
    _waiting: deque[Asked] = field(factory=deque, init=False)  # their output is ready, for a place
    _running: dict[int, Asked] = field(factory=dict, init=False)
    _asked: dict[int, Asked] = field(factory=dict, init=False)  # all that have not ended
    _reserved: int = field(default=0, init=False)  # entries that wait for their encoding
    _encoding: str | None = field(default=None, init=False)
    _begun: float = field(default=0.0, init=False)  # the present encoding, or run of steps
    _until: float | None = field(default=None, init=False)  # its end; ``None`` while the device is idle
    _steps_until: float = field(default=0.0, init=False)  # the turn of the steps behind an encoding

    def __attrs_post_init__(self) -> None:
        self.ledger = EncoderLedger(self.costs.outputs, batch_size=BatchSize(1))

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, asked: Asked, now: float) -> None:
        """``asked`` waits for its encoder output."""
        asked.left = asked.tokens
        self._asked[asked.number] = asked
        self._obey(self.ledger.acquire(str(asked.number), asked.key, size=1, embeddings=1, payload=asked.key))
        self._interrupt(now)
        self._go_on(now)

    def lost(self) -> list[Asked]:
        """The replica dies: the requests that it had."""
        self.turn += 1
        gone, self._asked = list(self._asked.values()), {}
        return gone

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        return len(self._asked)

    def load_of(self, routers: int) -> list[int]:
        """`load`, by router, of so many that take requests in turn."""
        counts = [0] * routers
        for number in self._asked:
            counts[number % routers] += 1
        return counts

    def held(self) -> list[str]:
        """The keys of the outputs that are resident, or will be."""
        return list(self.ledger.entries())

    # -- the device --------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Asked]:
        """The present thing is done: the requests that ended by it."""
        ended = self._finish(now)
        self._go_on(now)
        return ended

    def _finish(self, now: float) -> list[Asked]:
        self.busy += now - self._begun
        self._until = None
        if self._encoding is not None:
            key, self._encoding = self._encoding, None
            self.encodes += 1
            self._steps_until = now + STEPS_PER_ENCODE * (now - self._begun)
            self._obey(self.ledger.encoded((key,), now=now))
            return []
        steps = round((now - self._begun) / self.costs.step)
        for asked in self._running.values():
            asked.left -= steps
        return [self._end(asked, now) for asked in list(self._running.values()) if asked.left <= 0]

    def _end(self, asked: Asked, now: float) -> Asked:
        asked.ended = now
        del self._running[asked.number], self._asked[asked.number]
        self._obey(self.ledger.release(str(asked.number), asked.key, now=now))
        return asked

    def _interrupt(self, now: float) -> None:
        """A run of steps was planned without what comes now: it ends with the step that runs."""
        if self._until is None or self._encoding is not None:
            return
        steps = max(1, math.ceil(round((now - self._begun) / self.costs.step, 6)))
        end = self._begun + steps * self.costs.step
        if end < self._until:
            self._run_until(end)

    def _go_on(self, now: float) -> None:
        if self._until is not None:
            return
        while self._waiting and len(self._running) < self.costs.places:
            asked = self._waiting.popleft()
            self._running[asked.number] = asked
        self._begun = now
        if self._reserved and (not self._running or now >= self._steps_until - 1e-9):
            (job,) = self.ledger.take_encode_batch()
            self._encoding, self._reserved = job.key, self._reserved - 1
            self._run_until(now + self.costs.encode)
        elif self._running:
            steps = min(asked.left for asked in self._running.values())
            if self._reserved:
                steps = min(steps, max(1, math.ceil((self._steps_until - now) / self.costs.step)))
            self._run_until(now + steps * self.costs.step)

    def _run_until(self, end: float) -> None:
        self._until = end
        self.turn += 1
        self.wake(self, end)

    def _obey(self, decisions: Decisions) -> None:
        """Frees are done at once: they cost the device a thousandth of a second, and nobody waits for them."""
        while True:
            self._reserved += len(decisions.reserved)
            self._waiting.extend(self._asked[int(hold.holder)] for hold in decisions.ready)
            if not decisions.free:
                return
            decisions = self.ledger.freed(decisions.free)
