"""Reasoning, pure: where it ends in any text, however the text comes, and how its budget is spent."""

from __future__ import annotations

import re
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from triolet.core.reasoning import Reasoning, Split, Stage, Track

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("Here is my thought process:", "Here is my response:"),
    ("aab", "aa\naab"),  # each begins within itself and within the other
    ("«»", "»«"),
)


OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"around": ("<response>", "</response>")},
    {"call": "<tool_call>"},
    {"around": ("<|final|>", ""), "pauses": ("<|end|><|again|>", "<|end|><|aside|>")},
    {"around": ("ab", "ba")},  # each may begin within the marks
    {"pauses": ("aabb",)},
    {"call": "aba"},
)


@st.composite
def reasonings(draw: st.DrawFn) -> Reasoning:
    opening, closing = draw(st.sampled_from(MARKS))
    stage = draw(st.sampled_from([Stage.UNDECIDED, Stage.OPENED, Stage.REASONS]))
    return Reasoning(opening=opening, closing=closing, stage=stage, **draw(st.sampled_from(OTHERS)))


@st.composite
def texts(draw: st.DrawFn, reasoning: Reasoning) -> str:
    """Marks, parts of marks, blanks and other texts, in any order."""
    others = (*reasoning.around, *reasoning.pauses, reasoning.call)
    marks = [reasoning.opening, reasoning.closing, *filter(None, others)]
    parts = st.one_of(
        st.sampled_from([*marks, "\n", "\n\n", " ", "a", "so", "ü", "<", "\N{NO-BREAK SPACE}"]),
        st.sampled_from(marks).flatmap(lambda mark: st.integers(1, len(mark)).map(lambda end: mark[:end])),
    )
    return "".join(draw(st.lists(parts, max_size=12)))


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def whole(reasoning: Reasoning, text: str) -> tuple[str, str]:
    """The reasoning and the answer of a whole text, by regular expressions."""
    opening, before = re.escape(reasoning.opening), re.escape(reasoning.around[0])
    stage = reasoning.stage
    if stage is Stage.UNDECIDED:
        headed = re.match(rf"[ \t\r\n]*{before}", text)
        if before and headed is not None:
            return "", answered(reasoning, text[headed.end() :])
        begun = re.match(rf"[ \t\r\n]*{opening}", text)
        if begun is None:
            return "", ended(reasoning, text)
        text, stage = text[begun.end() :], Stage.OPENED
    if stage is Stage.OPENED:
        again = re.match(rf"\n*(?:{opening}\n*)*", text)
        assert again is not None
        text = text[again.end() :]
        if reasoning.opening.startswith(text):
            return "", ""
    thought, mark, behind = text.partition(reasoning.closing)
    for pause in reasoning.pauses:
        thought = thought.replace(pause, "\n")
    called = thought.find(f"\n{reasoning.call}") if reasoning.call else -1
    if called >= 0:
        return thought[:called].rstrip("\n"), ended(reasoning, thought[called + 1 :] + mark + behind)
    if mark:
        return thought.rstrip("\n"), answered(reasoning, behind)
    marks = [reasoning.closing, *reasoning.pauses, *([f"\n{reasoning.call}"] if reasoning.call else [])]
    halves = [
        at for mark in marks for at in range(len(thought)) if mark.startswith(thought[at:]) and mark != thought[at:]
    ]
    cut = thought[: min(halves, default=len(thought))].rstrip("\n")
    return (thought if cut == thought.rstrip("\n") else cut), ""


def answered(reasoning: Reasoning, text: str) -> str:
    """The answer in what follows a mark."""
    before = re.escape(reasoning.around[0])
    begun = re.match(rf"\n*(?:{before}\n*)*" if before else r"\n*", text)
    assert begun is not None
    return ended(reasoning, text[begun.end() :])


def ended(reasoning: Reasoning, text: str) -> str:
    behind = re.escape(reasoning.around[1])
    return re.sub(rf"\n*{behind}[ \t\r\n]*\Z", "", text, count=1) if behind else text


def fed(reasoning: Reasoning, parts: list[str]) -> tuple[str, str]:
    split, thoughts, answers = Split(reasoning, reasoning.stage), list[str](), list[str]()
    for part in parts:
        split, thought, answer = split.add(part)
        thoughts.append(thought)
        answers.append(answer)
    thought, answer = split.rest()
    return "".join([*thoughts, thought]), "".join([*answers, answer])


@given(st.data())
def test_however_a_text_comes_reasoning_and_answer_are_the_text_without_its_marks(data: st.DataObject) -> None:
    reasoning = data.draw(reasonings())
    text = data.draw(texts(reasoning))
    assert fed(reasoning, data.draw(pieces(text))) == whole(reasoning, text)
    assert fed(reasoning, list(text)) == whole(reasoning, text)


@given(st.data())
def test_no_half_of_a_mark_is_passed_on_before_the_text_ends(data: st.DataObject) -> None:
    """What is passed on stays the same, whatever text follows."""
    reasoning = data.draw(reasonings())
    text, more = data.draw(texts(reasoning)), data.draw(texts(reasoning))
    _, thought, answer = Split(reasoning, reasoning.stage).add(text)
    told = whole(reasoning, text + more)
    assert told[0].startswith(thought)
    assert told[1].startswith(answer)


