"""The table of mutants: live sessions, what is stable and what is read."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from . import test_agreement, test_endpoints, test_live_words
from .mutants import Killer, Mutant


def few(test: Any, strategies: dict[str, Any]) -> Killer:
    """A property over a few examples, the same in every run, not shrunk."""
    check = test.hypothesis.inner_test

    def kill(**drawn: Any) -> None:
        check(**drawn)

    chosen = settings(
        derandomize=True,
        max_examples=150,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return chosen(given(**strategies)(kill))


AGREES = few(test_agreement.test_stable_text_is_only_added_to_and_has_every_word_once, {"acts": test_agreement.ACTS})
READS = few(test_endpoints.test_all_speech_is_read_and_nothing_else, test_endpoints.SESSIONS)
TIMES = few(test_live_words.test_words_are_timed_in_order_and_joined_are_the_text, test_live_words.TEXTS)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a word is stable by one hypothesis",
        function="api.live.agreement:agreed",
        fragment="            break",
        mistake="            count += 1\n            break",
        killer=AGREES,
        reason="a word is stable by two hypotheses, and no other one is",
    ),
    Mutant(
        name="words that are the same anywhere behind a difference are stable",
        function="api.live.agreement:agreed",
        fragment="            break",
        mistake="            continue",
        killer=AGREES,
        reason="a word is stable by two hypotheses, and no other one is",
    ),
    Mutant(
        name="stable words are provisional too",
        function="api.live.agreement:Agreement._accept",
        fragment="words[:count], words[count:]",
        mistake="words[:count], words",
        killer=AGREES,
        reason=("stable and provisional words are the hypothesis", "settling changes no word"),
    ),
    Mutant(
        name="stable words are replaced",
        function="api.live.agreement:Agreement._accept",
        fragment="self.stable + words[:count]",
        mistake="words[:count]",
        killer=AGREES,
        reason="a stable word is lost or repeated",
    ),
    Mutant(
        name="the last words are forgotten",
        function="api.live.agreement:Agreement.forget",
        fragment="self.stable[:count], self.stable[count:]",
        mistake="self.stable[-count:], self.stable[:-count]",
        killer=AGREES,
        reason=("other words than the first are forgotten", "a stable word is lost or repeated"),
    ),
    Mutant(
        name="more than a window is read",
        function="api.live.endpoints:Endpointer.due",
        fragment="min(stop, start + self.window)",
        mistake="stop",
        killer=READS,
        reason="more than a window is read",
    ),
    Mutant(
        name="a full window waits for more voice",
        function="api.live.endpoints:Endpointer.due",
        fragment="stop - start > self.window or (not self._ended and self.is_full)",
        mistake="stop - start > self.window",
        killer=READS,
        reason="hearing waits, and nothing is due",
    ),
    Mutant(
        name="an utterance that was read before its end is not read at its end",
        function="api.live.endpoints:Endpointer.due",
        fragment="done.stop >= stop and done.pauses",
        mistake="done.pauses",
        killer=test_endpoints.test_a_step_of_new_voice_is_read_and_each_pause_at_once,
        reason="assert readings(decides",
    ),
    Mutant(
        name="silence behind voice is read as far as it was heard",
        function="api.live.endpoints:Endpointer.due",
        fragment="min(utterance.stop, self._heard)",
        mistake="self._heard",
        killer=READS,
        reason=("silence is read", "hearing waits, and nothing is due"),
    ),
    Mutant(
        name="what waits to be read is forgotten",
        function="api.live.endpoints:Endpointer.needed",
        fragment="self._ended[0].start if self._ended else self._spans.settled",
        mistake="self._spans.settled",
        killer=READS,
        reason="what is due was forgotten",
    ),
    Mutant(
        name="the next utterance is taken for read as far as the last one",
        function="api.live.endpoints:Endpointer.next",
        fragment="self._read = None",
        mistake="pass",
        killer=test_endpoints.test_the_next_utterance_is_read_from_its_own_beginning,
        reason="a step of the second utterance is not what was read",
    ),
    Mutant(
        name="an utterance is over before its silence is read to",
        function="api.live.endpoints:Endpointer.is_over",
        fragment="bool(self._ended) and self.due() is None",
        mistake="bool(self._ended)",
        killer=test_endpoints.test_an_utterance_is_not_over_before_it_is_read,
        reason="nothing was read",
    ),
    Mutant(
        name="a mark has the pause behind it",
        function="api.live.words:_mended",
        fragment="word = evolve(word, start=at, end=at)",
        mistake="pass",
        killer=TIMES,
        reason="a mark has a length",
    ),
    Mutant(
        name="a word is cut from its mark",
        function="api.live.words:_is_whole",
        fragment="words[count].number != words[count - 1].number",
        mistake="True",
        killer=test_live_words.test_a_cut_leaves_a_word_whole,
        reason="assert",
    ),
    Mutant(
        name="an utterance is cut in the middle of a sentence",
        function="api.live.words:cut",
        fragment="(sentences or whole)[-1]",
        mistake="whole[-1]",
        killer=test_live_words.test_a_cut_is_behind_the_last_stable_sentence,
        reason="assert",
    ),
)
