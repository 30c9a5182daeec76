"""Words with their times, computed from a window's tokens, their log-probabilities, and the frames at which they begin.

`WordTokens.request` asks for the times of all text in a window. `place_words` combines the answer with the window's
segments into words. The rules are those of openai/whisper's ``timing.py``. They mend a fault of alignments: a pause is
counted as part of a word beside it, which then lasts for seconds::

    aligned    |Yes| .         |Well       |then|     "." and " Well" share the pause
    mended     |Yes|.|              |Well  |then|     neither is longer than two usual words of the window
    merged     |Yes. |              |Well  |then|     the mark is part of its word, and its time is ignored

Two things differ from openai/whisper. A word never crosses segments. And no rule moves a word's start before its
aligned start, or its end after its aligned end: so words never overlap, and segments begin and end with their words.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from statistics import fmean, median

from attrs import evolve, frozen

from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ...core.plan import AlignedTokens
from ...core.speech import WordTokens, is_unspaced
from ..outputs.results import Segment, Word

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages without spaces between words. Here each character is a word, or all characters of one token together."""

SENTENCE_ENDS = tuple(".。!！?？")
"""The marks that end a sentence."""

_AFTER_LETTERS = frozenset(',;:!?)]}"')  # the marks behind which no word goes on, though a number may: 4,5
_LONGEST_MEDIAN = 0.7  # seconds: the most that counts as a word's usual duration, however slowly somebody speaks
_HINT = 0.5  # seconds: a segment's own time counts only if it shortens a word by more than this

Decode = Callable[[Sequence[int]], str]


def check_alignment(description: ModelDescription) -> None:
    """Raises `InvalidRequest` if the model cannot find the times of words."""
    facts = None if description.speech is None else description.speech.facts
    if facts is not None and facts.word_times is None:
        raise InvalidRequest(
            f"timestamps='word', but {description.architecture} has no times of words: "
            f"{facts.word_fault}. Allowed: timestamps='segment', 'none', or an aligner, such as the engine of a "
            "Qwen3-ForcedAligner"
        )


def places(tokens: WordTokens, segments: Sequence[Segment]) -> list[int]:
    """Returns the indices in `WordTokens.aligned` of the text tokens of ``segments``, in order. Text that is in no
    segment is skipped: a window's last sentence may be read again in the next window."""
    aligned = tokens.aligned
    texts = [index for index, token in enumerate(aligned) if token < tokens.text]
    found, first = [], 0
    for segment in segments:
        count = len(segment.token_ids)
        while tuple(aligned[index] for index in texts[first : first + count]) != segment.token_ids:
            first += 1
            assert first + count <= len(texts), f"the window has no text {segment.text!r}"
        found += texts[first : first + count]
        first += count
    return found


@frozen(kw_only=True)
class WordRules:
    """The rules by which a window's tokens become words. ``decode`` returns the text of tokens without special ones.
    The marks in ``prepended`` belong to the word after them, and the marks in ``appended`` to the word before them.
    ``frame_seconds`` is the duration of an encoder frame, and ``lead`` the frames by which times are ahead of the
    sound."""

    decode: Decode
    language: str | None
    prepended: str
    appended: str
    frame_seconds: float = 0.02
    lead: int = 0


@frozen(kw_only=True)
class TextWord:
    """The text of a word or mark, usually with a leading space, and its tokens."""

    text: str
    token_ids: tuple[int, ...]


def ending_by(word: Word, end: float) -> Word:
    """Returns ``word``, which begins and ends at ``end`` or before. Where the audio ends, times that are moved by a
    `lead`, or rounded, may be later."""
    return evolve(word, start=min(word.start, end), end=min(word.end, end))


def segment_ending_by(segment: Segment, end: float) -> Segment:
    """Returns ``segment`` with its words, none of which ends later than ``end``."""
    words = None if segment.words is None else tuple(ending_by(word, end) for word in segment.words)
    return evolve(segment, start=min(segment.start, end), end=min(segment.end, end), words=words)


