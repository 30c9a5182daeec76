"""The planner's decisions: actions, which the scheduler turns into messages and events."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from ..plan import SampledToken
from ..request import EncoderItem, FinishReason


@frozen
class Acquire:
    """Orders the encoder cache to acquire the item. The encoder cache gets this action as a message.
    `Planner.encoder_ready` or `encoder_refused` answers, unless a `Release` comes before.

    ``holder`` is a new name for every acquire, so that a late answer to a withdrawn acquire is recognised. The smallest
    ``order`` is served first."""

    holder: str
    item: EncoderItem
    order: int = 0
    request_id: str = ""


@frozen
class Release:
    """Reports that ``holder`` releases the entry of ``key``, or withdraws its acquire. The encoder cache gets this
    action as a message; borrowers send the same message."""

    holder: str
    key: str


@frozen
class HoldsAll:
    """The request holds all encoder outputs that it has acquired."""

    request_id: str


@frozen
class Start:
    """The request has a place and pages, and is part of the next step."""

    request_id: str


@frozen
class Preempt:
    """The request gave way to another one and waits again."""

    request_id: str


@frozen
class Suspect:
    """The request was part of a failed step."""

    request_id: str


@frozen
class Shrink:
    """Steps feed at most ``tokens`` tokens from now on, since a step did not fit the device's memory."""

    tokens: int


@frozen
class Commit:
    """A step's results for the request are final."""

    request_id: str
    sampled: tuple[SampledToken, ...]


@frozen
class Finish:
    """The request ended well."""

    request_id: str
    reason: FinishReason


@frozen
class Fail:
    """The request ended with an error."""

    request_id: str
    error: Exception


@frozen
class Abort:
    """The request was aborted."""

    request_id: str


Action: TypeAlias = Acquire | Release | HoldsAll | Start | Preempt | Suspect | Shrink | Commit | Finish | Fail | Abort
"""One decision of the planner."""
