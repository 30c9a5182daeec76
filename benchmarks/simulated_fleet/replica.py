"""A replica of a fleet: the engine's own planner, ledger and time share, and a device that runs one call after another.

It stands for an engine with a decoder that reads audio or images, without cross-attention slots and prefix cache. Only
the actors and the model are left out: on the simulated device a call is one event, at its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from triolet.actors.worker import Job
from triolet.core.batch_size import BatchSize
from triolet.core.config import EngineConfig
from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import State
from triolet.core.ledger_values import Decisions
from triolet.core.plan import SampledToken, StepPlan, StepResult
from triolet.core.planning.actions import Acquire, Finish, Release
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import EncoderItem, Request
from triolet.core.share import TimeShare
from triolet_testing.sim import SECONDS

_MOST_TOKENS = 4096  # the most positions of a sequence, which all fit one page
_TOKEN = SampledToken(token_id=1)


@frozen(kw_only=True)
class Costs:
    """The times and the room of a replica.

    Attributes:
        encode: seconds of an encode launch, which has one item.
        step: seconds of a step, however many sequences it has.
        places: how many sequences run at once.
        outputs: how many encoder outputs the cache holds.
        idle_seconds: seconds after which an output that nobody holds is freed. The default of
            `EngineConfig.encoder_idle_seconds` is shorter; a fleet should raise it, since no other program needs its
            memory.
    """

    encode: float = SECONDS[Job.ENCODE]
    step: float = SECONDS[Job.STEP]
    places: int = 16
    outputs: int = 64
    idle_seconds: float = math.inf

    @property
    def limits(self) -> PlannerLimits:
        """The limits of the replica's planner."""
        return PlannerLimits(
            pages=4 * self.places,
            page_size=_MOST_TOKENS,
            max_step_tokens=EngineConfig().max_step_tokens,
            max_running=self.places,
            steps_in_flight=EngineConfig().steps_in_flight,
            encoder_cache_bytes=self.outputs,
            cross_slots=0,
            eos_token_ids=frozenset(),
            prefix_caching=False,
        )


