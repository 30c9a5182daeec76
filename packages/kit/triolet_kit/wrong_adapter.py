"""The checks of what an adapter is and answers."""

from __future__ import annotations

from typing import Any

from .findings import SPEAKS, BrokenPromise

SCHEDULER = "If it is a scheduler, examine it as one: examine_scheduler, or --protocol scheduler"
"""What to do about a scheduler that was given as a cache manager."""


def check_methods(adapter: Any, names: tuple[str, ...], protocol: str) -> None:
    """Raises `BrokenPromise` unless the adapter has these methods."""
    missing = [name for name in names if not callable(getattr(adapter, name, None))]
    if missing:
        what = f"{type(adapter).__name__} has no {', '.join(missing)}; see {protocol}"
        if callable(getattr(adapter, "schedule", None)):
            what += f". {SCHEDULER}"
        raise BrokenPromise(SPEAKS, what, kind=f"no {missing[0]}")


def as_texts(value: Any, what: str) -> list[str]:
    """Returns the texts of a collection that an adapter returned, as a list.

    Raises:
        BrokenPromise: ``value`` is not a collection of texts. A single text is refused too, since it would be read as
            its letters.
    """
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise BrokenPromise(SPEAKS, f"{what} is {value!r}; allowed: texts in a list, tuple or set", kind=what)
    texts = list(value)
    if not all(isinstance(one, str) for one in texts):
        raise BrokenPromise(SPEAKS, f"{what} is {texts!r}; allowed: texts", kind=what)
    return texts
