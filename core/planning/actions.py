"""The planner's decisions: actions, which the scheduler turns into messages, and events, which it emits."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from ..events import Event
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
    action as a message."""

    holder: str
    key: str


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
    """The request was aborted, or is ``stopped``: its client has found a stop string."""

    request_id: str
    stopped: bool = False


@frozen
class DropAdapter:
    """One load of the adapter ``key`` is taken back. The runner gets this action as a message."""

    key: str


Action: TypeAlias = Acquire | Release | Commit | Finish | Fail | Abort | DropAdapter | Event
"""One decision of the planner, or an event that the scheduler emits."""
