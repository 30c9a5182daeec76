"""What happened inside an engine, as values: the trace that tests, monitors and users' observers read.

Events are facts, told after the state they speak of has changed. ``EngineConfig(observer=...)`` receives each one.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Event:
    """Root of all events."""


@frozen
class RequestAccepted(Event):
    """The scheduler took the request over."""

    request_id: str


@frozen
class RequestEnded(Event):
    """The request's one end: ``"finished"``, ``"failed"`` or ``"aborted"``."""

    request_id: str
    outcome: str


@frozen
class EntryWanted(Event):
    """``holder`` asked for ``key``: `EntryHeld`, `EntryRefused` or, where it is withdrawn, `EntryReleased` answers."""

    key: str
    holder: str


@frozen
class EntryRefused(Event):
    """``holder`` will not get ``key``."""

    key: str
    holder: str


@frozen
class EntryReserved(Event):
    """The ledger took ``size`` bytes for ``key``."""

    key: str
    size: int


@frozen
class EntryHeld(Event):
    """``holder`` may read ``key``: it is resident until released."""

    key: str
    holder: str


@frozen
class EntryReleased(Event):
    """``holder`` gave ``key`` back, or no longer waits for it."""

    key: str
    holder: str


@frozen
class EntryTakenBack(Event):
    """The scheduler is gone and ``holder`` has not given ``key`` back: the encoder cache does."""

    key: str
    holder: str


@frozen
class EntryDropped(Event):
    """A reservation was rolled back, or its encoding failed: ``key`` is absent again."""

    key: str


@frozen
class EncodeDispatched(Event):
    """One encode batch went to the runner."""

    keys: tuple[str, ...]
    embeddings: int


@frozen
class EncodeDone(Event):
    """The outputs of ``keys`` are on the device."""

    keys: tuple[str, ...]


@frozen
class EncodeBroke(Event):
    """The encode batch failed and computed nothing. What is wanted of it is tried again in halves; the requests of an
    item that fails alone hear of it."""

    keys: tuple[str, ...]


@frozen
class FreeSent(Event):
    """The runner was told to drop ``keys``; their bytes count until `EntryFreed`."""

    keys: tuple[str, ...]


@frozen
class EntryFreed(Event):
    """The runner has dropped ``keys``."""

    keys: tuple[str, ...]


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
    """The step's result was committed (``ok``), or it failed."""

    step_id: int
    ok: bool


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
