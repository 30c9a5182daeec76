"""The table of mutants: the walk of a transcription, its plans and cuts, what came before, pieces read at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio
import trio.testing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ..api import test_speech_cuts as cuts
from ..api import test_speech_parallel as parallel
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
    return lambda: trio.run(test, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


def timely(test: Callable[..., Any]) -> Killer:
    """One test without threads, which fails where it waits for ever."""

    async def run() -> None:
        with trio.fail_after(60):
            await test()

    return case(run)


CUT = examples(
    cuts.test_windows_cover_all_speech_and_never_overlap, cuts.speech(), cuts.all_rules(), st.integers(0, 200)
)
INSIDE = examples(cuts.test_a_window_is_never_cut_inside_speech_where_there_is_a_pause, cuts.speech(), cuts.all_rules())
LONG_PIECES = partial(cuts.test_a_piece_is_cut, 1, [(4, 950)], cuts.EVERYTHING, [(0, 800), (800, 954)])
PIECES = examples(
    cuts.test_pieces_tile_the_speech_and_are_not_cut_in_its_middle,
    cuts.speech(),
    cuts.all_rules(),
    cuts.clips_of(),
    st.integers(1, 80),
)

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
        name="a window is cut where it is full, although there is a pause",
        function="api.speech.cuts:_pause",
        fragment="return (start + stop) // 2",
        mistake="return latest",
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
        killer=case(walks.test_a_clip_of_a_few_samples_does_not_end_the_others, False, "en"),
        reason="times(transcription)",
    ),
    Mutant(
        name="text that misled the model is given on",
        function="api.speech.walk:Walk._remember",
        fragment="if read.misled:",
        mistake="if False:",
        killer=case(walks.test_text_that_misled_the_model_is_not_given_on),
        reason="texts_before(script) ==",
    ),
    Mutant(
        name="text sampled at the highest temperature that is given on is not",
        function="api.speech.history:History.add",
        fragment="temperature > self.reset_above",
        mistake="temperature >= self.reset_above",
        killer=examples(
            walks.test_the_history_is_the_end_of_all_text_since_the_last_reset,
            walks.texts,
            st.lists(st.integers(10, 19), max_size=6),
            st.integers(0, 8),
            st.booleans(),
        ),
        reason="history.last()",
    ),
    Mutant(
        name="the first window decides whether the last is certain",
        function="api.speech.languages:certain",
        fragment="last = found[-1]",
        mistake="last = found[0]",
        killer=case(
            walks.test_the_language_is_detected_in_several_windows_until_it_is_certain,
            3,
            [(0.3, 0.3), (0.1, 0.9)],
            "de",
            2,
        ),
        reason="starts ==",
    ),
    Mutant(
        name="where no window is certain the last one decides",
        function="api.speech.languages:Languages.detect",
        fragment="self._decide(mean(found))",
        mistake="self._decide(found[-1])",
        killer=case(
            walks.test_the_language_is_detected_in_several_windows_until_it_is_certain,
            9,
            [(0.55, 0.45), (0.55, 0.45), (0.55, 0.45), (0.4, 0.6)],
            "en",
            4,
        ),
        reason="transcription.language == language",
    ),
    Mutant(
        name="a multilingual recording has one language",
        function="api.speech.languages:Languages.of",
        fragment="not recipe.options.multilingual",
        mistake="self.language is not None",
        killer=case(walks.test_a_multilingual_recording_is_asked_for_its_language_in_every_window),
        reason="EN in request.prompt_token_ids",
    ),
    Mutant(
        name="coverage passes over a second of speech without text",
        function="api.speech.coverage:_untold",
        fragment="last - first < slight",
        mistake="last - first <= slight",
        killer=lambda: cuts.test_coverage(
            [(2, 4)], [(1, 4.5)], [(1, "silent"), (2, "failed"), (4, "speech"), (10, "silent")]
        ),
        reason="coverage(10.0, told, heard)",
    ),
    Mutant(
        name="coverage joins what is not alike",
        function="api.speech.coverage:_joined",
        fragment="found[-1].kind == one.kind and",
        mistake="",
        killer=examples(
            cuts.test_coverage_tells_every_second_once,
            cuts.quarters,
            cuts.apart(),
            cuts.apart(),
            st.sampled_from([0.25, 1.0, 2.0]),
        ),
        reason=("speech at", "silent at", "failed at", "nobody speaks at"),
    ),
    Mutant(
        name="a piece is cut inside of speech",
        function="api.speech.plan:VoicedPlan.piece",
        fragment="speaks(self.speech, stop)",
        mistake="False",
        killer=PIECES,
        reason="is cut inside of speech",
    ),
    Mutant(
        name="a piece has one window too many",
        function="api.speech.plan:VoicedPlan.piece",
        fragment="(MOST_WINDOWS if unbroken else windows)",
        mistake="(MOST_WINDOWS + 1 if unbroken else windows)",
        killer=LONG_PIECES,
        reason="(0, 900)",
    ),
    Mutant(
        name="a piece reaches into the next clip",
        function="api.speech.plan:VoicedPlan.piece",
        fragment="self._clip_ends(stop, following[0])",
        mistake="False",
        killer=PIECES,
        reason=("outside of the clips", "is too long"),
    ),
    Mutant(
        name="every window of short audio shares a piece",
        function="api.speech.parallel:ParallelTranscription._windows",
        fragment="max(1, min(full // _LEAST_PIECES, _MOST_TOGETHER))",
        mistake="_MOST_TOGETHER",
        killer=case(parallel.test_a_piece_has_windows_by_the_length_of_the_audio, 9, 2),
        reason="assert [0, 4, 8] == [0, 2, 4, 6, 8]",
    ),
    Mutant(
        name="whichever piece is read is told",
        function="api.speech.parallel:ParallelTranscription._next",
        fragment="self._of_first(self._pieces[0])",
        mistake="self._of_first(self._pieces[-1])",
        killer=case(parallel.test_segments_come_in_order_whatever_ends_first),
        reason="told == expected",
    ),
    Mutant(
        name="a piece that failed is never read again",
        function="api.speech.parallel:ParallelTranscription._go_on",
        fragment="self._pieces[0].failed",
        mistake="False",
        killer=timely(parallel.test_an_error_is_raised_when_all_before_it_was_told_and_the_piece_can_be_read_again),
        reason="TooSlowError",
    ),
    Mutant(
        name="a recording that failed is never cut on",
        function="api.speech.parallel:ParallelTranscription._cut",
        fragment="self._error = error",
        mistake="self._error, self._all_cut = error, True",
        killer=case(parallel.test_a_recording_that_failed_is_cut_on_by_the_next_call),
        reason="rest.segments",
    ),
    Mutant(
        name="a piece's error is told before what it has read",
        function="api.speech.parallel:ParallelTranscription._of_first",
        fragment="if piece.read:",
        mistake="if piece.read and piece.error is None:",
        killer=case(parallel.test_what_a_piece_has_read_is_told_before_its_error),
        reason="told ==",
    ),
    Mutant(
        name="a piece that is read keeps its place",
        function="api.speech.parallel:ParallelTranscription._read",
        fragment="self._at_once.release()",
        mistake="pass",
        killer=case(parallel.test_one_piece_more_is_cut_than_may_be_read_at_once),
        reason="sorted(run.asked) == [0, 1, 2]",
    ),
)
