"""Words with their times: from a window's tokens, the frames at which they begin, and their log-probabilities.

`words_request` asks for the times of a window's text, all its segments together; `place_words` makes words of the
answer. In between nothing is decided. The rules are those of openai/whisper's ``timing.py``, which mend what the
alignment of a pause gives: the silence goes to a word beside it, which then lasts for seconds::

    aligned    |Yes| .         |Well       |then|     "." and " Well" share the pause
    mended     |Yes|.|              |Well  |then|     neither is longer than two words of this window usually are
    merged     |Yes. |              |Well  |then|     the mark is part of its word, its time counts for nothing

Two things differ from openai/whisper. A word never crosses segments. And no rule moves a word's start before its
aligned start, or its end behind its aligned end: so words never overlap, and segments begin and end with their words.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from attrs import evolve, frozen

from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ...core.plan import AlignedTokens
from ...core.request import Alignment, EncoderItem, Request
from ..outputs.results import Segment, Word

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that put no spaces between words: each character is one here, where a token does not hold several."""

_SENTENCE_ENDS = ".。!！?？"
_LONGEST_MEDIAN = 0.7  # seconds: of the usual duration of a word, however slowly somebody speaks
_HINT = 0.5  # seconds: by so much a segment's own time must cut its word short to count

Decode = Callable[[Sequence[int]], str]


def check_alignment(description: ModelDescription) -> None:
    """Raises `InvalidRequest` where the model cannot tell the times of words."""
    if description.alignment_fault is not None:
        raise InvalidRequest(
            f"timestamps='word', but {description.name} cannot tell when words are spoken: "
            f"{description.alignment_fault}. Without it allowed: timestamps='segment', 'none'"
        )


def words_request(
    request_id: str,
    item: EncoderItem,
    *,
    special: Sequence[int],
    text: Sequence[int],
    frames: int,
    most_positions: int,
    among: int,
) -> Request | None:
    """A request for the times of ``text``; ``None``: there is no text.

    Args:
        item: the window's own, whose encoding and cross-attention slot are shared.
        special: what stands before the text: <|startoftranscript|>, the language, the task, <|notimestamps|>.
        text: the text tokens of all the window's segments, in order, without timestamps.
        frames: encoder frames (20 ms) with audio in them, at least 1.
        most_positions: of the decoder.
        among: how many tokens of the vocabulary, the first ones, are text: words' probabilities are among these.
    """
    if not text:
        return None
    prompt = (*special, *text)
    assert len(prompt) <= most_positions, f"a text of {len(text)} tokens is longer than the model writes"
    return Request(
        id=request_id,
        prompt_token_ids=prompt,
        items=(item,),
        alignment=Alignment(start=len(special), frames=max(1, frames), among=among),
    )


@frozen(kw_only=True)
class WordRules:
    """How a window's tokens become words. ``decode`` gives the text of tokens, special ones left out; ``prepended`` and
    ``appended`` are the marks that belong to the word behind and before them; ``frame_seconds`` is an encoder frame."""

    decode: Decode
    language: str
    prepended: str
    appended: str
    frame_seconds: float = 0.02


@frozen(kw_only=True)
class Piece:
    """A word's text, and how many tokens it has."""

    text: str
    tokens: int


@frozen(kw_only=True)
class Spoken:
    """A word in the making."""

    text: str
    start: float
    end: float
    probability: float

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end - self.start


def place_words(
    segments: Sequence[Segment],
    aligned: AlignedTokens | None,
    *,
    rules: WordRules,
    offset: float,
    spoken_until: float,
) -> tuple[Segment, ...]:
    """A window's ``segments`` with words, and with the times of their first and last word.

    Args:
        aligned: the answer to `words_request` with the tokens of all ``segments``; ``None``: they have no tokens.
        offset: seconds from the beginning of the audio to the window's.
        spoken_until: where the last segment before the window ends, in seconds from the beginning of the audio; 0 where
            there is none.
    """
    parts = _spoken(segments, aligned, rules, offset)
    usual = _usual_seconds([word for part in parts for word in part])
    placed = []
    for segment, words in zip(segments, _without_long_ends(parts, 2 * usual), strict=True):
        merged = merge_marks(words, rules.prepended, rules.appended)
        found = _mended(segment, merged, usual, spoken_until)
        placed.append(found)
        spoken_until = found.end if found.words else spoken_until
    return tuple(placed)


def _spoken(
    segments: Sequence[Segment], aligned: AlignedTokens | None, rules: WordRules, offset: float
) -> list[list[Spoken]]:
    """The words of each segment as they were aligned."""
    count = sum(len(segment.token_ids) for segment in segments)
    answer = AlignedTokens(frames=(0,), logprobs=()) if aligned is None else aligned
    assert len(answer.logprobs) == count, f"{len(answer.logprobs)} tokens were aligned, but the segments have {count}"
    parts, first = [], 0
    for segment in segments:
        part = []
        for piece in split_words(segment.token_ids, rules.decode, rules.language):
            last = first + piece.tokens
            start, end = (offset + answer.frames[index] * rules.frame_seconds for index in (first, last))
            probability = fmean(map(math.exp, answer.logprobs[first:last]))
            part.append(Spoken(text=piece.text, start=start, end=end, probability=probability))
            first = last
        parts.append(part)
    return parts


