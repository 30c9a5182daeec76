"""Local agreement: the rule by which words of a growing utterance become stable.

A live session reads the same utterance again and again, each time with more of its audio. Each reading gives a
hypothesis. A word becomes stable if two successive hypotheses have it at the same place, directly after stable words
(LocalAgreement-2: Liu et al. 2020, "Low-Latency Sequence-to-Sequence Speech Recognition and Translation by Partial
Hypothesis Selection"; Macháček et al. 2023, "Turning Whisper into Real-Time Transcription System")::

    hypothesis  1   the cat sad
    hypothesis  2   the cat sat on them        the cat | sat on them
    hypothesis  3           sat on the mat     the cat sat on | the mat
                    stable  ^ provisional

If the model continues a text that was begun (`SpeechFacts.begins`), it gets the stable words as the beginning. So each
hypothesis has only the words after them, and cannot contradict them. Other models write the whole text each time, and
`said_again` finds where it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from attrs import define, evolve, frozen

from ...core.plan import AlignedTokens
from ..outputs.results import Word
from ..speech.words import SENTENCE_ENDS, TextWord, WordRules, timed_word, unfinished

Words = tuple[TextWord, ...]


def agreed(before: Sequence[TextWord], words: Sequence[TextWord]) -> int:
    """Returns the number of words at the beginning whose texts are the same in both."""
    count = 0
    for first, second in zip(before, words, strict=False):
        if first.text != second.text:
            break
        count += 1
    return count


def said_again(stable: Sequence[TextWord], words: Sequence[TextWord]) -> int:
    """Returns how many words at the beginning of ``words`` are the ``stable`` ones, said again: the number with the
    fewest differences (words that are new, gone or changed), of several with the most words that are the same, and of
    several the nearest to that of the stable words."""
    row = [(count, 0) for count in range(len(words) + 1)]  # differences, and equal words as a negative number
    for number, one in enumerate(stable, 1):
        before, row = row, [(number, 0)]
        for count, word in enumerate(words, 1):
            differences, same = before[count - 1]
            is_same = one.text.strip() == word.text.strip()
            other = min(row[-1], before[count])
            row.append(min((differences + (not is_same), same - is_same), (other[0] + 1, other[1])))
    return min(range(len(row)), key=lambda count: (*row[count], abs(count - len(stable))))


@define
class Agreement:
    """The words of the part of an utterance whose audio is still read.

    Attributes:
        stable: words that never change; the latest hypothesis begins after them.
        provisional: the words of the latest hypothesis that are not stable.
    """

    stable: Words = ()
    provisional: Words = ()

    def hear(self, words: Sequence[TextWord], *, goes_on: bool = False) -> Words:
        """Adds the next hypothesis: the words after the stable ones. Returns the words that become stable. ``goes_on``:
        the audio ends in the middle of speech. The words that may be cut off do not become stable.
        """
        most = len(words) - (unfinished(words) if goes_on else 0)
        return self._accept(tuple(words), min(agreed(self.provisional, words), most))

    def settle(self, count: int | None = None) -> Words:
        """Makes the first ``count`` provisional words, or all, stable without a second hypothesis. Returns these
        words."""
        return self._accept(self.provisional, len(self.provisional) if count is None else count)

    def forget(self, count: int) -> Words:
        """Drops the first ``count`` stable words, whose audio is not read any more. Returns these words."""
        assert count <= len(self.stable), f"{count} words are to be dropped, but {len(self.stable)} are stable"
        dropped, self.stable = self.stable[:count], self.stable[count:]
        return dropped

    def _accept(self, words: Words, count: int) -> Words:
        self.stable, self.provisional = self.stable + words[:count], words[count:]
        return words[:count]


def text_of(words: Sequence[TextWord]) -> str:
    """Returns the joined text of the words, as the model wrote it."""
    return "".join(word.text for word in words)


# ---- the times of words ----------------------------------------------------------------------------------------------


_LONGEST_USUAL = 0.7  # seconds: the most that counts as a word's usual duration, however slowly somebody speaks


@frozen(kw_only=True)
class TimedWord:
    """A word or mark of a hypothesis with its time. A word and the marks that belong to it have the same ``number``. A
    mark has no duration."""

    number: int
    word: Word


def timed(
    words: Sequence[TextWord], aligned: AlignedTokens, *, rules: WordRules, offset: float
) -> tuple[TimedWord, ...]:
    """Returns the words with their times.

    The alignment counts a pause as part of the mark before it, or of the word after it. So marks get no duration. A
    word after a mark or at the beginning is shortened to twice the usual duration of a word, by a later start.

    Args:
        aligned: the times of all tokens of ``words``, in order.
        offset: seconds from the beginning of the session to the beginning of the aligned audio.
    """
    found: list[TimedWord] = []
    first = 0
    for word, number in zip(words, _numbers(words, rules), strict=True):
        places = range(first, first + len(word.token_ids))
        found.append(TimedWord(number=number, word=timed_word(word, places, aligned, rules, offset)))
        first = places.stop
    return _mended(found, exact=bool(aligned.ends))


def spread(words: Sequence[TextWord], start: float, end: float, probability: float) -> tuple[TimedWord, ...]:
    """Returns the words of a model that knows no times. Each has a share of the time from ``start`` to ``end`` by the
    number of its characters."""
    total, found, at = sum(len(word.text) for word in words), list[TimedWord](), start
    for number, word in enumerate(words):
        until = at + (end - start) * len(word.text) / total
        timed_word = Word(text=word.text, start=round(at, 3), end=round(until, 3), probability=probability)
        found.append(TimedWord(number=number, word=timed_word))
        at = until
    return tuple(found)


def after(words: Sequence[TimedWord], later: Sequence[TimedWord]) -> tuple[TimedWord, ...]:
    """Returns ``words`` and the ``later`` ones of another hypothesis, which count on."""
    first = words[-1].number + 1 if words else 0
    least = later[0].number if later else 0
    return (*words, *(evolve(one, number=one.number - least + first) for one in later))


def _numbers(words: Sequence[TextWord], rules: WordRules) -> list[int]:
    """Returns the number of each word, counting up. A mark has the number of the word to which it belongs."""
    numbers: list[int] = []
    number, opens = -1, False  # opens: the mark before belongs to this word
    for word in words:
        closes = bool(numbers) and is_mark(word.text) and word.text in rules.appended
        number += not (closes or opens)
        opens = is_mark(word.text) and word.text.startswith(" ") and word.text.strip() in rules.prepended
        numbers.append(number)
    return numbers


def is_mark(text: str) -> bool:
    """True if ``text`` has no letter and no digit, so that nothing of it is spoken."""
    return not any(character.isalnum() for character in text)


def _mended(words: Sequence[TimedWord], *, exact: bool) -> tuple[TimedWord, ...]:
    """Returns the words, rounded. Unless their times are ``exact``, marks get no duration, and long words at the
    beginning or after marks are shortened."""
    lasting = [one.word.end - one.word.start for one in words if not is_mark(one.word.text)]
    longest = 2 * min(_LONGEST_USUAL, median(lasting)) if lasting else 0.0
    found: list[TimedWord] = []
    after_mark = True
    for one in words:
        word = one.word
        if not exact and is_mark(word.text):
            at = word.end if word.text.startswith(" ") else word.start
            word = evolve(word, start=at, end=at)
        elif not exact and after_mark and 0 < longest < word.end - word.start:
            word = evolve(word, start=word.end - longest)
        after_mark = is_mark(word.text)
        found.append(evolve(one, word=evolve(word, start=round(word.start, 3), end=round(word.end, 3))))
    return tuple(found)


def joined(words: Sequence[TimedWord]) -> tuple[Word, ...]:
    """Joins ``words`` with the marks that belong to them."""
    groups = [[one.word for one in group] for _, group in groupby(words, key=lambda one: one.number)]
    return tuple(map(_together, groups))


def _together(parts: Sequence[Word]) -> Word:
    spoken = [part for part in parts if not is_mark(part.text)] or parts
    return Word(
        text="".join(part.text for part in parts),
        start=spoken[0].start,
        end=spoken[-1].end,
        probability=spoken[0].probability,
    )


def cut(words: Sequence[TimedWord], stable: int, start: float) -> tuple[int, float] | None:
    """Finds the cut through the audio of a long utterance. Returns the number of words before the cut, and its time in
    seconds. The cut is later than ``start``. It comes after the last stable sentence, or else after the last stable
    word that is whole. ``None``: no such word exists.

    Args:
        words: the words of the latest hypothesis, stable and provisional.
        stable: the number of stable words.
        start: the beginning of the utterance's audio, in seconds.
    """
    whole = [count for count in range(1, stable + 1) if _is_whole(words, count) and _border(words, count) > start]
    sentences = [count for count in whole if words[count - 1].word.text.strip().endswith(SENTENCE_ENDS)]
    if not whole:
        return None
    count = (sentences or whole)[-1]
    return count, _border(words, count)


def _is_whole(words: Sequence[TimedWord], count: int) -> bool:
    """True if a cut after ``count`` words does not separate a word from its marks."""
    return count == len(words) or words[count].number != words[count - 1].number


def _border(words: Sequence[TimedWord], count: int) -> float:
    """The middle between the last word before the cut and the first after it."""
    end = words[count - 1].word.end
    following = words[count].word.start if count < len(words) else end
    return (end + following) / 2 if following > end else end
