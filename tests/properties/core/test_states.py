"""The books of recurrent states, and the states of beams: what is read is what was written, and nothing is lost."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import initialize, invariant, rule

from triolet.core.plan import Chunk, Keep
from triolet.core.planning.states import StatePool
from triolet.core.recurrent import BeamStates, OwnState

from ..machines import Machine

KEYS = ("a", "b", "c", "d")


class StatesMachine(Machine):
    """Sequences that take states, keep some under keys, go on from those that others kept, and leave."""

    @initialize(total=st.integers(1, 6))
    def open(self, total: int) -> None:
        self.states = StatePool(total)
        self.own: list[int] = []
        self.readers: list[tuple[int, str]] = []  # of kept states, with the key that each was found under
        self.listed: dict[str, int] = {}
        self.worth: set[str] = set()
        self.written: dict[int, str] = {}  # what lies in a state that was kept
        self.unused: list[str] = []  # keys of kept states without a reader, the first to be evicted first

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        free = self.states.free
        states = self.states.try_take(count)
        if states is None:
            assert count > free, "what is free can be taken"
            return
        in_use = {*self.own, *(state for state, _ in self.readers)}
        assert not in_use & set(states), "no state is taken from its users"
        lost = max(0, count - (free - len(self.unused)))
        for key in self.unused[:lost]:
            assert self.listed[key] in states, "least recently used first"
            self.forget(key)
        assert not set(states) & set(self.listed.values()), "what is taken is found no more"
        self.own += states

    def forget(self, key: str) -> None:
        self.listed.pop(key, None)
        self.worth.discard(key)
        self.unused = [one for one in self.unused if one != key]

    @rule(data=st.data(), key=st.sampled_from(KEYS), worth=st.booleans())
    def keep(self, data: st.DataObject, key: str, worth: bool) -> None:
        if not self.own:
            return
        state = self.own.pop(data.draw(st.integers(0, len(self.own) - 1)))
        anew = self.states.keep(state, key, worth=worth)
        assert anew == (key not in self.listed), "one state for a key"
        if anew:
            self.listed[key] = state
            self.written[state] = key
            self.unused.append(key)
        if worth:
            self.worth.add(key)

    @rule(key=st.sampled_from(KEYS))
    def go_on(self, key: str) -> None:
        assert self.states.resident(key) == (key in self.listed)
        if key not in self.listed:
            return
        state = self.states.share(key)
        assert self.written[state] == key, "no phantom: a state has read what it is found as"
        self.readers.append((state, key))
        self.unused = [one for one in self.unused if one != key]

    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        if not self.readers:
            return
        state, key = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        assert self.written[state] == key, "what is read stays as it is"
        self.states.give_back((state,))
        if self.listed.get(key) == state and state not in {one for one, _ in self.readers}:
            self.unused.append(key)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.own:
            self.states.give_back((self.own.pop(data.draw(st.integers(0, len(self.own) - 1))),))

    @rule(key=st.sampled_from(KEYS))
    def pages_are_gone(self, key: str) -> None:
        self.states.unlist(key)
        self.forget(key)

    @rule(key=st.sampled_from(KEYS))
    def give_way(self, key: str) -> None:
        self.states.give_way(key)
        if key in self.unused and key not in self.worth:
            self.forget(key)

    @rule(really=st.sampled_from((False, False, True)))
    def contents_are_lost(self, really: bool) -> None:
        if really:
            self.states.forget_contents()
            self.listed.clear()
            self.worth.clear()
            self.unused.clear()

    @invariant()
    def every_state_is_free_or_in_use(self) -> None:
        in_use = {*self.own, *(state for state, _ in self.readers)}
        assert len(in_use) + self.states.free == self.states.total, "books balance"
        assert self.states.cached == len(self.unused), "books balance: of kept states"
        assert max(Counter(self.own).values(), default=0) <= 1
        assert not set(self.own) & {state for state, _ in self.readers}, "a state that is read is never written"
        for key in KEYS:
            assert self.states.resident(key) == (key in self.listed)
            assert self.states.is_cached(key) == (key in self.unused)
        assert self.states._worth == self.worth, "nothing is worth keeping that is gone"

    def teardown(self) -> None:
        """Whatever was taken can be taken again."""
        if self.failed:
            return
        self.states.give_back(self.own)
        for state, _ in self.readers:
            self.states.give_back((state,))
        assert sorted(self.states.try_take(self.states.total) or ()) == list(range(self.states.total))


def test_what_is_read_neither_gives_way_nor_comes_back():
    states = StatePool(2)
    (state,) = states.try_take(1)
    states.keep(state, "a", worth=False)
    states.share("a")
    states.give_way("a")
    assert states.resident("a"), "it gives way though it is read"
    states.unlist("a")
    assert states.free == 1, "it counts as free though it is read"
    states.give_back((state,))
    assert states.free == 2


TestStates = StatesMachine.TestCase
TestStates.settings = settings(stateful_step_count=30)


@given(
    size=st.integers(1, 5),
    choices=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=12),
)
def test_each_beam_has_a_state_of_its_own_that_has_read_its_tokens(size: int, choices: list[list[int]]) -> None:
    """Beams fork, die and go on in any order. Copies are made one after the other, as devices do."""
    states, table = BeamStates(size), [7 * (number + 1) for number in range(size)]
    held = dict.fromkeys(table, (-1,))  # the tokens that each state has read
    held[table[0]] = ()
    beams: list[tuple[int, ...]] = [()]
    for number, choice in enumerate(choices):
        parents = [parent % len(beams) for parent in choice[:size]]
        states.go_on(parents)
        beams = [beams[parent] for parent in parents]
        copies = states.enter(table)
        assert not {source for source, _ in copies} & {target for _, target in copies}
        assert len(copies) == len(parents) - len(set(parents)), "who goes on alone is not copied"
        for source, target in copies:
            held[target] = held[source]
        own = [states.of(index, table) for index in range(len(beams))]
        assert len(set(own)) == len(own), "beams share no state, since each changes its own"
        assert set(own) <= set(table), "a state that the planner has not given"
        assert [held[state] for state in own] == beams, "a beam's state has read its own tokens"
        beams = [(*beam, 10 * number + index) for index, beam in enumerate(beams)]
        held.update(zip(own, beams, strict=True))
    assert states.enter(table) == (), "a copy is made once"


@given(
    cached=st.sampled_from((0, 4)),
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
)
def test_a_sequences_state_has_read_each_of_its_tokens_once_and_no_wrong_draft(
    cached: int, steps: list[tuple[int, int, int]]
) -> None:
    """A device feeds the chunks that `OwnState` says. Each step has new tokens, draft tokens, and how many are right.
    The token at a position is its number, a wrong one -1; every state is kept."""
    own, position = OwnState(), cached
    held: dict[int, tuple[int, ...]] = {0: (), 9: tuple(range(cached))}  # what each state has read
    for new, proposed, accepted in steps:
        keeps = tuple(Keep(at, 10 + at) for at in range(position + 1, position + new + 4))
        part = Chunk(0, position, new, (), None, samples=True, draft_tokens=proposed, states=(0, 1), keeps=keeps)
        copy = own.enter(part, 9 if cached else None)
        if copy is not None:
            held[copy[1]] = held[copy[0]]
        fed, right = own.fed(part, proposed), position + new + min(accepted, proposed)
        end = position + new + proposed
        assert {keep.position for keep in fed.keeps} == set(range(position + 1, end + 1))
        assert fed.start + fed.length == end
        state = held[fed.states[0]]
        for at in range(fed.start, fed.start + fed.length):
            state = (*state, at if at < right else -1)
            held.update({keep.state: state for keep in fed.keeps if keep.position == at + 1})
        held[fed.states[0]] = state
        own.leave(right=right == end)
        for at in range(position + 1, right + 1):
            assert held[10 + at] == tuple(range(at)), "what is kept has read what comes before it"
        position = right


def test_what_is_unlisted_is_no_longer_worth_keeping():
    states = StatePool(1)
    for worth in (True, False):
        (state,) = states.try_take(1)
        states.keep(state, "a", worth=worth)
        states.give_way("a")
        assert states.resident("a") == worth, "nothing is worth keeping that is gone"
        states.unlist("a")
