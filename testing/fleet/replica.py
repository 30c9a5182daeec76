"""One replica: the ledger of encoder outputs, a device that does one thing at a time, and places for what decodes.

It stands for an engine with a decoder that reads audio or images, without cross-attention slots and prefix cache. What
happens between two changes is not played step by step: a batch that stays the same for forty steps is one event.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from ...actors.worker import Job
from ...core.batch_size import BatchSize
from ...core.config import EngineConfig
from ...core.ledger import EncoderLedger
from ...core.ledger_table import State
from ...core.ledger_values import Decisions
from ...core.planning.limits import PlannerLimits
from ...core.share import STEPS_PER_ENCODE
from ..sim import SECONDS

_IN_FLIGHT = EngineConfig().steps_in_flight
_EXACT = 1e-9  # seconds: sums of floats that differ by less are the same moment


@frozen(kw_only=True)
class Costs:
    """What a replica takes, and what it has room for.

    Attributes:
        encode: seconds of an encode launch, of one item.
        step: seconds of a step, however many sequences it has.
        places: sequences that run at once.
        outputs: encoder outputs that the cache holds.
        idle_seconds: after which an output that nobody holds is freed. `EngineConfig.encoder_idle_seconds` is shorter
            by default: a fleet, whose memory is its own, should raise it.
    """

    encode: float = SECONDS[Job.ENCODE]
    step: float = SECONDS[Job.STEP]
    places: int = 16
    outputs: int = 64
    idle_seconds: float = math.inf

    @property
    def acquire_ahead(self) -> int:
        """The planner's own rule."""
        limits = PlannerLimits(
            max_running=self.places, max_step_tokens=1, page_size=1, pages=1, cross_slots=0, eos_token_ids=frozenset()
        )
        return limits.acquire_ahead


@define(eq=False)
class SimRequest:
    """A request of the fleet, with one encoder item.

    Attributes:
        number: of its arrival.
        key: of its content.
        tokens: that it will have.
        arrived, first, ended: seconds: when it came, when it had its first token, when its last.
        replica: where it is, or was last.
        sent: how often it was sent: more than once where replicas died.
        hit: its output was there or on its way when it acquired it.
        tokens_left: tokens to come.
    """

    number: int
    key: str
    tokens: int
    arrived: float
    first: float = math.nan
    ended: float = math.nan
    replica: str = ""
    sent: int = 0
    hit: bool = False
    tokens_left: int = 0


@frozen
class ReplicaLoad:
    """Requests that have not ended, and encodings that are to come."""

    requests: int
    encodings: int


