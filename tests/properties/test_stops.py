"""Stop strings, over every text of a small alphabet that Hypothesis finds, cut anyhow."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from triolet.api.outputs.text import StopStrings

TEXT = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=4).map(tuple)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


def first_place(text: str, stops: tuple[str, ...]) -> int:
    """By definition: the first place where any stop string stands."""
    places = [place for place in range(len(text)) if text.startswith(stops, place)] if stops else []
    return places[0] if places else len(text)


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_the_text_ends_at_the_first_stop_string_however_it_is_cut(text, stops, cuts, keep):
    """Before it, or with ``keep`` behind it."""
    stream = StopStrings(stops, keep)
    given_on = [stream.feed(piece) for piece in pieces_of(text, cuts)]
    given_on.append(stream.rest())
    place = first_place(text, stops)
    found = [len(stop) for stop in stops if keep and text.startswith(stop, place)]
    assert "".join(given_on) == text[: place + min(found, default=0)]
    assert stream.stopped is (place < len(text))


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=8))
def test_what_is_given_on_is_never_more_than_what_is_certain(text, stops, cuts):
    """Whatever text follows, what was given on is a beginning of the result: here, every stop string follows."""
    stream, seen, out = StopStrings(stops), "", ""
    for piece in pieces_of(text, cuts):
        seen, out = seen + piece, out + stream.feed(piece)
        for stop in stops:
            for length in range(len(stop) + 1):
                future = seen + stop[-length:]
                assert future[: first_place(future, stops)].startswith(out)


@given(TEXT, STOPS)
def test_what_cannot_become_a_stop_string_is_given_on_at_once(text, stops):
    """Held back is less than the longest stop string, and only while one may still grow from its beginning."""
    stream, out = StopStrings(stops), ""
    for end, character in enumerate(text, 1):
        out += stream.feed(character)
        if stream.stopped:
            return
        held = text[len(out) : end]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
