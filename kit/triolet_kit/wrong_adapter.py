"""The error of an adapter that does not speak its protocol."""

from __future__ import annotations

from typing import Any


class WrongAdapter(TypeError):
    """The error of an adapter that does not speak its protocol."""


def check_methods(adapter: Any, names: tuple[str, ...], protocol: str) -> None:
    """Raises `WrongAdapter` unless the adapter has these methods."""
    missing = [name for name in names if not callable(getattr(adapter, name, None))]
    if missing:
        raise WrongAdapter(f"{type(adapter).__name__} has no {missing[0]}; see {protocol}")


def as_texts(value: Any, what: str) -> list[str]:
    """Returns the texts of a collection that an adapter returned, as a list.

    Raises:
        WrongAdapter: ``values`` is not a collection of texts. A single text is refused too, since it would be read as
            its letters.
    """
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise WrongAdapter(f"{what} is {value!r}; allowed: texts in a list, tuple or set")
    texts = list(value)
    if not all(isinstance(one, str) for one in texts):
        raise WrongAdapter(f"{what} is {texts!r}; allowed: texts")
    return texts
