"""The table of mutants: the walk of a transcription, its plans and cuts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import trio
import trio.testing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..api import test_speech_cuts as cuts
from ..api import test_speech_walk as walks
from .mutants import Killer, Mutant

CHOSEN = settings(
    derandomize=True,
    max_examples=150,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def examples(test: Any, *strategies: Any) -> Killer:
    """A property over a few examples, the same in every run, not shrunk."""
    inner: Callable[..., None] = test.hypothesis.inner_test

    @CHOSEN
    @given(st.tuples(*strategies))
    def kill(values: Any) -> None:
        inner(*values)

    return kill


def case(test: Callable[..., Any], *arguments: Any) -> Killer:
    """One test on virtual time."""
    return functools.partial(trio.run, test, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


CUT = examples(
    cuts.test_windows_cover_all_speech_and_never_overlap, cuts.speech(), cuts.all_rules(), st.integers(0, 200)
)
INSIDE = examples(cuts.test_a_window_is_never_cut_inside_speech_where_there_is_a_pause, cuts.speech(), cuts.all_rules())

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="speech that a window does not finish is not read",
        function="api.speech.cuts:window_at",
        fragment="return start, min(before + rules.padding, latest)",
        mistake="return start, latest",
        killer=examples(cuts.test_no_long_silence_is_read, cuts.speech(), cuts.all_rules()),
        reason="silence of",
    ),
    Mutant(
        name="a window is longer than the model can read",
        function="api.speech.cuts:window_at",
        fragment="return start, min(ahead[-1][1] + rules.padding, latest)",
        mistake="return start, ahead[-1][1] + rules.padding",
        killer=CUT,
        reason="too long",
    ),
    Mutant(
        name="a window is cut where it is quietest, although there is a pause",
        function="api.speech.cuts:_cut",
        fragment="if not pauses:",
        mistake="if True:",
        killer=INSIDE,
        reason="although there are pauses",
    ),
    Mutant(
        name="a window without progress is read again",
        function="api.speech.walk:Walk._far_enough",
        fragment="if self._short else 1",
        mistake="if self._short else 0",
        killer=case(walks.test_without_progress_the_window_is_used_up),
        reason="script.requests",
    ),
    Mutant(
        name="a short clip ends the clips behind it",
        function="api.speech.reader:WindowReader.ends_before",
        fragment="min(planned, self.recipe.timestamp_step)",
        mistake="self.recipe.timestamp_step",
        killer=functools.partial(case(walks.test_a_clip_of_a_few_samples_does_not_end_the_others, False, "en")),
        reason="times(transcription)",
    ),
    Mutant(
        name="detection forgets what the walk will read",
        function="api.speech.transcription:_FirstWindows.next",
        fragment="ahead=self._seek > 0",
        mistake="ahead=False",
        killer=case(walks.test_what_the_language_was_detected_in_is_read_from_its_beginning),
        reason="was forgotten",
    ),
)
