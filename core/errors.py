"""Every error that Triolet raises on purpose, as one tree.

::

    TrioletError
    ├── CallerError                  the caller can mend it; other requests are not affected
    │   ├── InvalidRequest           400  a value that can never work
    │   │   ├── UnsupportedAudio     415  not audio, or audio that cannot be decoded
    │   │   ├── UnsupportedImage     415  not an image, or one that cannot be read
    │   │   ├── RequestTooLarge      413  more tokens, bytes or embeddings than the engine can ever hold
    │   │   │   └── ContextLengthExceeded  400  more tokens than the model has positions
    │   │   └── UnknownModel         404  a name that belongs to none of the models
    │   ├── Overloaded               429  no room: the queue is full and nobody waits, or others hold the memory
    │   ├── CheckpointError          404  the checkpoint is not there, or has no weights
    │   │   └── UnsupportedModel     422  a checkpoint of an architecture without an adapter
    │   ├── ModelTooLarge            507  a model that needs more memory than the budget of all models
    │   └── EngineStateError         409  used outside its block, entered twice
    └── EngineError                  the fault is ours, or the device's
        ├── EngineClosed             503  the block ended before the request did
        ├── EngineAsleep             503  the engine was put to sleep and refuses requests until it is woken
        ├── EncodeFailed             500  the encoder failed on the request's input
        ├── DeviceOutOfMemory        500  a call needed more memory than the device has left
        ├── PoisonRequest            500  the request crashes the step every time it runs, even alone
        ├── DeviceLost               500  the device's context is broken for good; only a new process helps
        ├── RunnerCrashed            500  an actor stopped, and the engine cannot go on
        ├── EngineTeardownError      500  a device call did not end in its time, or a release failed
        └── InvariantViolation       500  the engine broke one of its own promises: a bug of ours

Each message names the given value, what is allowed, and what to do. ``http_status`` is a hint for servers.
"""

from __future__ import annotations

import types
import typing

Left: typing.TypeAlias = tuple[type[BaseException] | None, BaseException | None, types.TracebackType | None]
"""The error with which a block is left, as ``__exit__`` is told: its class, itself and its traceback, or ``None`` for
each."""
_Error = typing.TypeVar("_Error", bound=BaseException)


def caused(error: _Error, cause: BaseException | None) -> _Error:
    """Returns ``error`` with its ``cause``, as ``raise error from cause`` leaves it: others will raise it."""
    error.__cause__ = cause
    return error


class TrioletError(Exception):
    """The root of the tree. ``http_status`` is the status that a server should answer with."""

    http_status = 500


class CallerError(TrioletError):
    """The request cannot be served as it was made. Other requests are not affected."""

    http_status = 400


class InvalidRequest(CallerError, ValueError):
    """An argument has a value that can never work."""


class UnsupportedAudio(InvalidRequest):
    """The input is not audio, or is audio that cannot be decoded."""

    http_status = 415


class UnsupportedImage(InvalidRequest):
    """The input is not an image, or is an image that cannot be read."""

    http_status = 415


class RequestTooLarge(InvalidRequest):
    """The request needs more tokens, bytes or embeddings than the engine can ever hold."""

    http_status = 413


class ContextLengthExceeded(RequestTooLarge):
    """The request needs more tokens than the model has positions."""

    http_status = 400


class UnknownModel(InvalidRequest):
    """The name belongs to none of the models."""

    http_status = 404


class Overloaded(CallerError):
    """There is no room now: the engine's queue is full and the caller asked not to wait, or the requests of a server
    hold all of its `Budget`."""

    http_status = 429


class CheckpointError(CallerError):
    """The checkpoint is not there, is incomplete or cannot be read."""

    http_status = 404


class UnsupportedModel(CheckpointError):
    """The checkpoint's architecture has no adapter."""

    http_status = 422


class ModelTooLarge(CallerError):
    """The model needs more memory than the budget of all models together, or more than the models that its task uses
    leave of the budget."""

    http_status = 507


class EngineStateError(CallerError, RuntimeError):
    """The engine was used outside its ``async with`` block, or entered twice."""

    http_status = 409


class EngineError(TrioletError):
    """The engine or its device failed; the caller did nothing wrong."""


class EngineClosed(EngineError):
    """The engine's block ended before the request did."""

    http_status = 503


class EngineAsleep(EngineError):
    """The engine was put to sleep, and its settings refuse requests until it is woken."""

    http_status = 503


class EncodeFailed(EngineError):
    """The encoder failed on this request's input, alone in its batch. The cause is attached."""


class DeviceOutOfMemory(EngineError, MemoryError):
    """A call needed more memory than the device has left. The engine responds with smaller batches. A request gets the
    error only if the smallest batch is still too large."""


class PoisonRequest(EngineError):
    """The request crashed its step each time it ran, at last even alone."""


class DeviceLost(EngineError):
    """A sticky error of the device, such as an illegal address or a failed assert. This process cannot use the device
    any more."""


class RunnerCrashed(EngineError):
    """The runner, or another actor, stopped, and the engine cannot go on. The cause is attached."""


class EngineTeardownError(EngineError):
    """A call on the device did not end within its time, or a release failed."""


class InvariantViolation(EngineError):
    """The promise named ``invariant`` is broken. ``history`` has the events that show this, the last event last.

    If an engine raises the error (`triolet_testing.TraceChecker`, in production with ``EngineConfig(verify=True)``), it
    shows a bug of Triolet. If `triolet_testing.check_model_adapter` raises it, it shows a bug of the adapter.
    """

    def __init__(self, invariant: str, what: str, history: tuple[object, ...] = ()) -> None:
        told = "".join(f"\n  {number}. {event}" for number, event in enumerate(history, 1))
        super().__init__(f"{invariant}: {what}" + (f"; what happened:{told}" if told else ""))
        self.invariant = invariant
        self.what = what
        self.history = history

    def __reduce__(self) -> tuple[type[InvariantViolation], tuple[str, str, tuple[object, ...]]]:
        """Returns what pickle needs to send the error to another process."""
        return type(self), (self.invariant, self.what, self.history)
