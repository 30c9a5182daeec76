"""A request's progress through the planner, and the actions, limits and statistics that the planner speaks in."""

from __future__ import annotations

import enum

from attrs import define, field, frozen

from .model import ModelDescription
from .plan import Drawn
from .request import EncoderItem, FinishReason, Request

# -- actions ---------------------------------------------------------------------------------------------------------


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
    drawn: Drawn


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


# -- state -----------------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"  # no further slices; resources go back when no step mentions it


class Entry(enum.Enum):
    """What the request has of its encoder entry."""

    NONE = "none"
    ASKED = "asked"
    HELD = "held"


@define(eq=False)
class Sequence:
    """A request's progress. ``tokens`` is the prompt and the committed tokens."""

    request: Request
    arrival: int
    tokens: list[int]
    phase: Phase = Phase.WAITING
    entry: Entry = Entry.NONE
    holder: str = ""  # its name at the encoder cache, while ``entry`` is not NONE
    asks: int = 0
    id: int | None = None  # the executor's name for it; a new one for each time it starts
    dispatched: int = 0  # positions that dispatched steps have fed or will feed
    draws: int = 0  # tokens drawn by steps in flight
    in_flight: int = 0  # steps in flight that mention it
    pages: list[int] = field(factory=list)
    slot: int | None = None
    ended: bool = False  # its one end has been told
    suspicion: int = 0  # failed steps it was part of, since the last one that went well
    crashes_alone: int = 0

    @property
    def item(self) -> EncoderItem | None:
        return self.request.items[0] if self.request.items else None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def known(self) -> int:
        """Tokens it will have when the steps in flight are done."""
        return len(self.tokens) + self.draws

    @property
    def wants_slice(self) -> bool:
        return self.dispatched < self.known and self.generated + self.draws < self.request.max_tokens

    @property
    def order(self) -> tuple[int, int]:
        return (self.request.priority, self.arrival)


# -- limits and statistics -------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class PlannerStatistics:
    """A snapshot of the planner. Counters since the start."""

    waiting: int
    running: int
    leaving: int
    steps_in_flight: int
    pages: int
    pages_free: int
    cross_slots: int
    cross_slots_used: int
    cross_slots_idle: int
    cross_written: int
    cross_shared: int  # starts that found their cross-attention KV resident
    steps: int
    tokens_fed: int
    tokens_committed: int
    preemptions: int
    failed_steps: int
    step_tokens: int  # what a step may feed now; less than ``max_step_tokens`` after one was too large for the memory


@frozen(kw_only=True)
class PlannerLimits:
    """What the planner plans against."""

    max_running: int
    max_step_tokens: int
    page_size: int
    pages: int
    cross_slots: int
    eos_token_ids: frozenset[int]
    steps_in_flight: int = 2
    crashes_alone: int = 2  # a request whose step fails this often, alone, is poison; more where the device is flaky

    @classmethod
    def of(
        cls, description: ModelDescription, *, max_running: int, max_step_tokens: int, steps_in_flight: int
    ) -> PlannerLimits:
        """The limits of a loaded model under an engine's settings."""
        return cls(
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            page_size=description.page_size,
            pages=description.pages,
            cross_slots=description.cross_slots,
            eos_token_ids=frozenset(description.eos_token_ids),
            steps_in_flight=steps_in_flight,
        )