def place_words(
    segments: Sequence[Segment],
    tokens: WordTokens,
    aligned: AlignedTokens | None,
    *,
    rules: WordRules,
    offset: float,
    spoken_until: float,
) -> tuple[Segment, ...]:
    """Returns a window's ``segments`` with their words. Each segment starts and ends with its first and last word. If
    the model knows where tokens end, nothing is mended.

    Args:
        tokens: the tokens of the window.
        aligned: the answer to the request of ``tokens``; ``None``: the window has no text.
        offset: seconds from the beginning of the audio to the beginning of the window.
        spoken_until: the end of the last segment before the window, in seconds from the beginning of the audio; 0 if
            there is none.
    """
    parts = _spoken(segments, tokens, aligned, rules, offset)
    is_exact = aligned is not None and bool(aligned.ends)
    usual = math.inf if is_exact else _usual_seconds([word for part in parts for word in part])
    placed = []
    for segment, words in zip(segments, _without_long_ends(parts, 2 * usual), strict=True):
        merged = merge_marks(words, rules.prepended, rules.appended)
        found = _mended(segment, merged, usual, spoken_until)
        placed.append(found)
        spoken_until = found.end if found.words else spoken_until
    return tuple(placed)


def _spoken(
    segments: Sequence[Segment], tokens: WordTokens, aligned: AlignedTokens | None, rules: WordRules, offset: float
) -> list[list[Word]]:
    """Returns the words of each segment with their aligned times."""
    if aligned is None:
        return [[] for _ in segments]
    found = iter(places(tokens, segments))
    return [
        [
            timed_word(piece, [next(found) for _ in piece.token_ids], aligned, rules, offset)
            for piece in split_words(segment.token_ids, rules.decode, rules.language)
        ]
        for segment in segments
    ]


def timed_word(word: TextWord, places: Sequence[int], aligned: AlignedTokens, rules: WordRules, offset: float) -> Word:
    """Returns the word with its time. ``places`` are the indices of its tokens among the aligned tokens."""
    last = places[-1]
    frames = aligned.frames[places[0]], aligned.ends[last] if aligned.ends else aligned.frames[last + 1]
    start, end = (offset + (frame + rules.lead) * rules.frame_seconds for frame in frames)
    probability = fmean([math.exp(aligned.logprobs[at]) for at in places])
    return Word(text=word.text, start=start, end=end, probability=probability, token_ids=word.token_ids)


# -- tokens to words -------------------------------------------------------------------------------------------------


def split_words(token_ids: Sequence[int], decode: Decode, language: str | None) -> list[TextWord]:
    """Splits ``token_ids`` into words. Each token is in exactly one word, and the joined texts of the words are the
    whole text. A word begins with a space, or is a mark. A mark between two letters or digits is inside of their word:
    ``$43,000`` and ``well-known`` are words. In `UNSPACED` languages a word is a character, or the characters of one
    token.
    """
    pieces = _characters(token_ids, decode)
    if language in UNSPACED:
        return pieces
    words: list[TextWord] = []
    for piece, following in zip_longest(pieces, pieces[1:]):
        is_inside = bool(words and following) and is_spoken(words[-1].text[-1]) and is_spoken(following.text[0])
        is_mark = piece.text.strip() in string.punctuation and not is_inside
        if not words or piece.text.startswith(" ") or is_mark:
            words.append(piece)
        else:
            words[-1] = TextWord(text=words[-1].text + piece.text, token_ids=words[-1].token_ids + piece.token_ids)
    return words


def is_spoken(character: str) -> bool:
    """True for letters with their accents, and digits."""
    return unicodedata.category(character)[0] in "LMN"


def unfinished(words: Sequence[TextWord]) -> int:
    """Returns the number of last words that may go on: a last word, or a last mark that may be inside of a word, as in
    ``don't``, and the word before it."""
    if len(words) < 2 or words[-1].text not in string.punctuation:
        return min(len(words), 1)
    before = words[-2].text[-1]
    return 2 if before.isdigit() or (is_spoken(before) and words[-1].text not in _AFTER_LETTERS) else 1


def split_text(text: str) -> list[TextWord]:
    """Splits ``text`` into words without tokens, at blanks. In scripts without blanks a word is a character."""
    parts = re.findall(r"\s*\S+", text)
    found = [list(part) if is_unspaced(part.strip()[0]) else [part] for part in parts]
    return [TextWord(text=word, token_ids=()) for words in found for word in words]


def _characters(token_ids: Sequence[int], decode: Decode) -> list[TextWord]:
    """Returns the smallest groups of tokens that make whole characters, since one character may take several tokens.
    Tokens that are left at the end, such as half a character, are a group too, or join the last group if they have no
    text."""
    text, begun, first = decode(token_ids), 0, 0
    pieces: list[TextWord] = []
    for last in range(1, len(token_ids) + 1):
        found = decode(token_ids[first:last]) if last < len(token_ids) else text[begun:]
        if found and text.startswith(found, begun):
            pieces.append(TextWord(text=found, token_ids=tuple(token_ids[first:last])))
            begun, first = begun + len(found), last
    if pieces and first < len(token_ids):
        pieces[-1] = evolve(pieces[-1], token_ids=pieces[-1].token_ids + tuple(token_ids[first:]))
    return pieces


