"""Every message between actors, grouped by the channel it travels on. Commands are imperative, facts past tense.

Frozen, slotted, tuples inside; keys, never tensors. Inboxes are unbounded, so that clean-up under cancellation can use
``send_nowait``; the engine bounds the admission instead.
"""

from __future__ import annotations

from typing import Protocol

from attrs import field, frozen

from ..core.errors import RunnerCrashed
from ..core.plan import LentOutput, SampledToken, StepPlan, StepResult
from ..core.planning.actions import Acquire as Acquire  # noqa: PLC0414  (a message of ours, too)
from ..core.planning.actions import Release as Release  # noqa: PLC0414
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
    """Last message of a request that its client, or the end of the engine, aborted. A stop string also ends a request
    by an abort, so this message has ``timings`` too."""

    timings: Timings | None = None


End = Finished | Failed | Aborted


class Stream(Protocol):
    """The place where the scheduler puts a request's tokens and its end. Neither method waits or raises, even where the
    reader has gone away."""

    def put(self, sampled: tuple[SampledToken, ...]) -> None:
        """Hands over one step's results for the request, in order; at least one."""

    def end(self, end: End) -> None:
        """Hands over the request's one end. Nothing comes after it."""


class Lent(Protocol):
    """The place where the encoder cache puts the answer to a `Lend`, once. Neither method waits or raises."""

    def put(self, output: LentOutput) -> None:
        """A copy of the output. The loan goes on until it is released, or its term is over."""

    def refuse(self, error: Exception) -> None:
        """The loan has ended, and there is no output."""


class Lenders(Protocol):
    """The engines that the encoder cache borrows from. Neither method waits or raises."""

    def ask(self, number: int, item: EncoderItem) -> None:
        """Asks a lender for ``item``. `Arrived` or `BorrowBroken` answers, with its number, once and soon: also where
        the lender is lost."""

    def withdraw(self, number: int) -> None:
        """The answer is not wanted any more."""


class Reply(Protocol):
    """The place where the scheduler puts the answer to an order, once."""

    def put(self, error: Exception | None) -> None:
        """Done (``None``), or the error. Never waits, never raises."""


# -- from the runner to the encoder cache, which hands it on to the scheduler -----------------------------------------


@frozen
class RunnerRestarted:
    """The runner has restarted as ``generation``, or has given the device back (``asleep``). All KV, encoder outputs
    and steps in flight are lost. The runner drops messages of older generations. The scheduler gets the message from
    the encoder cache, so that no `EncoderReady` overtakes it."""

    generation: int
    asleep: bool


@frozen
class RunnerWoke:
    """The runner has taken the device again."""


# -- to the scheduler ------------------------------------------------------------------------------------------------


@frozen
class Submit:
    """The engine submits a new request, and names the place where its tokens go."""

    request: Request
    stream: Stream = field(repr=False)


@frozen
class AbortRequest:
    """The engine withdraws a request: its client no longer wants it."""

    request_id: str


@frozen
class Drain:
    """The supervisor orders the end: no submits follow. The scheduler finishes requests until ``deadline`` (trio time),
    then aborts the others."""

    deadline: float


@frozen
class EncoderReady:
    """The encoder cache grants: ``holder`` may read its entry until it releases the entry, or the runner restarts."""

    holder: str


@frozen
class EncoderRefused:
    """The encoder cache refuses: ``holder`` will not get its entry."""

    holder: str
    error: Exception


@frozen
class StepDone:
    """The runner reports that the oldest step in flight went well."""

    result: StepResult


@frozen
class StepFailed:
    """The runner reports that the oldest step in flight raised, or was skipped because an earlier step had raised."""

    step_id: int
    error: Exception
    skipped: bool


@frozen
class WakeFailed:
    """The runner reports that it could not take the device, and sleeps on."""

    error: Exception


@frozen
class SleepFailed:
    """The runner reports that it could not park the weights, and is awake."""

    error: Exception


