"""Frames become emissions as the definitions of CTC and of transducers say, however many labels come at a time."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from triolet.core.emissions import Emissions

BLANK = 0
LABELS = st.lists(st.integers(0, 3), max_size=40)
AHEAD = st.integers(1, 5)


def emitted(rules, frames, ahead, label_of):
    """The labels that are emitted, with their frames. ``label_of(frame, count)`` is the label of a frame, and its
    duration, after so many emissions."""
    place, found = rules.begin(frames), []
    while not place.over:
        before = place.frame
        asked = [label_of(frame, len(found)) for frame in range(place.frame, min(place.frame + ahead, frames))]
        index = rules.search(place, [label for label, _ in asked], [duration for _, duration in asked])
        assert place.frame >= before, "frames never decrease"
        assert (index is None) == (place.emitted is None)
        if index is not None:
            first, stop = place.emitted
            assert first == before + index
            assert first <= stop
            found.append((asked[index][0], first))
    return found


@given(LABELS, AHEAD)
def test_ctc_joins_equal_neighbours_and_drops_blanks(labels, ahead):
    rules = Emissions(blank=BLANK)
    found = emitted(rules, len(labels), ahead, lambda frame, _: (labels[frame], 0))
    runs = [(label, [at for at, _ in run]) for label, run in groupby(enumerate(labels), key=lambda pair: pair[1])]
    assert found == [(label, places[0]) for label, places in runs if label != BLANK]


@given(LABELS, AHEAD, st.integers(1, 4), st.integers(0, 30))
def test_a_transducer_stays_at_a_frame_until_blank_or_its_most_symbols(labels, ahead, most, frames):
    """Labels depend on the emissions before, as a prediction network's do."""
    given = [*labels, BLANK]

    def label_of(frame, count):
        return given[(frame + 7 * count) % len(given)], 0

    expected, frame, symbols = [], 0, 0
    while frame < frames:
        label, _ = label_of(frame, len(expected))
        if label != BLANK:
            expected.append((label, frame))
            symbols += 1
        if label == BLANK or symbols == most:
            frame, symbols = frame + 1, 0
    assert emitted(Emissions(blank=BLANK, most_symbols=most), frames, ahead, label_of) == expected


@given(LABELS, AHEAD, st.integers(1, 3), st.integers(0, 30))
def test_durations_move_on_and_no_loop_of_zeros_is_endless(labels, ahead, most, frames):
    given = [*labels, BLANK]

    def label_of(frame, count):
        return given[(frame + 5 * count) % len(given)], given[(2 * frame + count) % len(given)]

    expected, frame, left = [], 0, most * frames
    while frame < frames and left:
        label, duration = label_of(frame, len(expected))
        left -= 1
        if label != BLANK:
            expected.append((label, frame))
        frame += max(duration, label == BLANK)
    assert emitted(Emissions(blank=BLANK, most_symbols=most, durations=4), frames, ahead, label_of) == expected
