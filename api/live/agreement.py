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

from attrs import define

from ..speech.words import TextWord

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
        the audio ends in the middle of speech. The last word may be cut off, so it does not become stable.
        """
        most = max(len(words) - goes_on, 0)
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
