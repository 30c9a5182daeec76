"""Divides a text that is still being written into content and tool calls."""

from __future__ import annotations

from attrs import define, field

from ...core.errors import InvalidRequest
from .syntax import ArgumentsPiece, CallBegin, CallReading, ContentPiece, Syntax, ToolPart, Tools
from .text import More, NoCall, Pattern, Text

_LONG = 2_000  # characters: what may be a call is read anew for each piece, and from here on when it has grown
_GROWTH = 64  # by one part in 64: all readings together take time in proportion to the text


@define(eq=False)
class ToolReader:
    """Reads the text of one completion piece by piece.

    The content is the text without its calls; if there are calls, blanks at both ends of the content are removed, too.
    Text that only looks like a call (broken JSON, an unknown tool) is content, so a call is returned only when it is
    complete. The joined parts depend only on the text, never on how it was cut.

    Attributes:
        calls: how many calls were read.
        unread: how many marks with which calls begin are in the content, since no call could be read behind them.
    """

    _syntax: Syntax
    _tools: Tools
    _text: Text = field(init=False, factory=Text)  # what may be a call
    _after: tuple[Pattern, ...] = field(init=False, default=())  # behind a call: what may follow it
    _blanks: list[str] = field(init=False, factory=list)  # after the content: returned with the next content
    _has_content: bool = field(init=False, default=False)  # content was returned
    calls: int = field(init=False, default=0)
    _looked_at: int = field(init=False, default=0)  # characters of what may be a call, when it was read last
    unread: int = field(init=False, default=0)

    def feed(self, text: str) -> tuple[ToolPart, ...]:
        """Adds the next piece, ``text``, and returns the parts that are certain now.

        Raises:
            InvalidRequest: the text has ended.
        """
        if self._text.ended:
            raise InvalidRequest(
                f"a piece of {len(text)} characters came after the end of the text; make a new reader for each text"
            )
        self._text.text += text
        length = len(self._text.text)
        if length > _LONG and length - self._looked_at <= self._looked_at // _GROWTH:
            return ()
        return self._read()

    def end(self) -> tuple[ToolPart, ...]:
        """Ends the text, and returns the parts that were held back."""
        self._text.ended = True
        return self._read()

    def _read(self) -> tuple[ToolPart, ...]:
        parts: list[ToolPart] = []
        start = place = 0  # of the text that is neither returned nor skipped; of what may be a call in it
        text = self._text.text
        while place < len(text):
            try:
                if self._after:
                    reading = self._go_on(place)
                else:
                    found = self._syntax.find(self._text, place, bare=place == start and not self._has_content)
                    place = len(text) if found is None else found.start()
                    reading = self._syntax.read(self._text, self._text.whole(found), self._tools)
            except More:
                break
            except NoCall:  # the next call may begin one character later
                place, self._after = min(place + (not self._after), len(text)), ()
                continue
            if reading.calls:
                self._add(text[start:place], parts)
            for call in reading.calls:
                parts += (CallBegin(self.calls, call.name), ArgumentsPiece(self.calls, call.arguments))
                self.calls += 1
            start, place, self._after = reading.end, reading.end, reading.after
        self._add(text[start:place], parts, is_all=self._text.ended and not self.calls)
        self._text.text, self._looked_at = text[place:], len(text) - place
        return tuple(parts)

    def _go_on(self, place: int) -> CallReading:
        """Reads what follows a call: the next one, or the markers at the end."""
        for pattern in self._after:
            try:
                found = self._text.match(pattern, place)
                is_end = found.lastgroup == "end"
                return CallReading((), found.end()) if is_end else self._syntax.read(self._text, found, self._tools)
            except NoCall:
                continue
        raise NoCall

    def _add(self, text: str, parts: list[ToolPart], *, is_all: bool = False) -> None:
        """Adds content. Blanks are held back until more content follows, or there are no calls at all. Those between
        calls at the beginning of the text and the content are dropped.
        """
        self.unread += sum(map(text.count, self._syntax.markers[:1]))
        content = text if is_all else text.rstrip()
        if content or is_all:
            first = self.calls and not self._has_content
            whole = content.lstrip() if first else "".join((*self._blanks, content))
            parts += (ContentPiece(whole),) if whole else ()
            self._blanks, self._has_content = [], True
        if len(content) < len(text):
            self._blanks.append(text[len(content) :])
