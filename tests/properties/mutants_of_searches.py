"""The table of mutants: beam search."""

from __future__ import annotations

import functools

from . import test_beams, test_planner_searches
from .mutants import SEARCH, Mutant

MUTANTS: tuple[Mutant, ...] = (
    # where beams lie
    Mutant(
        name="two beams write into one page",
        function="core.beam_pages:BeamPages.enter",
        fragment="        if page in seen:\n",
        mistake="        if False:\n",
        killer=test_beams.beams_read_their_own_tokens,
        reason="a page is written while two beams read it",
    ),
    Mutant(
        name="a beam's own page is not copied",
        function="core.beam_pages:BeamPages.enter",
        fragment="    return tuple(copies)\n",
        mistake="    return ()\n",
        killer=test_beams.beams_read_their_own_tokens,
        reason=("KeyError", "a beam's pages spell its own tokens"),
    ),
    Mutant(
        name="beams keep the pages of those that were in their place",
        function="core.beam_pages:BeamPages.go_on",
        fragment="[block[parent] for parent in parents]",
        mistake="[*block, *block, *block][: len(parents)]",
        killer=test_beams.beams_read_their_own_tokens,
        reason=("a beam's pages spell its own tokens", "KeyError"),
    ),
    Mutant(
        name="beams share the first page behind a prompt that fills its last one",
        function="core.beam_pages:BeamPages.enter",
        fragment="if position % self.page_size else list(range(self._beams))",
        mistake="if True else []",
        killer=test_beams.test_beams_that_go_on_alone_move_no_page,
        reason="enter(2, range(4)) == ()",
    ),
    # what is found
    Mutant(
        name="every candidate may end",
        function="core.beams:BeamSearch.advance",
        fragment="ends and place < settings.size",
        mistake="ends",
        killer=test_beams.test_only_the_best_candidates_may_end_and_those_behind_take_their_beams_place,
        reason="counts for nothing",
    ),
    Mutant(
        name="the prompt's length counts in the score",
        function="core.beams:BeamSettings.score",
        fragment="math.pow(length, ",
        mistake="math.pow(length + 1, ",
        killer=test_beams.hypotheses_are_what_they_say,
        reason="one.score ==",
    ),
    Mutant(
        name="a search without patience is over as soon as it has enough",
        function="core.beams:BeamSearch._is_over",
        fragment="self.settings.early or ",
        mistake="True or ",
        killer=functools.partial(
            test_beams.test_without_patience_a_search_is_over_when_its_best_beam_can_do_no_better, -2.9, False
        ),
        reason="search.done is over",
    ),
    # the planner
    Mutant(
        name="a search that starts anew keeps its stand-ins",
        function="core.planning.sequence:Sequence.rewind",
        fragment="if self.beams > 1:",
        mistake="if False:",
        killer=SEARCH,
        reason=("a search starts anew from its prompt", "every position of a beam is fed once"),
    ),
    Mutant(
        name="a page of one beam can be found",
        function="core.planning.room:Room.list_pages",
        fragment="if sequence.beams == 1 else sequence.prompt_length",
        mistake="if True else 0",
        killer=test_planner_searches.test_only_the_full_pages_of_a_searchs_prompt_can_be_found,
        reason="pages_cached",
    ),
    Mutant(
        name="a search has the pages of one sequence",
        function="core.planning.sequence:Sequence.pages_for",
        fragment="if self.beams == 1:",
        mistake="if True:",
        killer=SEARCH,
        reason=("each block behind the prompt has a page for each beam", "no more pages than positions need", "range"),
    ),
    Mutant(
        name="a search that replays what it had is innocent",
        function="core.planning.planner:_to_clear",
        fragment=" and not sequence.replays",
        mistake="",
        killer=test_planner_searches.test_a_search_that_crashes_its_later_steps_is_poison,
        reason="tried again for ever",
    ),
    Mutant(
        name="a search is as likely to have crashed in each of its steps",
        function="core.planning.quarantine:Quarantine._is_poison",
        fragment=" or suspect.crashes_at_its_token >= needed()",
        mistake="",
        killer=test_planner_searches.test_a_search_that_crashes_one_late_step_does_not_run_all_the_others_again_and_again,
        reason="it starts anew more than once",
    ),
    Mutant(
        name="failures of a search where it went well before speak against it",
        function="core.planning.quarantine:Quarantine.step_failed",
        fragment=" if request_id not in replaying",
        mistake="",
        killer=test_planner_searches.test_a_search_that_fails_where_it_went_well_before_has_a_flaky_device_and_is_innocent,
        reason="an innocent search is condemned",
    ),
    Mutant(
        name="a search that cannot be smaller is tried again for ever",
        function="core.planning.planner:Planner._divisible",
        fragment="any(part.length + part.draft_tokens > 1 for part in step.plan.chunks)",
        mistake="step.plan.tokens > 1",
        killer=test_planner_searches.test_a_search_too_large_for_the_memory_fails,
        reason="tried again for ever",
    ),
    Mutant(
        name="a search with more rows than a smaller step never runs",
        function="core.planning.acts:Acts._chosen",
        fragment=" or not (chosen or draft.parts)",
        mistake="",
        killer=test_planner_searches.test_a_search_larger_than_a_smaller_step_runs_alone,
        reason="the search waits for ever",
    ),
)
