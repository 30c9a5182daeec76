"""Reasoning: what a model writes before its answer, between the marks of its chat template.

One rule, `Split`, divides the text of tokens as they come. Callers get the parts. The sampler follows the rule with a
`Track` of each sequence: it spends the budget, and holds the structure from the answer on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Self

from attrs import define, evolve, frozen

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

    ``stage`` is that of the prompt's end, since templates may write the opening mark themselves. ``spelled`` has the
    special tokens of the marks, which have no text otherwise. Behind ``budget`` tokens of reasoning come
    ``closing_ids``. Each of ``pauses`` is a line break of the reasoning: a model with headers writes several messages.
    ``around`` are marks around the answer. A line that begins with ``call`` ends reasoning that was not closed, and is
    the answer's. ``structured``: the answer follows a structure, which begins right behind the closing mark.
    """

    opening: str
    closing: str
    stage: Stage = Stage.UNDECIDED
    opening_ids: tuple[int, ...] = ()
    closing_ids: tuple[int, ...] = ()
    spelled: tuple[tuple[int, str], ...] = ()
    budget: int | None = None
    pauses: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")
    call: str = ""
    structured: bool = False

    @property
    def before(self) -> str:
        """The mark before the answer; empty: there is none."""
        return "" if self.structured else self.around[0]

    @property
    def behind(self) -> str:
        """The mark behind the answer; empty: there is none."""
        return "" if self.structured else self.around[1]

    def certain(self, text: str) -> str:
        """Returns what of ``text`` is reasoning, whatever follows: all but line breaks and half a mark at its end."""
        ends = (self.closing, *self.pauses, *([f"\n{self.call}"] if self.call else []))
        return min((without_half(text, mark) for mark in ends), key=len).rstrip("\n")

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
    def is_spent(self) -> bool:
        """True if the budget is spent. The closing mark is written next, perhaps behind half a mark."""
        return self.thinks and self.reasoning.budget is not None and self.spent >= self.reasoning.budget

    @property
    def forced(self) -> int | None:
        """The token that must come next, since the budget is spent; ``None``: any may come."""
        over = self.spent - (self.reasoning.budget or 0)
        closing = self.reasoning.closing_ids
        return closing[over] if self.is_spent and over < len(closing) else None

    def spelling(self, token: int) -> str | None:
        """Returns the mark that the special ``token`` is, or is a part of; ``None``: it has the text that it has."""
        mark = dict(self.reasoning.spelled).get(token)
        return mark if mark is None or self.answer is None or mark in self.reasoning.before else None

    def add(self, text: str) -> tuple[Split, str, str]:
        """Adds the text of a token. Returns what of all texts is certain now: of the reasoning, and of the answer."""
        marks, opening = self.reasoning, self.reasoning.opening
        stage, held, thought, told, read, begun = self.stage, self.held + text, "", "", self.read + 1, self.answer
        if stage is Stage.UNDECIDED:
            stage, held = self._begun(held)
            begun = 0 if stage is Stage.ANSWERS else None
        if stage is Stage.OPENED:
            held = held.lstrip("\n")
            while held.startswith(opening):  # models repeat what the prompt has
                held = held[len(opening) :].lstrip("\n")
            stage = stage if opening.startswith(held) else Stage.REASONS
        if stage is Stage.REASONS:
            stage, thought, held = self._closed(held)
            begun = self.read if stage is Stage.ANSWERS else begun
        if stage is Stage.CLOSED:
            stage, held = self._answered(held)
            if begun is None or (text and stage is Stage.CLOSED and not held and not marks.structured):
                begun = read
        if stage is Stage.ANSWERS:
            told = self._certain_answer(held)
            held = held[len(told) :]
        return Split(marks, stage, held, read, self.spent + self.thinks, begun), thought, told

    def _begun(self, held: str) -> tuple[Stage, str]:
        bare, firsts = held.lstrip(_BLANKS), {self.reasoning.before: Stage.CLOSED, self.reasoning.opening: Stage.OPENED}
        for mark, stage in firsts.items():
            if mark and bare.startswith(mark):
                return stage, bare[len(mark) :]
        return (Stage.UNDECIDED if any(mark.startswith(bare) for mark in firsts) else Stage.ANSWERS), held

    def _closed(self, held: str) -> tuple[Stage, str, str]:
        """Returns the stage behind ``held``, which begins in the reasoning; what of it is certain; and what follows."""
        marks, closing = self.reasoning, self.reasoning.closing
        before, mark, behind = held.partition(closing)
        for pause in marks.pauses:
            before = before.replace(pause, "\n")
        own, line, called = (
            before.partition(f"\n{marks.call}") if marks.call and not self.is_spent else (before, "", "")
        )
        if line:
            return Stage.ANSWERS, own.rstrip("\n"), line[1:] + called + mark + behind
        if mark:
            thought = (without_half(before, closing) if self.is_spent else before).rstrip("\n")
            return Stage.CLOSED, thought, behind
        thought = "" if self.is_spent else marks.certain(before)
        return Stage.REASONS, thought, before[len(thought) :]

    def _answered(self, held: str) -> tuple[Stage, str]:
        """Returns the stage behind ``held``, which comes behind a mark, and what of it is the answer's."""
        mark = self.reasoning.before
        if self.reasoning.structured and self.stage is Stage.CLOSED:
            return (Stage.ANSWERS if held else Stage.CLOSED), held
        held = held.lstrip("\n")
        while mark and held.startswith(mark):
            held = held[len(mark) :].lstrip("\n")
        return (Stage.CLOSED if mark.startswith(held) else Stage.ANSWERS), held

    def _certain_answer(self, held: str) -> str:
        mark, bare = self.reasoning.behind, held.rstrip(_BLANKS)
        if not mark:
            return held
        return (bare[: -len(mark)] if bare.endswith(mark) else without_half(held, mark)).rstrip("\n")

    def rest(self) -> tuple[str, str]:
        """Returns the reasoning and the answer in the text that is held at the end of all, without half a mark that
        reasoning ends in."""
        if not self.thinks:
            is_mark = bool(self.reasoning.behind) and self.held.strip(_BLANKS) == self.reasoning.behind
            return "", "" if is_mark else self.held
        if self.stage is Stage.OPENED:  # held is the beginning of another opening mark
            return "", ""
        thought, closing = self.reasoning.certain(self.held), self.reasoning.closing
        thought = without_half(thought, closing) if self.is_spent else thought
        return (self.held if thought == self.held.rstrip("\n") else thought.rstrip("\n")), ""


