"""Flights: requests that run on replicas elsewhere, and their handling after the loss of a replica.

Pure. A flight is sent to a replica, gets tokens, and ends. When its replica is lost, the flight is sent again together
with its tokens so far, so its stream goes on without a gap or a duplicate. Later answers of a lost replica are ignored.

One of the requests on a lost replica may have caused the loss. So all of them are suspects, and go on in quarantine, on
a replica for suspects alone. They run together there. If that replica is lost too, they run one after another
(`SuspectTrials`). If the replica is lost once more, the suspect that was on trial is poison. So a request that ends
processes ends only one replica with other requests, and no innocent request is taken for poison.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from attrs import define, evolve, field

from triolet.core.errors import PoisonRequest, caused
from triolet.core.plan import SampledToken
from triolet.core.request import Request

CLEARED_AFTER = 8
"""The number of tokens that a suspect samples in quarantine until it is cleared. A lost replica may have sampled tokens
that it did not report, so the crash may come again only after these tokens."""


class Place(enum.Enum):
    """The place where a flight runs."""

    AMONG_OTHERS = enum.auto()
    IN_QUARANTINE = enum.auto()  # with other suspects
    ALONE = enum.auto()  # in quarantine, and no other suspect is tried until it is cleared


@define(eq=False)
class Flight:
    """The progress of one request.

    Attributes:
        place: the place that the request is sent to.
        attempt: the number of the attempt, which grows with every sending and every loss. Messages of earlier attempts
            are late.
        losses: the number of lost replicas that the request was on.
    """

    request: Request
    place: Place = Place.AMONG_OTHERS
    attempt: int = 0
    losses: int = 0
    ended: bool = False
    _apart: bool = field(default=False, init=False)  # whether the present attempt is
    _lost_apart: int = field(default=0, init=False)
    _committed: list[int] = field(factory=list, init=False)
    _sampled: int = field(default=0, init=False)  # tokens of this attempt
    _probed: bool = field(default=False, init=False)

    @property
    def cleared(self) -> bool:
        """True if the request cannot have caused the last loss, since it has sampled enough tokens after the loss."""
        return self._sampled >= CLEARED_AFTER

    def send(self, *, apart: bool = False) -> tuple[int, Request]:
        """Returns the number of the attempt, and the request to send. ``apart``: the request is a suspect that no
        quarantine can take, so it runs among others, in steps of its own."""
        assert not self.ended, "a request that has ended is sent"
        self.attempt += 1
        self._apart = apart
        self._sampled = 0
        probe = None if self._probed else self.request.probe
        return self.attempt, evolve(self.request, committed=tuple(self._committed), probe=probe, suspect=apart)

    def took(self, attempt: int, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Notes tokens that have come from an ``attempt``. Returns the tokens for the stream."""
        if self.ended or attempt != self.attempt:
            return ()
        self._committed += [one.token_id for one in sampled if one.token_id is not None]
        self._sampled += len(sampled)
        self._probed = self._probed or any(one.probe is not None for one in sampled)
        return sampled

    def end(self, attempt: int) -> bool:
        """Notes that the request has ended in an ``attempt``. Returns whether its stream ends."""
        if self.ended or attempt != self.attempt:
            return False
        self.ended = True
        return True

    def lost(
        self, attempt: int, cause: BaseException, *, alone: bool = False, blameless: bool = False
    ) -> PoisonRequest | None:
        """Notes that the replica of an ``attempt`` is lost. Returns the error of a request that is not sent again;
        ``None``: the request is sent again.

        Args:
            alone: True if the replica had no other request.
            blameless: True if no request can have caused the loss, for example because the machine was taken away.
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
            f"request {self.request.id} was running on {self.losses} replicas when they were lost, {how}; it is not "
            f"sent to another replica. The last replica was lost by {type(cause).__name__}: {cause}"
        )
        return caused(error, cause)


@define
class _SuspectTrial:
    alone: bool  # no other trial may begin beside this one
    cleared: bool = False
    had_company: bool = False


@define(eq=False)
class SuspectTrials:
    """The suspects that wait for a trial or run in quarantine, by request id. A trial ends when its suspect is cleared.
    The suspect goes on in quarantine then, and other trials may begin beside it."""

    _together: dict[str, None] = field(factory=dict, init=False)  # waiting suspects; an ordered set
    _alone: dict[str, None] = field(factory=dict, init=False)  # waiting suspects
    _there: dict[str, _SuspectTrial] = field(factory=dict, init=False)  # suspects that run in quarantine

    def add(self, request_id: str, place: Place) -> None:
        """Adds a suspect that waits for its trial."""
        (self._alone if place is Place.ALONE else self._together)[request_id] = None

    def cleared(self, request_id: str) -> None:
        """Notes that a trial has ended well. An id that is not in quarantine changes nothing."""
        if request_id in self._there:
            self._there[request_id].cleared = True

    def gone(self, request_id: str) -> bool:
        """Notes that a request has ended, was lost, or need not be tried any more. Returns whether the request was
        alone in quarantine since its trial began."""
        self._together.pop(request_id, None)
        self._alone.pop(request_id, None)
        trial = self._there.pop(request_id, None)
        return trial is not None and not trial.had_company

    def begin(self) -> Sequence[str]:
        """Returns the suspects whose trials begin now. The caller sends them."""
        tried = [trial for trial in self._there.values() if not trial.cleared]
        if any(trial.alone for trial in tried) or (self._alone and tried):
            return ()
        alone = bool(self._alone)
        waiting = self._alone if alone else self._together
        begun = tuple(waiting)[: 1 if alone else None]
        for request_id in begun:
            del waiting[request_id]
            self._there[request_id] = _SuspectTrial(alone=alone)
        if begun and len(self._there) > 1:
            for trial in self._there.values():
                trial.had_company = True
        return begun
