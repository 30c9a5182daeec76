"""Who speaks: turns of voices, and the speakers of words. The network is replaced by one whose voices are levels of a
constant signal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.inputs.audio import Samples
from triolet.api.outputs.results import Segment, Transcript, Turn, Word
from triolet.api.speech.speakers import Diarization, DiarizeQuery, TurnMaker, VoiceTurn, named_turns, with_speakers
from triolet.api.speech.voice import SpanRules
from triolet.api.speech.voices import WINDOW, Array, VoiceClusters, cluster, nearest

RATE, FRAME = 16_000, 512
Talk = list[tuple[float, float, int]]  # seconds of silence, then of speech, and the voice

talks = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.floats(0.2, 5.0), st.integers(0, 2)), min_size=1, max_size=8
)


class Levels:
    """An encoder: a voice is a level."""

    def embed(self, windows: Sequence[Samples]) -> Array:
        assert all(0 < len(one) <= WINDOW for one in windows)
        return np.eye(9)[[round(float(np.median(one)) * 10) for one in windows]]


def audio_of(talk: Talk, voices: Sequence[int] = range(8)) -> Samples:
    parts = [
        np.full(round(seconds * RATE), level, np.float32)
        for silence, speech, voice in talk
        for seconds, level in ((silence, 0.0), (speech, (voices[voice] + 1) / 10))
    ]
    return np.concatenate([*parts, np.zeros(RATE, np.float32)])


def heard(samples: Samples, block: int = 8 * RATE, *, least: int = 1, most: int = 8) -> Diarization:
    """The turns, of audio in which each frame that is not silent is speech."""
    listener = VoiceClusters(lambda: Levels().embed).listen(FRAME, least=least, most=most, known={})
    samples = np.append(samples, np.zeros(-len(samples) % FRAME, np.float32))
    block -= block % FRAME
    for start in range(0, len(samples), block):
        part = samples[start : start + block]
        listener.hear(part, np.where(part.reshape(-1, FRAME).any(axis=1), 1.0, 0.0).astype(np.float32))
        assert listener._held.count <= WINDOW + 2 * block + RATE, "samples are dropped, however long somebody speaks"
    return listener.diarization()


@given(talks, st.sampled_from([FRAME, RATE, 20 * RATE]))
@settings(max_examples=30)
def test_turns_never_overlap_and_cover_the_speech_whatever_the_blocks(talk: Talk, block: int) -> None:
    samples = audio_of(talk)
    found = heard(samples)
    assert found.turns == heard(samples, block).turns
    assert all(one.start < one.end for one in found.turns)
    assert all(before.end <= after.start for before, after in pairwise(found.turns))
    loud = np.flatnonzero(samples) / RATE
    starts, ends = np.array([one.start for one in found.turns]), np.array([one.end for one in found.turns])
    at = np.searchsorted(starts, loud, side="right") - 1
    assert (at >= 0).all()
    assert (loud < ends[at]).all()
    assert sum(ends - starts) <= len(loud) / RATE + len(talk) * 0.2, "but little more than the speech"


@given(talks, st.permutations(range(8)))
@settings(max_examples=30)
def test_voices_that_change_places_change_nothing_else(talk: Talk, voices: list[int]) -> None:
    plain = named_turns(heard(audio_of(talk)), ())
    assert named_turns(heard(audio_of(talk, voices)), ()) == plain


@given(talks, st.integers(1, 4))
@settings(max_examples=30)
def test_there_are_never_more_voices_than_are_allowed(talk: Talk, most: int) -> None:
    found = heard(audio_of(talk), least=most, most=most)
    assert len({one.voice for one in found.turns}) <= most


def test_voices_are_told_apart_and_a_wrong_number_is_not_asked_for() -> None:
    talk = [(0.5, 5.0, voice) for voice in (0, 1, 0, 2, 1, 0, 2, 1) * 3]
    turns = named_turns(heard(audio_of(talk)), ())
    assert [one.speaker for one in turns] == ["A", "B", "A", "C", "B", "A", "C", "B"] * 3
    alone = heard(audio_of([(0.5, 4.0, 3)] * 9))
    assert {one.voice for one in alone.turns} == {0}


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_nobody_speaks_in_silence(seconds: float) -> None:
    assert heard(np.zeros(round(seconds * RATE), np.float32)) == Diarization()


def test_speech_shorter_than_a_window_is_one_turn() -> None:
    [turn] = heard(audio_of([(1.0, 0.4, 0)])).turns
    assert (turn.start, turn.end) == (pytest.approx(0.97, abs=0.04), pytest.approx(1.43, abs=0.04))


def test_the_number_of_windows_that_are_compared_is_bounded() -> None:
    """Five hours: a matrix of all windows would have 4 GB."""
    vectors = np.tile(np.eye(3, 64, dtype=np.float32), (8_000, 1))
    assert nearest(vectors, cluster(vectors, 1, 10)).tolist() == [0, 1, 2] * 8_000


# -- words -------------------------------------------------------------------------------------------------------------

places = st.lists(st.integers(0, 240), min_size=2, max_size=12, unique=True).map(
    lambda at: [one / 8 for one in sorted(at)]
)
turn_lists = places.flatmap(
    lambda at: st.lists(
        st.tuples(st.integers(0, len(at) - 2), st.integers(1, 3), st.sampled_from("AB")), min_size=1, max_size=len(at)
    ).map(
        lambda found: tuple(
            Turn(start=at[first], end=at[min(first + length, len(at) - 1)], speaker=who)
            for first, length, who in sorted(found)
        )
    )
)


def transcript_of(times: Sequence[float], per_segment: int, turns: tuple[Turn, ...]) -> Transcript:
    words = [
        Word(text=f" w{at}", start=a, end=b, probability=1.0, token_ids=(at, 100 + at))
        for at, (a, b) in enumerate(pairwise(times))
    ]
    groups = [words[at : at + per_segment] for at in range(0, len(words), per_segment)]
    segments = [
        Segment(
            id=number,
            start=group[0].start,
            end=group[-1].end,
            text="".join(word.text for word in group),
            token_ids=tuple(token for word in group for token in word.token_ids),
            logprobs=tuple(float(-token) for word in group for token in word.token_ids),
            avg_logprob=-0.1,
            no_speech_prob=0.0,
            compression_ratio=1.0,
            temperature=0.0,
            words=tuple(group),
        )
        for number, group in enumerate(groups)
    ]
    return Transcript(
        text="", language="en", language_probability=None, duration=31.0, segments=tuple(segments), turns=turns
    )


def seconds_of(word: Word, turns: Sequence[Turn], speaker: str) -> float:
    return sum(max(0.0, min(one.end, word.end) - max(one.start, word.start)) for one in turns if one.speaker == speaker)


@given(places, st.integers(1, 5), turn_lists)
def test_each_word_has_the_speaker_whom_it_overlaps_most(
    times: list[float], per_segment: int, turns: Sequence[Turn]
) -> None:
    before = transcript_of(times, per_segment, tuple(turns))
    after = with_speakers(before)
    for segment in after.segments:
        assert segment.text == "".join(word.text for word in segment.words or ())
        assert {word.speaker for word in segment.words or ()} == {segment.speaker}
        for word in segment.words or ():
            most = max(seconds_of(word, turns, speaker) for speaker in "AB")
            if most:
                assert seconds_of(word, turns, word.speaker or "") == most
            else:
                gaps = {max(one.start - word.end, word.start - one.end): one.speaker for one in reversed(turns)}
                assert word.speaker == gaps[min(gaps)]
    assert [one.id for one in after.segments] == list(range(len(after.segments)))
    for what in ("token_ids", "logprobs"):
        assert [each for one in after.segments for each in getattr(one, what)] == [
            each for one in before.segments for each in getattr(one, what)
        ]
    assert all(one.end <= two.start for one, two in pairwise(after.segments))
    assert (after.segments[0].start, after.segments[-1].end) == (before.segments[0].start, before.segments[-1].end)


def test_a_segment_without_words_has_the_speaker_who_speaks_longest_in_it() -> None:
    turns = (Turn(start=0, end=2, speaker="A"), Turn(start=2, end=5, speaker="B"), Turn(start=5, end=6, speaker="A"))
    plain = transcript_of([0.0, 6.0], 1, turns)
    plain = evolve(plain, segments=(evolve(plain.segments[0], words=None),))
    for end, speaker in ((4.5, "A"), (5.5, "B")):
        assert with_speakers(evolve(plain, turns=(turns[0], evolve(turns[1], end=end), turns[2]))).speakers == (
            speaker,
        )


def test_parts_of_a_segment_whose_words_an_aligner_found_have_no_tokens() -> None:
    """Which of the segment's tokens are theirs is not known."""
    plain = transcript_of([0.0, 1.0, 2.0], 2, (Turn(start=0, end=1, speaker="A"), Turn(start=1, end=2, speaker="B")))
    words = tuple(evolve(word, token_ids=()) for word in plain.segments[0].words or ())
    parts = with_speakers(evolve(plain, segments=(evolve(plain.segments[0], words=words),))).segments
    assert [(one.speaker, one.token_ids, one.logprobs) for one in parts] == [("A", (), ()), ("B", (), ())]


