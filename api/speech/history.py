"""The text before a window, in the form in which the model gets it."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field


@define
class History:
    """The tokens of the hotwords, the initial prompt and the earlier windows, timestamps included.

    Args:
        always: the tokens that every window gets, before all others.
        initial: the tokens of the initial prompt, if only the first windows get it.
        room: the most tokens of the text that the next window gets; the last ones are kept.
        goes_on: ``False``: no window gets the text of earlier windows, and only the first window gets the initial
            prompt.
        reset_above: text that was sampled at a higher temperature is dropped, with all text before it.
    """

    always: tuple[int, ...]
    initial: tuple[int, ...]
    room: int
    goes_on: bool
    reset_above: float
    _tokens: list[int] = field(init=False)
    _language: str | None = field(default=None, init=False)  # of the text; None: it is not known

    def __attrs_post_init__(self) -> None:
        self._tokens = list(self.initial)

    def last(self, taken: int = 0, language: str | None = None) -> tuple[int, ...]:
        """Returns the tokens that the next window gets, in which ``language`` is spoken. Text in another language is
        left out, since the model would go on in that language. ``taken`` positions of the room are taken by other
        tokens."""
        return (*self.always, *self._last(0 if self._is_foreign(language) else max(self.room - taken, 0)))

    def add(self, token_ids: Iterable[int], temperature: float, language: str | None = None) -> None:
        """Adds the text of a window, which was sampled at ``temperature`` and is in ``language``. Earlier text in
        another language is dropped first. If the history does not go on, or if ``temperature`` is above
        ``reset_above``, nothing is added, and all text is dropped."""
        if self._is_foreign(language):
            self._tokens.clear()
        self._language = language or self._language
        if not self.goes_on or temperature > self.reset_above:
            self._tokens.clear()
        else:
            self._tokens = [*self._last(self.room), *token_ids]

    def clear(self) -> None:
        """Drops all text, since it has misled the model."""
        self._tokens.clear()

    def _is_foreign(self, language: str | None) -> bool:
        return None not in (language, self._language) and language != self._language

    def _last(self, most: int) -> list[int]:
        return self._tokens[max(len(self._tokens) - most, 0) :]
