"""The answers about one window, the quality of their texts, and the words that nobody spoke.

The decisions are those of openai/whisper's ``transcribe.py`` (Radford et al. 2022, section 4.5). All are pure
functions.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Sequence

from attrs import frozen

from ...core.plan import AlignedTokens
from ...core.request import FinishReason
from ...core.speech import Ask, Sound
from ...core.timings import Timings
from ..outputs.results import Segment, Word
from .options import APPENDED, PREPENDED, TranscribeOptions


@frozen(kw_only=True)
class Generated:
    """The output of one request. ``token_ids`` excludes the end-of-text token. ``logprobs`` has one value for each
    token, and may have one more for the end-of-text token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    probe: tuple[float, ...] | None = None  # the log-probabilities that `Request.probe` asked for
    frames: tuple[tuple[int, int], ...] = ()  # of the tokens, if the model reads frames, as `SampledToken.frames`
    aligned: AlignedTokens | None = None  # the answer to `Request.alignment`
    timings: Timings | None = None

    @property
    def total_logprob(self) -> float:
        """The log-probability of the whole output."""
        return sum(self.logprobs)


def compression_ratio(text: str) -> float:
    """Returns the UTF-8 bytes of ``text`` over its zlib-compressed bytes. Repetitions make the ratio large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@frozen(kw_only=True)
class Assessment:
    """One window's text at one temperature, with the measures of its quality."""

    text: str
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float

    @classmethod
    def of(cls, generated: Generated, text: str, temperature: float) -> Assessment:
        """Returns the assessment of ``generated``. The average log-probability counts the end-of-text token, as the
        code of Radford et al. does."""
        return cls(
            text=text,
            avg_logprob=generated.total_logprob / (len(generated.token_ids) + 1),
            no_speech_prob=math.exp(generated.probe[0]) if generated.probe else 0.0,
            compression_ratio=compression_ratio(text.strip()),
            temperature=temperature,
        )

    def is_improbable(self, options: TranscribeOptions) -> bool:
        """True if the average log-probability of the tokens is below the threshold."""
        limit = options.logprob_threshold
        return limit is not None and not self.avg_logprob >= limit

    def is_silent(self, options: TranscribeOptions) -> bool:
        """True if nobody speaks in the window: the model says that nobody speaks, and the text is empty or too
        improbable to contradict."""
        limit = options.logprob_threshold
        return self._hears_nobody(options) and (limit is None or not self.avg_logprob > limit or not self.text.strip())

    def repeats(self, options: TranscribeOptions) -> bool:
        """True if the text repeats itself."""
        limit = options.compression_ratio_threshold
        return limit is not None and self.compression_ratio > limit

    def is_good(self, options: TranscribeOptions) -> bool:
        """True if no other temperature is needed: the text is good, or nobody speaks."""
        if not (self.repeats(options) or self.is_improbable(options)):
            return True
        return self._hears_nobody(options) and (options.logprob_threshold is None or self.is_improbable(options))

    def hears_somebody(self, options: TranscribeOptions) -> bool:
        """True if the text is good, and the model does not say that nobody speaks."""
        return self.is_good(options) and bool(self.text.strip()) and not self._hears_nobody(options)

    def _hears_nobody(self, options: TranscribeOptions) -> bool:
        """True if the model says that nobody speaks, whatever the text is."""
        limit = options.no_speech_threshold
        return limit is not None and self.no_speech_prob > limit


@frozen
class Attempt:
    """A window's text at one temperature, and what it was read from."""

    generated: Generated
    assessment: Assessment
    sound: Sound
    ask: Ask


def likeliest(sampled: Iterable[Generated], length_penalty: float = 1.0) -> Generated:
    """Returns the best of several texts that were sampled at one temperature. The score of a text is its
    log-probability divided by its length to the power of ``length_penalty``. The length excludes the end-of-text token.
    The first of equal texts is taken."""
    return max(sampled, key=lambda one: one.total_logprob / max(len(one.token_ids), 1) ** length_penalty)


def best_attempt(attempts: Sequence[Attempt], options: TranscribeOptions) -> Attempt:
    """Returns the best of several attempts if none is good. Attempts that do not repeat themselves come first, and the
    likeliest of them is the best. If all repeat themselves, the one that repeats least is the best."""
    calm = [one for one in attempts if not one.assessment.repeats(options)]
    if calm:
        return max(calm, key=lambda one: one.assessment.avg_logprob)
    return min(attempts, key=lambda one: one.assessment.compression_ratio)


# ---- text that comes from the text before ----------------------------------------------------------------------------


_WORD = re.compile(r"\w+")


def _says_again(text: str) -> bool:
    """True if the words of a text are there twice or more, in the mean."""
    words = _WORD.findall(text.casefold())
    return 2 * len(set(words)) <= len(words)


def is_echo(found: Assessment, callers: str, options: TranscribeOptions) -> bool:
    """True if the text before a window may have made its text: the text repeats itself at every temperature; or a third
    of its words are those of the ``callers``, and it says words again, or voice activity has not heard the window."""
    words, known = _WORD.findall(found.text.casefold()), {*_WORD.findall(callers.casefold())}
    repeated = bool(known) and 3 * sum(word in known for word in words) >= len(words)
    return found.repeats(options) or (repeated and (options.voice_activity == "off" or _says_again(found.text)))


def without_echo(found: Attempt, plain: Attempt, options: TranscribeOptions) -> Attempt:
    """Returns the attempt that is taken: ``found``, whose text may be an echo, or ``plain``, which had no text before
    it. A text that repeats itself is an echo; another one if nobody is heard without the text before."""
    if plain.assessment.repeats(options):
        return best_attempt((found, plain), options)
    again = found.assessment.repeats(options) or _says_again(found.assessment.text)
    return found if not again and plain.assessment.hears_somebody(options) else plain


# ---- words that nobody spoke -----------------------------------------------------------------------------------------
# A model that hears a long silence still writes something. Such words are improbable, or much too short or too long in
# time, and have silence around them. Times are in seconds.


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