@define(eq=False)
class SimRequest:
    """A request of the fleet, with one encoder item.

    Attributes:
        number: the number of its arrival.
        key: the key of its content.
        tokens: how many tokens it will get.
        arrived, first, ended: the times, in seconds, of its arrival, its first token and its last token.
        replica: the replica that has the request, or had it last.
        sent: how often the request was sent; more than once if replicas died.
        hit: its output was resident or on its way when the request acquired it.
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


@frozen
class ReplicaLoad:
    """The load that other routers have sent to a replica."""

    requests: int
    encodings: int


@define(eq=False)
class Replica:
    """One replica. It calls ``wake`` with the time of the next `advance`. A call that was asked for in an earlier
    ``turn`` is void."""

    name: str
    costs: Costs
    wake: Callable[[Replica, float], None]
    encodes: int = field(default=0, init=False)
    busy: float = field(default=0.0, init=False)  # seconds in which the device worked
    turn: int = field(default=0, init=False)
    planner: Planner = field(init=False)
    ledger: EncoderLedger = field(init=False)
    _share: TimeShare = field(factory=TimeShare, init=False)
    _requests: dict[int, SimRequest] = field(factory=dict, init=False)
    _missed: dict[str, int] = field(factory=dict, init=False)  # keys to encode, with the request that acquired each
    _device: deque[StepPlan | str] = field(factory=deque, init=False)  # the calls that were sent; a text is a key
    _begun: float | None = field(default=None, init=False)  # when the first of these calls began

    def __attrs_post_init__(self) -> None:
        self.planner = Planner(self.costs.limits)
        self.ledger = EncoderLedger(self.costs.outputs, batch_size=BatchSize(1))

    def fill(self, keys: Sequence[str], now: float) -> None:
        """Makes the outputs of ``keys`` resident, as many as fit; the first key becomes the newest. All are encoded in
        one batch, which is faster to simulate."""
        kept = tuple(reversed(keys[: self.costs.outputs]))
        self.ledger.batch_size = BatchSize(self.costs.outputs)
        for key in kept:
            self.ledger.acquire("", EncoderItem(key=key, payload=key, embeddings=1, size=1))
        self.ledger.take_encode_batch()
        self.ledger.encoded(kept, now=now)
        for key in kept:
            self.ledger.release("", key, now=now)
        self.ledger.batch_size = BatchSize(1)

    def submit(self, request: SimRequest, now: float) -> None:
        """Queues ``request``."""
        self._requests[request.number] = request
        self._free_idle(now)
        item = EncoderItem(key=request.key, payload=request.key, embeddings=1, size=1, spans=((1, 2),))
        self.planner.submit(
            Request(id=str(request.number), prompt_token_ids=(1, 1, 1), items=(item,), max_tokens=request.tokens)
        )
        self._go_on(now)

    def lose(self) -> list[SimRequest]:
        """Kills the replica. Returns the requests that the replica had."""
        self.turn += 1
        return list(self._requests.values())

    def close(self, now: float) -> None:
        """Frees every output, after all requests have ended."""
        assert not self._requests, f"{self.name} is closed with {len(self._requests)} requests"
        self._obey(self.ledger.close(now=now))
        assert self.ledger.drained, f"{self.name} still holds {list(self.ledger.entries())}"

    def others(self, routers: int) -> list[ReplicaLoad]:
        """Returns, for each router, the load that the other routers have sent. Requests come to the ``routers`` in
        turn."""
        requests, encodings = [len(self._requests)] * routers, [len(self._missed)] * routers
        for number in self._requests:
            requests[number % routers] -= 1
        for number in self._missed.values():
            encodings[number % routers] -= 1
        return [ReplicaLoad(*pair) for pair in zip(requests, encodings, strict=True)]

    def held(self, now: float) -> list[str]:
        """Returns the keys of the outputs that are resident or on their way, the oldest first."""
        self._free_idle(now)
        return list(self.ledger.entries())

    def advance(self, now: float) -> list[SimRequest]:
        """Ends the device's present call. Returns the requests that ended with this call."""
        call, begun, self._begun = self._device.popleft(), self._begun, None
        assert begun is not None, "a call ended that never began"
        self.busy += now - begun
        if isinstance(call, str):
            self.encodes += 1
            del self._missed[call]
            self._share.encode_ended(now)
            self._obey(self.ledger.encoded((call,), now=now))
        else:
            self._share.step_ended(now)
            for number in map(int, self.planner.in_flight(call.step_id).samples):
                if number in self._requests and math.isnan(self._requests[number].first):
                    self._requests[number].first = now
            self.planner.step_done(StepResult(step_id=call.step_id, sampled=(_TOKEN,) * len(call.chunks)))
        ended = self._go_on(now)
        for request in ended:
            request.ended = now
        return ended

    def _go_on(self, now: float) -> list[SimRequest]:
        """Plays the actors, which send to the device whatever can be sent. Returns the requests that have ended."""
        if not self._share.steps_turn(now):
            self._try_encode(now)  # the encoding has waited, and goes before the steps that are planned now
        ended = self._act(now)
        while (plan := self.planner.next_step()) is not None:
            self._device.append(plan)
            ended += self._act(now)
        if not (self._device and self._share.steps_turn(now)):
            self._try_encode(now)
        if self._device and self._begun is None:
            self._begun = now
            self.turn += 1
            self.wake(self, now + (self.costs.encode if isinstance(self._device[0], str) else self.costs.step))
        return ended

    def _try_encode(self, now: float) -> None:
        """Sends the next encode launch, unless an encode launch is under way."""
        if any(isinstance(call, str) for call in self._device):
            return
        for job in self.ledger.take_encode_batch():
            self._share.encode_sent(now)
            self._device.append(job.key)

    def _act(self, now: float) -> list[SimRequest]:
        ended: list[SimRequest] = []
        while actions := self.planner.take_actions():
            for action in actions:
                match action:
                    case Acquire(holder, item):
                        request = self._requests[int(holder.partition("/")[0])]
                        request.hit = self.ledger.state(item.key) is not State.ABSENT
                        if not request.hit:
                            self._missed[item.key] = request.number
                        self._obey(self.ledger.acquire(holder, item))
                    case Release(holder, key):
                        self._obey(self.ledger.release(holder, key, now=now))
                    case Finish(request_id):
                        ended.append(self._requests.pop(int(request_id)))
        return ended

    def _free_idle(self, now: float) -> None:
        if self.costs.idle_seconds < math.inf:
            self._obey(self.ledger.evict_idle(now=now, idle_seconds=self.costs.idle_seconds))

    def _obey(self, decisions: Decisions) -> None:
        """Plays the encoder cache. Frees are done at once, since they take a thousandth of a second and nobody waits
        for them."""
        for hold in decisions.ready:
            self.planner.encoder_ready(hold.holder)
        if decisions.free:
            self._obey(self.ledger.freed(decisions.free))
