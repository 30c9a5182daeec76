"""The promises of flights: a stream has every token once, in order, whatever is lost; every request ends once; a
request that ends processes ends one replica that has others, and nobody else is taken for it."""

from __future__ import annotations

import hypothesis.strategies as st
from attrs import define, field
from hypothesis import given
from hypothesis.stateful import initialize, invariant, rule

from tests.properties.machines import Machine
from triolet.core.errors import PoisonRequest
from triolet.core.plan import SampledToken
from triolet.core.request import Request
from triolet_ray.flights import CLEARED_AFTER, Flight, Place, SuspectTrials

PROMPT = (7, 8)
LENGTH = 3 * CLEARED_AFTER
REPLICAS = 2
QUARANTINE = "quarantine"
NEVER = LENGTH
POISON_AT = (NEVER, NEVER, 0, 1, CLEARED_AFTER, LENGTH - 1)


def token(position: int) -> int:
    """The token that every replica samples there."""
    return 100 + position


@define(eq=False)
class Attempt:
    """An attempt, as its replica sees it: it goes on behind what it was given."""

    name: str
    number: int
    where: str
    at: int
    told: list[tuple[int, ...]] = field(factory=list)  # its words that are still on their way
    lost_with: int | None = None  # how many were on its replica when it was lost


@define(eq=False)
class Client:
    """A request, and at which token it ends the process that samples it."""

    flight: Flight
    poison_at: int
    stream: list[int] = field(factory=list)
    ends: int = 0
    refusal: PoisonRequest | None = None


