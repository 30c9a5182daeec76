"""The alignment of a known text: `TextAligner`, the values that cross it, and the cut of a text into its words."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

from attrs import field, frozen

from .plan import AlignedTokens
from .request import Alignment, EncoderItem
from .speech import is_unspaced

APOSTROPHES = "'’"


@frozen
class Timed:
    """The time of a word, in seconds from the beginning of the audio, and its probability, 0 to 1."""

    start: float
    end: float
    probability: float = 0.0


@frozen(kw_only=True, eq=False)
class TextDraft:
    """The question at what times the words of a text are spoken.

    Args:
        words: the text, cut into words, as `cut_words` does. Their joined texts are the text.
        token_ids: the prompt of the request; empty: the text has no word that the model knows.
        items: the encoder items of the request.
        alignment: the question of the request.
        places: for each word the ``[first, stop)`` of its tokens, or of its marks, in the answer; ``None``: the model
            knows no letter of the word.
    """

    words: tuple[str, ...]
    token_ids: tuple[int, ...]
    items: tuple[EncoderItem, ...] = field(repr=False)
    alignment: Alignment
    places: tuple[tuple[int, int] | None, ...]


class TextAligner(Protocol):
    """A model's way to find the times of a known text. Methods are called in threads, so an aligner never changes. It
    can be pickled."""

    def draft(self, samples: Any, text: str, language: str | None) -> TextDraft:
        """Returns the question for ``samples``, float32 of shape (n,) at `ModelDescription.sampling_rate`.

        Args:
            language: a code of ISO 639; ``None``: it is not known.

        Raises:
            InvalidRequest: the text does not fit the audio, or the model does not know the language.
        """

    def times(self, draft: TextDraft, answer: AlignedTokens) -> tuple[Timed | None, ...]:
        """Returns the time of each word of ``draft``; ``None`` for a word without a place."""


def spoken_words(text: str) -> list[str]:
    """Returns the words of ``text`` without marks: letters, numbers and apostrophes between blanks. In scripts without
    blanks between words each character is a word."""
    words = [""]
    for character in text:
        if character.isspace():
            words.append("")
        elif character in APOSTROPHES or unicodedata.category(character)[0] in "LNM":
            words[-1] += character
            if is_unspaced(character):
                words[-1:] = [words[-1][:-1], character, ""]
    return [word for word in words if word]


def cut_words(text: str, spoken: Sequence[str]) -> tuple[str, ...]:
    """Cuts ``text`` into as many parts as there are words in ``spoken``, and at least one. Each word of ``spoken`` is a
    word of the text, or what is left of it without marks. The cut between two words is at the first blank between them,
    so that a mark belongs to the word that it touches, or else before the second word.

    Raises:
        ValueError: ``spoken`` has a character that the text does not have at its place.
    """
    cuts, at = [0], 0
    for word in spoken:
        begin = text.index(word[0], at)
        if at:
            gap = text[at:begin]
            cuts.append(at + next((index for index, mark in enumerate(gap) if mark.isspace()), len(gap)))
        for character in word:
            at = text.index(character, at) + 1
    return tuple(text[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(text)], strict=True))


def least_frames(tokens: Sequence[int]) -> int:
    """Returns the number of frames that a CTC model needs for ``tokens``: one for each, and a blank between equal
    neighbours."""
    return len(tokens) + sum(left == right for left, right in pairwise(tokens))


def between(times: Sequence[Timed | None], start: float, end: float) -> tuple[Timed, ...]:
    """Returns ``times`` in order and within ``start`` and ``end``. Words without a time share the time between their
    neighbours evenly, with probability 0."""
    found, at = list[Timed](), start
    for index, time in enumerate(times):
        known = _shared(times[index:], at, end) if time is None else time
        begin = min(max(known.start, at), end)
        at = min(max(known.end, begin), end)
        found.append(Timed(begin, at, known.probability))
    return tuple(found)


def _shared(times: Sequence[Timed | None], start: float, end: float) -> Timed:
    """Returns the time of the first word, which has none, if all words without a time share the time from ``start`` to
    the first word with one."""
    later = next((one for one in times if one is not None), None)
    sharing = len(times) if later is None else times.index(later)
    until = end if later is None else min(later.start, end)
    return Timed(start, start + max(until - start, 0.0) / sharing)
