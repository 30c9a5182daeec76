"""The museum: faults of real engines, planted into our own code, and the property that catches each. First those of
encoder caches, then those of requests and their memory, then those of errors and shutdown (the device's are in
``tests/models``).

The public references are numbers of issues and pull requests of vLLM unless said otherwise. `assert_caught` is given
the property, or the shortest history of it, the words by which it catches the fault, and the fault.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from triolet.core.trace import ALWAYS_FREED, FREE_FOLLOWS_COMPLETION, NO_PHANTOM
from triolet_testing.clients import SCENARIOS, Client, Scenario
from triolet_testing.simulation import simulate

from ..actors import test_recovery as recovery_tests
from ..api import test_memory as memory_tests
from . import test_recovery
from .core.test_ledger import LedgerMachine
from .planner_machine import PlannerMachine
from .planting import Killer, engine_test, planted, verdict

Fault = tuple[str, str, str]  # the function, the fragment of its source, and the mistake in its place
Step = Callable[[Any], object]

PROMISES = (
    "books_balance",
    "no_free_while_held",
    "no_use_before_ready",
    "nobody_waits_while_there_is_room",
    "pages_balance",
    "a_waiting_request_holds_no_pages",
    "nobody_holds_what_another_one_waits_for",
    "what_is_found_was_fed",
    "what_has_been_read_is_given_back",
    "what_is_given_away_is_forgotten",
    "a_state_is_never_shared_and_written",
    "a_kept_state_goes_with_its_pages",
    "sequences_have_what_they_need",
)


@functools.cache
def without_fault(prop: Killer) -> str | None:
    return verdict(prop)


def assert_caught(prop: Killer, reason: str, *faults: Fault) -> None:
    """``prop`` passes on our code, and fails with ``reason`` once the faults are planted."""
    assert (said := without_fault(prop)) is None, f"not even without the fault: {said}"
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(planted(*fault))
        said = verdict(prop)
    assert said is not None, "the property does not notice the fault"
    assert reason in said, f"caught, but not because of {reason!r}: {said[-2000:]}"


def shrunk(kind: type[LedgerMachine | PlannerMachine], *steps: Step) -> Killer:
    """One history of a state machine: its promises are checked after every step, and those of its end at last."""

    def kill() -> None:
        state = kind()
        for step in steps:
            step(state)
            for promise in PROMISES:
                getattr(state, promise, lambda: None)()
        state.teardown()

    return kill


def ledger(*steps: Step, capacity: int = 1) -> Killer:
    return shrunk(LedgerMachine, lambda state: state.open(capacity), *steps)


def planner(*steps: Step, budget: int = 4) -> Killer:
    """One page fits four positions; there is one place, one cross slot and room for one encoder entry."""
    return shrunk(
        PlannerMachine,
        lambda state: state.open(pages=6, slots=1, running=1, budget=budget, capacity=1, depth=1),
        *steps,
    )


def acquire(key: str) -> Step:
    return lambda state: state.acquire(key)


def submit(key: str, *, priority: int = 0, max_tokens: int = 1) -> Step:
    return lambda state: state.submit(length=1, key=key, max_tokens=max_tokens, priority=priority, poison=False)


def dispatch(state: LedgerMachine) -> None:
    state.dispatch(3)


def encodes(state: LedgerMachine | PlannerMachine) -> None:
    if isinstance(state, LedgerMachine):
        state.device_encodes()
    else:
        state.device_encodes(broken=False)


def step(state: PlannerMachine) -> None:
    state.plan()
    state.device_steps(broken=False)


def leaves(holder: str) -> Step:
    return lambda state: state.leave(holder)


def test_e1_an_entry_offered_for_freeing_while_it_is_being_encoded():
    """E1 (31577, fixed by 32789): an entry is offered for freeing while it is still being computed. The runner has
    nothing to free yet, and what it computes later is nobody's: entries pile up."""
    early_free = (
        "core.ledger:EncoderLedger._give_back",
        "    self._change(entry, Change.RELEASE)\n",
        "    self._change(entry, Change.RELEASE)\n"
        "    if entry.state is State.ENCODING and not entry.holders:\n"
        "        entry.state = State.FREEING\n"
        "        self._draft.free.append(hold.key)\n",
    )
    shortest = ledger(acquire("a"), dispatch, leaves("r0"))
    assert_caught(shortest, "books balance: only what is resident is freed", early_free)


