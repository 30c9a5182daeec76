"""The museum once more, where items lie among the tokens: encoder-cache faults of real engines, planted into the path
of a decoder's images, and the property that catches each. See ``test_known_bugs.py``; E1 and E2 are the ledger's alone,
and E10 is the device's.
"""

from __future__ import annotations

import functools
import gc
import weakref

from attrs import evolve

from triolet.core.planning.planner import Planner
from triolet.core.request import EncoderItem, Request
from triolet.core.trace import ALWAYS_FREED, FREE_FOLLOWS_COMPLETION, NO_PHANTOM
from triolet_testing.clients import SCENARIOS, Client, Scenario
from triolet_testing.sim_model import IMAGE, START
from triolet_testing.simulation import simulate

from .planting import Killer
from .test_known_bugs import BOUND_TO_ITSELF, IN_ITS_BOOKS_ALONE, LISTED, Step, assert_caught, encodes, shrunk, step
from .test_planner import asks, opened, request
from .test_planner_machines import SharingMachine


def images(*steps: Step, capacity: int = 1, budget: int = 10, draft_tokens: int = 0) -> Killer:
    """A page fits four positions, the encoder cache one image (r: none at all)."""
    return shrunk(
        SharingMachine,
        lambda state: state.open(
            pages=6, running=1, budget=budget, capacity=capacity, depth=1, draft_tokens=draft_tokens
        ),
        *steps,
    )


def submit(*keys: str, before: int = 0, max_tokens: int = 1, priority: int = 0) -> Step:
    """Image p has one embedding, q three, r five; a token comes behind each, and ``before`` the first."""
    return lambda state: state.submit_placed(before, list(keys), max_tokens, priority)


def simulated(name: str) -> Killer:
    return functools.partial(simulate, SCENARIOS[name])


_FIRST, _SECOND, _THIRD = SCENARIOS["images that do not fit together"].clients
IMPATIENT = evolve(
    SCENARIOS["images that do not fit together"], clients=(_FIRST, evolve(_SECOND, patience=0.25), _THIRD)
)


def test_e3_an_abort_that_does_not_release_the_images():
    """E3 (12545): a request that is aborted keeps what it holds for ever."""
    assert_caught(functools.partial(simulate, IMPATIENT), ALWAYS_FREED, IN_ITS_BOOKS_ALONE)
    shortest = images(submit("p"), encodes, lambda state: (state.planner.abort("r0"), state.publish()))
    assert_caught(shortest, "encoder entries are left", IN_ITS_BOOKS_ALONE)


def test_e4_a_running_request_waits_for_the_image_that_a_waiting_one_holds():
    """E4 (31857): requests that wait hold entries which those before them need, and wait behind them: nobody moves.
    Here: nobody gives way to a running request that waits for its next image."""
    nobody_gives_way = (
        "core.planning.acquirer:Acquirer._withdraw_for",
        "if last is None or",
        "if True or",
    )
    shortest = images(submit("p", "q"), encodes, lambda state: state.plan(), submit("p"), submit("q"), step)
    assert_caught(shortest, "a request never ended", nobody_gives_way)


def test_e5_an_image_given_back_before_the_step_that_reads_it_has_run():
    """E5 (32469, 38551, 38907, 45347, 46315): an entry is given back when its last step is planned, not when done."""
    at_planning = (
        "core.planning.planner:Planner._dispatch",
        "    self._to_forget = []\n",
        "    self._to_forget = []\n    for part in draft.parts:\n        self._acquirer.release(part.sequence)\n",
    )
    assert_caught(simulated("images that do not fit together"), FREE_FOLLOWS_COMPLETION, at_planning)


def test_e6_a_page_evicted_and_taken_again_that_is_still_found():
    """E6 (52482): an entry is evicted and its place taken anew before all have forgotten it. The ledger's part is in
    the other museum; here a cached page of an image is evicted, and can still be found by its key."""
    still_found = (
        "core.planning.pages:PageAllocator._pop",
        "    del self._listed[key]\n",
        "",
    )
    filling = [functools.partial(_serve, times=8)]
    shortest = images(submit("q", before=2, max_tokens=6), *filling, _large, *filling, submit("q", before=2), *filling)
    assert_caught(shortest, "it is not listed", still_found)


def _serve(state: SharingMachine, times: int) -> None:
    for _ in range(times):
        encodes(state)
        step(state)


def _large(state: SharingMachine) -> None:
    state.ask(tuple(range(2, 18)), (), max_tokens=8, poison=False)


