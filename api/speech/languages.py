"""The language of a recording: named by the caller, or detected in its first windows, or in every window."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from attrs import define, field

from ...core.request import EncoderItem
from .reader import WindowReader


def certain(found: Sequence[Mapping[str, float]], threshold: float) -> Mapping[str, float] | None:
    """The probabilities of the last window, if they are certain."""
    last = found[-1]
    return last if max(last.values()) >= threshold else None


def mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean probabilities over windows."""
    return {code: sum(one[code] for one in found) / len(found) for code in found[0]}


@define(eq=False)
class Languages:
    """Decides the language once, or with ``multilingual`` for each window.

    Attributes:
        language: the code; with ``multilingual`` that of the first window; ``None`` before it is known.
        probabilities: of each language by code; ``None`` where nothing was detected.
    """

    reader: WindowReader
    language: str | None = field(init=False)
    probabilities: Mapping[str, float] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.language = self.reader.recipe.language

    @property
    def probability(self) -> float | None:
        """The probability of the language that was detected; ``None`` where none was."""
        return None if self.probabilities is None or self.language is None else self.probabilities[self.language]

    async def detect(self, next_item: Callable[[], Awaitable[EncoderItem | None]]) -> None:
        """Detects the language where it is not known, in up to ``language_detection_segments`` windows, until one is
        certain. ``next_item`` gives the windows; where it has none at all, the language stays unknown."""
        options = self.reader.recipe.options
        found: list[Mapping[str, float]] = []
        while self.language is None and len(found) < options.language_detection_segments:
            item = await next_item()
            if item is None:
                break
            found.append(await self.reader.languages(item))
            if (sure := certain(found, options.language_detection_threshold)) is not None:
                self._decide(sure)
        if self.language is None and found:
            self._decide(mean(found))

    def _decide(self, probabilities: Mapping[str, float]) -> None:
        self.probabilities = probabilities
        self.language = max(probabilities, key=probabilities.__getitem__)

    async def of(self, item: EncoderItem) -> str:
        """The language to read a window in."""
        recipe = self.reader.recipe
        if not recipe.options.multilingual or not recipe.tokens.language_ids:
            assert self.language is not None, "a window is read before the language is known"
            return self.language
        found = await self.reader.languages(item)
        return max(found, key=found.__getitem__)
