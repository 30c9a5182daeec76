"""The values that a scheduler gets from the kit, and those that it answers. An adapter may answer with objects of its
own that have the same attributes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from attrs import field, frozen

from .findings import SPEAKS, BrokenPromise, tupled
from .wrong_adapter import as_texts


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The room of a scheduler. ``room`` and the sizes of items are in units of the encoder cache. A request can run
    alone if the pages suffice for its prompt and for all but the last token that it asks for, and ``room`` suffices for
    each item. ``states`` is how many recurrent states there are; 0: the model has no recurrent layers.
    """

    pages: int
    page_size: int
    max_step_tokens: int
    max_running: int
    room: int
    steps_in_flight: int
    states: int = 0


@dataclass(frozen=True)
class Item:
    """An image, or audio: ``length`` positions from ``start`` on read its encoder output. Items with equal keys have
    equal content and size. A request may have one item twice.
    """

    key: str
    size: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A request of a client. ``max_tokens`` is how many tokens it asks for; `EOS` ends it earlier. The smallest
    ``priority`` is served first.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    items: tuple[Item, ...] = ()
    priority: int = 0


@frozen
class Chunk:
    """One request's part of a step: feed its tokens at positions ``start .. start+length-1``, over ``pages``. Position
    p lies in ``pages[p // page_size]``. The chunk reads all positions before its end. ``samples``: a token is sampled
    after it.

    In a model with recurrent layers ``state`` is the state that the chunk changes. The chunk goes on from a copy of
    ``source``, or from ``state`` itself if there is none; at position 0 it goes on from nothing. ``keeps`` are pairs
    of a position and a state, into which the chunk's state is copied as it is before that position is read.
    """

    request: str
    start: int
    length: int
    pages: tuple[int, ...] = field(converter=tupled)
    samples: bool
    state: int | None = None
    source: int | None = None
    keeps: tuple[tuple[int, int], ...] = field(default=(), converter=tupled)


@frozen(kw_only=True)
class Step:
    """One launch of the device, which frees encoder outputs, encodes items and runs chunks, in this order. ``own`` is
    for the adapter, which gets it back with the step in `Scheduler.update`. For example, it is the engine's plan.
    """

    chunks: tuple[Chunk, ...] = field(default=(), converter=tupled)
    encodes: tuple[str, ...] = field(default=(), converter=tupled)
    frees: tuple[str, ...] = field(default=(), converter=tupled)
    own: Any = field(default=None, repr=False, eq=False)


@frozen(kw_only=True)
class _Copy(Step):
    """A step that the adapter answered as an object of its own, which is ``own``. The copy stays as it is while the
    scheduler goes on.
    """


def checked(given: Any) -> Step | None:
    """Returns what the scheduler has planned, as a `Step`; ``None``: nothing.

    Raises:
        BrokenPromise: the scheduler has planned something else.
    """
    if given is None:
        return None
    if not hasattr(getattr(given, "chunks", None), "__iter__"):
        _refuse(f"schedule returned {given!r}; allowed: None, or a step with chunks", "no step")
    encodes = tuple(as_texts(getattr(given, "encodes", ()), "what a step encodes"))
    frees = tuple(as_texts(getattr(given, "frees", ()), "what a step frees"))
    chunks = tuple(_checked_chunk(chunk) for chunk in given.chunks)
    if isinstance(given, Step) and all(map(operator.is_, chunks, given.chunks)):
        return given
    return _Copy(chunks=chunks, encodes=encodes, frees=frees, own=given)


def given_as(step: Step) -> Any:
    """Returns the step as the adapter answered it."""
    return step.own if isinstance(step, _Copy) else step


def _checked_chunk(chunk: Any) -> Chunk:
    try:
        values = (chunk.request, chunk.start, chunk.length, tuple(chunk.pages), bool(chunk.samples))
    except (AttributeError, TypeError) as error:
        allowed = "chunks with request, start, length, pages and samples"
        _refuse(f"schedule returned the chunk {chunk!r} ({error}); allowed: {allowed}", "no chunk")
    of_states = getattr(chunk, "state", None), getattr(chunk, "source", None), tuple(getattr(chunk, "keeps", ()))
    name, start, length, pages, _ = values
    if not isinstance(name, str) or not all(hasattr(number, "__index__") for number in (start, length, *pages)):
        _refuse(f"schedule returned the chunk {chunk!r}; allowed: a text, and numbers", "no numbers")
    return chunk if isinstance(chunk, Chunk) else Chunk(*values, *of_states)


def _refuse(what: str, kind: str) -> NoReturn:
    raise BrokenPromise(SPEAKS, what, kind=kind)


def describe(request: NewRequest) -> str:
    """Returns the client's request in words."""
    items = "".join(f", {item.key} of size {item.size} at {item.start}" for item in request.items)
    priority = f", priority {request.priority}" if request.priority else ""
    tokens = " ".join(map(str, request.tokens))
    return f"{request.id} asks for {request.max_tokens} after {tokens}{items}{priority}"


def _describe_states(chunk: Chunk) -> str:
    own = "" if chunk.state is None else f", state {chunk.state}"
    source = "" if chunk.source is None else f" from {chunk.source}"
    return own + source + "".join(f", kept in {state} before {position}" for position, state in chunk.keeps)


def has_work(step: Step) -> bool:
    """Returns whether a step does anything."""
    return bool(step.chunks or step.frees or step.encodes)


def describe_step(step: Step, planned: Mapping[str, int]) -> str:
    """Returns the work of a step in words. ``planned`` says how far each request was planned before: one that begins
    earlier was preempted.
    """
    if not has_work(step):
        return "a step without work"
    told = [f"frees {', '.join(step.frees)}"] if step.frees else []
    told += [f"encodes {', '.join(step.encodes)}"] if step.encodes else []
    for chunk in step.chunks:
        samples = " and samples" if chunk.samples else ""
        pages = " ".join(map(str, chunk.pages)) + _describe_states(chunk)
        preempted = ", preempted before" if chunk.start < planned.get(chunk.request, 0) else ""
        told.append(
            f"{chunk.request}{preempted}: {chunk.start}-{chunk.start + chunk.length - 1} in pages {pages}{samples}"
        )
    return "; ".join(told)