def test_e2_the_reuse_of_an_idle_entry_takes_its_bytes_again():
    """E2 (described in 29421): reuse of an idle entry takes its bytes once more; the books drift from the device."""
    taken_twice = (
        "core.ledger:EncoderLedger._serve",
        "self._counters.hits += entry is not None\n",
        "self._bytes[State.ABSENT] -= entry.item.size if entry is not None and entry.state is State.IDLE else 0\n",
    )
    assert_caught(ledger(acquire("a"), dispatch, encodes, leaves("r0"), acquire("a")), "books balance", taken_twice)


IN_ITS_BOOKS_ALONE = (
    "core.planning.acquirer:Acquirer._release",
    "self.actions.append(",
    "None if sequence.ended else self.actions.append(",
)


def test_e3_an_abort_that_does_not_release_the_entry():
    """E3 (12545): a request that is aborted keeps its entry for ever."""
    assert_caught(lambda: simulate(SCENARIOS["abort storm"]), ALWAYS_FREED, IN_ITS_BOOKS_ALONE)


def test_e4_requests_that_wait_hold_the_entries_that_others_need():
    """E4 (31857): requests that wait hold entries which those before them need, and wait behind them: nobody moves.
    Here: requests start strictly in line, also where the first one still waits for its entry, and nobody gives up what
    it has acquired for an earlier one."""
    in_line = (
        "core.planning.acts:Acts._admit",
        "if draft.preempted:",
        "waiting = [sequence for sequence in self.sequences.values() if sequence.phase is Phase.WAITING]\n"
        "    if draft.preempted or min(waiting, key=_IN_ORDER, default=None) not in self.acquirer.ready:",
    )
    nobody_withdraws = ("core.planning.acquirer:Acquirer._withdraw_for", "if last is None or", "if True or")
    shortest = planner(submit("a", priority=1), encodes, submit("b", priority=0))
    assert_caught(shortest, "a request never ended", in_line, nobody_withdraws)


def test_e5_an_entry_given_back_before_the_step_that_reads_it_has_run():
    """E5 (32469, 38551, 38907, 45347, 46315): an entry is given back when its last step is planned, not when done."""
    at_planning = (
        "core.planning.planner:Planner._dispatch",
        "    self._to_forget = []\n",
        "    self._to_forget = []\n    for sequence in written:\n        self._acquirer.release(sequence)\n",
    )
    assert_caught(lambda: simulate(SCENARIOS["plain"]), FREE_FOLLOWS_COMPLETION, at_planning)


def test_e6_an_entry_evicted_and_reserved_again_before_it_is_freed():
    """E6 (52482): an entry is evicted and its place taken anew before the runner has dropped it: the late free deletes
    the new output. Here: the ledger forgets an entry as soon as its free is sent."""
    forgotten = (
        "core.ledger:EncoderLedger._enter",
        "            self._draft.free.append(key)\n",
        "            self._draft.free.append(key)\n"
        "            del self._entries[key]\n"
        "            self._bytes[State.FREEING] -= entry.item.size\n"
        "            self._bytes[State.ABSENT] += entry.item.size\n",
    )
    unasked = (
        "core.ledger:EncoderLedger.freed",
        "        self._change(self._entries[key], Change.FREED)\n",
        "        pass\n",
    )
    shortest = ledger(acquire("a"), dispatch, encodes, leaves("r0"), lambda state: state.time_passes(10.0))
    assert_caught(shortest, "books balance", forgotten, unasked)


def test_e7_an_entry_of_two_readers_freed_after_the_first():
    """E7 (54284): an entry with two uses is freed at the first one's end. (There: an item twice in one request. A
    request of ours has one item; two requests share its entry.)"""
    first_leaves = ("core.ledger:EncoderLedger._part", "del entry.holders[holder]", "entry.holders.clear()")
    shortest = ledger(acquire("a"), acquire("a"), dispatch, encodes, leaves("r0"))
    assert_caught(shortest, "no use before ready", first_leaves)


def test_e8_every_decode_step_gives_the_slots_back_again():
    """E8 (55733, 51228): every decode step gives the cross-attention slot back, and the count of free ones grows."""
    every_step = (
        "core.planning.planner:Planner._chunk_done",
        "    sequence.in_flight -= 1  #",
        "    if sequence.slot is not None:\n"
        "        self._room.slots.give_back((sequence.slot,))\n"
        "    sequence.in_flight -= 1  #",
    )
    assert_caught(planner(submit("a", max_tokens=3), encodes, step, step), "it is not taken", every_step)


PHANTOM = Scenario(  # a client leaves while its audio waits for the encoder; another one comes with the same audio
    name="phantom",
    clients=(
        Client(audio=1),
        Client(audio=2, arrives=0.1, patience=0.1),
        Client(audio=2, arrives=0.25),
    ),
)