class ClusterMachine(Machine):
    """Requests on replicas that sample the same tokens, whose words come late, which are killed by chance, and which
    some requests end. The losses come late too."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: dict[str, Client] = {}
        self.attempts: list[Attempt] = []  # all that were ever sent
        self.trials = SuspectTrials()
        self.losses: list[Attempt] = []  # that the cluster has not heard of
        self.ended_by: list[str] = []  # requests that have ended a replica that has others

    @initialize(poison_at=st.lists(st.sampled_from(POISON_AT), min_size=1, max_size=6))
    def ask(self, poison_at: list[int]) -> None:
        for number, position in enumerate(poison_at):
            name = f"r{number}"
            flight = Flight(Request(id=name, prompt_token_ids=PROMPT, max_tokens=LENGTH))
            self.clients[name] = Client(flight, position)
            self.send(name, f"replica {number % REPLICAS}")

    # -- as the cluster ----------------------------------------------------------------------------------------------

    def send(self, name: str, where: str) -> None:
        client = self.clients[name]
        number, request = client.flight.send()
        assert request.committed == tuple(client.stream), "it goes on where its stream is"
        assert request.prompt_token_ids == PROMPT
        assert (where == QUARANTINE) == (client.flight.place is not Place.AMONG_OTHERS)
        self.attempts.append(Attempt(name, number, where, len(client.stream)))

    def begin_trials(self) -> None:
        for name in self.trials.begin():
            self.send(name, QUARANTINE)

    def close(self, name: str) -> None:
        self.clients[name].ends += 1
        self.trials.gone(name)
        self.begin_trials()

    def running(self, where: str) -> list[Attempt]:
        """Those that run there: they have not ended, been aborted, or been lost."""
        return [one for one in self.attempts if one.where == where and self.runs(one)]

    def runs(self, one: Attempt) -> bool:
        flight = self.clients[one.name].flight
        return not flight.ended and flight.attempt == one.number and one.lost_with is None

    def tried(self) -> list[str]:
        """Who is in quarantine and not cleared."""
        names = [one.name for one in self.running(QUARANTINE)]
        return [name for name in names if not self.clients[name].flight.cleared]

    def lose(self, where: str) -> None:
        """All that run there are lost; the cluster hears of each later, in any order."""
        gone = self.running(where)
        for one in gone:
            one.lost_with = len(gone)
        self.losses += gone

    @rule(which=st.integers(0, 5))
    def hear_of_a_loss(self, which: int) -> None:
        if not self.losses:
            return
        one = self.losses.pop(which % len(self.losses))
        client = self.clients[one.name]
        if client.flight.ended:
            return
        alone = self.trials.gone(one.name)
        refusal = client.flight.lost(one.number, ConnectionError("gone"), alone=alone)
        if refusal is None and client.flight.place is Place.AMONG_OTHERS:
            self.send(one.name, f"replica {which % REPLICAS}")
        elif refusal is None:
            self.trials.add(one.name, client.flight.place)
        else:
            assert one.lost_with == 1, "who is condemned was alone"
            client.refusal = refusal
            client.ends += 1
        self.begin_trials()

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 30), count=st.integers(1, CLEARED_AFTER))
    def sample(self, which: int, count: int) -> None:
        """A replica samples tokens, even of a request that was aborted; one of them may end it."""
        living = [one for one in self.attempts if one.lost_with is None]
        if not living:
            return
        one = living[which % len(living)]
        client = self.clients[one.name]
        stop = min(one.at + count, LENGTH)
        killed = self.runs(one) and one.at <= client.poison_at < stop
        stop = client.poison_at if killed else stop
        if one.at < stop:
            one.told.append(tuple(range(one.at, stop)))
            one.at = stop
        if killed:
            one.told = one.told[:-1]  # its last words are lost with it
            if one.where != QUARANTINE:
                assert one.name not in self.ended_by, "a request ends one replica that has others"
                self.ended_by.append(one.name)
            self.lose(one.where)

    @rule(which=st.integers(0, 30))
    def hear(self, which: int) -> None:
        """A word of a replica comes."""
        if not self.attempts:
            return
        one = self.attempts[which % len(self.attempts)]
        if not one.told:
            return
        client, positions = self.clients[one.name], one.told.pop(0)
        kept = client.flight.took(one.number, tuple(SampledToken(token_id=token(position)) for position in positions))
        client.stream += [sampled.token_id for sampled in kept if sampled.token_id is not None]
        if positions[-1] == LENGTH - 1 and client.flight.end(one.number):
            self.close(one.name)
        elif kept and client.flight.cleared:
            self.trials.cleared(one.name)
            self.begin_trials()

    @rule(number=st.integers(0, REPLICAS - 1))
    def kill(self, number: int) -> None:
        """By chance."""
        self.lose(f"replica {number}")

    @rule()
    def kill_quarantine(self) -> None:
        """By chance, where nobody is tried alone, who would be taken for it."""
        places = [self.clients[one.name].flight.place for one in self.running(QUARANTINE)]
        if Place.ALONE not in places:
            self.lose(QUARANTINE)

    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        """Its client goes away."""
        names = sorted(self.clients)
        if not names:
            return
        client = self.clients[names[which % len(names)]]
        if client.flight.end(client.flight.attempt):
            self.close(client.flight.request.id)

    # -- the promises ------------------------------------------------------------------------------------------------

    @invariant()
    def a_stream_has_every_token_once_and_in_order(self) -> None:
        for client in self.clients.values():
            assert client.stream == [token(position) for position in range(len(client.stream))]

    @invariant()
    def a_request_ends_once(self) -> None:
        for client in self.clients.values():
            assert client.ends == client.flight.ended

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        waiting = [client for client in self.clients.values() if not client.flight.ended and not self.has_place(client)]
        assert not waiting or self.tried() or self.losses, "the next trial begins when one has ended"

    def has_place(self, client: Client) -> bool:
        """It runs, or the cluster takes it to run."""
        last = max((one for one in self.attempts if one.name == client.flight.request.id), key=lambda one: one.number)
        return last.number == client.flight.attempt

    @invariant()
    def who_is_tried_alone_is_tried_alone(self) -> None:
        tried = self.tried()
        assert len(tried) == 1 or not any(self.clients[name].flight.place is Place.ALONE for name in tried)

    def teardown(self) -> None:
        """Without further chance all of them end: the innocent well, and what ends processes as poison, unless its
        client went away."""
        if self.failed:
            return
        while self.losses or any(self.runs(one) for one in self.attempts):
            while self.losses:
                self.hear_of_a_loss(0)
            living = [one for one in self.attempts if one.lost_with is None]
            for index, one in enumerate(living):
                if self.runs(one):
                    self.sample(index, 1)
                    while one.told:
                        self.hear(self.attempts.index(one))
                    break
        for client in self.clients.values():
            assert client.flight.ended, "all of them end"
            assert client.refusal is None or client.poison_at != NEVER, "an innocent one was taken for poison"


TestCluster = ClusterMachine.TestCase


@given(st.integers(1, 3))
def test_a_replica_whose_machine_is_known_to_be_gone_makes_no_suspects(times: int) -> None:
    flight = Flight(Request(id="r", prompt_token_ids=PROMPT, max_tokens=LENGTH))
    for _ in range(times):
        number, _ = flight.send()
        assert flight.lost(number, ConnectionError("preempted"), blameless=True) is None
        assert flight.place is Place.AMONG_OTHERS


def test_who_is_cleared_is_no_suspect_of_the_next_loss() -> None:
    flight = Flight(Request(id="r", prompt_token_ids=PROMPT, max_tokens=LENGTH), place=Place.ALONE)
    number, _ = flight.send()
    flight.took(number, (SampledToken(token_id=1),) * CLEARED_AFTER)
    assert flight.lost(number, ConnectionError("gone"), alone=True) is None
    assert flight.place is Place.IN_QUARANTINE


def test_a_suspect_that_runs_among_others_is_not_alone() -> None:
    """Quarantine has no room, say: who ended the replica may have been any of them, but not twice."""
    flight = Flight(Request(id="r", prompt_token_ids=PROMPT, max_tokens=LENGTH), place=Place.ALONE)
    number, request = flight.send(apart=True)
    assert request.suspect
    assert flight.lost(number, ConnectionError("gone"), alone=True) is None
    number, _ = flight.send(apart=True)
    refusal = flight.lost(number, ConnectionError("gone"), alone=True)
    assert "in steps of its own on the last" in str(refusal)
