"""What is alive and what keeps it alive, for tests with the garbage collector switched off."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import attrs
import pytest
import trio

from triolet.actors.encoder_cache import EncoderCache
from triolet.actors.scheduler import Scheduler
from triolet.api.outputs.streams import Mailbox
from triolet.core.planning.sequence import Sequence
from triolet.core.request import EncoderItem, Request
from triolet_testing import live_bytes

# -- garbage ---------------------------------------------------------------------------------------------------------


@contextmanager
def without_collector() -> Iterator[None]:
    """Memory dies by reference count or not at all. What is garbage already is collected first."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def garbage() -> Iterator[list[object]]:
    """The collector is off in the block; after it the list holds all that was made there and that only the collector
    could have freed. What there was before is set apart, so that the search is short, and stays so: the next one need
    not look at it either."""
    found: list[object] = []
    with without_collector():
        gc.freeze()
        try:
            yield found
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found += gc.garbage
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


def assert_none(found: list[object]) -> None:
    """Fails with how many of each type there are, and of frames and functions whose."""
    kinds = Counter(_name(part) for part in found)
    listed = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds, key=lambda kind: (" of " not in kind, kind)))
    assert not found, f"only a collection would free: {listed}"


def _name(found: object) -> str:
    code = _code(found)
    return type(found).__qualname__ if code is None else f"{type(found).__qualname__} of {code.co_qualname}"


def _code(found: object) -> types.CodeType | None:
    if isinstance(found, types.TracebackType):
        return found.tb_frame.f_code
    for name in ("__code__", "f_code", "cr_code", "gi_code", "ag_code"):
        code = getattr(type(found), name, None) and getattr(found, name)
        if isinstance(code, types.CodeType):
            return code
    return None


def not_theirs(found: list[object]) -> list[object]:
    """Without what opening a checkpoint leaves: functions inside of functions that call themselves, in transformers
    where it writes configurations out (``PreTrainedConfig.to_dict``, ``GenerationConfig.to_json_string``, and json's
    ``_make_iterencode`` for them), and in torch where a step is tried on no device (``tree_flatten``). Each of these is
    a cycle of a function and its cell, which holds settings at most, and no tensor."""
    functions = [part for part in found if isinstance(part, types.FunctionType) and _is_theirs(part)]
    theirs: set[int] = set()
    pending: list[object] = list(functions)
    members = {id(part) for part in found}
    while pending:
        part = pending.pop()
        if id(part) in members and id(part) not in theirs:
            theirs.add(id(part))
            pending += gc.get_referents(part)
    return [part for part in found if id(part) not in theirs]


_THEIRS = (
    "PreTrainedConfig.to_dict.<locals>",
    "GenerationConfig.to_json_string.<locals>",
    "_make_iterencode.<locals>",
    "tree_flatten.<locals>.helper",
)


def _is_theirs(function: types.FunctionType) -> bool:
    return function.__qualname__.startswith(_THEIRS)


@attrs.frozen
class expected:  # noqa: N801  (reads as `pytest.raises` does)
    """As ``pytest.raises``, which may keep the error, and so every frame that it came through; and no generator, whose
    frame would be one of these: contextlib's, which names the error, is behind it since Python 3.12."""

    error: type[BaseException]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        assert kind is not None, f"no {self.error.__name__} was raised"
        return issubclass(kind, self.error)


# -- requests --------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Births:
    """Everything that came into being for requests, by kind."""

    _born: list[tuple[str, weakref.ref[Any]]] = attrs.field(factory=list, init=False)

    def note(self, kind: str, born: object) -> None:
        if born is None:  # an item whose payload was let go
            return
        self._born.append((kind, weakref.ref(born)))

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self._born}

    @property
    def alive(self) -> dict[str, int]:
        """How many of each kind have not died."""
        return dict(Counter(kind for kind, born in self._born if born() is not None))


@contextmanager
def births() -> Iterator[Births]:
    """Sees every request, payload, sequence and mailbox that is made in the block."""
    born = Births()

    def also(kind: str, original: Callable[..., None], parts: Callable[[Any], Iterable[object]]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for part in parts(self):
                born.note(kind, part)

        return init

    kinds: dict[str, tuple[type, Callable[[Any], Iterable[object]]]] = {
        "request": (Request, lambda request: (request,)),
        "payload": (EncoderItem, _payload),
        "sequence": (Sequence, lambda sequence: (sequence,)),
        "mailbox": (Mailbox, lambda mailbox: (mailbox,)),
    }
    with pytest.MonkeyPatch.context() as patch:
        for kind, (cls, parts) in kinds.items():
            patch.setattr(cls, "__init__", also(kind, cls.__init__, parts))
        yield born


def _payload(item: EncoderItem) -> tuple[object, ...]:
    """Samples are one array; images are several tensors."""
    return tuple(item.payload.values()) if isinstance(item.payload, Mapping) else (item.payload,)


# -- engines ---------------------------------------------------------------------------------------------------------

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_CHANNELS = ("MemoryChannelState", "MemorySendChannel", "MemoryReceiveChannel")  # what trio keeps for others


def actors() -> list[object]:
    """The actors of this process, which only their tasks know."""
    return [part for part in gc.get_objects() if type(part) in (Scheduler, EncoderCache)]


def _leads_on(found: object) -> bool:
    """Not to code, and not through trio's tasks or a logger's handlers to the rest of the program."""
    kind = type(found)
    if issubclass(kind, logging.Logger):
        return False
    return not issubclass(kind, _CODE) and (kind.__module__.split(".")[0] != "trio" or kind.__name__ in _CHANNELS)


def kept(*roots: object) -> int:
    """How many elements the containers hold that can be reached from ``roots``. Those of a deque with a bound do not
    count: it is a diary of the latest, cannot grow for ever, and is as long as the schedule had it."""
    seen: set[int] = set()
    pending: list[object] = list(roots)
    total = 0
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, list | dict | set | deque | OrderedDict) and getattr(found, "maxlen", None) is None:
            total += len(found)
        if isinstance(found, types.MethodType):
            pending.append(found.__self__)
        elif _leads_on(found):
            pending += gc.get_referents(found)
    return total


@attrs.frozen(kw_only=True)
class Level:
    """What a process holds; within `garbage`, of tensors and objects only what was made there. ``objects`` are those of
    our own and of trio's types."""

    tensor_bytes: int
    threads: int  # but for those that trio keeps for its next call
    descriptors: int
    objects: int

    @classmethod
    def now(cls) -> Self:
        found = gc.get_objects()
        return cls(
            tensor_bytes=live_bytes(),
            threads=sum(not thread.name.startswith("Trio thread") for thread in threading.enumerate()),
            descriptors=_descriptors(),
            objects=sum(_counts(part) for part in found),
        )


def _counts(found: object) -> bool:
    """Scopes do not: trio's heap of deadlines keeps some that were left, until it is worth tidying up. Nor do the
    threads that it keeps for its next call, and drops when that does not come."""
    kind = type(found)
    kept = kind is trio.CancelScope or kind.__name__ == "WorkerThread"
    return str(kind.__module__).startswith("trio") and not kept


def _descriptors() -> int:
    """0 where the system does not tell."""
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.is_dir() else 0