LISTED = (
    "core.ledger:EncoderLedger._give_back",
    "    self._change(entry, Change.RELEASE)\n",
    "    if entry.state is State.RESERVED and not entry.holders:\n"
    "        self._reserved.discard(hold.key)\n"
    "        entry.state = State.IDLE\n"
    "        self._idle[hold.key] = self._now\n"
    "        return\n"
    "    self._change(entry, Change.RELEASE)\n",
)


def test_e9_a_reservation_that_is_withdrawn_stays_listed_as_computed():
    """E9 (hazard named in 53723): a reservation is withdrawn before anything was dispatched, but the entry stays listed
    as computed; the next request "hits" it."""
    assert_caught(lambda: simulate(PHANTOM), NO_PHANTOM, LISTED)


def test_e10_an_output_that_is_a_view_of_its_batch():
    """E10 (the reason for TensorRT-LLM 15734): outputs are kept as views of their batch: freeing two of three frees
    nothing. ``tests/models/test_executor.py`` says the same of the whole executor; here it is the store alone."""
    torch = pytest.importorskip("torch")
    from triolet.models.executor import EncoderOutputs

    def bytes_follow_freeing(share: bool) -> bool:
        batch, store = torch.ones(3, 10, 4), EncoderOutputs()
        store.add({key: batch[index] if share else batch[index].clone() for index, key in enumerate("abc")})
        store.free(("a", "b"))
        return store.get("c").untyped_storage().nbytes() == batch.nbytes // 3

    assert bytes_follow_freeing(share=False)
    assert not bytes_follow_freeing(share=True), "bytes follow freeing"


def test_e11_an_item_larger_than_the_cache_waits_for_ever():
    """E11 (a hazard by design): an item larger than the whole cache waits for room that can never come."""
    not_refused = ("core.ledger:EncoderLedger.acquire", "if item.size > self.capacity:", "if item.size > 1 << 40:")
    assert_caught(ledger(acquire("d")), "every acquire is answered", not_refused)


def test_e12_steps_without_progress():
    """E12 (vllm-ascend 17195): look-ahead keeps a request from ever covering its item, and the engine plans for ever
    without progress. Here: a step's token budget is rounded down to whole pages, to nothing where it is small."""
    rounded_down = (
        "core.planning.acts:Acts.draft",
        "tokens=self.step_size.budget",
        "tokens=self.limits.max_step_tokens // self.limits.page_size * self.limits.page_size",
    )
    assert_caught(planner(submit("a"), budget=3), "a request never ended", rounded_down)


# -- requests and host memory ----------------------------------------------------------------------------------------

DIES = memory_tests.test_whatever_ends_a_request_nothing_of_it_stays


BOUND_TO_ITSELF = (
    "core.planning.planner:Planner.submit",
    "    self._sequences[request.id] = sequence\n",
    "    from functools import partial\n"
    "    class Bound(Sequence):\n"
    "        __slots__ = ('settle',)\n"
    "    names = ('request', 'key', 'tokens', 'page_keys', 'placeholders', 'cross_item', 'limit', 'stops')\n"
    "    sequence = Bound(*[getattr(sequence, name) for name in names])\n"
    "    sequence.settle = partial(self._settle, sequence)\n"
    "    self._sequences[request.id] = sequence\n",
)


def test_r1_a_request_that_holds_a_bound_partial_of_itself():
    """R1 (28726, fixed by 34183): a request holds a partial that is bound to it: a cycle, with megabytes of features,
    until a collection of the oldest generation. Here: its sequence does, which holds the request."""
    assert_caught(engine_test(DIES, ending=memory_tests.ask), "still alive", BOUND_TO_ITSELF)


def test_r2_a_list_for_others_that_is_never_drained():
    """R2 (44490): ids of new blocks are listed for the workers, and the list is never drained. Ours is that of the
    sequences whose records the executor drops with the next step."""
    never_drained = ("core.planning.planner:Planner._dispatch", "    self._to_forget = []\n", "")
    never_alone = (
        "core.planning.planner:Planner.next_step",
        "self._to_forget and not (self._steps or draft.preempted)",
        "False",
    )
    listed_still = (
        "core.planning.planner:Planner.step_failed",
        "self._to_forget.extend(step.plan.ended)",
        "pass",
    )
    killer = engine_test(memory_tests.test_an_engine_that_serves_keeps_no_more_than_before, seeds=1)
    assert_caught(killer, "elements kept", never_drained, never_alone, listed_still)


ADDED = engine_test(memory_tests.test_a_request_cancelled_while_it_is_added_leaves_nothing_with_the_engine)


