"""The facts about an engine, as values. They form the trace that tests, monitors and users' observers read.

An event is emitted after the state has changed. ``EngineConfig(observer=...)`` receives each event. The event itself
determines what the log and a timeline show of it.
"""

from __future__ import annotations

import math
from logging import DEBUG, ERROR, INFO, WARNING

from attrs import field, frozen

from .log_lines import Line, one_line


@frozen
class Event:
    """The root of all events. ``time`` is the time at which the event was emitted, in seconds of the engine's monotonic
    clock. Equality ignores it."""

    time: float = field(default=math.nan, kw_only=True, eq=False, repr=False)

    def line(self) -> Line | None:
        """Returns the line for the log; ``None``: the log gets none. The line holds no prompt, text or audio."""
        return None

    @property
    def note(self) -> str:
        """The name of the event's mark in a timeline; empty if the event gets no mark."""
        return ""


def error_text(error: BaseException) -> str:
    """Returns the type and text of a failure, for events. The error itself has a traceback, whose frames hold
    tensors."""
    return f"{type(error).__name__}: {error}"


@frozen
class OfRequest(Event):
    """The root of the events of one request."""

    request_id: str


@frozen
class OfKey(Event):
    """The root of the events of the encoder output ``key``."""

    key: str


@frozen
class OfHolder(OfKey):
    """The root of the events of one acquire: that of ``key`` by ``holder``."""

    holder: str


@frozen
class OfKeys(Event):
    """The root of the events of the encoder outputs ``keys``."""

    keys: tuple[str, ...]


@frozen
class RequestQueued(OfRequest):
    """The scheduler accepted the request. The request now waits for its encoder outputs, or for a place."""


@frozen
class EncoderWaitOver(OfRequest):
    """The request has waited for encoder outputs, and holds all of them now."""


@frozen
class RequestStarted(OfRequest):
    """The request has a place and pages, and its first chunk is in the next step. It must be fed ``tokens`` before it
    gets one. A request that was preempted, or whose step failed, starts again."""

    tokens: int


@frozen
class FirstToken(OfRequest):
    """The request has its first token."""


@frozen
class RequestPreempted(OfRequest):
    """The request gave its place and pages to the request ``to``. It waits again, keeps its tokens, and does not start
    before ``to`` has run or ended."""

    to: str


@frozen
class RequestSuspected(OfRequest):
    """The request was in a failed step. It is in quarantine until it has sampled a token."""


@frozen
class RequestEnded(OfRequest):
    """The request has ended: ``outcome`` is ``"finished"``, ``"failed"`` or ``"aborted"``. Each request has one such
    event. ``error`` is the type and text of a failure."""

    outcome: str
    error: str = ""

    def line(self) -> Line:
        """Returns a warning for a poison request, and a line for debugging otherwise."""
        if self.error.startswith("PoisonRequest"):
            return WARNING, f"request {self.request_id} failed as poison: {one_line(self.error)}"
        kind = f" with {self.error.partition(':')[0]}" if self.error else ""  # the text may quote the user's input
        return DEBUG, f"request {self.request_id} {self.outcome}{kind}"


@frozen
class EntryAcquired(OfHolder):
    """The acquire of ``key`` by ``holder`` has begun. `EntryHeld` or `EntryRefused` answers, or `EntryReleased` if the
    acquire is withdrawn."""


@frozen
class EntryRefused(OfHolder):
    """The ``holder`` will not get ``key``."""

    error: str = ""
    note = "encoder output refused"

    def line(self) -> Line:
        """Returns a warning."""
        return WARNING, f"an encoder output is refused to {self.holder}: {one_line(self.error)}"


@frozen
class EntryReserved(OfKey):
    """The ledger took ``size`` bytes for ``key``."""

    size: int


@frozen
class EntryHeld(OfHolder):
    """The ``holder`` may read ``key``, which stays resident until the holder releases it."""


@frozen
class EntryReleased(OfHolder):
    """The ``holder`` gave ``key`` back, or withdrew its acquire."""


@frozen
class EntryTakenBack(OfHolder):
    """The encoder cache took ``key`` back, since the scheduler is gone and ``holder`` has not released the entry."""


@frozen
class EntryDropped(OfKey):
    """The entry of ``key`` is absent again, since its reservation was withdrawn or its encoding failed."""


@frozen
class EncodeDispatched(OfKeys):
    """One encode batch was sent to the runner."""

    embeddings: int


@frozen
class EncodeDone(OfKeys):
    """The outputs of ``keys`` are on the device."""


@frozen
class EncodeBroke(OfKeys):
    """The encode batch failed, and kept no output. Items that are still held are tried again in smaller batches. If an
    item fails alone twice, its requests fail."""

    error: str = ""
    note = "encode batch failed"

    def line(self) -> Line:
        """Returns a warning."""
        return WARNING, f"an encode batch of {len(self.keys)} failed, and is tried again: {one_line(self.error)}"


