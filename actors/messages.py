"""Every message between actors, grouped by the channel it travels on. Commands are imperative, facts past tense.

Frozen, slotted, tuples inside; keys, never tensors. Inboxes are unbounded, so that clean-up under cancellation can use
``send_nowait``; what is bounded is admission, in the engine.
"""

from __future__ import annotations

from typing import Protocol

from attrs import field, frozen

from ..core.errors import RunnerCrashed
from ..core.plan import EncodeJob, SampledToken, StepPlan, StepResult
from ..core.request import EncoderItem, FinishReason, Request
from ..core.timings import Timings

# -- scheduler -> one request's stream -------------------------------------------------------------------------------


@frozen
class Finished:
    """Last message of a request that ended well. ``timings`` count from `Submit`."""

    reason: FinishReason
    timings: Timings


@frozen
class Failed:
    """Last message of a request that could not be served."""

    error: Exception


@frozen
class Aborted:
    """Last message of a request that its client, or the end of the engine, withdrew. A stop string ends a request that
    way too, so ``timings`` count here as well."""

    timings: Timings | None = None


End = Finished | Failed | Aborted


class Stream(Protocol):
    """Where the scheduler puts what a request gives. Neither method waits or raises; a reader that has gone away is
    not the scheduler's business."""

    def put(self, sampled: tuple[SampledToken, ...]) -> None:
        """Hands over all that one step gave to the request, in order; at least one token."""

    def end(self, end: End) -> None:
        """Hands over the request's one end. Nothing comes after it."""


class Reply(Protocol):
    """Where the answer to an order is put, once."""

    def put(self, error: Exception | None) -> None:
        """Done, or why not. Never waits, never raises."""


# -- to the scheduler ------------------------------------------------------------------------------------------------


@frozen
class Submit:
    """From the engine: a new request and where its tokens go."""

    request: Request
    stream: Stream = field(repr=False)


@frozen
class AbortRequest:
    """From the engine: the client no longer wants it."""

    request_id: str


@frozen
class Drain:
    """From the supervisor: no more submits come. Finish what is here until ``deadline`` (trio time), abort the rest."""

    deadline: float


@frozen
class EncoderReady:
    """From the encoder cache: ``holder`` may read its entry until it releases it, or the runner starts anew."""

    holder: str


@frozen
class EncoderRefused:
    """From the encoder cache: ``holder`` will not get its entry."""

    holder: str
    error: Exception


@frozen
class StepDone:
    """From the runner: the oldest step in flight has been run."""

    result: StepResult


@frozen
class StepFailed:
    """From the runner: the oldest step in flight raised, or was skipped because the one before it did."""

    step_id: int
    error: Exception
    skipped: bool


@frozen
class GenerationLost:
    """From the encoder cache, to which the runner said it: the runner has started anew as ``generation``, or has given
    the device back (``asleep``). What was computed and what was in flight is gone. It comes this way so that no
    `EncoderReady` overtakes it."""

    generation: int
    asleep: bool


@frozen
class Woke:
    """From the encoder cache, to which the runner said it: the device is taken again."""


@frozen
class WakeFailed:
    """From the runner: the device could not be taken; it sleeps on."""

    error: Exception


@frozen
class SleepFailed:
    """From the runner: the weights could not be parked; it is awake."""

    error: Exception


@frozen
class OrderSleep:
    """From the engine: give the device back, until `OrderWake`."""

    reply: Reply = field(repr=False)


@frozen
class OrderWake:
    """From the engine: take the device again."""

    reply: Reply = field(repr=False)


@frozen
class RunnerStopped:
    """From the supervisor: the runner is gone and will answer nothing any more."""

    error: RunnerCrashed


SchedulerMessage = (
    Submit
    | AbortRequest
    | Drain
    | EncoderReady
    | EncoderRefused
    | StepDone
    | StepFailed
    | GenerationLost
    | Woke
    | SleepFailed
    | WakeFailed
    | OrderSleep
    | OrderWake
    | RunnerStopped
)

# -- to the encoder cache --------------------------------------------------------------------------------------------


@frozen
class Acquire:
    """From the scheduler: ``holder``, a name that is new for every acquire, is to hold ``item``. Smaller ``order``
    comes first. `EncoderReady` or `EncoderRefused` answers, unless `Release` comes before."""

    holder: str
    item: EncoderItem
    order: int = 0


@frozen
class Release:
    """From the scheduler: ``holder`` gives its hold of ``key`` back, or withdraws its acquire."""

    holder: str
    key: str


@frozen
class Encoded:
    """From the runner: the outputs of ``keys`` are resident."""

    keys: tuple[str, ...]


@frozen
class EncodeBroken:
    """From the runner: the encode batch raised and left nothing behind."""

    keys: tuple[str, ...]
    error: Exception


@frozen
class Freed:
    """From the runner: the outputs of ``keys`` are dropped."""

    keys: tuple[str, ...]


@frozen
class SchedulerClosed:
    """From the scheduler, its last: nothing is held any more and nothing will be acquired."""


@frozen
class RunnerRestarted:
    """From the runner: it has started anew as ``generation``, or has given the device back (``asleep``); every encoder
    output is gone, and what is asked of it in the name of an older generation is dropped."""

    generation: int
    asleep: bool


@frozen
class RunnerWoke:
    """From the runner: it has taken the device again."""


@frozen
class RunnerLost:
    """From the supervisor: the runner is gone and with it every encoder output."""


EncoderCacheMessage = (
    Acquire | Release | Encoded | EncodeBroken | Freed | SchedulerClosed | RunnerRestarted | RunnerWoke | RunnerLost
)

# -- to the runner ---------------------------------------------------------------------------------------------------


@frozen
class Encode:
    """From the encoder cache, on the encode lane: one batch. A runner that has started anew since drops it."""

    jobs: tuple[EncodeJob, ...]
    generation: int


@frozen
class Free:
    """From the encoder cache, on the encode lane: drop these outputs."""

    keys: tuple[str, ...]
    generation: int


@frozen
class Step:
    """From the scheduler, on the step lane. A runner that has started anew since drops it."""

    plan: StepPlan
    generation: int


@frozen
class Sleep:
    """From the scheduler, on the step lane: give the device back, after what runs."""


@frozen
class Wake:
    """From the scheduler, on the step lane: take the device again."""


StepLaneMessage = Step | Sleep | Wake
EncodeLaneMessage = Encode | Free
RunnerMessage = StepLaneMessage | EncodeLaneMessage
