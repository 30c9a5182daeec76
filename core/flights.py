"""Flights: requests that run on replicas elsewhere, and what is done with them when a replica is lost.

Pure. A flight is sent to a replica, has tokens, and ends. When its replica is lost it is sent again, from the tokens
that it had: its stream goes on without a gap or a duplicate. What a lost replica still says is late, and counts for
nothing.

One of the requests on a lost replica may be what ended it. So they are suspects, and no other replica gets them: they
go on in quarantine, on a replica for suspects alone. They run there together, and when it is lost too, one after
another (`Trials`). The one that was tried when it was lost again is poison. So a request that ends processes ends one
replica that has other requests, and no request is taken for it that is not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from attrs import define, evolve, field

from .errors import PoisonRequest
from .plan import SampledToken
from .request import Request

CLEARED_AFTER = 8
"""Tokens that a suspect samples in quarantine until it is cleared. A lost replica may have sampled some that nobody
heard of: what ended it comes again after these."""


class Place(enum.Enum):
    """The place where a flight runs."""

    AMONG_OTHERS = enum.auto()
    IN_QUARANTINE = enum.auto()  # with other suspects
    ALONE = enum.auto()  # in quarantine, and no other suspect is tried until it is cleared


@define(eq=False)
class Flight:
    """One request.

    Attributes:
        place: where it is sent.
        attempt: counts up with every sending and every loss; what belongs to an earlier one is late.
        losses: of replicas that it was on.
    """

    request: Request
    place: Place = Place.AMONG_OTHERS
    attempt: int = 0
    losses: int = 0
    ended: bool = False
    _apart: bool = field(default=False, init=False)  # the present attempt
    _lost_apart: int = field(default=0, init=False)
    _committed: list[int] = field(factory=list, init=False)
    _sampled: int = field(default=0, init=False)  # tokens of this attempt
    _probed: bool = field(default=False, init=False)

    @property
    def cleared(self) -> bool:
        """It has run so far, since it was sent, that what ended its last replica would have come again."""
        return self._sampled >= CLEARED_AFTER

    def send(self, *, apart: bool = False) -> tuple[int, Request]:
        """The number of the attempt, and the request to be sent. ``apart``: a suspect that no quarantine can take, so
        that it runs in steps of its own among others."""
        assert not self.ended, "a request that has ended is sent"
        self.attempt += 1
        self._apart = apart
        self._sampled = 0
        probe = None if self._probed else self.request.probe
        return self.attempt, evolve(self.request, committed=tuple(self._committed), probe=probe, suspect=apart)

    def took(self, attempt: int, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Tokens of an ``attempt`` have come. Returns those that the stream gets."""
        if self.ended or attempt != self.attempt:
            return ()
        self._committed += [one.token_id for one in sampled if one.token_id is not None]
        self._sampled += len(sampled)
        self._probed = self._probed or any(one.probe is not None for one in sampled)
        return sampled

    def end(self, attempt: int) -> bool:
        """The request has ended in an ``attempt``. Returns whether its stream ends."""
        if self.ended or attempt != self.attempt:
            return False
        self.ended = True
        return True

    def lost(
        self, attempt: int, cause: BaseException, *, alone: bool = False, blameless: bool = False
    ) -> PoisonRequest | None:
        """The replica of an ``attempt`` is lost. Returns the error of a request that is not sent again.

        Args:
            alone: there was no other request on it.
            blameless: it is known that no request ended the replica; its machine was taken away, say.
        """
        assert attempt == self.attempt, "an attempt is lost once, before the next begins"
        self.attempt += 1
        self.losses += 1
        if blameless:
            return None
        if self.place is Place.AMONG_OTHERS or self.cleared:
            self.place = Place.IN_QUARANTINE
            return None
        tried_alone = self.place is Place.ALONE
        self.place = Place.ALONE
        self._lost_apart += self._apart
        if not (self._lost_apart > 1 if self._apart else alone and tried_alone):
            return None
        self.ended = True
        how = "in steps of its own on the last" if self._apart else "alone on the last"
        error = PoisonRequest(
            f"request {self.request.id} was running on {self.losses} replicas when they were lost, {how}, and is not "
            f"sent to another; the last was lost to {type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        return error


@define
class _Trial:
    alone: bool  # no other is to begin beside it
    cleared: bool = False
    had_company: bool = False


@define(eq=False)
class Trials:
    """The suspects that wait for a trial or run in quarantine, by request id. A trial ends when the suspect is cleared:
    it runs on there, and others may begin beside it."""

    _together: dict[str, None] = field(factory=dict, init=False)  # that wait; an ordered set
    _alone: dict[str, None] = field(factory=dict, init=False)  # that wait
    _there: dict[str, _Trial] = field(factory=dict, init=False)  # that run in quarantine

    def add(self, request_id: str, place: Place) -> None:
        """A suspect is to be tried."""
        (self._alone if place is Place.ALONE else self._together)[request_id] = None

    def cleared(self, request_id: str) -> None:
        """A trial has ended well. Of one that is not there nothing changes."""
        if request_id in self._there:
            self._there[request_id].cleared = True

    def gone(self, request_id: str) -> bool:
        """A request has ended, or was lost, or is not to be tried any more. Returns whether it was alone in quarantine
        from the beginning of its trial."""
        self._together.pop(request_id, None)
        self._alone.pop(request_id, None)
        trial = self._there.pop(request_id, None)
        return trial is not None and not trial.had_company

    def begin(self) -> Sequence[str]:
        """Returns the suspects whose trials begin now: the caller sends them."""
        tried = [trial for trial in self._there.values() if not trial.cleared]
        if any(trial.alone for trial in tried) or (self._alone and tried):
            return ()
        alone = bool(self._alone)
        waiting = self._alone if alone else self._together
        begun = tuple(waiting)[: 1 if alone else None]
        for request_id in begun:
            del waiting[request_id]
            self._there[request_id] = _Trial(alone=alone)
        if begun and len(self._there) > 1:
            for trial in self._there.values():
                trial.had_company = True
        return begun
