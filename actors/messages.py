"""Every message between actors, grouped by the channel it travels on. Commands are imperative, facts past tense.

Frozen, slotted, tuples inside; keys, never tensors. Inboxes are unbounded, so that clean-up under cancellation can use
``send_nowait``; the engine bounds the admission instead.
"""

from __future__ import annotations

from typing import Protocol

from attrs import field, frozen

from ..core.errors import RunnerCrashed
from ..core.plan import EncodeJob, LentOutput, SampledToken, StepPlan, StepResult
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
    """Where the scheduler puts a request's tokens and its end. Neither method waits or raises, even where the reader
    has gone away."""

    def put(self, sampled: tuple[SampledToken, ...]) -> None:
        """Hands over one step's results for the request, in order; at least one."""

    def end(self, end: End) -> None:
        """Hands over the request's one end. Nothing comes after it."""


class Lent(Protocol):
    """Where the encoder cache puts the answer to a `Lend`, once. Neither method waits or raises."""

    def put(self, output: LentOutput) -> None:
        """A copy of the output. The loan goes on until it is released, or its term is over."""

    def refuse(self, error: Exception) -> None:
        """The loan has ended, and there is no output."""


class Lenders(Protocol):
    """Where the encoder cache borrows. Neither method waits or raises."""

    def ask(self, number: int, item: EncoderItem) -> None:
        """Asks a lender for ``item``. `Arrived` or `BorrowBroken` answers, with its number, once and soon: also where
        the lender is lost."""

    def withdraw(self, number: int) -> None:
        """The answer is not wanted any more."""


class Reply(Protocol):
    """Where the scheduler puts the answer to an order, once."""

    def put(self, error: Exception | None) -> None:
        """Done (``None``), or the error. Never waits, never raises."""


# -- to the scheduler ------------------------------------------------------------------------------------------------


@frozen
class Submit:
    """From the engine: a new request and where its tokens go."""

    request: Request
    stream: Stream = field(repr=False)


@frozen
class AbortRequest:
    """From the engine: the client no longer wants the request."""

    request_id: str


@frozen
class Drain:
    """From the supervisor: no submits follow. Finish requests until ``deadline`` (trio time), then abort the others."""

    deadline: float


@frozen
class EncoderReady:
    """From the encoder cache: ``holder`` may read its entry until it releases the entry, or the runner restarts."""

    holder: str


@frozen
class EncoderRefused:
    """From the encoder cache: ``holder`` will not get its entry."""

    holder: str
    error: Exception


@frozen
class StepDone:
    """From the runner: the oldest step in flight went well."""

    result: StepResult


@frozen
class StepFailed:
    """From the runner: the oldest step in flight raised, or was skipped because an earlier step had raised."""

    step_id: int
    error: Exception
    skipped: bool


@frozen
class GenerationLost:
    """From the encoder cache, on the runner's behalf: the runner has restarted as ``generation``, or has given the
    device back (``asleep``). All KV, encoder outputs and steps in flight are lost. The message takes this way to keep
    its order among the `EncoderReady` ones."""

    generation: int
    asleep: bool


@frozen
class Woke:
    """From the encoder cache, on the runner's behalf: the runner has taken the device again."""


@frozen
class WakeFailed:
    """From the runner: it could not take the device, and sleeps on."""

    error: Exception


@frozen
class SleepFailed:
    """From the runner: it could not park the weights, and is awake."""

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
    """From the supervisor: the runner is gone and sends no more answers."""

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
    """From the scheduler: ``holder``, a name that is new for every acquire, acquires ``item``. The smallest ``order``
    comes first. `EncoderReady` or `EncoderRefused` answers, unless `Release` comes before."""

    holder: str
    item: EncoderItem
    order: int = 0


@frozen
class Release:
    """From the scheduler, or a borrower: ``holder`` releases ``key``, or withdraws its acquire."""

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
class Lend:
    """From another engine: the borrower acquires ``item`` as ``loan``, a name that is new for every loan. `Release`
    ends the loan."""

    loan: str
    item: EncoderItem
    lent: Lent = field(repr=False)


@frozen
class TakenOut:
    """From the runner: a copy of the output of a loan."""

    loan: str
    output: LentOutput = field(repr=False)


@frozen
class TakeOutBroken:
    """From the runner: the copy for a loan could not be made."""

    loan: str
    key: str
    error: Exception


@frozen
class Arrived:
    """From the `Lenders`: what was borrowed as ``number``."""

    number: int
    output: LentOutput = field(repr=False)


@frozen
class BorrowBroken:
    """From the `Lenders`: nothing comes as ``number``."""

    number: int
    error: Exception


@frozen
class PutInDone:
    """From the runner: the borrowed output of ``key`` is resident."""

    key: str


@frozen
class PutInBroken:
    """From the runner: the borrowed output of ``key`` could not be kept."""

    key: str
    error: Exception


@frozen
class Freed:
    """From the runner: it has dropped the outputs of ``keys``."""

    keys: tuple[str, ...]


@frozen
class SchedulerClosed:
    """From the scheduler, its last message: all holds are void, and no acquire follows."""


@frozen
class RunnerRestarted:
    """From the runner: it has restarted as ``generation``, or has given the device back (``asleep``). Every encoder
    output is gone. The runner drops messages of older generations."""

    generation: int
    asleep: bool


@frozen
class RunnerWoke:
    """From the runner: it has taken the device again."""


@frozen
class RunnerLost:
    """From the supervisor: the runner is gone and with it every encoder output."""


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
    """From the encoder cache, on the encode lane: encode one batch. A runner that has restarted since drops it."""

    jobs: tuple[EncodeJob, ...]
    generation: int


@frozen
class Free:
    """From the encoder cache, on the encode lane: drop these outputs."""

    keys: tuple[str, ...]
    generation: int


@frozen
class TakeOut:
    """From the encoder cache, on the encode lane: make a copy of an output for ``loan``."""

    loan: str
    key: str
    generation: int


@frozen
class PutIn:
    """From the encoder cache, on the encode lane: keep an output that was borrowed."""

    output: LentOutput = field(repr=False)
    generation: int


@frozen
class Step:
    """From the scheduler, on the step lane. A runner that has restarted since drops the step."""

    plan: StepPlan
    generation: int


@frozen
class Sleep:
    """From the scheduler, on the step lane: give the device back, after the calls in flight."""


@frozen
class Wake:
    """From the scheduler, on the step lane: take the device again."""


StepLaneMessage = Step | Sleep | Wake
EncodeLaneMessage = Encode | Free | TakeOut | PutIn
RunnerMessage = StepLaneMessage | EncodeLaneMessage
