"""Turns that are made of the probabilities of frames."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triolet.api.speech.speakers import DiarizeQuery, TurnMaker, VoiceTurn
from triolet.api.speech.voice import SpanRules

RATE, FRAME = 16_000, 160

frames = st.integers(1, 4).flatmap(
    lambda speakers: st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=speakers, max_size=speakers), min_size=1, max_size=60
    )
)
limits = st.sampled_from([0.0, 0.01, 0.02, 0.05])


@given(frames, st.sampled_from([0.25, 0.5, 1.0]), limits, limits, st.lists(st.integers(0, 60)))
def test_turns_are_the_runs_of_each_speaker_however_the_frames_are_cut(
    frames: list[list[float]], threshold: float, speech: float, silence: float, cuts: list[int]
) -> None:
    probabilities = np.array(frames, np.float32)
    speakers = probabilities.shape[1]
    query = DiarizeQuery("", None, threshold, speech, silence, True, priority=0, request_id=None, wait=True)
    maker = TurnMaker.of(query, FRAME, RATE, speakers)
    for part in np.split(probabilities, sorted(min(cut, len(frames)) for cut in cuts)):
        maker.hear(part)
    expected = []
    for voice in range(speakers):
        active = [0, *(probabilities[:, voice] >= threshold).astype(int), 0]
        edges = np.flatnonzero(np.diff(active)).tolist()
        runs: list[list[int]] = []
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            if runs and start - runs[-1][1] < round(100 * silence):
                runs[-1][1] = stop
            else:
                runs.append([start, stop])
        kept = [(start, stop) for start, stop in runs if stop - start >= round(100 * speech)]
        expected += [VoiceTurn(start / 100, stop / 100, voice) for start, stop in kept]
    assert maker.end().turns == sorted(expected)


def test_the_rules_have_no_margin_and_one_threshold() -> None:
    query = DiarizeQuery("", None, 0.5, 0.0, 0.0, True, priority=0, request_id=None, wait=True)
    (spans,) = TurnMaker.of(query, FRAME, RATE, 1).spans
    assert spans.rules == SpanRules(threshold=0.5, end_threshold=0.5, min_speech=0.0, min_silence=0.0, padding=0.0)
