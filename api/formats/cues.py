"""Cues, the subtitles of SRT and WebVTT. A cue is a text in lines, with the times at which it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from attrs import define, evolve, field, frozen

from ...core.errors import InvalidRequest
from ..outputs.results import Segment, Word
from .settings import SubtitleSettings

LONG_PAUSE = 3.0  # seconds between the starts of two words: after a longer pause, subtitles that run on begin anew
LEAST = 40  # milliseconds that a cue is shown: an image of a film. WebVTT forbids cues without duration
_ARROW = re.compile(r"-{2,}>")  # separates the times of a cue, so that no text may hold it
_LINE_END = re.compile(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+")


@frozen
class Cue:
    """``text``, of one or more lines, is shown from ``start`` to ``end``, both in milliseconds. ``speaker`` says it."""

    start: int
    end: int
    text: str
    speaker: str | None = None


def milliseconds(seconds: float) -> int:
    """Returns ``seconds`` rounded to whole milliseconds."""
    return round(seconds * 1000)


def one_line(text: str) -> str:
    """Returns ``text`` with a blank in place of line ends, since an empty line would end a cue."""
    return _LINE_END.sub(" ", text)


@frozen
class _CueWord:
    """A word in its cue. If ``text`` begins with a line end, the word begins a new line."""

    start: int
    end: int
    text: str

    @property
    def underlined(self) -> _CueWord:
        bare = self.text.lstrip()
        return evolve(self, text=f"{self.text[: len(self.text) - len(bare)]}<u>{bare}</u>") if bare else self


@define
class CueMaker:
    """Makes cues from segments, one after the other. ``escape`` is applied to the text of each word and segment.

    Segments with words are cut as openai/whisper cuts them, by `SubtitleSettings`. A segment without words is one cue.
    No cue has the words of two speakers. Each is shown for `LEAST` or longer; the next one begins later if need be.
    """

    settings: SubtitleSettings
    escape: Callable[[str], str]
    _pieces: list[_CueWord] = field(factory=list, init=False)  # of the cue that is not finished
    _width: int = field(default=0, init=False)  # characters of its last line
    _lines: int = field(default=1, init=False)
    _last: float | None = field(default=None, init=False)  # seconds: the start of the last word
    _speaker: str | None = field(default=None, init=False)  # of the cue that is not finished
    _shown: int = field(default=0, init=False)  # milliseconds: the end of the last finished cue

    def add(self, segment: Segment) -> list[Cue]:
        """Adds ``segment``. Returns the cues that are now finished.

        Raises:
            InvalidRequest: the settings need words, and the segment has none.
        """
        finished = self.end() if segment.speaker != self._speaker else []
        self._speaker = segment.speaker
        if segment.words is not None:
            return finished + [cue for chunk in self._chunks(segment.words) for cue in self._add_chunk(chunk)]
        if self.settings.needing_words is not None:
            raise InvalidRequest(
                f"{self.settings.needing_words} needs a transcript with the times of words, and this one has none; "
                "transcribe with timestamps='word'"
            )
        text = _without_arrow(self.escape(one_line(segment.text).strip()))
        finished += self.end()
        return [*finished, *([self._cue(milliseconds(segment.start), milliseconds(segment.end), text)] if text else [])]

    def end(self) -> list[Cue]:
        """Finishes the current cue and returns it, as several cues if words are highlighted."""
        pieces, self._pieces = self._pieces, []
        self._width, self._lines = 0, 1
        if not any(piece.text.strip() for piece in pieces):
            return []
        if self.settings.highlight_words:
            return list(self._highlighted(pieces))
        return [self._cue(pieces[0].start, pieces[-1].end, _text_of(pieces))]

    def _cue(self, start: int, end: int, text: str) -> Cue:
        """Returns a cue that begins where the last one ended, or later, and is shown for `LEAST` or longer."""
        start = max(start, self._shown)
        self._shown = max(end, start + LEAST)
        return Cue(start, self._shown, text, self._speaker)

    def _highlighted(self, pieces: Sequence[_CueWord]) -> Iterator[Cue]:
        """Yields a cue for each word, in which the word is underlined, and one for each gap between two words. A word
        begins earlier if the gap would be shorter than `LEAST`."""
        for at, piece in enumerate(pieces):
            gap, start = piece.start - self._shown if at else 0, piece.start
            if gap >= LEAST:
                yield self._cue(self._shown, start, _text_of(pieces))
            elif gap > 0:
                start = self._shown
            yield self._cue(start, piece.end, _text_of([*pieces[:at], piece.underlined, *pieces[at + 1 :]]))

    def _chunks(self, words: Sequence[Word]) -> Iterator[Sequence[Word]]:
        size = self.settings.max_words_per_line or max(1, len(words))
        return (words[start : start + size] for start in range(0, len(words), size))

    def _add_chunk(self, words: Sequence[Word]) -> Iterator[Cue]:
        for index, word in enumerate(words):
            yield from self._add_word(word, begins=index == 0 and not self.settings.runs_on)

    def _add_word(self, word: Word, *, begins: bool) -> list[Cue]:
        """Adds ``word``. Returns the cues that end before it. ``begins``: the word begins a new cue."""
        settings, text, finished = self.settings, one_line(word.text), []
        pause = settings.runs_on and self._last is not None and word.start - self._last > LONG_PAUSE
        self._last = word.start
        room = settings.max_line_width is None or self._width + len(text) <= settings.max_line_width
        separator = ""
        if self._width and room and not pause and not begins:
            self._width += len(text)
        elif not text.strip():
            return []  # a blank begins no line
        else:
            text = text.strip()
            full = settings.max_line_count is not None and (pause or self._lines >= settings.max_line_count)
            if self._pieces and (full or begins):
                finished = self.end()
            elif self._width:
                self._lines += 1
                separator = "\n"
            self._width = len(text)
        self._pieces.append(_CueWord(milliseconds(word.start), milliseconds(word.end), separator + self.escape(text)))
        return finished


def _text_of(pieces: Sequence[_CueWord]) -> str:
    return _without_arrow("".join(piece.text for piece in pieces))


def _without_arrow(text: str) -> str:
    return _ARROW.sub("->", text)
