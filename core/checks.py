"""Checks of what callers write, where it enters: a value as its field declares it, or `InvalidRequest`.

A class lists the `Check` of each of its fields; `settle` goes by the list. Numbers of other libraries (numpy's, say)
become plain ones, so that what is kept is of the declared type, can be compared and can be a key.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from numbers import Real
from typing import Any, TypeVar

from attrs import frozen

from .errors import InvalidRequest

_Value = TypeVar("_Value")
_MOST_SHOWN = 300  # characters of a value in a message: it may be a whole image


class Refused(Exception):
    """A value is none of those that are allowed. `Check.of` tells it as `InvalidRequest`."""


@frozen
class Check:
    """What a field may be. ``read`` gives the value as it is kept, or raises `Refused`; ``allowed`` says which do."""

    read: Callable[[Any], Any]
    allowed: str

    def of(self, name: str, value: object) -> Any:
        """``value`` as it is kept.

        Raises:
            InvalidRequest: it is not allowed.
        """
        try:
            return self.read(value)
        except Refused:
            raise InvalidRequest(f"{name}={shown(value)}; allowed: {self.allowed}") from None

    def or_none(self, meaning: str) -> Check:
        """The same, or ``None``, which means ``meaning``."""
        return Check(lambda value: None if value is None else self.read(value), f"{self.allowed}; None: {meaning}")


def settle(values: object, checks: Mapping[str, Check], *, named: str = "{}") -> None:
    """Puts each field of a frozen attrs object that is being made through its check.

    Raises:
        InvalidRequest: of the first field that is refused; ``named`` says how its name is told.
    """
    for name, check in checks.items():
        object.__setattr__(values, name, check.of(named.format(name), getattr(values, name)))


def shown(value: object) -> str:
    """``value`` for a message. It is somebody else's: it may be huge, or have no text at all."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (an integer of 5,000 digits; a repr that is broken)
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# -- kinds of fields -------------------------------------------------------------------------------------------------


def integer(least: int, most: int, note: str = "") -> Check:
    """An integer from ``least`` to ``most``; numpy's are, true and false are not."""

    def read(value: Any) -> int:
        found = as_integer(value)
        return _kept(found, least <= found <= most)

    return Check(read, f"an integer, {least} to {most}" + note)


def number(least: float, most: float, note: str = "", *, above: bool = False) -> Check:
    """A number from ``least`` to ``most``, itself not ``least`` where it is to be ``above``. NaN is none."""

    def read(value: Any) -> float:
        found = as_number(value)
        return _kept(found, least <= found <= most and not (above and found == least))

    low = f"more than {least:g}" if above else f"{least:g} or more"
    allowed = f"a number, {low}" if math.isinf(most) else f"a number, {low}, up to {most:g}"
    return Check(read, allowed + note)


def flag() -> Check:
    """True or false, not what is taken for them."""
    return instance(bool, "True or False")


def one_of(*texts: str) -> Check:
    """One of ``texts``."""

    def read(value: Any) -> Any:
        return _kept(value, isinstance(value, str) and value in texts)

    return Check(read, " or ".join((", ".join(map(repr, texts[:-1])), repr(texts[-1]))))


def instance(kind: type, allowed: str) -> Check:
    """An object of ``kind``."""
    return Check(lambda value: _kept(value, isinstance(value, kind)), allowed)


def path(allowed: str) -> Check:
    """A text that is not blank, or a path, which becomes a text."""

    def read(value: Any) -> Any:
        found = value.__fspath__() if hasattr(value, "__fspath__") else value
        return _kept(found, isinstance(found, str) and bool(found.strip()))

    return Check(_tried(read), allowed)


def function(allowed: str) -> Check:
    """Something to be called, which is no async function: nobody would await it."""

    def read(value: Any) -> Any:
        waits = inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(getattr(value, "__call__", None))  # noqa: B004
        return _kept(value, callable(value) and not isinstance(value, type) and not waits)

    return Check(read, allowed)


def several(each: Callable[[Any], Any], most: int, allowed: str) -> Check:
    """A tuple of what ``each`` reads, from any collection, of up to ``most``."""

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise Refused
        found = tuple(map(each, islice(iter(value), most + 1)))  # what is endless ends here
        return _kept(found, len(found) <= most)

    return Check(_tried(read), allowed)


# -- values ----------------------------------------------------------------------------------------------------------


def as_integer(value: Any) -> int:
    """A plain integer of any kind of integer; raises `Refused` for true, false and all else."""
    if isinstance(value, bool):
        raise Refused
    return int(_tried(operator.index)(value))


def as_number(value: Any) -> float:
    """A plain number of any kind of number; raises `Refused` for true, false and all else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Refused
    return float(_tried(float)(value))


def check_characters(text: str) -> None:
    """Raises `InvalidRequest` where ``text`` has lone surrogates, as file names and arguments that are no text have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"a text with {text[error.start]!r} at character {error.start}, half of a surrogate pair, which is no "
            "character; decode it from bytes with errors='replace'"
        ) from None


def _kept(value: _Value, allowed: bool) -> _Value:
    if not allowed:
        raise Refused
    return value


def _tried(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``read``, for values whose own methods may raise what they like."""

    def call(value: Any) -> Any:
        try:
            return read(value)
        except Exception:  # noqa: BLE001  (`Check.of` tells the value)
            raise Refused from None

    return call
