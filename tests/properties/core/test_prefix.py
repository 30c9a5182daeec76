"""Pages are shared by content: two full pages have one key exactly where all that they depend on is equal."""

from __future__ import annotations

import hypothesis.strategies as st
from attrs import evolve, frozen
from hypothesis import example, given

from triolet.core.planning import prefix
from triolet.core.planning.pages import PageAllocator
from triolet.core.planning.prefix import PageKeys
from triolet.core.request import Placeholder

PAGE = 2


@frozen(kw_only=True)
class Prompt:
    """What the KV of a position depends on: the weights, the audio, the tokens and the items up to there."""

    tokens: tuple[int, ...]
    placeholders: tuple[Placeholder, ...] = ()
    identity: str = "weights"
    audio: str | None = None

    def keys(self) -> list[bytes]:
        pages = len(self.tokens) // PAGE
        return list(self.page_keys().upto(self.tokens, pages))

    def page_keys(self) -> PageKeys:
        return PageKeys(PAGE, self.placeholders, prefix.root_key(self.identity, self.audio))

    def read(self, stop: int) -> tuple[object, ...]:
        """All that the first ``stop`` positions depend on."""
        rows: dict[int, tuple[str, int]] = {}
        for placeholder in self.placeholders:
            positions = [position for span in placeholder.spans for position in range(*span)]
            rows.update({position: (placeholder.key, row) for row, position in enumerate(positions)})
        return (self.identity, self.audio, self.tokens[:stop], tuple(rows.get(position) for position in range(stop)))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Few tokens and few items, so that two prompts often begin alike: an item is one span, or two that lie apart."""
    tokens: list[int] = []
    placeholders = []
    for _ in range(draw(st.integers(0, 3))):
        tokens += draw(st.lists(st.integers(1, 2), max_size=2))
        spans = []
        for _ in range(draw(st.integers(1, 2))):
            start = len(tokens)
            tokens += [9] * draw(st.integers(1, 3))
            spans.append((start, len(tokens)))
            tokens.append(1)  # spans that touch would be one
        placeholders.append(Placeholder(key=draw(st.sampled_from("pq")), spans=tuple(spans)))
    tokens += draw(st.lists(st.integers(1, 2), max_size=3))
    identity, audio = draw(st.sampled_from(("weights", "weights", "others"))), draw(st.sampled_from((None, None, "a")))
    return Prompt(tokens=tuple(tokens), placeholders=tuple(placeholders), identity=identity, audio=audio)


def item(*spans: tuple[int, int], key: str = "p") -> tuple[Placeholder, ...]:
    return (Placeholder(key=key, spans=spans),)


FLAT = Prompt(tokens=(9, 9, 9, 9), placeholders=item((0, 2)))
SPLIT = Prompt(tokens=(9, 1, 1, 9, 1, 9), placeholders=item((0, 1), (3, 4)))


@given(prompts(), prompts())
@example(FLAT, evolve(FLAT, tokens=(9, 9, 9, 8)))
@example(FLAT, evolve(FLAT, placeholders=()))
@example(FLAT, evolve(FLAT, placeholders=item((0, 2), key="q")))
@example(FLAT, evolve(FLAT, placeholders=item((1, 3))))
@example(FLAT, evolve(FLAT, identity="others"))
@example(FLAT, evolve(FLAT, audio="a"))
@example(Prompt(tokens=(1, 1, 5, 5)), Prompt(tokens=(2, 2, 5, 5)))
@example(SPLIT, evolve(SPLIT, placeholders=(*item((0, 1), (5, 6)), *item((3, 4)))))
def test_equal_keys_mean_equal_prefixes(one: Prompt, other: Prompt):
    for page, (first, second) in enumerate(zip(one.keys(), other.keys(), strict=False), 1):
        equal = one.read(page * PAGE) == other.read(page * PAGE)
        assert equal or first != second, f"one key for two contents: {one.read(page * PAGE)}, {other.read(page * PAGE)}"


@given(prompts(), st.lists(st.integers(1, 9), max_size=5))
def test_equal_prefixes_have_equal_keys_whatever_comes_behind(prompt: Prompt, behind: list[int]):
    """Also where another item comes behind, and whatever page keys were asked for before."""
    start = len(prompt.tokens)
    longer = evolve(
        prompt,
        tokens=(*prompt.tokens, *behind, 9),
        placeholders=(*prompt.placeholders, *item((start + len(behind), start + len(behind) + 1), key="r")),
    )
    keys = prompt.keys()
    assert longer.keys()[: len(keys)] == keys, "the same beginning has two keys"
    bit_by_bit = prompt.page_keys()
    assert [[*bit_by_bit.upto(prompt.tokens, page)][-1] for page in range(1, len(keys) + 1)] == keys
    assert [[*bit_by_bit.upto(prompt.tokens, len(keys), first=page)] for page in range(len(keys))] == [
        keys[page:] for page in range(len(keys))
    ]


def test_a_prompt_of_which_nothing_is_found_costs_one_key():
    """All of a long one would hold up everybody for tens of milliseconds."""
    prompt = Prompt(tokens=(1,) * 1000)
    keys = prompt.page_keys()
    assert PageAllocator(4).find(keys.upto(prompt.tokens, 500)) == ()
    assert len(keys._keys) == 1
