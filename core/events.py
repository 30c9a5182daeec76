"""The facts about an engine, as values: the trace that tests, monitors and users' observers read.

Events are facts: the state has changed before its event is emitted. ``EngineConfig(observer=...)`` receives each one.
An event says itself what the log and a timeline show of it.
"""

from __future__ import annotations

import math
from logging import DEBUG, ERROR, INFO, WARNING

from attrs import field, frozen

from .log_lines import Line, one_line


@frozen
class Event:
    """Root of all events. ``time``: when the event was emitted, in seconds of the engine's monotonic clock; equality
    ignores it."""

    time: float = field(default=math.nan, kw_only=True, eq=False, repr=False)

    def line(self) -> Line | None:
        """The line that the log gets. It holds no prompt, text or audio."""
        return None

    @property
    def note(self) -> str:
        """The name of the mark in a timeline; empty where the event gets none."""
        return ""


def error_text(error: BaseException) -> str:
    """The type and text of a failure, for events. The error itself has a traceback, whose frames hold tensors."""
    return f"{type(error).__name__}: {error}"


@frozen
class OfRequest(Event):
    """Root of the events of one request."""

    request_id: str


@frozen
class OfKey(Event):
    """Root of the events of the encoder output ``key``."""

    key: str


@frozen
class OfHolder(OfKey):
    """Root of the events of one acquire: that of ``key`` by ``holder``."""

    holder: str


@frozen
class OfKeys(Event):
    """Root of the events of the encoder outputs ``keys``."""

    keys: tuple[str, ...]


@frozen
class RequestQueued(OfRequest):
    """The scheduler accepted the request, which waits for its encoder output, or for a place."""


@frozen
class EncoderWaitOver(OfRequest):
    """The request has waited for encoder outputs, and holds them now."""


@frozen
class RequestStarted(OfRequest):
    """The request has a place and pages: its first chunk is in the step that is dispatched next. A request that was
    preempted, or whose step failed, starts again."""


@frozen
class FirstToken(OfRequest):
    """The request has its first token."""


@frozen
class RequestPreempted(OfRequest):
    """The request gave its place and pages to an earlier request. The request waits again, and keeps its tokens."""


@frozen
class RequestSuspected(OfRequest):
    """The request was in a failed step: it is in quarantine until it has sampled a token."""


@frozen
class RequestEnded(OfRequest):
    """The request's one end: ``"finished"``, ``"failed"`` or ``"aborted"``. ``error``: type and text of a failure."""

    outcome: str
    error: str = ""

    def line(self) -> Line:
        """A warning for poison."""
        if self.error.startswith("PoisonRequest"):
            return WARNING, f"request {self.request_id} failed as poison: {one_line(self.error)}"
        kind = f" with {self.error.partition(':')[0]}" if self.error else ""  # the text may quote the user's input
        return DEBUG, f"request {self.request_id} {self.outcome}{kind}"


@frozen
class EntryAcquired(OfHolder):
    """``holder`` acquires ``key``: `EntryHeld` or `EntryRefused` answers, or `EntryReleased` where it is withdrawn."""


@frozen
class EntryRefused(OfHolder):
    """``holder`` will not get ``key``."""

    error: str = ""
    note = "encoder output refused"

    def line(self) -> Line:
        """A warning."""
        return WARNING, f"an encoder output is refused to {self.holder}: {one_line(self.error)}"


@frozen
class EntryReserved(OfKey):
    """The ledger took ``size`` bytes for ``key``."""

    size: int


@frozen
class EntryHeld(OfHolder):
    """``holder`` may read ``key``, which is resident until released."""


@frozen
class EntryReleased(OfHolder):
    """``holder`` gave ``key`` back, or withdrew its acquire."""


@frozen
class EntryTakenBack(OfHolder):
    """The encoder cache took ``key`` back: the scheduler is gone, and ``holder`` has not released it."""


@frozen
class EntryDropped(OfKey):
    """A reservation was rolled back, or its encoding failed: ``key`` is absent again."""


@frozen
class EncodeDispatched(OfKeys):
    """One encode batch went to the runner."""

    embeddings: int


@frozen
class EncodeDone(OfKeys):
    """The outputs of ``keys`` are on the device."""


@frozen
class EncodeBroke(OfKeys):
    """The encode batch failed and computed nothing. Items that are still held are tried again in smaller batches. The
    requests of an item that fails alone, twice, fail."""

    error: str = ""
    note = "encode batch failed"

    def line(self) -> Line:
        """A warning."""
        return WARNING, f"an encode batch of {len(self.keys)} failed, and is tried again: {one_line(self.error)}"


