"""Lookups: what followed the last tokens before, learned a bounded piece at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triolet.models.sampling.lookup import Lookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def guess_of(tokens: list[int], match: int, count: int) -> tuple[int, ...]:
    """By search, without a table."""
    for length in range(min(match, len(tokens)), 0, -1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if ends:
            return tuple(tokens[ends[-1] : ends[-1] + count])
    return ()


@given(TOKENS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 20))
def test_a_text_that_was_learned_in_pieces_guesses_as_a_search_does(tokens, match, count, most):
    lookup = Lookup(match)
    while learned := lookup.learn(tokens, most):
        assert learned <= most
    assert lookup.propose(tokens, count) == guess_of(tokens, match, count)


@given(TOKENS, st.integers(1, 5), st.integers(0, 60))
def test_until_all_is_learned_guesses_are_of_what_is(tokens, match, known):
    lookup = Lookup(match)
    lookup.learn(tokens, known)
    guess = lookup.propose(tokens, 3)
    assert not guess or any(
        tuple(tokens[end : end + 3]) == guess and tokens[end - 1] == tokens[-1] for end in range(1, known + 1)
    )


def test_no_call_pays_for_a_whole_prompt():
    lookup, tokens = Lookup(3), list(range(100_000))
    assert [lookup.learn(tokens, 2_048) for _ in range(50)] == [2_048] * 48 + [99_999 - 48 * 2_048, 0]
    assert lookup.learn([*tokens, 1, 2], 2_048) == 2