@define(eq=False)
class Replica:
    """``wake`` is called with the time at which `advance` wants to be called next, whenever that changes."""

    name: str
    costs: Costs
    wake: Callable[[Replica, float], None] = field(repr=False)
    ledger: EncoderLedger = field(init=False)
    encodes: int = field(default=0, init=False)
    encode_seconds: float = field(default=0.0, init=False)  # of the device
    step_seconds: float = field(default=0.0, init=False)
    turn: int = field(default=0, init=False)  # the wake-up that counts; those of before are stale
    _requests: dict[int, SimRequest] = field(factory=dict, init=False)  # all that have not ended
    _seeking: deque[SimRequest] = field(factory=deque, init=False)  # they have acquired nothing yet
    _ahead: int = field(default=0, init=False)  # those that have acquired, and do not run
    _held: Counter[str] = field(factory=Counter, init=False)  # the keys that these acquired
    _missed: dict[str, int] = field(factory=dict, init=False)  # keys to be encoded: the request that each is for
    _ready: list[int] = field(factory=list, init=False)  # of these, those whose output is there; a heap
    _running: dict[int, SimRequest] = field(factory=dict, init=False)
    _leaving: int = field(default=0, init=False)  # those that have ended, whose places the step in flight still has
    _reserved: int = field(default=0, init=False)  # entries that wait for their encoding
    _encoding: str | None = field(default=None, init=False)
    _begun: float = field(default=0.0, init=False)  # the present encoding, or run of steps
    _until: float | None = field(default=None, init=False)  # its end; ``None`` while the device is idle
    _steps_until: float = field(default=0.0, init=False)  # the turn of the steps behind an encoding
    _planned: int = field(default=0, init=False)  # steps that were planned before an encoding, and run behind it
    _ahead_most: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.ledger = EncoderLedger(self.costs.outputs, batch_size=BatchSize(1))
        self._ahead_most = self.costs.acquire_ahead

    # -- requests ----------------------------------------------------------------------------------------------------

    def fill(self, keys: Sequence[str], now: float) -> None:
        """The outputs of ``keys`` are resident, the first as the newest, as far as there is room. In one batch, which
        is sooner played."""
        kept = tuple(reversed(keys[: self.costs.outputs]))
        self.ledger.batch_size = BatchSize(self.costs.outputs)
        for key in kept:
            self.ledger.acquire("", key, size=1, embeddings=1, payload=key)
        self.ledger.take_encode_batch()
        self.ledger.encoded(kept, now=now)
        for key in kept:
            self.ledger.release("", key, now=now)
        self.ledger.batch_size = BatchSize(1)

    def submit(self, request: SimRequest, now: float) -> None:
        """``request`` waits for its encoder output, and then for a place."""
        request.tokens_left = request.tokens
        request.hit = False
        self._requests[request.number] = request
        self._free_idle(now)
        self._seeking.append(request)
        self._acquire()
        if self._reserved or self._ready:
            self._interrupt(now)
        self._go_on(now)

    def lose(self) -> list[SimRequest]:
        """The replica dies: the requests that it had."""
        self.turn += 1
        return list(self._requests.values())

    def close(self, now: float) -> None:
        """All requests have ended: every output is freed."""
        assert not self._requests, f"{self.name} is closed with {len(self._requests)} requests"
        self._obey(self.ledger.close(now=now))
        assert self.ledger.drained, f"{self.name} still holds {list(self.ledger.entries())}"

    @property
    def busy(self) -> float:
        """Seconds of the device, so far."""
        return self.encode_seconds + self.step_seconds

    def others(self, routers: int) -> list[ReplicaLoad]:
        """For each of so many routers, which take requests in turn, the load that the others have sent."""
        requests, encodings = [len(self._requests)] * routers, [len(self._missed)] * routers
        for number in self._requests:
            requests[number % routers] -= 1
        for number in self._missed.values():
            encodings[number % routers] -= 1
        return [ReplicaLoad(*pair) for pair in zip(requests, encodings, strict=True)]

    def held(self, now: float) -> list[str]:
        """The keys of the outputs that are resident, or will be, the oldest first."""
        self._free_idle(now)
        return list(self.ledger.entries())

    # -- the device --------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[SimRequest]:
        """The present thing is done: the requests that ended by it."""
        ended = self._steps_ended(now) if self._encoding is None else self._encode_ended(now)
        self._go_on(now)
        return ended

    def _encode_ended(self, now: float) -> list[SimRequest]:
        assert self._encoding is not None, "an encoding ended that never began"
        key, self._encoding, self._until = self._encoding, None, None
        self.encodes += 1
        del self._missed[key]
        self.encode_seconds += now - self._begun
        self._steps_until = now + STEPS_PER_ENCODE * (now - self._begun)
        self._planned = _IN_FLIGHT if self._running else 0
        self._obey(self.ledger.encoded((key,), now=now))
        return []

    def _steps_ended(self, now: float) -> list[SimRequest]:
        self.step_seconds += now - self._begun
        self._until = None
        steps = round((now - self._begun) / self.costs.step)
        self._planned = max(0, self._planned - steps)
        for request in self._running.values():
            if request.tokens_left == request.tokens:
                request.first = self._begun + self.costs.step
            request.tokens_left -= steps
        ended = [request for request in self._running.values() if request.tokens_left <= 0]
        for request in ended:
            request.ended = now
            del self._running[request.number], self._requests[request.number]
        self._leaving = len(ended)
        return ended

    def _interrupt(self, now: float) -> None:
        """A run of steps was planned without what comes now: it ends with the steps that are in flight."""
        if self._until is None or self._encoding is not None:
            return
        begun = math.floor((now - self._begun + _EXACT) / self.costs.step)
        end = self._begun + (begun + _IN_FLIGHT) * self.costs.step
        if end < self._until - _EXACT:
            self._run_until(end)

    def _go_on(self, now: float) -> None:
        """Begins the next thing, if the device is idle."""
        if self._until is not None:
            return
        self._begun = now
        if self._leaving and not self._running:
            self._run_until(now + self.costs.step)  # the step that was in flight when the last sequence ended
            return
        if not (self._planned and self._running):
            self._admit(now)
        if self._reserved and (not self._running or now >= self._steps_until - _EXACT):
            self._begin_encode(now)
        elif self._running:
            self._run_until(now + self._steps(now) * self.costs.step)

    def _admit(self, now: float) -> None:
        """The first in order get the free places. The step that reads an output is planned: it is released."""
        while self._ready and len(self._running) + self._leaving < self.costs.places:
            request = self._requests[heapq.heappop(self._ready)]
            self._running[request.number] = request
            self._ahead -= 1
            self._held[request.key] -= 1
            if not self._held[request.key]:
                del self._held[request.key]
            self._obey(self.ledger.release(str(request.number), request.key, now=now))
            self._acquire()

    def _begin_encode(self, now: float) -> None:
        (job,) = self.ledger.take_encode_batch()
        self._encoding, self._reserved = job.key, self._reserved - 1
        self._run_until(now + self.costs.encode)

    def _steps(self, now: float) -> int:
        """How many run before the batch changes: somebody ends or joins, or an encoding begins behind those in
        flight."""
        if self._leaving and self._ready:
            return 1
        steps = min(request.tokens_left for request in self._running.values())
        if self._planned:
            steps = min(steps, self._planned)
        if self._reserved:
            turn = math.ceil((self._steps_until - now - _EXACT) / self.costs.step)
            steps = min(steps, max(1, turn + _IN_FLIGHT - 1))
        return steps

    def _run_until(self, end: float) -> None:
        self._until = end
        self.turn += 1
        self.wake(self, end)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """As the planner: in order, as far ahead as it may, and only what fits the cache together."""
        while self._seeking and self._ahead < self._ahead_most:
            request = self._seeking[0]
            if request.key not in self._held and len(self._held) >= self.costs.outputs:
                return
            self._seeking.popleft()
            self._ahead += 1
            self._held[request.key] += 1
            key, holder = request.key, str(request.number)
            request.hit = self.ledger.state(key) is not State.ABSENT
            if not request.hit:
                self._missed[key] = request.number
            self._obey(self.ledger.acquire(holder, key, size=1, embeddings=1, payload=key))

    def _free_idle(self, now: float) -> None:
        if self.costs.idle_seconds < math.inf:
            self._obey(self.ledger.evict_idle(now=now, idle_seconds=self.costs.idle_seconds))

    def _obey(self, decisions: Decisions) -> None:
        """Frees are done at once: they take the device a thousandth of a second, and nobody waits for them."""
        while True:
            self._reserved += len(decisions.reserved)
            for hold in decisions.ready:
                heapq.heappush(self._ready, int(hold.holder))
            if not decisions.free:
                return
            decisions = self.ledger.freed(decisions.free)
