"""Stop strings: the end of a text found while it is written, whatever pieces it comes in."""

from __future__ import annotations

from attrs import define, field


@define(eq=False)
class StopStrings:
    """Gives on what is certain of a text, and ends it before the first of ``stops``.

    First is the one that begins first in the whole text; of two that begin at one place either gives the same text.
    What may be the beginning of a stop string is held back until the text that follows tells; so may a stop string
    that is complete, while a longer one that began before it may still become so. What comes out depends on the text
    alone, never on how it was cut.

    Args:
        stops: the strings, none of them empty. Without any, everything is given on at once.
    """

    stops: tuple[str, ...]
    stopped: bool = field(default=False, init=False)
    """A stop string was found: nothing more will be given on."""
    _held: str = field(default="", init=False)

    def feed(self, text: str) -> str:
        """What is now certain, ``text`` being the next piece."""
        if self.stopped:
            return ""
        held = self._held + text
        found, begun = self._found(held), self._begun(held)
        self.stopped = found <= begun and found < len(held)
        keep = min(found, begun)
        self._held = "" if self.stopped else held[keep:]
        return held[:keep]

    def rest(self) -> str:
        """What was held back, up to a stop string in it; the text has ended."""
        held, self._held = self._held, ""
        found = self._found(held)
        self.stopped = self.stopped or found < len(held)
        return held[:found]

    def _found(self, text: str) -> int:
        """Where the first complete stop string begins, else the text's end."""
        places = (text.find(stop) for stop in self.stops)
        return min((place for place in places if place >= 0), default=len(text))

    def _begun(self, text: str) -> int:
        """Where the longest end of ``text`` begins that a stop string may yet grow from, else the text's end."""
        return len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of ``text`` that is a beginning of ``stop``, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
