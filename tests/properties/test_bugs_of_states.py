"""Mistakes that one makes with recurrent states, planted into our own code, and what catches each. See
``test_known_bugs.py``.

vLLM had several of them: results that differ within a batch (57267), states that are corrupt behind wrong draft tokens
(53912), states that a preempted request leaves behind (55600).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from triolet.core.trace import NO_STATE_SHARED
from triolet_testing.clients import SCENARIOS
from triolet_testing.simulation import simulate

from . import test_planner_states as histories
from .core import test_states as pools
from .planting import Killer
from .test_known_bugs import Fault, Step, assert_caught, shrunk
from .test_planner_states import StatesMachine

ROOM, ACTS, PLANNER = "core.planning.room:Room", "core.planning.acts:Acts", "core.planning.planner:Planner"
POOL, OWN, BEAMS = "core.planning.states:StatePool", "core.recurrent:OwnState", "core.recurrent:BeamStates"
BOOKS = "core.planning.pages:PageAllocator"


def history(*steps: Step, states: int = 4) -> Killer:
    """Two requests in six pages of four positions."""
    sizes: dict[str, Any] = {"pages": 6, "running": 2, "states": states, "budget": 12, "depth": 1}
    return shrunk(StatesMachine, lambda state: state.open(**sizes, caching=True, draft_tokens=0, headroom=0), *steps)


def asks(*tokens: int, max_tokens: int = 1) -> Step:
    return lambda state: state.ask(tokens, (), max_tokens=max_tokens, poison=False)


def plans(state: StatesMachine) -> None:
    state.plan()


def works(state: StatesMachine) -> None:
    state.work_on(4)


def fails(state: StatesMachine) -> None:
    state.device_steps(broken=True)


def restarts(state: StatesMachine) -> None:
    state.runner_restarts(really=True)


ONE, OTHER = tuple(range(2, 11)), tuple(range(20, 42))

SCENARIO = functools.partial(simulate, SCENARIOS["recurrent states"])
EVICTS = history(asks(*ONE), works, asks(*OTHER), works, states=10)
FAILS = history(asks(*ONE), plans, fails)
FAILS_BEHIND_A_HIT = history(asks(*ONE), works, asks(*ONE, 11), plans, fails)
RESTARTS = history(asks(*ONE), works, restarts, asks(*ONE, 11), works)
HITS_BESIDE_ANOTHER = history(asks(*ONE), works, asks(50, max_tokens=4), plans, asks(*ONE, 11), plans, states=2)


MUTANTS: dict[str, tuple[Killer, str, *tuple[Fault, ...]]] = {
    "a state comes back while a step changes it": (
        SCENARIO,
        NO_STATE_SHARED,
        (
            f"{ROOM}.leave",
            "    self.leaving.add(sequence)\n",
            "    self.leaving.add(sequence)\n    self.states.give_back(sequence.states)\n    sequence.states = ()\n",
        ),
    ),
    "a state that is read counts as unused": (
        SCENARIO,
        NO_STATE_SHARED,
        (f"{ROOM}.join", "self.states.share(", "self.states._listed.get("),
        (f"{ROOM}._release_source", "self.states.give_back((sequence.source,))", "pass"),
    ),
    "a state is found before its step is answered": (
        SCENARIO,
        NO_STATE_SHARED,
        (
            f"{ROOM}.take_keeps",
            "    draft.states -= len(states)\n",
            "    draft.states -= len(states)\n"
            "    tokens, size = part.sequence.tokens, self.limits.page_size\n"
            "    for position, state in zip(positions[len(positions) - len(states) :], states):\n"
            "        keys = list(part.sequence.page_keys.upto(tokens, min(position, len(tokens)) // size))\n"
            "        if keys and keys[-1] not in self.states._listed:\n"
            "            self.states.list_as(state, keys[-1])\n",
        ),
    ),
    "a state is found one page off": (
        SCENARIO,
        "has read something else",
        (f"{ROOM}.settle_states", "sequence.page_keys.last_of(end)", "sequence.page_keys.last_of(max(1, end - 1))"),
    ),
    "who hits makes no copy": (
        SCENARIO,
        "has read something else",
        (f"{OWN}.enter", "return None if cached is None else (cached, self._current)", "return None"),
    ),
    "a state behind wrong draft tokens goes on": (
        SCENARIO,
        "the device was misused",
        (f"{OWN}.leave", "if not right:", "if False:"),
    ),
    "accepted draft tokens are not read again": (
        SCENARIO,
        "has read something else",
        (f"{OWN}.fed", "start=self._read, length=length + proposed", "start=part.start, length=part.length + proposed"),
    ),
    "draft tokens without a second state": (
        SCENARIO,
        "the device was misused",
        (f"{ACTS}._propose", "part.states += states", "pass"),
    ),
    "two beams have one state": (
        SCENARIO,
        "two beams have the same state",
        (f"{BEAMS}.go_on", "own.append(spare.pop() if state in seen else state)", "own.append(state)"),
    ),
    "a fork makes no copy": (
        SCENARIO,
        "a beam's state has read what another beam has read",
        (f"{BEAMS}.go_on", "self._copies.append((state, own[-1]))", "pass"),
    ),
    "a fork's copies are made again": (
        SCENARIO,
        "a beam's state has read what another beam has read",
        (f"{BEAMS}.enter", "    self._copies.clear()\n", ""),
    ),
    "a state outlives its pages": (
        EVICTS,
        "a state is kept, and its last page is gone",
        (f"{ROOM}.__attrs_post_init__", ", evicted=self.states.unlist)", ")"),
    ),
    "a failed step loses what it keeps": (
        FAILS,
        "books balance: a state is free or taken",
        (f"{PLANNER}._unanswered", "self._room.states.give_back([keep.state for keep in chunk.keeps])", "pass"),
    ),
    "who leaves keeps its state": (
        FAILS,
        "books balance: a state is free or taken",
        (f"{ROOM}.give_back", "    self.states.give_back(sequence.states)\n", ""),
    ),
    "who leaves before its copy is made keeps what it would copy": (
        FAILS_BEHIND_A_HIT,
        "a waiting request holds no states",
        (f"{ROOM}.give_back", "    self._release_source(sequence)\n", ""),
    ),
    "what a restart has lost is found": (
        RESTARTS,
        "a state is kept, and its last page is gone",
        (f"{ROOM}.generation_lost", "    self.states.forget_contents()\n", ""),
    ),
    "a kept state costs nothing while it is copied": (
        HITS_BESIDE_ANOTHER,
        "a step was drafted with states that are not there",
        (
            f"{ROOM}.states_for",
            "sequence.beams + (key is not None and key not in joined and",
            "sequence.beams + (False and",
        ),
    ),
    "a search that needs all states waits for one more": (
        SCENARIO,
        "wait for ever",
        (f"{ROOM}.cached_pages", " or sequence.beams == self.limits.states", ""),
    ),
    "what is kept has a user for ever": (
        SCENARIO,
        "wait for ever",
        (f"{POOL}.keep", "    self.give_back((state,))\n", ""),
    ),
    "what is unlisted is lost": (
        SCENARIO,
        "wait for ever",
        (f"{BOOKS}.unlist", "        self._free.append(page)\n", "        pass\n"),
    ),
    "what is unlisted is free, though it is read": (
        pools.test_what_is_read_neither_gives_way_nor_comes_back,
        "it counts as free though it is read",
        (f"{BOOKS}.unlist", "        self._free.append(page)\n", "    self._free.append(page)\n"),
    ),
    "a state gives way though it is read": (
        pools.test_what_is_read_neither_gives_way_nor_comes_back,
        "it gives way though it is read",
        (f"{POOL}.give_way", " and self.is_cached(key)", ""),
    ),
    "what is gone is worth keeping": (
        pools.test_what_is_unlisted_is_no_longer_worth_keeping,
        "nothing is worth keeping that is gone",
        (f"{POOL}.unlist", "    self._worth.discard(key)\n", ""),
    ),
    "a state that comes back is no news": (
        histories.test_a_copy_that_was_written_lets_the_next_request_start,
        "",
        (f"{ROOM}.settle_states", "    self._came += bool(keeps) or sequence.source is not None\n", ""),
    ),
    "nobody gives way for a state": (
        histories.test_an_urgent_request_gets_the_state_of_another,
        "",
        (f"{ACTS}._give_way", "        trial.states += len(victim.states)\n", ""),
    ),
    "a runner that is gone takes states along": (
        histories.test_a_runner_that_is_gone_leaves_no_state_taken,
        "",
        (
            f"{PLANNER}.fail_all",
            "        self._unanswered(step)\n",
            "        for sequence in step.sequences:\n            sequence.in_flight = 0\n",
        ),
    ),
    "the end of the page before a prompt's last one is not kept": (
        histories.test_a_conversation_is_read_on_from_the_end_of_its_last_prompt,
        "",
        ("core.planning.sequence:Sequence.find_ends", "{known, last, last - 1}", "{known, last}"),
    ),
    "no state is kept where prompts leave each other": (
        histories.test_where_prompts_leave_each_other_a_state_is_kept_from_the_second_one_on,
        "",
        ("core.planning.sequence:Sequence.find_ends", "{known, last, last - 1}", "{last, last - 1}"),
    ),
    "no state gives way to the next one of its sequence": (
        histories.test_a_sequence_that_reads_on_keeps_its_prompts_last_ends_and_one_more,
        "",
        (f"{ROOM}.settle_states", "self.states.give_way(sequence.trail)", "pass"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_with_states_is_caught(name: str) -> None:
    prop, reason, *faults = MUTANTS[name]
    assert_caught(prop, reason, *faults)
