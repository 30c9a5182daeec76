"""The table of mutants: alignments in the planner, and words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from ..api import test_words
from . import test_alignment
from .mutants import Killer, Mutant


def _drawn(check: Callable[..., None], strategies: dict[str, Any], examples: int = 100) -> Killer:
    """A property over a few examples, the same in every run, not shrunk."""
    chosen = settings(
        derandomize=True,
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def kill(**drawn: Any) -> None:
        check(**drawn)

    return chosen(given(**strategies)(kill))


_ANSWERED = _drawn(test_alignment.alignments_are_answered, test_alignment.HISTORIES)
_SPLIT = _drawn(test_words.words_are_the_text, test_words.BYTES)
_PLACED = _drawn(test_words.words_are_in_order, test_words.WINDOWS)


def _long_first_word() -> None:
    test_words.test_long_words_are_mended(
        "a first word that has the pause before it begins late",
        " a b c",
        [0.02, 4.0, 4.2, 4.4],
        (0.02, 4.4),
        [(" a", 3.6, 4.0), (" b", 4.0, 4.2), (" c", 4.2, 4.4)],
    )


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="an alignment finds all its tokens in the prefix cache",
        function="core.planning.sequence:Sequence.most_cached",
        fragment="most = min(most, self.request.alignment.start - 1)",
        mistake="pass",
        killer=_ANSWERED,
        reason="needs what comes before it",
    ),
    Mutant(
        name="the token before the first aligned one is found in the prefix cache",
        function="core.planning.sequence:Sequence.most_cached",
        fragment="self.request.alignment.start - 1)",
        mistake="self.request.alignment.start)",
        killer=_ANSWERED,
        reason="needs what comes before it",
    ),
    Mutant(
        name="half a character at the end of a segment is lost",
        function="api.speech.words:_characters",
        fragment=" if last < len(token_ids) else text[begun:]",
        mistake="",
        killer=_SPLIT,
        reason=("the words are the text", "each token is in one word"),
    ),
    Mutant(
        name="a segment's end is not its last word's",
        function="api.speech.words:_mended",
        fragment="end=found[-1].end",
        mistake="end=segment.end",
        killer=_PLACED,
        reason=("a segment is its words", "segments do not overlap"),
    ),
    Mutant(
        name="a first word is lengthened into the text before it",
        function="api.speech.words:_after_pause",
        fragment="max(first.start, first.end - longest)",
        mistake="first.end - 2 * longest",
        killer=_long_first_word,
        reason="a first word that has the pause before it begins late",
    ),
    Mutant(
        name="a last word is lengthened into the text behind it",
        function="api.speech.words:_hinted",
        fragment="end=min(last.end, end)",
        mistake="end=last.end + 1.0",
        killer=_PLACED,
        reason=("segments do not overlap", "words are in order", "no word ends behind its window"),
    ),
)
