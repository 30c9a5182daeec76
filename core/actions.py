"""What the planner decided and others must hear of: actions, which the scheduler turns into messages and events."""

from __future__ import annotations

from attrs import frozen

from .plan import SampledToken
from .request import EncoderItem, FinishReason


@frozen
class Action:
    """Something that the scheduler must tell others."""


@frozen
class AcquireItem(Action):
    """Ask the encoder cache for the item; `Planner.encoder_ready` or `encoder_refused` answers.

    ``holder`` is new for every ask, so that a late answer to a withdrawn one is recognised."""

    holder: str
    item: EncoderItem


@frozen
class ReleaseItem(Action):
    """``holder`` no longer needs the entry (or no longer waits for it)."""

    holder: str
    key: str


@frozen
class Commit(Action):
    """A token of the request is final."""

    request_id: str
    sampled: SampledToken


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
