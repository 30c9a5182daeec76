"""What happened inside an engine, as values: the trace that tests, monitors and users' observers read.

Events are facts, told after the state they speak of has changed. ``EngineConfig(observer=...)`` receives each one.
"""

from __future__ import annotations

import math

from attrs import field, frozen


@frozen
class Event:
    """Root of all events. ``time``: when it was emitted, in seconds of the engine's monotonic clock; equality does not
    look at it."""

    time: float = field(default=math.nan, kw_only=True, eq=False, repr=False)


def error_text(error: BaseException) -> str:
    """What events say of a failure: type and text. The error itself has a traceback, whose frames hold tensors."""
    return f"{type(error).__name__}: {error}"


@frozen
class OfRequest(Event):
    """Root of what is told of one request."""

    request_id: str


@frozen
class OfHolder(Event):
    """Root of what is told of one acquire: that of ``key`` by ``holder``."""

    key: str
    holder: str


@frozen
class OfKeys(Event):
    """Root of what is told of the encoder outputs ``keys``."""

    keys: tuple[str, ...]


@frozen
class RequestQueued(OfRequest):
    """The scheduler took the request over: it waits for its encoder output, or for a place."""


@frozen
class EncoderWaitOver(OfRequest):
    """The request waited for encoder outputs, and holds them now."""


@frozen
class RequestStarted(OfRequest):
    """The request has a place and pages: its first chunk is in the step that is dispatched next. A request that was
    preempted, or whose step failed, starts again."""


@frozen
class FirstToken(OfRequest):
    """The request has its first token."""


@frozen
class RequestPreempted(OfRequest):
    """The request gave its place and pages to one that comes before it; it waits again, and keeps its tokens."""


@frozen
class RequestSuspected(OfRequest):
    """The request was in a failed step: it runs among suspects until it has a token."""


@frozen
class RequestEnded(OfRequest):
    """The request's one end: ``"finished"``, ``"failed"`` or ``"aborted"``. ``error``: type and text of a failure."""

    outcome: str
    error: str = ""


@frozen
class EntryAcquired(OfHolder):
    """``holder`` asked for ``key``: `EntryHeld`, `EntryRefused` or, where it is withdrawn, `EntryReleased` answers."""


@frozen
class EntryRefused(OfHolder):
    """``holder`` will not get ``key``."""

    error: str = ""


@frozen
class EntryReserved(Event):
    """The ledger took ``size`` bytes for ``key``."""

    key: str
    size: int


@frozen
class EntryHeld(OfHolder):
    """``holder`` may read ``key``: it is resident until released."""


@frozen
class EntryReleased(OfHolder):
    """``holder`` gave ``key`` back, or no longer waits for it."""


@frozen
class EntryTakenBack(OfHolder):
    """The scheduler is gone and ``holder`` has not given ``key`` back: the encoder cache does."""


@frozen
class EntryDropped(Event):
    """A reservation was rolled back, or its encoding failed: ``key`` is absent again."""

    key: str


@frozen
class EncodeDispatched(OfKeys):
    """One encode batch went to the runner."""

    embeddings: int


@frozen
class EncodeDone(OfKeys):
    """The outputs of ``keys`` are on the device."""


@frozen
class EncodeBroke(OfKeys):
    """The encode batch failed and computed nothing. What is wanted of it is tried again in halves; the requests of an
    item that fails alone, twice, hear of it."""

    error: str = ""


@frozen
class EncodeRetried(OfKeys):
    """``keys`` of a failed encode batch are reserved again, and will be encoded once more."""


@frozen
class EncodeShrunk(Event):
    """An encode batch did not fit the device's memory: the next ones have at most so many embeddings."""

    embeddings: int


@frozen
class FreeSent(OfKeys):
    """The runner was told to drop ``keys``; their bytes count until `EntryFreed`."""


@frozen
class EntryFreed(OfKeys):
    """The runner has dropped ``keys``."""


@frozen
class StepBegun(Event):
    """A step was sent to the runner: which requests it runs, which encoder outputs it reads and for which holders."""

    step_id: int
    request_ids: tuple[str, ...]
    reads: tuple[str, ...]
    readers: tuple[str, ...]  # the holder of each of ``reads``
    tokens: int


@frozen
class StepEnded(Event):
    """The step's result was committed (``ok``), or it failed. ``skipped``: it was not run, since the one before it
    failed. ``error``: type and text of the failure."""

    step_id: int
    ok: bool
    error: str = ""
    skipped: bool = False


@frozen
class StepRetried(Event):
    """The requests of a failed step wait to start again from their committed tokens."""

    step_id: int
    request_ids: tuple[str, ...]


@frozen
class StepShrunk(Event):
    """A step did not fit the device's memory: the next ones feed at most so many tokens."""

    tokens: int


@frozen
class RunnerRestarting(Event):
    """The runner failed and starts anew in its place; ``error`` says why."""

    generation: int
    error: str


@frozen
class RunnerAsleep(Event):
    """The device was given back: nothing is on it but weights that are parked there."""

    generation: int


@frozen
class RunnerAwake(Event):
    """The device was taken again."""


@frozen
class OutputsLost(Event):
    """The encoder cache knows of the restart, or of the sleep: nothing is resident any more, what is wanted is reserved
    again."""

    generation: int


@frozen
class StepsLost(Event):
    """The scheduler knows of the restart, or of the sleep: no step is in flight any more."""

    generation: int


@frozen
class ActorFailed(Event):
    """An actor ended though nobody had asked it to; the engine is being stopped."""

    actor: str
    error: str


@frozen
class StageReached(Event):
    """A stage of start or teardown is behind us."""

    stage: str
