"""What the planner decided and others must hear of: actions, which the scheduler turns into messages and events."""

from __future__ import annotations

from attrs import frozen

from .plan import SampledToken
from .request import EncoderItem, FinishReason


@frozen
class Action:
    """Something that the scheduler must tell others."""


@frozen
class Acquire(Action):
    """Ask the encoder cache for the item; `Planner.encoder_ready` or `encoder_refused` answers.

    ``holder`` is new for every acquire, so that a late answer to a withdrawn one is recognised. ``order``: the smallest
    is served first."""

    holder: str
    item: EncoderItem
    order: int
    request_id: str


@frozen
class Release(Action):
    """``holder`` no longer needs the entry (or no longer waits for it)."""

    holder: str
    key: str


@frozen
class HoldsAll(Action):
    """The request holds all encoder outputs that it has acquired."""

    request_id: str


@frozen
class Start(Action):
    """The request has a place and pages, and is part of the next step."""

    request_id: str


@frozen
class Preempt(Action):
    """The request gave way to another one and waits again."""

    request_id: str


@frozen
class Suspect(Action):
    """The request was part of a failed step."""

    request_id: str


@frozen
class Shrink(Action):
    """Steps feed at most ``tokens`` from now on: one did not fit the memory."""

    tokens: int


@frozen
class Commit(Action):
    """All that a step gave to the request is final."""

    request_id: str
    sampled: tuple[SampledToken, ...]


@frozen
class Finish(Action):
    """The request ended well."""

    request_id: str
    reason: FinishReason


@frozen
class Fail(Action):
    """The request ended with an error."""

    request_id: str
    error: Exception


@frozen
class Abort(Action):
    """The request ended because somebody wished so."""

    request_id: str
