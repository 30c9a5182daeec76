"""The promises of flights: a stream has every token once, in order, whatever is lost, and every request ends once."""

from __future__ import annotations

import hypothesis.strategies as st
from attrs import define, field
from hypothesis.stateful import invariant, precondition, rule

from triolet.core.errors import PoisonRequest
from triolet.core.flights import Flight
from triolet.core.plan import SampledToken
from triolet.core.request import Request

from .machines import Machine

PROMPT = (7, 8)
LENGTH = 6


def token(position: int) -> int:
    """The token that every replica samples there."""
    return 100 + position


@define
class Sent:
    """An attempt, as its replica sees it: it goes on behind what it was given."""

    number: int
    at: int
    lost: bool = False
    told: list[tuple[int, ...]] = field(factory=list)  # its words that are still on their way


class FlightMachine(Machine):
    """One request on replicas that sample the same tokens, whose words come late, and which are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.flight = Flight(Request(id="r", prompt_token_ids=PROMPT, max_tokens=LENGTH), most_losses=3)
        self.stream: list[int] = []
        self.ends = 0
        self.sent: list[Sent] = []
        self.send()

    def send(self) -> None:
        number, request = self.flight.send()
        assert request.committed == tuple(self.stream), "it goes on where its stream is"
        assert request.suspect == bool(self.sent), "what was on a lost replica runs apart"
        assert request.prompt_token_ids == PROMPT
        self.sent.append(Sent(number, len(self.stream)))

    @rule(which=st.integers(0, 3), count=st.integers(1, 3))
    def sample(self, which: int, count: int) -> None:
        """A replica samples tokens, even one that is taken for lost."""
        sent = self.sent[which % len(self.sent)]
        stop = min(sent.at + count, LENGTH)
        if sent.at < stop:
            sent.told.append(tuple(range(sent.at, stop)))
            sent.at = stop

    @rule(which=st.integers(0, 3))
    def hear(self, which: int) -> None:
        """A word of a replica comes."""
        sent = self.sent[which % len(self.sent)]
        if not sent.told:
            return
        positions = sent.told.pop(0)
        kept = self.flight.took(sent.number, tuple(SampledToken(token_id=token(one)) for one in positions))
        self.stream += [one.token_id for one in kept if one.token_id is not None]
        if positions[-1] == LENGTH - 1:
            self.ends += self.flight.end(sent.number)

    @precondition(lambda self: not self.flight.ended)
    @rule()
    def lose(self) -> None:
        """The replica that has it is lost. What it has told may still come."""
        self.sent[-1].lost = True
        refusal = self.flight.lost(self.sent[-1].number, ConnectionError("gone"))
        if refusal is None:
            self.send()
            return
        assert isinstance(refusal, PoisonRequest)
        assert len(self.sent) == 4, "it is sent again as often as it may be"
        self.ends += 1

    @rule(which=st.integers(0, 3))
    def abort(self, which: int) -> None:
        """Its client goes away; or an end comes, of whichever attempt."""
        self.ends += self.flight.end(self.sent[which % len(self.sent)].number)

    @invariant()
    def a_stream_has_every_token_once_and_in_order(self) -> None:
        assert self.stream == [token(position) for position in range(len(self.stream))]

    @invariant()
    def a_request_ends_once(self) -> None:
        assert self.ends == self.flight.ended


TestFlights = FlightMachine.TestCase
