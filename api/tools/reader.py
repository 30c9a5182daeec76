"""Divides a text that is still being written into content and tool calls."""

from __future__ import annotations

from attrs import define, field

from ...core.errors import InvalidRequest
from .calls import ArgumentsPiece, CallBegin, ContentPiece, ToolPart
from .scanner import NoCall, Scanner
from .syntax import Calls, Syntax, Tools


@define(eq=False)
class ToolReader:
    """Reads the text of one completion piece by piece.

    The content is the text without its calls, and, if there are any, without blanks around the whole. Text that
    looks like a call and is not one is content: broken JSON, an unknown tool. So a call is given when it is whole. The
    joined parts depend on the text alone, never on how it was cut.
    """

    _syntax: Syntax
    _tools: Tools
    _scanner: Scanner = field(init=False, factory=Scanner)
    _start: int = field(init=False, default=0)  # of the text that is neither given nor passed over, in the scanner's
    _blanks: list[str] = field(init=False, factory=list)  # after the content: given with what follows them
    _has_content: bool = field(init=False, default=False)  # there was content
    _calls: int = field(init=False, default=0)
    _candidate: Calls | None = field(init=False, default=None)  # what may be calls, from ``_begun`` on
    _begun: int = field(init=False, default=0)

    def feed(self, text: str) -> tuple[ToolPart, ...]:
        """The parts that the next piece of the text, ``text``, makes certain.

        Raises:
            InvalidRequest: the text has ended.
        """
        if self._scanner.ended:
            raise InvalidRequest(f"a piece of {len(text)} characters after the end; each text has a reader of its own")
        self._scanner.text += text
        return self._read()

    def end(self) -> tuple[ToolPart, ...]:
        """The parts that were held back; the text has ended."""
        self._scanner.ended = True
        return self._read()

    def _read(self) -> tuple[ToolPart, ...]:
        parts: list[ToolPart] = []
        while self._candidate is not None or self._begin(parts):
            if not self._go_on(parts):
                return _joined(parts)
        self._scanner.text, self._start = self._scanner.text[self._start :], 0
        if self._scanner.ended and not self._calls:
            parts += map(ContentPiece, self._blanks)
            self._blanks = []
        return _joined(parts)

    def _begin(self, parts: list[ToolPart]) -> bool:
        """Adds the content before the place where a call may begin. False: there is no such place yet."""
        scanner = self._scanner
        place = self._next()
        self._add(scanner.text[self._start : place], parts)
        self._start = self._begun = scanner.place = place
        if place < len(scanner.text):
            self._candidate = self._syntax.read(scanner, self._tools)
        return self._candidate is not None

    def _next(self) -> int:
        """The first place where a call may begin, as far as the text is there; else its end."""
        text, ended = self._scanner.text, self._scanner.ended
        if not self._has_content and self._syntax.opens:
            place = len(text) - len(text[self._start :].lstrip())
            if text.startswith(self._syntax.opens, place):
                return place
        return self._syntax.first(text, self._start, ended=ended)

    def _go_on(self, parts: list[ToolPart]) -> bool:
        """Reads on. False: more text is needed."""
        assert self._candidate is not None, "no call has begun"
        try:
            call = next(self._candidate)
        except StopIteration:
            self._candidate, self._start = None, self._scanner.place
        except NoCall:
            self._candidate = None
            if self._start == self._begun:  # without a call: the next one may begin after its first character
                self._add(self._scanner.text[self._start], parts)
                self._start += 1
        else:
            if call is None:
                return False
            self._start = self._scanner.place
            parts += (CallBegin(self._calls, call.name), ArgumentsPiece(self._calls, call.arguments))
            self._calls += 1
        return True

    def _add(self, text: str, parts: list[ToolPart]) -> None:
        """Adds content. Blanks wait for what follows them; after calls that begin the text they are dropped."""
        content = text.rstrip()
        if content:
            first = self._calls and not self._has_content
            parts += map(ContentPiece, (content.lstrip(),) if first else (*self._blanks, content))
            self._blanks, self._has_content = [], True
        if len(content) < len(text):
            self._blanks.append(text[len(content) :])


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
