"""Stop strings: finds the end of a text while the text is written, however it is cut into pieces."""

from __future__ import annotations

from attrs import define, field


@define(eq=False)
class StopStrings:
    """Passes on the part of a text that is certain, and ends the text before the first of ``stops``.

    The first stop string is the one that begins first in the whole text. Text that may be the beginning of a stop
    string is held back until more text decides. A complete stop string is held back, too, while a longer one that began
    before it may still be completed. The output depends on the text alone, never on how it was cut.

    Args:
        stops: the stop strings, none of them empty. Without stop strings all text is passed on at once.
    """

    stops: tuple[str, ...]
    stopped: bool = field(default=False, init=False)
    """True if a stop string was found: no more text is passed on."""
    _held: str = field(default="", init=False)

    def feed(self, text: str) -> str:
        """Adds the next piece, ``text``, and returns the text that is certain now."""
        if self.stopped:
            return ""
        held = self._held + text
        found, begun = self._found(held), self._begun(held)
        self.stopped = found <= begun and found < len(held)
        keep = min(found, begun)
        self._held = "" if self.stopped else held[keep:]
        return held[:keep]

    def rest(self) -> str:
        """Ends the whole text, and returns the text that was held back, up to a stop string in it."""
        held, self._held = self._held, ""
        found = self._found(held)
        self.stopped = self.stopped or found < len(held)
        return held[:found]

    def _found(self, text: str) -> int:
        """The place of the first complete stop string, or else the end of ``text``."""
        places = (text.find(stop) for stop in self.stops)
        return min((place for place in places if place >= 0), default=len(text))

    def _begun(self, text: str) -> int:
        """The place from which on text must be held back, since the rest of ``text`` may become a stop string; the end
        of ``text`` if nothing must be.
        """
        return len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``stop``, but not all of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