def without_half(text: str, mark: str) -> str:
    """Returns ``text`` without the part of ``mark`` that it ends in."""
    return text[: len(text) - overlap(text, mark)]


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``mark``, but not all of ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)


@define(eq=False)
class Track:
    """Finds the place of one sequence among its marks. Each call names all tokens sampled so far: more than the call
    before, but for draft tokens, which may be taken back. Texts are compared byte by byte."""

    _tokens: TokenBytes
    _sure: Split  # behind the tokens that stay, at most up to the beginning of the answer

    @classmethod
    def of(cls, reasoning: Reasoning, tokens: TokenBytes) -> Self:
        """Returns the track of a sequence without tokens."""
        texts: dict[str, Any] = {name: _as_bytes(getattr(reasoning, name)) for name in ("opening", "closing", "call")}
        texts |= {name: tuple(map(_as_bytes, getattr(reasoning, name))) for name in ("pauses", "around")}
        marks = evolve(reasoning, **texts)
        return cls(tokens, Split(marks, marks.stage))

    def at(self, generated: Sequence[int], drafted: int = 0) -> Split:
        """Returns the split behind ``generated``, the tokens after the prompt, or where its answer begins. The last
        ``drafted`` tokens are drafts."""
        place, stay = self._sure, len(generated) - drafted
        assert place.read <= stay, f"{stay} tokens stay of {place.read}"
        while place.read < len(generated) and place.answer is None:
            token, before = generated[place.read], generated[place.read - 1] if place.read else None
            mark = dict(place.reasoning.spelled).get(token)
            text = self._tokens.of(token, before) if mark is None else mark.encode()
            place = place.add(text.decode("latin-1"))[0]
            self._sure = place if place.read <= stay else self._sure
        return place

    def straddling(self, place: Split) -> list[int]:
        """Returns the tokens whose text would complete the closing mark at ``place`` and begin the answer, too."""
        closing, found = place.reasoning.closing, list[int]()
        for token, text in self._tokens.beyond(closing):
            _, mark, behind = (place.held + text).partition(closing)
            if mark and behind.strip("\n"):
                found.append(token)
        return found


def _as_bytes(text: str) -> str:
    return text.encode().decode("latin-1")
