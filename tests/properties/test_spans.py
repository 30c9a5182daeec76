"""Speech spans: decided frame by frame as they are decided all at once, by the four steps of the module's docstring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.speech.voice import SpanRules, SpeechSpan, SpeechSpans

RATE, FRAME = 1_000, 100  # frames of 0.1 s

tenths = st.integers(0, 12).map(lambda count: count / 10)
probabilities = st.lists(st.sampled_from([0.0, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0]), max_size=30)
runs = st.lists(st.tuples(st.sampled_from([0.0, 0.4, 0.9]), st.integers(1, 20)), max_size=6).map(
    lambda parts: [probability for probability, count in parts for _ in range(count)]
)


@st.composite
def rules(draw: st.DrawFn) -> SpanRules:
    silence, padding = draw(tenths), draw(tenths)
    padding = min(padding, math.floor(silence * 5) / 10)
    thresholds = draw(st.sampled_from([(0.5, 0.35), (0.5, 0.5), (0.9, 0.1)]))
    return SpanRules(
        threshold=thresholds[0],
        end_threshold=thresholds[1],
        min_speech=draw(tenths),
        min_silence=silence,
        padding=padding,
    )


def all_at_once(heard: Sequence[float], rule: SpanRules, length: int) -> list[SpeechSpan]:
    """The four steps over the whole recording."""
    voiced: list[bool] = []
    for probability in heard:
        limit = rule.end_threshold if voiced and voiced[-1] else rule.threshold
        voiced.append(probability >= limit)
    joined: list[list[int]] = []
    for frame in (frame for frame, is_voiced in enumerate(voiced) if is_voiced):
        if joined and (frame == joined[-1][1] or frame - joined[-1][1] < frames(rule.min_silence)):
            joined[-1][1] = frame + 1
        else:
            joined.append([frame, frame + 1])
    spans = []
    padding = round(rule.padding * RATE)
    for start, stop in joined:
        if stop - start >= frames(rule.min_speech):
            spans.append(SpeechSpan(max(start * FRAME - padding, 0), min(stop * FRAME + padding, length)))
    return spans


def frames(seconds: float) -> int:
    return math.ceil(seconds * RATE / FRAME)


def little_by_little(heard: Sequence[float], rule: SpanRules, length: int, sizes: Sequence[int]) -> list[SpeechSpan]:
    """In blocks of ``sizes``, with what must hold after each."""
    decides = SpeechSpans(rule, RATE, FRAME)
    found: list[SpeechSpan] = []
    at, settled = 0, 0
    for size in [*sizes, len(heard)]:
        told = decides.hear(heard[at : at + size])
        at = min(at + size, len(heard))
        assert decides.frames == at
        assert all(span.start >= settled for span in told), "a span begins before what was settled"
        found += told
        assert decides.settled >= max([settled, *(span.stop for span in found)]), "what was settled is open again"
        settled = decides.settled
        if decides.open is not None:
            assert decides.open.start == settled
    return found + decides.end(length)


SOME = settings(max_examples=settings.default.max_examples * 3 // 8)  # so simple that the first ones find it


@given(
    heard=probabilities | runs, rule=rules(), sizes=st.lists(st.integers(0, 9), max_size=12), short=st.integers(0, 99)
)
@SOME
def test_little_by_little_is_all_at_once(heard: list[float], rule: SpanRules, sizes: list[int], short: int) -> None:
    """Whatever the blocks: the same spans, and each is told when it is final."""
    length = max(len(heard) * FRAME - short, 0)  # the last frame need not be whole
    assert little_by_little(heard, rule, length, sizes) == all_at_once(heard, rule, length)


@given(heard=runs, rule=rules(), longer=st.integers(1, 40))
@SOME
def test_a_span_is_told_as_soon_as_nothing_can_change_it(heard: list[float], rule: SpanRules, longer: int) -> None:
    """What is not told yet differs by what may follow: silence, or speech that goes on."""
    decides = SpeechSpans(rule, RATE, FRAME)
    told = decides.hear(heard)
    length = (len(heard) + longer) * FRAME
    silent, spoken = (all_at_once([*heard, *([one] * longer)], rule, length) for one in (0.0, 1.0))
    assert told == silent[: len(told)] == spoken[: len(told)], "it changed its mind"
    if longer >= frames(rule.min_silence) + 1 and len(told) < len(silent):
        assert silent[len(told)] != (spoken[len(told)] if len(told) < len(spoken) else None), "it was told too late"


def test_hysteresis_keeps_what_it_would_not_begin() -> None:
    rule = SpanRules(min_speech=0, min_silence=0, padding=0)
    heard = [0.4, 0.4, 0.6, 0.4, 0.36, 0.3, 0.4, 0.5]
    assert little_by_little(heard, rule, 800, []) == [SpeechSpan(200, 500), SpeechSpan(700, 800)]


def test_speech_ends_with_the_frame_that_completes_the_silence() -> None:
    """Not one frame before, since it may go on, and not one after."""
    decides = SpeechSpans(SpanRules(min_silence=0.4, padding=0.1), RATE, FRAME)
    assert decides.hear([0.9, 0.9, 0.9, 0.0, 0.0, 0.0]) == [], "it may go on"
    assert decides.open == SpeechSpan(0, 400)
    assert decides.hear([0.0]) == [SpeechSpan(0, 400)], "it has ended"
    assert decides.open is None
    assert decides.settled == 600


def test_nothing_heard_is_no_speech() -> None:
    decides = SpeechSpans(SpanRules(), 16_000, 512)
    assert decides.end(0) == []
    assert decides.settled == 0
    assert decides.open is None
