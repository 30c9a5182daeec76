"""Every message between actors, grouped by the channel that carries the message. Commands are in the imperative, facts
in the past tense.

Messages are frozen and slotted, and contain tuples and keys, never tensors. Inboxes are unbounded, so that clean-up
under cancellation can use ``send_nowait``. The engine bounds the number of admitted requests instead.
"""

from __future__ import annotations

from typing import Protocol

from attrs import field, frozen

from ..core.errors import RunnerCrashed
from ..core.plan import SampledToken, StepPlan, StepResult
from ..core.planning.actions import Acquire as Acquire  # noqa: PLC0414  (a message of ours, too)
from ..core.planning.actions import DropAdapter as DropAdapter  # noqa: PLC0414
from ..core.planning.actions import Release as Release  # noqa: PLC0414
from ..core.power import Order
from ..core.request import EncoderItem, FinishReason, Request
from ..core.timings import Timings

# -- scheduler -> one request's stream -------------------------------------------------------------------------------


@frozen
class Finished:
    """The last message of a request that ended well. ``timings`` count from `Submit`."""

    reason: FinishReason
    timings: Timings


@frozen
class Failed:
    """The last message of a request that could not be served."""

    error: Exception


@frozen
class Aborted:
    """The last message of a request that was aborted by its client, or by the end of the engine. A stop string also
    ends a request by an abort, so this message has ``timings`` too."""

    timings: Timings | None = None


End = Finished | Failed | Aborted


class Stream(Protocol):
    """The place where the scheduler puts a request's tokens and its end. Neither method waits or raises, even if the
    reader has gone away."""

    def put(self, sampled: tuple[SampledToken, ...]) -> None:
        """Hands over the results of one step for the request, in order. There is at least one result."""

    def end(self, end: End) -> None:
        """Hands over the end of the request. Each request has one end, and nothing comes after it."""


class Reply(Protocol):
    """The place where the scheduler puts the one answer to an order."""

    def put(self, error: Exception | None) -> None:
        """Reports that the order was carried out (``None``), or the error. Never waits, never raises."""


class AdapterReply(Protocol):
    """The place where the scheduler puts the one answer to `LoadAdapter`."""

    def put(self, answer: str | Exception) -> None:
        """Reports the key of the adapter, or the error. Never waits, never raises."""


# -- from the runner to the encoder cache, which hands it on to the scheduler -----------------------------------------


@frozen
class RunnerRestarted:
    """The runner has restarted as ``generation``, or has given the device back (``asleep``). All KV, encoder outputs
    and steps in flight are lost, and the runner drops messages of older generations. The encoder cache passes this
    message on to the scheduler, so that no `EncoderReady` overtakes it."""

    generation: int
    asleep: bool


@frozen
class RunnerWoke:
    """The runner has taken the device again."""


# -- to the scheduler ------------------------------------------------------------------------------------------------


@frozen
class Submit:
    """The engine submits a new request, and names the stream that gets the request's tokens."""

    request: Request
    stream: Stream = field(repr=False)


@frozen
class AbortRequest:
    """The engine withdraws a request that the client no longer wants, since it has gone or has found a stop string."""

    request_id: str
    stopped: bool = False


@frozen
class Drain:
    """The supervisor orders the end: no `Submit` follows. The scheduler goes on with its requests until ``deadline``
    (trio time), and then aborts those that are left."""

    deadline: float


@frozen
class EncoderReady:
    """The encoder cache grants an acquire: ``holder`` may read its entry until it releases the entry, or the runner
    restarts."""

    holder: str


@frozen
class EncoderRefused:
    """The encoder cache refuses an acquire: ``holder`` will not get its entry."""

    holder: str
    error: Exception


@frozen
class StepDone:
    """The runner reports that the oldest step in flight went well."""

    result: StepResult


@frozen
class StepFailed:
    """The runner reports that the oldest step in flight raised, or that the step was skipped because an earlier step
    had raised."""

    step_id: int
    error: Exception
    skipped: bool


@frozen
class OrderFailed:
    """The runner reports that it could not carry out ``order``: it could not park the weights, or not take the device.
    The engine stays as it was."""

    order: Order
    error: Exception


@frozen
class OrderPower:
    """The engine orders that the device is given back or taken again. The order holds until the next one."""

    order: Order
    reply: Reply = field(repr=False)


@frozen
class LoadAdapter:
    """The engine orders that the adapter in ``folder`` is loaded. The scheduler passes the order on to the runner."""

    folder: str
    reply: AdapterReply = field(repr=False)


@frozen
class UnloadAdapter:
    """The engine takes one load of an adapter back."""

    key: str


@frozen
class AdapterLoaded:
    """The runner reports that it has loaded an adapter, whose key it tells, or the error."""

    reply: AdapterReply = field(repr=False)
    answer: str | Exception


@frozen
class RunnerStopped:
    """The supervisor reports that the runner is gone. No more answers of the runner will come."""

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
    | OrderFailed
    | OrderPower
    | LoadAdapter
    | UnloadAdapter
    | AdapterLoaded
    | RunnerStopped
)

# -- to the encoder cache, which also gets the planner's `Acquire` and `Release` --------------------------------------


@frozen
class Encoded:
    """The runner reports that the outputs of ``keys`` are resident."""

    keys: tuple[str, ...]


@frozen
class EncodeBroken:
    """The runner reports that the encode batch raised. None of its outputs was kept."""

    keys: tuple[str, ...]
    error: Exception


@frozen
class Freed:
    """The runner reports that it has dropped the outputs of ``keys``."""

    keys: tuple[str, ...]


@frozen
class SchedulerClosed:
    """The last message of the scheduler: all holds are void, and no acquire follows."""


@frozen
class RunnerLost:
    """The supervisor reports that the runner is gone. All encoder outputs are lost."""


EncoderCacheMessage = (
    Acquire | Release | Encoded | EncodeBroken | Freed | SchedulerClosed | RunnerRestarted | RunnerWoke | RunnerLost
)

# -- to the runner ---------------------------------------------------------------------------------------------------


@frozen
class Encode:
    """The encoder cache orders that one batch is encoded. A runner that has restarted since then drops the order."""

    items: tuple[EncoderItem, ...]
    generation: int


@frozen
class Free:
    """The encoder cache orders that the runner drops the outputs of ``keys``."""

    keys: tuple[str, ...]
    generation: int


@frozen
class Step:
    """The scheduler orders a step. A runner that has restarted since then drops the order."""

    plan: StepPlan
    generation: int


@frozen
class Sleep:
    """The scheduler orders that the device is given back, after the calls in flight."""


@frozen
class Wake:
    """The scheduler orders that the device is taken again."""


StepLaneMessage = Step | Sleep | Wake | LoadAdapter | DropAdapter
EncodeLaneMessage = Encode | Free
RunnerMessage = StepLaneMessage | EncodeLaneMessage
