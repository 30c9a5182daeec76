"""The log's lines for events: level and text, as pure functions. No line holds a prompt, a text or audio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any, TypeAlias

from . import events
from .model import Kind, ModelDescription
from .plan import DeviceMemory

Line: TypeAlias = tuple[int, str]  # level, text

LONGEST = 500  # characters of an error: CUDA's run over many lines
_TROUBLE = ("cut off", "device call abandoned")


def one_line(error: str) -> str:
    """An error's text on one line, cut where it is very long."""
    told = " ".join(error.split()) or "no error was told"
    return told if len(told) <= LONGEST else f"{told[:LONGEST]} ..."


def opened(model: ModelDescription, memory: DeviceMemory) -> Line:
    """The engine takes requests."""
    slots = f", {model.cross_slots} cross slots" if model.kind is Kind.ENCODER_DECODER else ""
    return INFO, (
        f"open: {model.name} ({model.architecture}) on {model.device}, {model.dtype}; {model.pages} pages of "
        f"{model.page_size} positions{slots}; memory {owners(memory)}"
    )


def closed(ended: Mapping[str, int], tokens: int, steps: int, seconds: float, held: int, left: int) -> Line:
    """The engine's block is over. ``ended``: number of requests by outcome; ``held`` and ``left``: bytes on the device
    before and after the teardown."""
    requests = ", ".join(f"{count} {outcome}" for outcome, count in sorted(ended.items())) or "none"
    level = WARNING if left else INFO
    return level, (
        f"closed after {seconds:.1f} s: requests: {requests}; {tokens} tokens in {steps} steps; "
        f"{mebibytes(held - left)} of {mebibytes(held)} given back"
    )


def teardown(error: Exception) -> Line:
    """The teardown could not give something back."""
    return WARNING, f"teardown: {one_line(str(error))}"


def model_loaded(name: str, seconds: float, memory: DeviceMemory, held: int, budget: int | None) -> Line:
    """One of several models is ready. ``held``: bytes of all of them."""
    most = "" if budget is None else f" of {mebibytes(budget)}"
    return INFO, f"{name}: loaded in {seconds:.1f} s: {owners(memory)}; all models count {mebibytes(held)}{most}"


def model_unloaded(name: str, why: str, given_back: int) -> Line:
    """One of several models is gone."""
    return INFO, f"{name}: unloaded, {mebibytes(given_back)} given back: {why}"


def model_failed(name: str, what: str, error: Exception) -> Line:
    """One of several models could not be loaded, failed or did not end as it should."""
    return WARNING, f"{name}: {what}: {type(error).__name__}: {one_line(str(error))}"


def owners(memory: DeviceMemory) -> str:
    """The bytes of all owners, and of each."""
    owners = ", ".join(f"{owner} {mebibytes(count)}" for owner, count in memory.by_owner.items() if count)
    return f"{mebibytes(memory.total)}" + (f": {owners}" if owners else "")


def mebibytes(count: int) -> str:
    """A number of bytes."""
    return f"{count / 2**20:.1f} MiB"


def _request_ended(event: events.RequestEnded) -> Line:
    if event.error.startswith("PoisonRequest"):
        return WARNING, f"request {event.request_id} failed as poison: {one_line(event.error)}"
    kind = f" with {event.error.partition(':')[0]}" if event.error else ""  # the text may quote the user's input
    return DEBUG, f"request {event.request_id} {event.outcome}{kind}"


def _step_ended(event: events.StepEnded) -> Line | None:
    if event.ok or event.skipped:
        return None
    return WARNING, f"step {event.step_id} failed: {one_line(event.error)}"


def _encode_broke(event: events.EncodeBroke) -> Line:
    return WARNING, f"an encode batch of {len(event.keys)} failed, and is tried again: {one_line(event.error)}"


def _entry_refused(event: events.EntryRefused) -> Line:
    return WARNING, f"an encoder output is refused to {event.holder}: {one_line(event.error)}"


def _stage(event: events.StageReached) -> Line | None:
    return (WARNING, f"teardown: {event.stage}") if event.stage.endswith(_TROUBLE) else None


LINES: Mapping[type[events.Event], Callable[[Any], Line | None]] = {
    events.RequestEnded: _request_ended,
    events.StepEnded: _step_ended,
    events.StepShrunk: lambda event: (WARNING, f"a step was too large: the next ones feed {event.tokens} tokens"),
    events.EncodeBroke: _encode_broke,
    events.EncodeShrunk: lambda event: (
        WARNING,
        f"an encode batch was too large: the next ones have {event.embeddings} embeddings",
    ),
    events.EntryRefused: _entry_refused,
    events.RunnerRestarting: lambda event: (
        WARNING,
        f"the runner starts anew (restart {event.generation}): {one_line(event.error)}",
    ),
    events.RunnerAsleep: lambda _: (INFO, "asleep: the device was given back"),
    events.RunnerAwake: lambda _: (INFO, "awake: the device was taken again"),
    events.ActorFailed: lambda event: (
        ERROR,
        f"the {event.actor} failed, the engine is being stopped: {one_line(event.error)}",
    ),
    events.StageReached: _stage,
}