# -- tokens ------------------------------------------------------------------------------------------------------------

PIECES = ("<", "/", "th", "ink", ">", "</th", "ink>\n\n", "so", "\n", "<think>", "</think>", "", "ü", " ")
SPECIAL = (PIECES.index(""), "</think>")  # a special token, which has no text of its own


class Bytes:
    """The bytes of tokens that are the pieces above."""

    def of(self, token: int, before: int | None) -> bytes:
        return PIECES[token].encode()


def reasoning_of(stage: Stage, budget: int | None) -> Reasoning:
    return Reasoning(
        opening="<think>",
        closing="</think>",
        stage=stage,
        opening_ids=(0, 2, 3, 4),
        closing_ids=(0, 1, 2, 3, 4),
        spelled=(SPECIAL,),
        budget=budget,
    )


def of_text(reasoning: Reasoning, tokens: list[int]) -> tuple[int | None, int, bool]:
    """The tokens before the answer, and those of reasoning, by the whole texts of the first tokens."""
    spent, opened = 0, reasoning.stage is not Stage.UNDECIDED
    for count in range(len(tokens) + 1):
        text = "".join(dict([SPECIAL]).get(token, PIECES[token]) for token in tokens[:count])
        bare = text.lstrip(" \n")
        if not opened and not "<think>".startswith(bare) and not bare.startswith("<think>"):
            return 0, 0, False
        if (opened or bare.startswith("<think>")) and "</think>" in text:
            return count, spent + 1, False
        spent += opened and count > 0
        opened = opened or bare.startswith("<think>")
    return None, spent, opened


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
STAGES = st.sampled_from([Stage.UNDECIDED, Stage.OPENED, Stage.REASONS])


@given(STAGES, TOKENS, st.lists(st.tuples(st.integers(0, 12), TOKENS), max_size=6))
def test_a_track_finds_the_same_place_whatever_draft_tokens_it_was_asked_before(
    stage: Stage, tokens: list[int], others: list[tuple[int, list[int]]]
) -> None:
    reasoning = reasoning_of(stage, None)
    track = Track.of(reasoning, Bytes())
    for kept, drafts in (*sorted(others, key=lambda other: other[0]), (len(tokens), [])):
        asked = [*tokens[:kept], *drafts]
        found = track.at(asked, len(drafts))
        assert (found.answer, found.spent, found.thinks) == of_text(reasoning, asked)


class Counted(list[int]):
    """Tokens that count how often they are read, and are never compared or copied."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        assert isinstance(place, int)
        self.reads += 1
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        raise AssertionError("all tokens are read")

    __eq__ = __iter__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def test_a_track_reads_each_token_once_and_none_of_the_answer() -> None:
    tokens, track = Counted(), Track.of(reasoning_of(Stage.OPENED, 99), Bytes())
    for token in (*[7] * 50, 10, *[7] * 50):
        tokens.append(token)
        track.at(tokens)
    assert tokens.reads == 51 + 50, "each of the reasoning is one, and has one before"


@given(st.data(), st.integers(0, 6))
def test_half_a_mark_before_the_forced_one_is_not_reasoning(data: st.DataObject, budget: int) -> None:
    """Wherever the text ends: neither half of a mark is passed on."""
    opening, closing = data.draw(st.sampled_from(MARKS[:4]))
    half = closing[: data.draw(st.integers(0, min(budget, len(closing) - 1)))]
    text = "s" * (budget - len(half)) + half
    reasoning = Reasoning(opening, closing, stage=Stage.REASONS, budget=budget)
    ends = data.draw(st.integers(0, len(closing)))
    answer = "yes" if ends == len(closing) else ""
    assert fed(reasoning, [*text, *closing[:ends], *answer]) == ("s" * (budget - len(half)), answer)


@given(STAGES, st.integers(0, 5), st.lists(st.tuples(st.integers(0, len(PIECES) - 1), st.booleans()), max_size=24))
def test_reasoning_never_has_more_tokens_than_its_budget_and_the_mark(
    stage: Stage, budget: int, wanted: list[tuple[int, bool]]
) -> None:
    """However often the sequence starts anew from the tokens that it has."""
    reasoning, tokens = reasoning_of(stage, budget), list[int]()
    track = Track.of(reasoning, Bytes())
    for token, starts_anew in wanted:
        track = Track.of(reasoning, Bytes()) if starts_anew else track
        forced = track.at(tokens).forced
        tokens.append(token if forced is None else forced)
    place = track.at(tokens)
    assert place.spent <= budget + len(reasoning.closing_ids)
    assert not place.thinks or place.spent < budget + len(reasoning.closing_ids)
    if place.spent == budget + len(reasoning.closing_ids):
        assert place.answer is not None
        assert tuple(tokens[: place.answer][-len(reasoning.closing_ids) :]) == reasoning.closing_ids


def test_the_opening_mark_may_come_as_long_as_nothing_else_is_there() -> None:
    reasoning = reasoning_of(Stage.UNDECIDED, None)
    assert [reasoning.opens(tokens) for tokens in ([], [0], [0, 2], [0, 2, 3], [0, 2, 3, 4], [1], [0, 3])] == [
        *(0, 2, 3, 4),
        *(None, None, None),
    ]
