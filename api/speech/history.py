"""The text before a window, as the model is given it."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field


@define
class History:
    """The tokens of the windows before, timestamps included, with the initial prompt in front.

    Args:
        initial: the tokens of the initial prompt.
        room: most tokens that are given on: the last ones.
        goes_on: false: no window's text is given on, and the initial prompt goes to the first window alone.
        reset_above: text sampled at a higher temperature is not given on, nor is the text before it.
    """

    initial: tuple[int, ...]
    room: int
    goes_on: bool
    reset_above: float
    _tokens: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tokens = list(self.initial)

    def last(self) -> tuple[int, ...]:
        """The tokens to give to the next window."""
        return tuple(self._tokens[max(len(self._tokens) - self.room, 0) :])

    def add(self, token_ids: Iterable[int], temperature: float) -> None:
        """A window's text was read, at that temperature."""
        if not self.goes_on or temperature > self.reset_above:
            self._tokens.clear()
        else:
            self._tokens = [*self.last(), *token_ids]

    def clear(self) -> None:
        """The text before has misled the model."""
        self._tokens.clear()
