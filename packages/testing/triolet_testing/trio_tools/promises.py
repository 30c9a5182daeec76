"""The promises of every run of a trio program, whatever was cancelled, and the report of a run that has broken one."""

from __future__ import annotations

import traceback
from pathlib import Path

import trio
from attrs import frozen

IT_ENDS = "it ends"
WORKS = "it works undisturbed"
CANCELLATION = "cancellation comes out"
INTERRUPT = "^C comes out"
REST_WORKS = "the rest works on"
ONLY_THE_FAULT = "only the fault comes out"
NO_TASK = "no task is left"
GENERATORS = "generators are closed"

PROMISES = {
    IT_ENDS: "Callers wait for ever, and so does whoever wants to stop the program.",
    WORKS: "It fails though nothing went wrong: under load it will, sometimes.",
    CANCELLATION: "Timeouts and shutdowns do not stop what they cancel: it goes on, or looks as if it were done.",
    INTERRUPT: "The program cannot be stopped by hand, or seems to have ended well.",
    REST_WORKS: "One client that leaves breaks the service for all others, until it is started anew.",
    ONLY_THE_FAULT: "Whoever cancels gets an error that nobody expects there, and clean-up is cut short.",
    NO_TASK: "Work goes on that nobody waits for, sees or stops; it adds up until the process ends.",
    GENERATORS: "What a generator holds (a connection, a lock, a request) is given back late, or never.",
}
"""The promises, the worst to break first, each with the reason why it matters in production."""

_TRIO = str(Path(trio.__file__).parent)


@frozen
class Broken:
    """A broken promise of a run: which promise, how it was broken, and why this matters."""

    promise: str
    what: str
    why: str


def told(error: BaseException) -> str:
    """Returns an error in one line, with the place in the program that raised it."""
    if isinstance(error, BaseExceptionGroup):
        return " and ".join(told(one) for one in error.exceptions)
    first = str(error).strip().splitlines()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TRIO)]
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{f': {first[0]}' if first else ''}{place}"


def without(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Returns an error, or a group of errors, without errors of ``kind``; ``None``: nothing is left."""
    if isinstance(error, BaseExceptionGroup):
        found, rest = error.split(kind)
        return rest if found is not None else error
    return None if isinstance(error, kind) else error
