"""The lines of the log that do not stand for an event, as level and text; those of events are in `events`. No line
holds a prompt, a text or audio."""

from __future__ import annotations

from collections.abc import Mapping
from logging import INFO, WARNING
from typing import TypeAlias

from .model import Kind, ModelDescription
from .plan import DeviceMemory

Line: TypeAlias = tuple[int, str]  # level, text

LONGEST = 500  # characters of an error: those of CUDA have many lines


def one_line(error: str) -> str:
    """Returns an error's text on one line, cut off if it is very long."""
    told = " ".join(error.split()) or "no error was reported"
    return told if len(told) <= LONGEST else f"{told[:LONGEST]} ..."


def opened(model: ModelDescription, memory: DeviceMemory) -> Line:
    """Returns the line for an engine that now takes requests."""
    slots = f", {model.cross_slots} cross slots" if model.kind is Kind.ENCODER_DECODER else ""
    return INFO, (
        f"open: {model.name} ({model.architecture}) on {model.device}, {model.dtype}; {model.pages} pages of "
        f"{model.page_size} positions{slots}; memory {owners(memory)}"
    )


def closed(ended: Mapping[str, int], tokens: int, steps: int, seconds: float, held: int, left: int) -> Line:
    """Returns the line for the end of the engine's block. ``ended`` has the number of requests by outcome. ``held`` and
    ``left`` are the bytes on the device before and after the teardown."""
    requests = ", ".join(f"{count} {outcome}" for outcome, count in sorted(ended.items())) or "none"
    level = WARNING if left else INFO
    return level, (
        f"closed after {seconds:.1f} s: requests: {requests}; {tokens} tokens in {steps} steps; "
        f"{mebibytes(held - left)} of {mebibytes(held)} given back"
    )


def teardown(error: Exception) -> Line:
    """Returns the line for a teardown that could not give something back."""
    return WARNING, f"teardown: {one_line(str(error))}"


def model_loaded(name: str, seconds: float, memory: DeviceMemory, held: int, budget: int | None) -> Line:
    """Returns the line for one of several models that is ready now. ``held`` has the bytes of all of them."""
    most = "" if budget is None else f" of {mebibytes(budget)}"
    return INFO, f"{name}: loaded in {seconds:.1f} s: {owners(memory)}; all models count {mebibytes(held)}{most}"


def model_unloaded(name: str, why: str, given_back: int) -> Line:
    """Returns the line for one of several models that is gone."""
    return INFO, f"{name}: unloaded, {mebibytes(given_back)} given back: {why}"


def model_failed(name: str, what: str, error: Exception) -> Line:
    """Returns the line for one of several models that could not be loaded, failed, or did not end as it should."""
    return WARNING, f"{name}: {what}: {type(error).__name__}: {one_line(str(error))}"


def owners(memory: DeviceMemory) -> str:
    """Returns a text with the bytes of all owners together, and of each owner."""
    owners = ", ".join(f"{owner} {mebibytes(count)}" for owner, count in memory.by_owner.items() if count)
    return f"{mebibytes(memory.total)}" + (f": {owners}" if owners else "")


def mebibytes(count: int) -> str:
    """Returns a text for a number of bytes, in MiB."""
    return f"{count / 2**20:.1f} MiB"
