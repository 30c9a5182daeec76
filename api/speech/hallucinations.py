"""Words that nobody spoke, found by their times and probabilities as in openai/whisper's ``transcribe.py``.

A model that hears a long silence still writes something. Such words are improbable, or much too short or too long in
time, and have silence around them. All functions are pure; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ..outputs.results import Segment, Word
from .options import APPENDED, PREPENDED

_LOOKED_AT = 8  # words at the beginning of a segment
_SHORT, _LONG = 0.133, 2.0  # seconds: a word that lasts shorter or longer is strange
_NEAR = 2.0  # seconds: a segment this near to its window's edge counts as next to silence


def strangeness(word: Word) -> float:
    """Returns 0 for a word as people speak it, and more for an improbable word, or one that is too short or too long in
    time.
    """
    seconds, strange = word.end - word.start, 0.0
    if word.probability < 0.15:
        strange += 1.0
    if seconds < _SHORT:
        strange += (_SHORT - seconds) * 15
    if seconds > _LONG:
        strange += seconds - _LONG
    return strange


def is_strange(segment: Segment | None) -> bool:
    """True if the first words of the segment are so strange that probably nobody spoke them."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.text not in PREPENDED + APPENDED][:_LOOKED_AT]
    score = sum(map(strangeness, words))
    return score >= 3 or score + 0.01 >= len(words)


@frozen(kw_only=True)
class Surroundings:
    """The place of a window in the audio. All times are in seconds from the beginning of the audio.

    Args:
        start: the beginning of the window.
        stop: the end of the window's audio.
        full: the end that a window of full length would have.
        audio: the end of the audio; ``None``: the end is unknown.
        last_speech: the end of the last word before the window.
        closed: the model says that nobody speaks after the window's last segment.
    """

    start: float
    stop: float
    full: float
    audio: float | None
    last_speech: float
    closed: bool


@frozen
class Kept:
    """The segments that somebody spoke, and the start of the next window. ``None``: the start does not change."""

    segments: tuple[Segment, ...]
    seek: float | None


def without_hallucinations(segments: Sequence[Segment], around: Surroundings, threshold: float) -> Kept:
    """Leaves out text that nobody spoke, if more than ``threshold`` seconds of silence surround it. Skips the
    silence."""
    seek = _after_last_word(segments, around, threshold)
    first = _next_spoken(segments, 0)
    if first is not None and is_strange(first) and first.start - around.start > threshold:
        return Kept((), first.start)  # the silence before the segment is skipped, and the segment is read again
    last_end = around.last_speech
    for index, segment in enumerate(segments):
        if not segment.words:
            continue
        if is_strange(segment) and _is_alone(segments, index, last_end, around, threshold):
            ends = around.audio is not None and around.audio - segment.end < threshold
            return Kept(tuple(segments[:index]), around.audio if ends else max(around.start + 1, segment.start))
        last_end = segment.end
    return Kept(tuple(segments), seek)


def _after_last_word(segments: Sequence[Segment], around: Surroundings, threshold: float) -> float | None:
    """Returns the start of the next window: the end of the last word if a long silence follows it, else this window's
    end. ``None``: the start does not change."""
    ends = [segment.words[-1].end for segment in segments if segment.words]
    if around.closed or not ends or ends[-1] <= around.start:
        return None
    return ends[-1] if around.full - ends[-1] > threshold else around.stop


def _is_alone(segments: Sequence[Segment], index: int, last_end: float, around: Surroundings, threshold: float) -> bool:
    """True if silence, an edge of the window, or more hallucinations lie on both sides of a segment."""
    segment, following = segments[index], _next_spoken(segments, index + 1)
    next_start = around.stop if following is None or not following.words else following.words[0].start
    before = segment.start - last_end > threshold or segment.start < threshold or segment.start - around.start < _NEAR
    after = next_start - segment.end > threshold or is_strange(following) or around.full - segment.end < _NEAR
    return before and after


def _next_spoken(segments: Sequence[Segment], first: int) -> Segment | None:
    return next((segment for segment in segments[first:] if segment.words), None)