@frozen
class EncodeRetried(OfKeys):
    """The ``keys`` of a failed encode batch are reserved again, and will be encoded once more."""


@frozen
class EncodeShrunk(Event):
    """An encode batch did not fit the device's memory. The next batches have at most ``embeddings``."""

    embeddings: int
    note = "encode batches shrunk"

    def line(self) -> Line:
        """Returns a warning."""
        return WARNING, f"an encode batch was too large: the next ones have {self.embeddings} embeddings"


@frozen
class FreeSent(OfKeys):
    """The runner was ordered to drop ``keys``. Their bytes count until `EntryFreed`."""


@frozen
class EntryFreed(OfKeys):
    """The runner has dropped ``keys``."""


@frozen
class StepBegun(Event):
    """A step was sent to the runner. ``request_ids`` are the requests that it runs. ``reads`` are the encoder outputs
    that it reads, each for the holder in ``readers``. ``samples`` are the requests that get a token from it, or go on
    with their beam search."""

    step_id: int
    request_ids: tuple[str, ...]
    reads: tuple[str, ...]
    readers: tuple[str, ...]  # the holder of each of ``reads``
    tokens: int
    samples: tuple[str, ...] = ()
    pages_used: int = 0  # pages used by sequences after the step was planned
    states: tuple[int, ...] = ()  # recurrent states of its requests
    owners: tuple[str, ...] = ()  # the request that has each of ``states``
    kept: tuple[int, ...] = ()  # states that the step writes for later requests
    sources: tuple[int, ...] = ()  # kept states that requests go on from


@frozen
class StepEnded(Event):
    """The result of the step was committed (``ok``), or the step failed. ``skipped``: the step was not run, since the
    step before it failed. ``error`` is the type and text of the failure."""

    step_id: int
    ok: bool
    error: str = ""
    skipped: bool = False

    def line(self) -> Line | None:
        """Returns a warning if the step itself failed."""
        return (WARNING, f"step {self.step_id} failed: {one_line(self.error)}") if self.note else None

    @property
    def note(self) -> str:
        """The mark of a step that itself failed."""
        return "" if self.ok or self.skipped else "step failed"


@frozen
class StepRetried(Event):
    """The requests of a failed step wait to start again from their committed tokens."""

    step_id: int
    request_ids: tuple[str, ...]


@frozen
class StepShrunk(Event):
    """A step did not fit the device's memory. The next steps feed at most ``tokens``."""

    tokens: int
    note = "steps shrunk"

    def line(self) -> Line:
        """Returns a warning."""
        return WARNING, f"a step was too large: the next ones feed {self.tokens} tokens"


@frozen
class RunnerRestarting(Event):
    """The runner failed, and restarts as ``generation``. ``error`` is the reason."""

    generation: int
    error: str
    note = "runner restarts"

    def line(self) -> Line:
        """Returns a warning."""
        return WARNING, f"the runner restarts (restart {self.generation}): {one_line(self.error)}"


@frozen
class RunnerAsleep(Event):
    """The runner gave the device back. Nothing of the engine is on the device, except for weights that are parked
    there."""

    generation: int
    note = "asleep"

    def line(self) -> Line:
        """Returns a line of information."""
        return INFO, "asleep: the device was given back"


@frozen
class RunnerAwake(Event):
    """The runner took the device again."""

    note = "awake"

    def line(self) -> Line:
        """Returns a line of information."""
        return INFO, "awake: the device was taken again"


@frozen
class OutputsLost(Event):
    """The encoder cache learned of a restart or a sleep. No output is resident any more, and entries that are held are
    reserved again."""

    generation: int
    note = "encoder outputs lost"


@frozen
class StepsLost(Event):
    """The scheduler learned of a restart or a sleep. No step is in flight any more."""

    generation: int
    note = "steps lost"


@frozen
class ActorFailed(Event):
    """An actor ended though it was not ordered to. The engine is being stopped."""

    actor: str
    error: str

    def line(self) -> Line:
        """Returns an error line."""
        return ERROR, f"the {self.actor} failed, the engine is being stopped: {one_line(self.error)}"

    @property
    def note(self) -> str:
        """The name of the actor, and that it failed."""
        return f"{self.actor} failed"


@frozen
class StageReached(Event):
    """A stage of the start or of the teardown is complete."""

    stage: str

    def line(self) -> Line | None:
        """Returns a warning if something was cut off."""
        trouble = self.stage.endswith(("cut off", "device call abandoned"))
        return (WARNING, f"teardown: {self.stage}") if trouble else None

    @property
    def note(self) -> str:
        """The name of the stage."""
        return self.stage
