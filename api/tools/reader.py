"""Divides a text that is still being written into content and tool calls."""

from __future__ import annotations

from itertools import islice

from attrs import define, field

from ...core.errors import InvalidRequest
from .calls import ArgumentsPiece, CallBegin, ContentPiece, ToolPart
from .scanner import More, NoCall, Scanner
from .syntax import Syntax, Tools

_LONG = 2_000  # characters: what may be a call is read anew for each piece, and from here on only for some
_ENDS = frozenset("}]>")  # the last character of a call, or the one before what shows that it is the last


@define(eq=False)
class ToolReader:
    """Reads the text of one completion piece by piece.

    The content is the text without its calls; if there are calls, blanks at both ends of the content are removed, too.
    Text that only looks like a call (broken JSON, an unknown tool) is content, so a call is returned only when it is
    complete. The joined parts depend only on the text, never on how it was cut.
    """

    _syntax: Syntax
    _tools: Tools
    _scanner: Scanner = field(init=False, factory=Scanner)
    _start: int = field(init=False, default=0)  # of the text that is neither returned nor skipped
    _blanks: list[str] = field(init=False, factory=list)  # after the content: returned with the next content
    _has_content: bool = field(init=False, default=False)  # content was returned
    _calls: int = field(init=False, default=0)
    _begun: int | None = field(init=False, default=None)  # where what may be calls begins
    _found: int = field(init=False, default=0)  # of these calls: those that were returned

    def feed(self, text: str) -> tuple[ToolPart, ...]:
        """Adds the next piece, ``text``, and returns the parts that are certain now.

        Raises:
            InvalidRequest: the text has ended.
        """
        if self._scanner.ended:
            raise InvalidRequest(
                f"a piece of {len(text)} characters came after the end of the text; make a new reader for each text"
            )
        self._scanner.text += text
        is_long = self._begun is not None and len(self._scanner.text) - self._start > _LONG
        if is_long and _ENDS.isdisjoint(self._scanner.text[-len(text) - 1 :]):
            return ()
        return self._read()

    def end(self) -> tuple[ToolPart, ...]:
        """Ends the text, and returns the parts that were held back."""
        self._scanner.ended = True
        return self._read()

    def _read(self) -> tuple[ToolPart, ...]:
        parts: list[ToolPart] = []
        while self._begun is not None or self._begin(parts):
            if not self._go_on(parts):
                return _joined(parts)
        self._scanner.text, self._start = self._scanner.text[self._start :], 0
        if self._scanner.ended and not self._calls:
            parts += map(ContentPiece, self._blanks)
            self._blanks = []
        return _joined(parts)

    def _begin(self, parts: list[ToolPart]) -> bool:
        """Adds the content before the next place where a call may begin. Returns false if there is no such place
        yet."""
        text, place = self._scanner.text, self._next()
        self._add(text[self._start : place], parts)
        self._start = place
        if place == len(text):
            return False
        self._begun, self._found = place, 0
        return True

    def _next(self) -> int:
        """The first place in the text so far where a call may begin, or else the end of the text."""
        text, ended = self._scanner.text, self._scanner.ended
        if not self._has_content and self._syntax.opens:
            place = len(text) - len(text[self._start :].lstrip())
            if text.startswith(self._syntax.opens, place):
                return place
        return self._syntax.first(text, self._start, ended=ended)

    def _go_on(self, parts: list[ToolPart]) -> bool:
        """Reads what may be calls. Returns false if more text is needed."""
        assert self._begun is not None, "no call has begun"
        scanner = self._scanner
        scanner.place = self._begun
        try:
            for call in islice(self._syntax.read(scanner, self._tools), self._found, None):
                self._start, self._found = scanner.place, self._found + 1
                parts += (CallBegin(self._calls, call.name), ArgumentsPiece(self._calls, call.arguments))
                self._calls += 1
        except More:
            return False
        except NoCall:
            if not self._found:  # the next call may begin one character later
                self._add(scanner.text[self._start], parts)
                self._start += 1
        else:
            self._start = scanner.place
        self._begun = None
        return True

    def _add(self, text: str, parts: list[ToolPart]) -> None:
        """Adds content. Blanks are held back until more content follows. Those between calls at the beginning of the
        text and the content are dropped.
        """
        content = text.rstrip()
        if content:
            first = self._calls and not self._has_content
            parts += map(ContentPiece, (content.lstrip(),) if first else (*self._blanks, content))
            self._blanks, self._has_content = [], True
        if len(content) < len(text):
            self._blanks.append(text[len(content) :])


def _joined(parts: list[ToolPart]) -> tuple[ToolPart, ...]:
    """``parts``, with neighbouring pieces of content joined."""
    found: list[ToolPart] = []
    texts: list[str] = []
    for part in (*parts, None):
        if isinstance(part, ContentPiece):
            texts.append(part.text)
            continue
        if texts:
            found.append(ContentPiece("".join(texts)))
            texts = []
        if part is not None:
            found.append(part)
    return tuple(found)
