"""The table of mutants: the spans of speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from . import test_spans
from .mutants import Killer, Mutant
from .test_spans import rules

LONG = st.lists(st.tuples(st.sampled_from([0.0, 0.4, 0.9]), st.integers(5, 20)), min_size=4, max_size=6).map(
    lambda parts: [probability for probability, count in parts for _ in range(count)]
)


def examples(test: Any, **strategies: st.SearchStrategy[Any]) -> Killer:
    """A property over a few examples, the same in every run, not shrunk."""
    check: Callable[..., None] = test.hypothesis.inner_test

    @settings(
        derandomize=True,
        max_examples=80,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.fixed_dictionaries({"heard": LONG, "rule": rules(), **strategies}))
    def kill(values: dict[str, Any]) -> None:
        check(**values)

    return kill


SAME = examples(
    test_spans.test_little_by_little_is_all_at_once,
    sizes=st.lists(st.integers(0, 9), max_size=12),
    short=st.integers(0, 99),
)
ORDERED = examples(test_spans.test_spans_are_ordered_and_disjoint_and_cover_what_is_voiced, short=st.integers(0, 99))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a frame is judged as if nobody had spoken before",
        function="api.speech.spans:SpeechSpans._hear",
        fragment="self.rules.end_threshold if self._voiced else self.rules.threshold",
        mistake="self.rules.threshold",
        killer=test_spans.test_hysteresis_keeps_what_it_would_not_begin,
        reason="[SpeechSpan(200, 500)",
    ),
    Mutant(
        name="a span is told one frame too early",
        function="api.speech.spans:SpeechSpans._hear",
        fragment="self.frames - self._stop >= self._silent_frames",
        mistake="self.frames - self._stop >= self._silent_frames - 1",
        killer=test_spans.test_speech_ends_with_the_frame_that_completes_the_silence,
        reason="it may go on",
    ),
    Mutant(
        name="a span is told one frame too late",
        function="api.speech.spans:SpeechSpans._hear",
        fragment="self.frames - self._stop >= self._silent_frames",
        mistake="self.frames - self._stop > self._silent_frames",
        killer=test_spans.test_speech_ends_with_the_frame_that_completes_the_silence,
        reason="it has ended",
    ),
    Mutant(
        name="a noise counts as speech",
        function="api.speech.spans:SpeechSpans._told",
        fragment="self._stop - start < self._least_frames",
        mistake="False",
        killer=SAME,
        reason="all_at_once(heard, rule, length)",
    ),
    Mutant(
        name="speech begins before the recording",
        function="api.speech.spans:SpeechSpans._begin",
        fragment="max(start * self.frame_samples - self._padding, 0)",
        mistake="start * self.frame_samples - self._padding",
        killer=ORDERED,
        reason=("0 <= span.start", "what was settled is open again", "begins before what was settled"),
    ),
    Mutant(
        name="padding reaches beyond the recording",
        function="api.speech.spans:SpeechSpans._told",
        fragment="min(stop, length)",
        mistake="stop",
        killer=ORDERED,
        reason="span.stop <= length",
    ),
)
