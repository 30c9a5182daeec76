"""What replicas say to routers: their load each time, what they hold seldom, and nothing new when nothing is."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from triolet_ray.replica_reports import ReplicaReport, Reporter

SECONDS = 5.0
MOMENTS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 4.0, 6.0]),  # since the last one
        st.integers(0, 2),
        st.integers(0, 1),
        st.lists(st.sampled_from("abcd"), unique=True),
    ),
    max_size=30,
)


def said(moments: list[tuple[float, int, int, list[str]]]) -> list[tuple[float, ReplicaReport]]:
    speaker, now, words = Reporter(SECONDS, most_keys=3), 100.0, []
    for seconds, requests, encodings, keys in moments:
        now += seconds
        words.append((now, speaker.report(now=now, requests=requests, encodings=encodings, keys=keys)))
    return words


@given(MOMENTS)
def test_every_word_has_the_load_and_a_number_that_tells_it_from_the_last(moments) -> None:
    words = [word for _, word in said(moments)]
    assert [(word["requests"], word["encodings"]) for word in words] == [moment[1:3] for moment in moments]
    for one, next_one in itertools.pairwise(words):
        assert next_one == one or next_one["number"] == one["number"] + 1
        assert next_one is one or next_one["number"] != one["number"], "a word never changes"


@given(MOMENTS)
def test_keys_are_said_at_a_bounded_rate_and_not_for_long_not(moments) -> None:
    """Whoever hears words for so long knows what is held, though it has missed those before."""
    spoken: dict[int, float] = {}  # when a word with keys was new
    for (now, word), (*_, keys) in zip(said(moments), moments, strict=True):
        if "keys" in word:
            spoken.setdefault(word["number"], now)
            assert spoken[word["number"]] != now or word["keys"] == keys[-3:], "the newest, as they are now"
        assert max(spoken.values()) > now - SECONDS or word["keys"] == keys[-3:]
    times = sorted(spoken.values())
    assert all(later - one >= SECONDS for one, later in itertools.pairwise(times))


def test_an_idle_replica_says_nothing_new_once_it_has_told_what_it_holds() -> None:
    busy, idle, due, again, changed = said(
        [(0, 1, 0, ["a"]), (1, 0, 0, ["a"]), (5, 0, 0, ["a"]), (60, 0, 0, ["a"]), (1, 0, 0, [])]
    )
    assert busy[1] == {"number": 1, "requests": 1, "encodings": 0, "keys": ["a"]}
    assert idle[1] == {"number": 2, "requests": 0, "encodings": 0}
    assert due[1] == {"number": 3, "requests": 0, "encodings": 0, "keys": ["a"]}
    assert again[1] == due[1]
    assert changed[1] == {"number": 4, "requests": 0, "encodings": 0, "keys": []}