def merge_marks(words: Sequence[Word], prepended: str, appended: str) -> list[Word]:
    """Returns ``words`` with marks joined to a neighbour. A mark in ``prepended`` that follows a space joins the word
    after it, and a mark in ``appended`` the word before it. The time and probability of a mark are ignored."""
    later: list[Word] = []
    for word in reversed(words):
        if later and word.text.startswith(" ") and word.text.strip() in prepended:
            later[-1] = _joined(word, later[-1], later[-1])
        else:
            later.append(word)
    merged: list[Word] = []
    for word in reversed(later):
        if merged and not merged[-1].text.endswith(" ") and word.text in appended:
            merged[-1] = _joined(merged[-1], word, merged[-1])
        else:
            merged.append(word)
    return merged


def _joined(first: Word, second: Word, timed: Word) -> Word:
    """Returns the two words as one, with the time and probability of ``timed``."""
    return evolve(timed, text=first.text + second.text, token_ids=first.token_ids + second.token_ids)


# -- long words ------------------------------------------------------------------------------------------------------


def _usual_seconds(words: Sequence[Word]) -> float:
    """Returns the usual duration of a word in the window, or 0 if no word has a duration."""
    lasting = [_seconds(word) for word in words if _seconds(word) > 0]
    return min(_LONGEST_MEDIAN, median(lasting)) if lasting else 0.0


def _without_long_ends(parts: Sequence[Sequence[Word]], longest: float) -> list[list[Word]]:
    """Returns the words. Marks at the end of a sentence, and words after such marks, are shortened to ``longest``,
    since a longer one includes a pause.
    """
    words = [word for part in parts for word in part]
    mended = words[:1] + [_cut(before, word, longest) for before, word in pairwise(words)]
    left = iter(mended)
    return [[next(left) for _ in part] for part in parts]


def _cut(before: Word, word: Word, longest: float) -> Word:
    if not 0 < longest < _seconds(word):
        return word
    if word.text in SENTENCE_ENDS:
        return evolve(word, end=word.start + longest)
    if before.text in SENTENCE_ENDS:
        return evolve(word, start=word.end - longest)
    return word


def _mended(segment: Segment, words: list[Word], usual: float, spoken_until: float) -> Segment:
    """Returns ``segment`` with ``words``, whose first and last ones may be shortened, and with the times of its
    words."""
    if not words:
        return evolve(segment, words=())
    words = _after_pause(words, usual, spoken_until)
    words = _hinted(words, segment, usual)
    found = tuple(evolve(word, start=round(word.start, 3), end=round(word.end, 3)) for word in words)
    return evolve(segment, start=found[0].start, end=found[-1].end, words=found)


def _after_pause(words: list[Word], usual: float, spoken_until: float) -> list[Word]:
    """Returns the words. After a pause, the first and the second word are shortened to twice the usual duration."""
    longest, first, others = 2 * usual, words[0], words[1:]
    second = others[0] if others else None
    together = second.end - first.start if second is not None else 0.0
    is_pause = first.end - spoken_until > 2 * longest
    if not is_pause or not (_seconds(first) > longest or together > 2 * longest):
        return words
    if second is not None and _seconds(second) > longest:
        border = max(second.end / 2, second.end - longest)
        first, others = evolve(first, end=border), [evolve(second, start=border), *others[1:]]
    return [evolve(first, start=max(first.start, first.end - longest)), *others]


def _hinted(words: list[Word], segment: Segment, usual: float) -> list[Word]:
    """Returns the words. The first and last may be shortened by the times of ``segment``: a first word that begins long
    before the segment is cut to the segment's start, and a last word that ends long after it to its end. Each keeps at
    least the usual duration.
    """
    first = words[0]
    if first.start + _HINT < segment.start < first.end:
        start = min(first.end - usual, segment.start)
        words = [evolve(first, start=max(first.start, start)), *words[1:]]
    last = words[-1]
    if last.start < segment.end < last.end - _HINT:
        end = max(last.start + usual, segment.end)
        words = [*words[:-1], evolve(last, end=min(last.end, end))]
    return words


def _seconds(word: Word) -> float:
    return word.end - word.start