@frozen
class EncodeRetried(OfKeys):
    """``keys`` of a failed encode batch are reserved again, and will be encoded once more."""


@frozen
class EncodeShrunk(Event):
    """An encode batch did not fit the device's memory: the next ones have at most ``embeddings``."""

    embeddings: int
    note = "encode batches shrunk"

    def line(self) -> Line:
        """A warning."""
        return WARNING, f"an encode batch was too large: the next ones have {self.embeddings} embeddings"


@frozen
class BorrowSent(OfKeys):
    """A lender was asked for ``keys``, which are not encoded here."""


@frozen
class BorrowDone(OfKeys):
    """The outputs of ``keys`` came from a lender, and are on the device."""


@frozen
class BorrowBroke(OfKeys):
    """No lender gave ``keys``, or what came could not be kept. Those that are still held are encoded here, or borrowed
    again."""

    error: str = ""
    note = "nothing borrowed"


@frozen
class FreeSent(OfKeys):
    """The runner was ordered to drop ``keys``; their bytes count until `EntryFreed`."""


@frozen
class EntryFreed(OfKeys):
    """The runner has dropped ``keys``."""


@frozen
class StepBegun(Event):
    """A step was sent to the runner: which requests it runs, which encoder outputs it reads and for which holders.
    ``samples``: those that get a token by it, or go on with their beam search."""

    step_id: int
    request_ids: tuple[str, ...]
    reads: tuple[str, ...]
    readers: tuple[str, ...]  # the holder of each of ``reads``
    tokens: int
    samples: tuple[str, ...] = ()
    pages_used: int = 0  # by sequences, once the step is planned


@frozen
class StepEnded(Event):
    """The step's result was committed (``ok``), or the step failed. ``skipped``: the step was not run, since the step
    before it failed. ``error``: type and text of the failure."""

    step_id: int
    ok: bool
    error: str = ""
    skipped: bool = False

    def line(self) -> Line | None:
        """A warning where the step itself failed."""
        return (WARNING, f"step {self.step_id} failed: {one_line(self.error)}") if self.note else None

    @property
    def note(self) -> str:
        """A mark where the step itself failed."""
        return "" if self.ok or self.skipped else "step failed"


@frozen
class StepRetried(Event):
    """The requests of a failed step wait to start again from their committed tokens."""

    step_id: int
    request_ids: tuple[str, ...]


@frozen
class StepShrunk(Event):
    """A step did not fit the device's memory: the next ones feed at most ``tokens``."""

    tokens: int
    note = "steps shrunk"

    def line(self) -> Line:
        """A warning."""
        return WARNING, f"a step was too large: the next ones feed {self.tokens} tokens"


@frozen
class RunnerRestarting(Event):
    """The runner failed, and a new one starts in its place; ``error`` says why."""

    generation: int
    error: str
    note = "runner restarts"

    def line(self) -> Line:
        """A warning."""
        return WARNING, f"the runner starts anew (restart {self.generation}): {one_line(self.error)}"


@frozen
class RunnerAsleep(Event):
    """The runner gave the device back: nothing of the engine is on it but weights that are parked there."""

    generation: int
    note = "asleep"

    def line(self) -> Line:
        """Information."""
        return INFO, "asleep: the device was given back"


@frozen
class RunnerAwake(Event):
    """The runner took the device again."""

    note = "awake"

    def line(self) -> Line:
        """Information."""
        return INFO, "awake: the device was taken again"


@frozen
class OutputsLost(Event):
    """The encoder cache learned of the restart, or of the sleep: no output is resident any more, and those that are
    held are reserved again."""

    generation: int
    note = "encoder outputs lost"


@frozen
class StepsLost(Event):
    """The scheduler learned of the restart, or of the sleep: no step is in flight any more."""

    generation: int
    note = "steps lost"


@frozen
class ActorFailed(Event):
    """An actor ended out of turn; the engine is being stopped."""

    actor: str
    error: str

    def line(self) -> Line:
        """An error."""
        return ERROR, f"the {self.actor} failed, the engine is being stopped: {one_line(self.error)}"

    @property
    def note(self) -> str:
        """The failure of the actor."""
        return f"{self.actor} failed"


@frozen
class StageReached(Event):
    """A stage of the start or the teardown is over."""

    stage: str

    def line(self) -> Line | None:
        """A warning where something was cut off."""
        trouble = self.stage.endswith(("cut off", "device call abandoned"))
        return (WARNING, f"teardown: {self.stage}") if trouble else None

    @property
    def note(self) -> str:
        """The stage."""
        return self.stage
