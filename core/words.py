"""The words of a replica to the routers: how much it has to do often, what it holds seldom.

Pure. A word is of plain values, since it goes through processes that know nothing of us. Serve hands on the words of
all replicas to each router whenever one of them has changed. So most words are short, an idle replica repeats its word,
and a number tells a router which it has heard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from attrs import define, field


class Word(TypedDict):
    """What a replica says of itself."""

    number: int
    requests: int  # that have not ended
    encodings: int  # that are to come
    keys: NotRequired[list[str]]  # of all that it holds


@define(eq=False)
class Speaker:
    """Makes the words of one replica.

    Args:
        keys_seconds: between two words with keys. They are said again though nothing has changed: a router may be new,
            or have missed a word.
        most_keys: of what is held, so many are told at most, the newest.
    """

    keys_seconds: float
    most_keys: int = 1_024
    _word: Word | None = field(default=None, init=False)
    _keys_at: float = field(default=-math.inf, init=False)

    def word(self, *, now: float, requests: int, encodings: int, keys: Sequence[str]) -> Word:
        """The word of ``now``. That of an idle replica is the last one again, once it has told all keys."""
        told, last = list(keys[-self.most_keys :]), self._word
        number = 0 if last is None else last["number"]
        if last == {"number": number, "requests": 0, "encodings": 0, "keys": told} and not (requests or encodings):
            return last
        self._word = word = Word(number=number + 1, requests=requests, encodings=encodings)
        if now - self._keys_at >= self.keys_seconds:
            self._keys_at = now
            word["keys"] = told
        return word
