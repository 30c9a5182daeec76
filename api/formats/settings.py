"""`SubtitleSettings`: how subtitles are broken into lines."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import fields, frozen

from ...core.checks import checked, flag, integer, settle

_MOST = 100_000


@frozen(kw_only=True)
class SubtitleSettings:
    """The settings by which subtitles (SRT, WebVTT) are broken into lines, as openai/whisper's writers break them.

    Every setting needs words with their times. Without any setting a segment is a subtitle of one line.

    Args:
        max_line_width: the most characters of a line. A longer word has a line of its own.
        max_line_count: the most lines of a subtitle, if ``max_line_width`` is given. Subtitles then run on over the
            ends of segments, and a pause of more than 3 s begins a new one.
        max_words_per_line: the most words of a subtitle, which then has one line.
        highlight_words: make a subtitle for each word, in which the word is underlined.

    Raises:
        InvalidRequest: a value that is not allowed.
    """

    max_line_width: int | None = checked(None, integer(1, _MOST).or_none("as long as the text is"))
    max_line_count: int | None = checked(None, integer(1, _MOST).or_none("as many as the width needs"))
    max_words_per_line: int | None = checked(None, integer(1, _MOST).or_none("as many as fit"))
    highlight_words: bool = checked(False, flag())

    def __attrs_post_init__(self) -> None:
        settle(self)

    @property
    def needing_words(self) -> str | None:
        """The name of the first setting that needs words; ``None`` if none does."""
        given = (one.name for one in fields(type(self)) if getattr(self, one.name) not in (None, False))
        return next(given, None)

    @property
    def runs_on(self) -> bool:
        """True if subtitles run on over the ends of segments."""
        return self.max_line_width is not None and self.max_line_count is not None

    def without_effect(self) -> Iterator[str]:
        """Yields a sentence for each setting that has no effect beside the others."""
        if self.max_line_count is not None and self.max_line_width is None:
            yield "max_line_count has no effect without max_line_width"
        if self.max_words_per_line is not None and self.runs_on:
            yield "max_words_per_line has no effect with max_line_width and max_line_count"
