"""Flights: requests that run on replicas elsewhere, and what is done with them when a replica is lost.

Pure. A flight is sent to a replica, has tokens, and ends. When its replica is lost it is sent again, from the tokens
that it had: its stream goes on without a gap or a duplicate. What a lost replica still says is late, and counts for
nothing.
"""

from __future__ import annotations

from attrs import define, evolve, field

from .errors import PoisonRequest
from .plan import SampledToken
from .request import Request


@define(eq=False)
class Flight:
    """One request. ``losses``: of replicas that it was on.

    Attributes:
        most_losses: with more, the request is taken for what ended them, and is not sent again.
        attempt: counts up with every sending; what belongs to an earlier one is late.
    """

    request: Request
    most_losses: int = 1
    attempt: int = 0
    losses: int = 0
    ended: bool = False
    _committed: list[int] = field(factory=list, init=False)
    _probed: bool = field(default=False, init=False)

    def send(self) -> tuple[int, Request]:
        """The number of the attempt, and the request to be sent."""
        assert not self.ended, "a request that has ended is sent"
        self.attempt += 1
        probe = None if self._probed else self.request.probe
        suspect = self.losses > 0
        return self.attempt, evolve(self.request, committed=tuple(self._committed), probe=probe, suspect=suspect)

    def took(self, attempt: int, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Tokens of an ``attempt`` have come. Returns those that the stream gets."""
        if self.ended or attempt != self.attempt:
            return ()
        self._committed += [one.token_id for one in sampled if one.token_id is not None]
        self._probed = self._probed or any(one.probe is not None for one in sampled)
        return sampled

    def end(self, attempt: int) -> bool:
        """The request has ended in an ``attempt``. Returns whether its stream ends."""
        if self.ended or attempt != self.attempt:
            return False
        self.ended = True
        return True

    def lost(self, attempt: int, cause: BaseException) -> PoisonRequest | None:
        """The replica of an ``attempt`` is lost. Returns the error of a request that is not sent again."""
        assert attempt == self.attempt, "an attempt is lost once, before the next begins"
        self.losses += 1
        if self.losses <= self.most_losses:
            return None
        self.ended = True
        error = PoisonRequest(
            f"request {self.request.id} was running on {self.losses} replicas when they were lost, and is not sent to "
            f"another one; the last was lost to {type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        return error
