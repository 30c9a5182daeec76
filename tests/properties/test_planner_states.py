"""The promises of the planner for models with recurrent layers, whose sequences have states beside their pages.

The simulated device keeps in each state the fingerprint of all that it has read, and refuses a chunk whose state has
read something else. So a state that is shared and written, that is read after it was given away, or that was not copied
where it had to be, is an error there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from triolet.core.errors import RunnerCrashed
from triolet.core.planning.planner import Planner
from triolet.core.planning.sequence import Phase, Sequence
from triolet.core.request import Request, SamplingParams
from triolet_testing.sim import SimExecutor

from .test_planner import opened, run
from .test_planner_machines import SearchMachine


class StatesMachine(SearchMachine):
    """Few states, so that kept ones are evicted, and sequences wait for one."""

    @initialize(
        pages=st.integers(6, 12),
        running=st.integers(1, 4),
        states=st.integers(1, 10),
        budget=st.integers(3, 12),
        depth=st.integers(1, 2),
        caching=st.sampled_from((True, True, True, False)),
        draft_tokens=st.sampled_from((0, 0, 3, 6)),
        headroom=st.sampled_from((0, 1)),
    )
    def open(
        self,
        pages: int,
        running: int,
        states: int,
        budget: int,
        depth: int,
        caching: bool,
        draft_tokens: int,
        headroom: int,
    ) -> None:
        sizes = {"pages": pages, "running": running, "budget": budget, "depth": depth, "states": states}
        super().open(**sizes, slots=2, capacity=2, caching=caching, draft_tokens=draft_tokens, headroom=headroom)

    @rule(first=st.integers(1, 3), length=st.integers(5, 14), max_tokens=st.integers(1, 6))
    def submit_long(self, first: int, length: int, max_tokens: int) -> None:
        """Prompts of several pages that begin alike and end differently."""
        text = (*range(2, 1 + length), 50 + first)
        self.ask(text, (), max_tokens=max_tokens, poison=False)

    @rule(
        length=st.integers(5, 12),
        more=st.integers(0, 3),
        turns=st.integers(3, 9),
        max_tokens=st.integers(1, 6),
        beams=st.sampled_from((1, 1, 2, 3)),
    )
    def submit_again(self, length: int, more: int, turns: int, max_tokens: int, beams: int) -> None:
        """A prompt that goes on from where another one has come."""
        self.submit_long(1, length, max_tokens)
        self.work_on(turns)
        text, sampling = tuple(range(2, 2 + length + more)), SamplingParams(beam_size=beams)
        self.ask(text, (), max_tokens=max_tokens, poison=False, sampling=sampling)
        self.plan()

    @rule(turns=st.integers(4, 12))
    def work_on(self, turns: int) -> None:
        """The device works undisturbed for a while."""
        for _ in range(turns):
            self.plan()
            self.device_encodes(broken=False)
            self.device_steps(broken=False)
            self.cache_answers(most=len(self.answers))

    def found_pages(self, sequence: Sequence) -> tuple[int, int]:
        """And a state that has read all of them, if its own states leave room for that one."""
        room, found = self.planner._room, []
        if sequence.beams == self.limits.states:
            return 0, 0
        for most in super().found_pages(sequence):
            ends = [end for end in range(1, most + 1) if room.states.resident(sequence.page_keys.last_of(end))]
            found.append(max(ends, default=0))
        self.seen["a page is found without a state"] += found[0] < super().found_pages(sequence)[0]
        return found[0], found[1]

    def was_too_large(self, request: Request) -> None:
        if request.sampling.beam_size <= self.limits.states:
            super().was_too_large(request)

    def own_states(self) -> Iterator[int]:
        for sequence in self.planner._sequences.values():
            yield from sequence.states

    def copies(self) -> Iterator[int]:
        for plan in self.flights:
            yield from (keep.state for part in plan.chunks for keep in part.keeps)

    @invariant()
    def a_state_is_never_shared_and_written(self) -> None:
        sources = {one.source for one in self.planner._sequences.values() if one.source is not None}
        written = Counter((*self.own_states(), *self.copies()))
        assert max(written.values(), default=0) <= 1, "a state is never shared and written"
        assert not written.keys() & sources, "a state that sequences go on from is never written"
        free = self.planner.statistics().states_free
        assert len(written) + len(sources) + free == self.limits.states, "books balance: a state is free or taken"

    @invariant()
    def what_is_given_away_is_forgotten(self) -> None:
        """A device has no need to keep what the planner counts as free, whatever steps are in flight."""
        self.executor.give_away(self.planner._room.states._free)

    @invariant()
    def a_kept_state_goes_with_its_pages(self) -> None:
        room = self.planner._room
        assert room.states._listed.keys() <= room.pages._listed.keys(), "a state is kept, and its last page is gone"
        assert room.states._worth <= room.states._listed.keys()
        self.seen["kept"] += bool(room.states._listed)

    @invariant()
    def sequences_have_what_they_need(self) -> None:
        for sequence in self.planner._sequences.values():
            most = 2 if sequence.beams == 1 and self.limits.draft_tokens else sequence.beams
            if sequence.phase is Phase.RUNNING:
                assert sequence.beams <= len(sequence.states) <= most, "a state for each beam, and one for drafts"
                self.seen["drafts"] += sequence.beams == 1 and len(sequence.states) == 2
                self.seen["beams"] += sequence.beams > 1
                self.seen["goes on"] += sequence.source is not None
            if sequence.phase is Phase.WAITING:
                assert not sequence.states, "a waiting request holds no states"
                assert sequence.source is None, "a waiting request holds no states"

    def everything_is_given_back(self) -> None:
        super().everything_is_given_back()
        assert self.planner.statistics().states_free == self.limits.states, "always freed eventually: states are left"
        assert not self.executor.misuses, "a state is read that has read something else"


# -- what one history shows ------------------------------------------------------------------------------------------


def starts(planner: Planner, executor: SimExecutor, *asked: Request) -> list[int]:
    """The positions at which requests start, each after the one before has ended."""
    found = []
    for one in asked:
        planner.submit(one)
        found.append(run(planner, executor)[0].chunks[0].start)
    return found


def of_text(name: str, *text: int, max_tokens: int = 1, **more: object) -> Request:
    return Request(id=name, prompt_token_ids=text, max_tokens=max_tokens, **more)


TALK = tuple(range(2, 40))


def test_a_conversation_is_read_on_from_the_end_of_its_last_prompt():
    """A page has four positions. The same prompt, one that is longer, and one that is some tokens shorter."""
    planner, executor = opened(states=8, prefix_caching=True)
    lengths = (14, 14, 20, 17)
    assert starts(planner, executor, *[of_text(f"r{n}", *TALK[:n]) for n in lengths[:1]]) == [0]
    again = [of_text(f"again{at}", *TALK[:n]) for at, n in enumerate(lengths[1:])]
    assert starts(planner, executor, *again) == [12, 12, 16]
    assert starts(planner, executor, of_text("shorter", *TALK[:12])) == [8], "the end of the page before the last one"


def test_where_prompts_leave_each_other_a_state_is_kept_from_the_second_one_on():
    planner, executor = opened(states=8, prefix_caching=True)
    texts = [(*TALK[:16], *range(60 + n, 48 + n, -1)) for n in range(3)]
    assert starts(planner, executor, *[of_text(f"r{n}", *text) for n, text in enumerate(texts)]) == [0, 0, 16]


def test_a_sequence_that_reads_on_keeps_its_prompts_last_ends_and_one_more():
    planner, executor = opened(states=8, prefix_caching=True)
    greedy = SamplingParams(ignore_eos=True)
    planner.submit(of_text("r", *TALK[:9], max_tokens=30, sampling=greedy))
    run(planner, executor)
    assert planner.statistics().states_cached == 3


def test_a_copy_that_was_written_lets_the_next_request_start():
    """It has had the last state until then."""
    planner, executor = opened(states=2, prefix_caching=True, depth=2)
    planner.submit(of_text("first", *TALK[:8], max_tokens=6, sampling=SamplingParams(ignore_eos=True)))
    step = planner.next_step()
    assert step.chunks[0].keeps
    planner.submit(of_text("second", *range(50, 45, -1)))
    assert len(planner.next_step().chunks) == 1, "a state is there that should not be"
    planner.step_done(executor.step(step))
    assert len(planner.next_step().chunks) == 2, "a request waits for a state that is there"


def test_an_urgent_request_gets_the_state_of_another():
    planner, executor = opened(states=1)
    planner.submit(of_text("patient", 3, 4, max_tokens=8, priority=1, sampling=SamplingParams(ignore_eos=True)))
    planner.step_done(executor.step(planner.next_step()))
    planner.submit(of_text("urgent", 5, 6))
    run(planner, executor)
    assert planner.statistics().preemptions == 1
    assert planner.statistics().states_free == 1


def test_a_runner_that_is_gone_leaves_no_state_taken():
    """Neither own ones, nor those that steps in flight write and go on from."""
    planner, executor = opened(states=6, prefix_caching=True, depth=2)
    starts(planner, executor, of_text("before", *TALK[:9]))
    for name in ("r", "s"):
        planner.submit(of_text(name, *TALK[:13], max_tokens=4))
    plan = planner.next_step()
    assert plan.chunks[0].keeps
    assert plan.started[0].state is not None
    planner.next_step()
    planner.fail_all(RunnerCrashed("gone"))
    assert planner.idle
    assert planner.statistics().states_free == 6


def test_states_keep_every_promise():
    StatesMachine.seen.clear()
    examples = settings(stateful_step_count=50, max_examples=settings.default.max_examples // 2)
    run_state_machine_as_test(StatesMachine, settings=examples)
    for situation in ("kept", "drafts", "beams", "goes on", "a page is found without a state"):
        assert StatesMachine.seen[situation], f"no example comes into the situation {situation!r}"
