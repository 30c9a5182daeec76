"""Checks of the values that callers pass. A check returns the value as its field declares it, or raises
`InvalidRequest`.

A class declares each field with its default and its `Check`, which `settle` applies. Numbers of other libraries such as
numpy become plain numbers. So the kept value has the declared type, can be compared, and can be a key.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import islice
from numbers import Real
from typing import Any, TypeVar

from attrs import AttrsInstance, field, fields, frozen

from .errors import InvalidRequest

_Value = TypeVar("_Value")
_Class = TypeVar("_Class", bound=AttrsInstance)
_MOST_SHOWN = 300  # characters of a value in a message: it may be a whole image


class Refused(Exception):
    """The value is not allowed. `Check.of` turns this error into `InvalidRequest`, and includes its text."""


@frozen
class Check:
    """The values that a field may have. ``read`` returns the value to keep, or raises `Refused`. ``allowed`` describes
    the values."""

    read: Callable[[Any], Any]
    allowed: str

    def of(self, name: str, value: object) -> Any:
        """Returns the value to keep for ``value``.

        Raises:
            InvalidRequest: ``value`` is not allowed.
        """
        try:
            return self.read(value)
        except Refused as refused:
            hint = f"; {refused}" if refused.args else ""
            raise InvalidRequest(f"{name}={shown(value)}; allowed: {self.allowed}{hint}") from None

    def or_none(self, meaning: str) -> Check:
        """Returns a check that also allows ``None``. Messages explain ``None`` by ``meaning``."""
        return Check(lambda value: None if value is None else self.read(value), f"{self.allowed}; None: {meaning}")


def unknown_name(name: str, known: Iterable[str], elsewhere: Mapping[str, str], *, owner: str) -> InvalidRequest:
    """Returns the error for a keyword ``name`` that ``owner`` does not have. The error suggests one of the ``known``
    names: the one that ``elsewhere`` gives for a name from another program, or else the one with the most similar
    spelling.
    """
    names = list(known)
    near = elsewhere.get(name) or next(iter(difflib.get_close_matches(name, names, 1, 0.6)), None)
    told = f"did you mean {near}?" if near else f"allowed: {', '.join(names)}"
    return InvalidRequest(f"{name}= is not an option of {owner}; {told}")


def nearest_names(elsewhere: Mapping[str, str]) -> Callable[[type[_Class]], type[_Class]]:
    """Returns a decorator of attrs classes: an unknown keyword raises `unknown_name` in place of a `TypeError`."""

    def decorated(made: type[_Class]) -> type[_Class]:
        names, init = tuple(one.alias for one in fields(made) if one.init), made.__init__

        @wraps(init)
        def named(self: _Class, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in names:
                    raise unknown_name(name, names, elsewhere, owner=made.__name__)
            init(self, *args, **given)

        setattr(made, "__init__", named)  # noqa: B010  (mypy allows no assignment to a method)
        return made

    return decorated


def by(check: Check) -> dict[str, Check]:
    """Returns the metadata of a field that `settle` checks with ``check``."""
    return {"check": check}


def checked(default: _Value, check: Check, **settings: Any) -> _Value:
    """Returns a field with a default that `settle` checks with ``check``. ``settings`` are those of `attrs.field`."""
    made: _Value = field(default=default, metadata=by(check), **settings)
    return made


def settle(values: AttrsInstance, *, named: str = "{}") -> None:
    """Checks each checked field of a frozen attrs object that is being made, and keeps the result.

    Raises:
        InvalidRequest: a field is refused. The message names the first such field, in the format ``named``.
    """
    for one in fields(type(values)):
        check = one.metadata.get("check")
        if check is not None:
            object.__setattr__(values, one.name, check.of(named.format(one.name), getattr(values, one.name)))


def demand(condition: bool, got: str, allowed: str) -> None:
    """Raises `InvalidRequest` unless ``condition`` holds. Used for values that exclude each other."""
    if not condition:
        raise InvalidRequest(f"{got}; allowed: {allowed}")


def shown(value: object) -> str:
    """Returns ``value`` as text for a message. A caller's value may be huge, or may have no working repr."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  (an integer of 5,000 digits; a repr that is broken)
        return f"a {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


# -- kinds of fields -------------------------------------------------------------------------------------------------


def integer(least: int, most: int, note: str = "") -> Check:
    """Returns the check of an integer from ``least`` to ``most``. numpy's integers are allowed; True and False are
    not."""

    def read(value: Any) -> int:
        found = as_integer(value)
        return _kept(found, least <= found <= most)

    return Check(read, f"an integer, {least} to {most}" + note)


def number(least: float, most: float, note: str = "", *, above: bool = False) -> Check:
    """Returns the check of a number from ``least`` to ``most``; with ``above``, greater than ``least``. NaN is not
    allowed."""

    def read(value: Any) -> float:
        found = as_number(value)
        return _kept(found, least <= found <= most and not (above and found == least))

    low = f"more than {least:g}" if above else f"{least:g} or more"
    allowed = f"a number, {low}" if math.isinf(most) else f"a number, {low}, up to {most:g}"
    return Check(read, allowed + note)


def flag() -> Check:
    """Returns the check of True or False. Other truthy or falsy values are not allowed."""
    return instance(bool, "True or False")


def one_of(*texts: str) -> Check:
    """Returns the check of a text that is one of ``texts``."""

    def read(value: Any) -> Any:
        return _kept(value, isinstance(value, str) and value in texts)

    named = [", ".join(map(repr, texts[:-1])), repr(texts[-1])]
    return Check(read, " or ".join(filter(None, named)))


def instance(kind: type, allowed: str) -> Check:
    """Returns the check of an object of ``kind``."""
    return Check(lambda value: _kept(value, isinstance(value, kind)), allowed)


def function(allowed: str) -> Check:
    """Returns the check of a callable. Classes are not allowed, and neither are async functions, since nobody would
    await them."""

    def read(value: Any) -> Any:
        waits = inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(getattr(value, "__call__", None))  # noqa: B004
        return _kept(value, callable(value) and not isinstance(value, type) and not waits)

    return Check(read, allowed)


def several(each: Callable[[Any], Any], most: int, allowed: str) -> Check:
    """Returns the check of a tuple of up to ``most`` items. ``each`` reads an item. Any iterable but a text or mapping
    is allowed."""

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise Refused
        found = tuple(map(each, islice(iter(value), most + 1)))  # an endless iterable ends here
        return _kept(found, len(found) <= most)

    return Check(_tried(read), allowed)


# -- values ----------------------------------------------------------------------------------------------------------


def as_integer(value: Any) -> int:
    """Returns a plain integer for any kind of integer. Raises `Refused` for True, False and all other values."""
    if isinstance(value, bool):
        raise Refused
    return int(_tried(operator.index)(value))


def as_number(value: Any) -> float:
    """Returns a plain number for any kind of number. Raises `Refused` for True, False and all other values."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise Refused
    return float(_tried(float)(value))


def check_characters(text: str) -> None:
    """Raises `InvalidRequest` if ``text`` has lone surrogates, as undecodable file names and arguments have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"a text has {text[error.start]!r} at character {error.start}: half of a surrogate pair, which is not a "
            "character; decode the text from bytes with errors='replace'"
        ) from None


def _kept(value: _Value, allowed: bool) -> _Value:
    if not allowed:
        raise Refused
    return value


def _tried(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a ``read`` that raises `Refused` if a method of the value raises any exception."""

    def call(value: Any) -> Any:
        try:
            return read(value)
        except Exception:  # noqa: BLE001  (`Check.of` names the value)
            raise Refused from None

    return call