def test_r3_a_request_cancelled_while_it_is_added_keeps_its_place():
    """R3 (57061): a request is cancelled while it is added, and what the front end keeps of it stays for ever. Here:
    its place among the pending requests."""
    kept_place = (
        "api.hosts.trio_engine:TrioEngine._submitted",
        "Mailbox(self._door.leave, ",
        "Mailbox(lambda: None, ",
    )
    assert_caught(ADDED, "Overloaded", kept_place)


def test_r3_a_request_cancelled_while_it_is_added_keeps_its_stream():
    """R3 again: the scheduler keeps the stream of a request that is withdrawn."""
    kept_stream = (
        "actors.scheduler:Scheduler._end",
        "self._clients.pop(request_id).stream",
        "(self._clients.get if outcome == 'aborted' else self._clients.pop)(request_id).stream",
    )
    assert_caught(ADDED, "'mailbox': 1", kept_stream)


def test_r4_the_last_payloads_stay_until_the_next_call():
    """R4 (read in 0.32): the runner keeps what it was last called with. ``tests/models/test_executor.py`` says the same
    of the executor; here the worker's thread keeps the call."""
    kept_call = ("actors.worker:_serve", "        del submitted\n", "")
    assert_caught(memory_tests.test_the_thread_of_an_idle_runner_holds_no_payload, "still alive", kept_call)


def test_r5_an_error_caught_on_the_worker_pins_the_frames_it_came_through():
    """R5 (pytorch 18853): an exception caught in a worker thread keeps its frames, and they their tensors.
    ``tests/models/test_frames.py`` has the payloads."""
    kept_frames = ("core.tracebacks:clear_frames", "traceback.clear_frames(current.__traceback__)", "pass")
    killer = engine_test(recovery_tests.test_a_kept_encode_error_keeps_no_payload)
    assert_caught(killer, "payload() is None", kept_frames)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_s5_one_exception_in_a_step_ends_every_request_in_it():
    """S5 (52871, 27194): a step raises, and every request that was in it fails."""
    all_condemned = (
        "core.planning.quarantine:Quarantine.poison",
        "if not self._is_poison(self._suspects[request_id], request_id, steps):",
        "if False:",
    )
    killer = engine_test(recovery_tests.test_a_request_that_crashes_its_step_fails_alone)
    assert_caught(killer, "PoisonRequest", all_condemned)


def test_s5_one_bad_item_ends_its_whole_encode_batch():
    """S5 again: an item cannot be encoded, and every item of its batch fails."""
    never_retried = (
        "core.ledger:EncoderLedger.encode_failed",
        "elif len(entries) == 1 and entries[0].failed_alone:\n        self._refuse(entries[0],",
        "elif True:\n        for entry in entries:\n            self._refuse(entry,",
    )
    assert_caught(test_recovery.test_an_encode_failure_fails_only_its_items, "refused == ", never_retried)


def test_s8_a_prompt_that_is_too_long_is_dropped_without_a_reply():
    """S8 (mini-sglang): a request is found to be too long where nobody can be told, is dropped; its client waits for
    ever. Here it is one of more than a single token."""
    dropped = (
        "actors.scheduler:Scheduler._accept",
        "    self.planner.submit(request)\n",
        "    if len(request.prompt_token_ids) == 1:\n        self.planner.submit(request)\n",
    )
    assert_caught(lambda: simulate(SCENARIOS["shared audio"]), "wait for ever", dropped)


CHILDREN = """
import os, subprocess, sys, trio
from triolet import Engine, EngineConfig, demo
from triolet.models.executor import TorchExecutor

load = TorchExecutor.open

def open(executor):
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    return load(executor)

async def main(fault):
    async with Engine(demo.checkpoint(), config=EngineConfig(threads=1)) as engine:
        await engine.transcribe(demo.samples()[0].path)
        try:
            os.waitpid(-1, os.WNOHANG)
            print(fault, "has started a process, which may outlive it")
        except ChildProcessError:
            print(fault, "has no children")

trio.run(main, "as it is it")
TorchExecutor.open = open
trio.run(main, "with the fault it")
"""


@pytest.mark.real_time
def test_s9_processes_that_outlive_their_parent():
    """S9 (55510, 55846): the parent is killed, and worker processes hold the device. An engine has none: it is a thread
    of its program, and what that holds the system takes back."""
    command = [sys.executable, "-c", CHILDREN]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=True)
    assert done.stdout.splitlines() == [
        "as it is it has no children",
        "with the fault it has started a process, which may outlive it",
    ]
