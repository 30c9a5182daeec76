"""Reasoning: what a model writes before its answer, between the marks of its chat template.

One rule, `Split`, divides the text of tokens as they come. Callers get the parts. The sampler follows the rule with a
`Track` of each sequence: it spends the budget, and holds the structure from the answer on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from .detokenizer import TokenBytes

_BLANKS = " \t\r\n"


class Stage(enum.Enum):
    """The place of a text's end among its marks. Line breaks beside a mark belong to it, as in templates."""

    UNDECIDED = "undecided"  # there are only blanks, or the beginning of the opening mark
    OPENED = "opened"  # right behind the opening mark
    REASONS = "reasons"
    CLOSED = "closed"  # right behind the closing mark
    ANSWERS = "answers"


@frozen
class Reasoning:
    """The marks of a request's reasoning, and its budget.

    ``stage`` is that of the prompt's end, since templates may write the opening mark themselves. ``direct`` is what
    begins an answer without reasoning, if the model marks that, too. ``spelled`` has the special tokens of the marks,
    which have no text otherwise. Behind ``budget`` tokens of reasoning come ``closing_ids``.
    """

    opening: str
    closing: str
    direct: str = ""
    stage: Stage = Stage.UNDECIDED
    opening_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()
    spelled: tuple[tuple[int, str], ...] = ()
    budget: int | None = None

    def opens(self, generated: Sequence[int]) -> int | None:
        """Returns the next token of the opening mark, if ``generated`` is nothing but a part of the mark."""
        mark, length = self.opening_ids, len(generated)
        return mark[length] if length < len(mark) and mark[:length] == tuple(generated) else None


@frozen
class Split:
    """The texts of tokens so far, as far as they decide what the next ones are. ``held`` may become a mark. Of the
    ``read`` tokens, ``spent`` are those of reasoning, and ``answer`` those before the answer; ``None``: it has not
    begun, or is not decided yet."""

    reasoning: Reasoning
    stage: Stage
    held: str = ""
    read: int = 0
    spent: int = 0
    answer: int | None = None

    @property
    def thinks(self) -> bool:
        """True if the next token is one of reasoning, or of the closing mark."""
        return self.stage in (Stage.OPENED, Stage.REASONS)

    @property
    def before(self) -> int:
        """The number of tokens that are known to come before the answer."""
        return self.answer if self.answer is not None else self.read * self.thinks

    @property
    def forced(self) -> int | None:
        """The token that must come next, since the budget is spent; ``None``: any may come."""
        budget, closing = self.reasoning.budget, self.reasoning.closing_ids
        is_spent = budget is not None and self.thinks and 0 <= self.spent - budget < len(closing)
        return closing[self.spent - budget] if budget is not None and is_spent else None

    def add(self, text: str) -> tuple[Split, str, str]:
        """Adds the text of a token. Returns what of all texts is certain now: of the reasoning, and of the answer."""
        opening, closing = self.reasoning.opening, self.reasoning.closing
        stage, held, thought, read = self.stage, self.held + text, "", self.read + 1
        if stage is Stage.UNDECIDED:
            stage, held = self._begun(held)
        answer = 0 if stage is Stage.ANSWERS else read
        if stage is Stage.OPENED:
            held = held.lstrip("\n")
            while held.startswith(opening):  # models repeat what the prompt has
                held = held[len(opening) :].lstrip("\n")
            stage = stage if opening.startswith(held) else Stage.REASONS
        if stage is Stage.REASONS:
            before, mark, behind = held.partition(closing)
            thought = (before if mark else held[: len(held) - overlap(held, closing)]).rstrip("\n")
            stage, held = (Stage.CLOSED, behind) if mark else (stage, held[len(thought) :])
        if stage is Stage.CLOSED:
            held = held.lstrip("\n")
            stage = Stage.ANSWERS if held else stage
        told, held = (held, "") if stage is Stage.ANSWERS else ("", held)
        begun = self.answer if self.answer is not None else answer if stage in (Stage.CLOSED, Stage.ANSWERS) else None
        return Split(self.reasoning, stage, held, read, self.spent + self.thinks, begun), thought, told

    def _begun(self, held: str) -> tuple[Stage, str]:
        bare, direct = held.lstrip(_BLANKS), self.reasoning.direct
        for mark, stage in ((self.reasoning.opening, Stage.OPENED), (direct, Stage.CLOSED)):
            if mark and bare.startswith(mark):
                return stage, bare[len(mark) :]
        begins = self.reasoning.opening.startswith(bare) or (direct and direct.startswith(bare))
        return (Stage.UNDECIDED if begins else Stage.ANSWERS), held

    def rest(self) -> tuple[str, str]:
        """Returns the reasoning and the answer in the text that is held at the end of all."""
        return (self.held, "") if self.thinks else ("", self.held)


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``mark``, but not all of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)


@define(eq=False)
class Track:
    """Finds the place of one sequence among its marks. Each call names all tokens sampled so far, whatever earlier
    calls named: draft tokens may be taken back, and beams share a track. Texts are compared byte by byte."""

    reasoning: Reasoning
    _tokens: TokenBytes
    _read: list[int] = field(init=False, factory=list)  # not beyond the beginning of the answer
    _splits: list[Split] = field(init=False)  # before the first token, and behind each that was read

    def __attrs_post_init__(self) -> None:
        names = ("opening", "closing", "direct")
        marks = {name: getattr(self.reasoning, name).encode().decode("latin-1") for name in names}
        self._splits = [Split(evolve(self.reasoning, **marks), self.reasoning.stage)]

    def at(self, generated: Sequence[int]) -> Split:
        """Returns the split behind ``generated``, the tokens after the prompt, or where its answer begins."""
        same = min(len(self._read), len(generated))
        if self._read[:same] != list(generated[:same]):
            same = next(place for place in range(same) if self._read[place] != generated[place])
        del self._read[same:], self._splits[same + 1 :]
        while len(self._read) < len(generated) and self._splits[-1].answer is None:
            token, before = generated[len(self._read)], self._read[-1] if self._read else None
            mark = dict(self.reasoning.spelled).get(token)
            text = self._tokens.of(token, before) if mark is None else mark.encode()
            self._read.append(token)
            self._splits.append(self._splits[-1].add(text.decode("latin-1"))[0])
        return self._splits[-1]
