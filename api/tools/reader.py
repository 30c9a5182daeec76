"""Divides a text that is still being written into content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import define, field

from .calls import ArgumentsPiece, CallBegin, ContentPiece, ToolCall, ToolPart
from .scanner import NoCall, Scanner, Steps
from .syntax import Syntax, Tools


@define(eq=False)
class ToolReader:
    """Reads the text of one completion piece by piece.

    The content is the text without its calls, and, if there are any, without blanks around the whole. What looks like a
    call and is none is content: broken JSON, a tool that there is not. So a call is told when all of it is there. The
    joined parts depend on the text alone, never on how it was cut.
    """

    _syntax: Syntax
    _tools: Tools
    _scanner: Scanner = field(init=False, factory=Scanner)
    _start: int = field(init=False, default=0)  # of what is neither told nor passed over, in the scanner's text
    _blanks: str = field(init=False, default="")  # behind the content: told with what follows them
    _told: bool = field(init=False, default=False)  # there was content
    _calls: int = field(init=False, default=0)
    _candidate: Steps[list[ToolCall]] | None = field(init=False, default=None)  # reads from ``_start`` on

    def feed(self, text: str) -> tuple[ToolPart, ...]:
        """What the next piece of the text, ``text``, makes certain."""
        assert not self._scanner.ended, "the text has ended"
        self._scanner.text += text
        return self._read()

    def end(self) -> tuple[ToolPart, ...]:
        """What was held back; the text has ended."""
        self._scanner.ended = True
        return self._read()

    def _read(self) -> tuple[ToolPart, ...]:
        parts: list[ToolPart] = []
        while self._candidate is not None or self._begin(parts):
            if not self._go_on(parts):
                return _joined(parts)
        self._scanner.text, self._start = self._scanner.text[self._start :], 0
        if self._scanner.ended and self._blanks and not self._calls:
            parts.append(ContentPiece(self._blanks))
            self._blanks = ""
        return _joined(parts)

    def _begin(self, parts: list[ToolPart]) -> bool:
        """Tells the content up to where a call may begin. False: there is no such place yet."""
        scanner = self._scanner
        place = self._next()
        self._tell(scanner.text[self._start : place], parts)
        self._start = scanner.place = place
        if place < len(scanner.text):
            self._candidate = self._syntax.read(scanner, self._tools)
        return self._candidate is not None

    def _next(self) -> int:
        """The first place where a call may begin, as far as the text is there; else its end."""
        text, ended = self._scanner.text, self._scanner.ended
        if not self._told and self._syntax.opens:
            place = len(text) - len(text[self._start :].lstrip())
            if text.startswith(self._syntax.opens, place):
                return place
        return min(_first(text, begin, self._start, ended) for begin in self._syntax.begins)

    def _go_on(self, parts: list[ToolPart]) -> bool:
        """Reads on. False: more text is needed."""
        assert self._candidate is not None, "no call has begun"
        try:
            next(self._candidate)
        except NoCall:
            self._tell(self._scanner.text[self._start], parts)
            self._start += 1
        except StopIteration as done:
            self._start = self._scanner.place
            parts += self._parts(done.value)
        else:
            return False
        self._candidate = None
        return True

    def _tell(self, text: str, parts: list[ToolPart]) -> None:
        """Adds content. Blanks wait for what follows them, and are dropped before a text that begins with a call."""
        content = (self._blanks + text).rstrip()
        self._blanks = (self._blanks + text)[len(content) :]
        if not content:
            return
        parts.append(ContentPiece(content.lstrip() if self._calls and not self._told else content))
        self._told = True

    def _parts(self, calls: Iterable[ToolCall]) -> Iterator[ToolPart]:
        for call in calls:
            yield CallBegin(self._calls, call.name)
            yield ArgumentsPiece(self._calls, call.arguments)
            self._calls += 1


def _joined(parts: list[ToolPart]) -> tuple[ToolPart, ...]:
    """``parts``, with neighbouring pieces of content as one."""
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


def _first(text: str, begin: str, start: int, ended: bool) -> int:
    """Where ``begin``, or at the end of the text a beginning of it, first stands from ``start`` on; else the end."""
    found = text.find(begin, start)
    if found >= 0:
        return found
    longest = 0 if ended else min(len(text) - start, len(begin) - 1)
    return len(text) - next((length for length in range(longest, 0, -1) if text.endswith(begin[:length])), 0)