# -- tokens to words -------------------------------------------------------------------------------------------------


def split_words(token_ids: Sequence[int], decode: Decode, language: str) -> list[Piece]:
    """The words of ``token_ids``: each token is in one word, and the words' texts joined are the text of all. A word
    begins with a space or is a mark; in `UNSPACED` languages it is a character, or the characters of one token."""
    pieces = list(_characters(token_ids, decode))
    if language in UNSPACED:
        return pieces
    words: list[Piece] = []
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in string.punctuation:
            words.append(piece)
        else:
            words[-1] = Piece(text=words[-1].text + piece.text, tokens=words[-1].tokens + piece.tokens)
    return words


def _characters(token_ids: Sequence[int], decode: Decode) -> Iterator[Piece]:
    """The least groups of tokens that are whole characters: one character may be of several tokens. What is left at the
    end, as half a character, is a group too."""
    text, begun, first = decode(token_ids), 0, 0
    for last in range(1, len(token_ids) + 1):
        found = decode(token_ids[first:last])
        if last == len(token_ids):
            found = text[begun:]
        elif not found or not text.startswith(found, begun):
            continue
        yield Piece(text=found, tokens=last - first)
        begun, first = begun + len(found), last


def merge_marks(words: Sequence[Spoken], prepended: str, appended: str) -> list[Spoken]:
    """``words`` with marks put to the word behind (``prepended``, where a space stands before them) or before
    (``appended``). A mark's time and probability count for nothing."""
    behind: list[Spoken] = []
    for word in reversed(words):
        if behind and word.text.startswith(" ") and word.text.strip() in prepended:
            behind[-1] = evolve(behind[-1], text=word.text + behind[-1].text)
        else:
            behind.append(word)
    merged: list[Spoken] = []
    for word in reversed(behind):
        if merged and not merged[-1].text.endswith(" ") and word.text in appended:
            merged[-1] = evolve(merged[-1], text=merged[-1].text + word.text)
        else:
            merged.append(word)
    return merged


# -- long words ------------------------------------------------------------------------------------------------------


def _usual_seconds(words: Sequence[Spoken]) -> float:
    """How long a word of this window usually lasts; 0 where none lasts."""
    lasting = [word.seconds for word in words if word.seconds > 0]
    return min(_LONGEST_MEDIAN, median(lasting)) if lasting else 0.0


def _without_long_ends(parts: Sequence[Sequence[Spoken]], longest: float) -> list[list[Spoken]]:
    """No mark at the end of a sentence, and no word behind one, lasts longer than ``longest``: they had the pause."""
    words = [word for part in parts for word in part]
    mended = words[:1] + [_cut(before, word, longest) for before, word in pairwise(words)]
    left = iter(mended)
    return [[next(left) for _ in part] for part in parts]


def _cut(before: Spoken, word: Spoken, longest: float) -> Spoken:
    if not 0 < longest < word.seconds:
        return word
    if word.text in _SENTENCE_ENDS:
        return evolve(word, end=word.start + longest)
    if before.text in _SENTENCE_ENDS:
        return evolve(word, start=word.end - longest)
    return word


def _mended(segment: Segment, words: list[Spoken], usual: float, spoken_until: float) -> Segment:
    """``segment`` with ``words``, the first and last of which may be cut, and with their times."""
    if not words:
        return evolve(segment, words=())
    words = _after_pause(words, usual, spoken_until)
    words = _hinted(words, segment, usual)
    found = tuple(_word(word) for word in words)
    return evolve(segment, start=found[0].start, end=found[-1].end, words=found)


def _after_pause(words: list[Spoken], usual: float, spoken_until: float) -> list[Spoken]:
    """The first and second word behind a pause last no longer than twice a word's usual time."""
    longest, first, others = 2 * usual, words[0], words[1:]
    second = others[0] if others else None
    together = second.end - first.start if second is not None else 0.0
    is_pause = first.end - spoken_until > 2 * longest
    if not is_pause or not (first.seconds > longest or together > 2 * longest):
        return words
    if second is not None and second.seconds > longest:
        border = max(second.end / 2, second.end - longest)
        first, others = evolve(first, end=border), [evolve(second, start=border), *others[1:]]
    return [evolve(first, start=max(first.start, first.end - longest)), *others]


def _hinted(words: list[Spoken], segment: Segment, usual: float) -> list[Spoken]:
    """A first word that begins long before its segment begins with it, and a last word that ends long behind its
    segment ends with it: but each keeps its usual time."""
    first = words[0]
    if first.start + _HINT < segment.start < first.end:
        start = min(first.end - usual, segment.start)
        words = [evolve(first, start=max(first.start, start)), *words[1:]]
    last = words[-1]
    if last.start < segment.end < last.end - _HINT:
        end = max(last.start + usual, segment.end)
        words = [*words[:-1], evolve(last, end=min(last.end, end))]
    return words


def _word(word: Spoken) -> Word:
    return Word(text=word.text, start=round(word.start, 3), end=round(word.end, 3), probability=word.probability)