def test_e7_an_image_that_occurs_twice_is_freed_at_its_first_occurrence():
    """E7 (54284): an item that occurs twice in one request is freed at its first occurrence."""
    at_the_first = (
        "core.planning.placeholders:PlaceholderItems.__attrs_post_init__",
        "max(placeholder.stop, self._last_stops.get(placeholder.key, 0))",
        "self._last_stops.get(placeholder.key, placeholder.stop)",
    )
    no_more = (
        "core.planning.placeholders:PlaceholderItems.needed",
        "self.all[index].stop > start",
        "index == 0",
    )
    assert_caught(images(submit("p", "p", before=1), budget=2), "a request never ended", at_the_first, no_more)


def test_e8_every_decode_step_gives_the_shared_pages_back_again():
    """E8 (55733, 51228): every decode step gives back once more what its request shares, and the count of free ones
    grows. There cross-attention slots, here the pages of a prefix."""
    every_step = (
        "core.planning.planner:Planner._chunk_done",
        "    sequence.in_flight -= 1",
        "    self._room.pages.give_back(sequence.pages[: sequence.listed])\n    sequence.in_flight -= 1",
    )
    shortest = images(submit("q", before=1, max_tokens=3), encodes, step)
    assert_caught(shortest, "a page has as many users as sequences have it", every_step)


PHANTOM = Scenario(
    name="phantom image",
    clients=(
        Client(images=(1,), prompt=(START, IMAGE)),
        Client(images=(2,), prompt=(START, IMAGE), arrives=0.1, patience=0.1),
        Client(images=(2,), prompt=(START, IMAGE), arrives=0.25),
    ),
    model=SCENARIOS["images that do not fit together"].model,
)


def test_e9_an_image_that_is_withdrawn_stays_listed_as_computed():
    """E9 (hazard named in 53723): a reservation is withdrawn before anything was dispatched, but stays listed as
    computed; the next request "hits" it."""
    assert_caught(functools.partial(simulate, PHANTOM), NO_PHANTOM, LISTED)


def test_e9_a_page_that_was_never_computed_is_found():
    """E9 again, of pages: they are listed when their step is planned; it fails, and they stay listed."""
    at_planning = (
        "core.planning.planner:Planner._chunk",
        "    sequence.sampling += samples\n",
        "    sequence.fed = sequence.dispatched\n"
        "    self._room.list_pages(sequence)\n"
        "    sequence.sampling += samples\n",
    )
    shortest = images(submit("q", before=1), encodes, lambda state: state.plan())
    assert_caught(shortest, "once answered steps have filled it", at_planning)


def test_e11_an_image_larger_than_the_cache_waits_for_ever():
    """E11 (a hazard by design): an item larger than the whole cache waits for room that can never come."""
    not_refused = ("core.planning.planner:Planner.submit", "if largest > self.limits.encoder_cache_bytes:", "if False:")
    assert_caught(images(submit("r")), "a request never ended", not_refused)


def test_e12_steps_without_progress():
    """E12 (vllm-ascend 17195): look-ahead keeps a request from ever covering its item, and the engine plans for ever
    without progress. Here: a chunk must not end within an image, which the budget can never cover."""
    whole_images = (
        "core.planning.acts:Acts._read_on",
        "        if length > 0 and",
        "        first, stop = sequence.dispatched, sequence.dispatched + length\n"
        "        ends = [p.start - first for p in sequence.placeholders.all if p.start < stop < p.stop]\n"
        "        length = min([length, *ends])\n"
        "        if length > 0 and",
    )
    assert_caught(images(submit("q", before=1), budget=1), "a request never ended", whole_images)


def a_request_with_images_dies_with_its_end() -> None:
    """By reference count: its payload is megabytes."""
    planner, executor = opened(prefix_caching=True, draft_tokens=3)
    executor.outputs["q"] = 100
    item = EncoderItem(key="q", payload="q", embeddings=3, size=100, spans=((1, 4),))
    living = request("r", prompt=6, items=(item,))
    died: weakref.ref[Request] = weakref.ref(living)
    del item
    gc.disable()
    try:
        _run_to_its_end(planner, living, executor)
        del living
        assert died() is None, "the request is still alive"
    finally:
        gc.enable()


def _run_to_its_end(planner: Planner, living: Request, executor: object) -> None:
    planner.submit(living)
    for ask in asks(planner):
        planner.encoder_ready(ask.holder)
    while (plan := planner.next_step()) is not None:
        planner.step_done(executor.step(plan))
    planner.take_actions()


def test_r1_a_request_with_images_that_holds_a_bound_partial_of_itself():
    """R1 (28726, fixed by 34183): a request holds a partial that is bound to it: a cycle, with megabytes of pixels,
    until a collection of the oldest generation. Here: its sequence does, which holds the request."""
    assert_caught(a_request_with_images_dies_with_its_end, "still alive", BOUND_TO_ITSELF)