def test_a_speaker_that_the_model_itself_has_written_stays() -> None:
    turns = (Turn(start=0, end=30, speaker="A"),)
    plain = transcript_of([0.0, 1.0, 2.0], 2, turns)
    own = evolve(plain, segments=(evolve(plain.segments[0], speaker="S01"),))
    for transcript in (own, evolve(own, turns=())):
        [segment] = with_speakers(transcript).segments
        assert {segment.speaker, *(word.speaker for word in segment.words or ())} == {"S01"}
    assert with_speakers(evolve(plain, turns=())).speakers == ()


def test_letters_follow_the_text_and_known_speakers_keep_their_names() -> None:
    turns = [VoiceTurn(at, at + 1.0, voice) for at, voice in enumerate([4, 2, 9, 2, 7])]
    found = named_turns(Diarization(turns, {9: "A"}), [(1.2, 1.8), (2.0, 3.0), (4.5, 5.0)])
    assert [one.speaker for one in found] == ["D", "B", "A", "B", "C"]
    assert [(one.start, one.end) for one in found] == [(one.start, one.end) for one in turns]


# ---- turns of a model ------------------------------------------------------------------------------------------------

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
    maker = TurnMaker.of(query, 160, RATE, speakers)
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
    (spans,) = TurnMaker.of(query, 160, RATE, 1).spans
    assert spans.rules == SpanRules(threshold=0.5, end_threshold=0.5, min_speech=0.0, min_silence=0.0, padding=0.0)