@frozen
class OrderSleep:
    """The engine orders the device to be given back, until `OrderWake`."""

    reply: Reply = field(repr=False)


@frozen
class OrderWake:
    """The engine orders the device to be taken again."""

    reply: Reply = field(repr=False)


@frozen
class RunnerStopped:
    """The supervisor reports that the runner is gone, and sends no more answers."""

    error: RunnerCrashed


SchedulerMessage = (
    Submit
    | AbortRequest
    | Drain
    | EncoderReady
    | EncoderRefused
    | StepDone
    | StepFailed
    | RunnerRestarted
    | RunnerWoke
    | SleepFailed
    | WakeFailed
    | OrderSleep
    | OrderWake
    | RunnerStopped
)

# -- to the encoder cache, which also gets the planner's `Acquire` and `Release`, and a borrower's `Release` -----------


@frozen
class Encoded:
    """The runner reports that the outputs of ``keys`` are resident."""

    keys: tuple[str, ...]


@frozen
class EncodeBroken:
    """The runner reports that the encode batch raised, and kept no output."""

    keys: tuple[str, ...]
    error: Exception


@frozen
class Lend:
    """Another engine borrows: it acquires ``item`` as ``loan``, a name that is new for every loan. `Release`
    ends the loan."""

    loan: str
    item: EncoderItem
    lent: Lent = field(repr=False)


@frozen
class TakenOut:
    """The runner gives a copy of the output of a loan."""

    loan: str
    output: LentOutput = field(repr=False)


@frozen
class TakeOutBroken:
    """The runner reports that the copy for a loan could not be made."""

    loan: str
    key: str
    error: Exception


@frozen
class Arrived:
    """The `Lenders` give the output that was asked for as ``number``."""

    number: int
    output: LentOutput = field(repr=False)


@frozen
class BorrowBroken:
    """The `Lenders` report that no output comes for ``number``."""

    number: int
    error: Exception


@frozen
class PutInDone:
    """The runner reports that the borrowed output of ``key`` is resident."""

    key: str


@frozen
class PutInBroken:
    """The runner reports that the borrowed output of ``key`` could not be kept."""

    key: str
    error: Exception


@frozen
class Freed:
    """The runner reports that it has dropped the outputs of ``keys``."""

    keys: tuple[str, ...]


@frozen
class SchedulerClosed:
    """The scheduler's last message: all holds are void, and no acquire follows."""


@frozen
class RunnerLost:
    """The supervisor reports that the runner is gone, and with it every encoder output."""


EncoderCacheMessage = (
    Acquire
    | Release
    | Encoded
    | EncodeBroken
    | Lend
    | TakenOut
    | TakeOutBroken
    | Arrived
    | BorrowBroken
    | PutInDone
    | PutInBroken
    | Freed
    | SchedulerClosed
    | RunnerRestarted
    | RunnerWoke
    | RunnerLost
)

# -- to the runner ---------------------------------------------------------------------------------------------------


@frozen
class Encode:
    """The encoder cache orders one batch to be encoded. A runner that has restarted since drops the order."""

    items: tuple[EncoderItem, ...]
    generation: int


@frozen
class Free:
    """The encoder cache orders these outputs to be dropped."""

    keys: tuple[str, ...]
    generation: int


@frozen
class TakeOut:
    """The encoder cache orders a copy of an output for ``loan``."""

    loan: str
    key: str
    generation: int


@frozen
class PutIn:
    """The encoder cache orders an output that was borrowed to be kept."""

    output: LentOutput = field(repr=False)
    generation: int


@frozen
class Step:
    """The scheduler orders a step. A runner that has restarted since drops it."""

    plan: StepPlan
    generation: int


@frozen
class Sleep:
    """The scheduler orders the device to be given back, after the calls in flight."""


@frozen
class Wake:
    """The scheduler orders the device to be taken again."""


StepLaneMessage = Step | Sleep | Wake
EncodeLaneMessage = Encode | Free | TakeOut | PutIn
RunnerMessage = StepLaneMessage | EncodeLaneMessage
