"""Readings of a live session: only of speech, all of it, never more than a window; and hearing never waits for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.live.endpoints import Endpointer, Reading
from triolet.api.speech.voice import SpanRules, SpeechSpan, SpeechSpans

RATE, FRAME = 1_000, 100  # frames of 0.1 s
SILENCE = 0.6

heard = st.lists(st.tuples(st.sampled_from([0.0, 0.9]), st.integers(1, 25)), max_size=6).map(
    lambda parts: [probability for probability, count in parts for _ in range(count)]
)


def endpointer(step: int = 1_000, window: int = 2_000) -> Endpointer:
    return Endpointer(sampling_rate=RATE, frame_samples=FRAME, endpoint_silence=SILENCE, step=step, window=window)


def spans_of(probabilities: Sequence[float], length: int) -> list[SpeechSpan]:
    """The utterances, known at the end."""
    spans = SpeechSpans(SpanRules(min_silence=SILENCE, padding=SILENCE / 2), RATE, FRAME)
    return [*spans.hear(probabilities), *spans.end(length)]


def frames(text: str) -> list[float]:
    """A frame for each character: # is voice."""
    return [0.9 if character == "#" else 0.0 for character in text]


def readings(decides: Endpointer, text: str) -> list[tuple[int, Reading]]:
    """Hears frame by frame. The readings that were due, each behind so many frames; each was made at once."""
    found = []
    for count, probability in enumerate(frames(text), 1):
        decides.hear([probability])
        while (reading := decides.due()) is not None:
            found.append((count, reading))
            decides.read(reading)
            if reading.full:
                decides.moved(reading.stop)
    return found


def test_a_step_of_new_voice_is_read_and_each_pause_at_once() -> None:
    """0.3 s around voice belong to the utterance. The pause of 0.4 s ends nothing, and the silence adds no reading."""
    decides = endpointer(window=4_000)
    assert readings(decides, "_____############____##______") == [
        (12, Reading(start=200, stop=1_200)),
        (20, Reading(start=200, stop=2_000, pauses=True)),
        (26, Reading(start=200, stop=2_600, pauses=True)),
    ]
    assert decides.is_over


def test_silence_is_never_read_and_not_kept() -> None:
    decides = endpointer()
    assert readings(decides, "_" * 100) == []
    assert decides.needed == 9_700
    assert not decides.is_full


def test_a_short_noise_is_no_utterance() -> None:
    decides = Endpointer(sampling_rate=RATE, frame_samples=20, endpoint_silence=SILENCE, step=500, window=2_000)
    assert readings(decides, "____##________________________________") == []


def test_an_utterance_ends_with_the_frame_that_completes_the_silence() -> None:
    decides = endpointer()
    readings(decides, "#####_____")
    assert not decides.is_over
    readings(decides, "_")
    assert decides.is_over
    decides.next()
    assert not decides.is_over
    assert decides.needed == 800


def test_a_long_utterance_is_read_in_windows() -> None:
    decides = endpointer()
    found = [reading for _, reading in readings(decides, "#" * 45)]
    assert [(one.start, one.stop) for one in found if one.full] == [(0, 2_000), (2_000, 4_000)]


def played(
    decides: Endpointer, probabilities: Sequence[float], cuts: Iterator[int], sizes: Iterator[int]
) -> list[Reading]:
    """A session: it hears some frames while there is room, and makes some of the readings that are due. Each full
    reading leaves something behind, other ones perhaps."""
    made: list[Reading] = []
    told = 0
    ended = False
    while True:
        if not decides.is_full and not ended:
            size = next(sizes)
            decides.hear(probabilities[told : told + size])
            told += size
            if told >= len(probabilities):
                decides.end(len(probabilities) * FRAME)
                ended = True
        reading = decides.due()
        assert reading is not None or decides.is_over or not decides.is_full, "hearing waits, and nothing is due"
        if reading is not None:
            assert decides.needed <= reading.start, "what is due was forgotten"
            made.append(reading)
            decides.read(reading)
            cut = next(cuts)
            if reading.full or cut:
                decides.moved(min(reading.start + max(cut, 1) * FRAME, reading.stop))
        elif decides.is_over:
            needed = decides.needed
            decides.next()
            assert decides.needed >= needed, "needed goes back"
        elif ended:
            return made


SESSIONS = {
    "probabilities": heard,
    "window": st.integers(3, 30),
    "step": st.integers(1, 30),
    "cuts": st.lists(st.integers(0, 9), min_size=1),
    "chance": st.randoms(),
}


@given(**SESSIONS)
@settings(max_examples=200)
def test_all_speech_is_read_and_nothing_else(
    probabilities: list[float], window: int, step: int, cuts: list[int], chance: object
) -> None:
    """However fast it is read and wherever it is cut: every sample of an utterance that was not left behind is read at
    its end, in readings of a window at most."""
    spans = spans_of(probabilities, len(probabilities) * FRAME)
    decides = endpointer(step=step * FRAME, window=window * FRAME)
    made = played(
        decides,
        probabilities,
        iter(lambda: chance.choice(cuts), None),  # type: ignore[attr-defined]
        iter(lambda: chance.randint(1, 8), None),  # type: ignore[attr-defined]
    )
    for reading in made:
        assert 0 < reading.stop - reading.start <= window * FRAME, "more than a window is read"
        assert any(span.start <= reading.start and reading.stop <= span.stop for span in spans), "silence is read"
    read = {frame for reading in made for frame in range(reading.start, reading.stop, FRAME // 2)}
    spoken = {frame for span in spans for frame in range(span.start, span.stop, FRAME // 2)}
    assert spoken <= read, "speech is not read"


def test_the_next_utterance_is_read_from_its_own_beginning() -> None:
    """A step is of its own voice; silence does not count."""
    decides = endpointer(window=4_000)
    readings(decides, "_____#####______")
    assert decides.is_over
    decides.next()
    second = readings(decides, "__________#########")
    assert second == [(17, Reading(start=2_300, stop=3_300))], "a step of the second utterance is not what was read"


def test_an_utterance_is_not_over_before_it_is_read() -> None:
    decides = endpointer(window=4_000)
    decides.hear(frames("_____#####______"))
    assert not decides.is_over, "nothing was read"
    reading = decides.due()
    assert reading == Reading(start=200, stop=1_300, pauses=True)
    decides.read(reading)
    assert decides.is_over
