"""The museum on the real executor: encoder-cache faults of real engines, planted into a real engine that serves images.

The same faults as in ``tests/properties/test_known_bugs_of_images.py``, here with threads, tensors and transformers'
modules. They are caught by `TraceChecker` (``verify=True``), by the books when all requests have ended, by tokens that
differ from those of an engine with room for everything, or because nothing moves any more.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from attrs import evolve

import triolet
from triolet.core import events
from triolet.testing.families import make_checkpoint

from ..properties.planting import planted, verdict

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ASKS = ((0,), (1, 0), (0, 1, 0), (1,), (2, 0), (0, 2))  # numbers of images: some come twice, some in several requests
LEAVES = 0  # first of all a request like this one leaves while its prompt is being fed
STILL = 100  # looks at an engine that does not change, until it is called stuck
TRIES = 12
Tokens = dict[int, tuple[int, ...]]

FIRST_STOP = "next(p.stop for p in self.placeholders if p.key == key) <= position"
FAULTS = {
    "E3 an abort keeps the images": (
        ("core.planning.planner:Planner._settle", "        self._acquirer.release(sequence)\n", "        pass\n"),
        "",
    ),
    "E4 nobody gives way to who waits for an image": (
        ("core.planning.acquirer:Acquirer._withdraw_for", "last = self._ahead.last()", "last = None"),
        "stuck",
    ),
    "E5 an image is given back when its step is planned": (
        (
            "core.planning.planner:Planner._chunk",
            "    sequence.sampling += samples\n",
            "    sequence.sampling += samples\n"
            "    fed, sequence.fed = sequence.fed, sequence.dispatched\n"
            "    if sequence.placeholders:\n"
            "        self._holds.release_read(sequence)\n"
            "    sequence.fed = fed\n",
        ),
        "",
    ),
    "E7 an image that comes twice is freed at its first place": (
        ("core.planning.placeholders:PlaceholderItems.is_read", "self._last_stops[key] <= position", FIRST_STOP),
        "",
    ),
    "E8 every step gives the shared pages back again": (
        (
            "core.planning.planner:Planner._chunk_done",
            "    sequence.in_flight -= 1",
            "    self._room.pages.give_back(sequence.pages[: sequence.listed])\n    sequence.in_flight -= 1",
        ),
        "",
    ),
    "E9 a page that was never computed is found": (
        (
            "core.planning.planner:Planner._chunk",
            "    sequence.sampling += samples\n",
            "    sequence.sampling += samples\n"
            "    fed, sequence.fed = sequence.fed, len(sequence.tokens)\n"
            "    self._room.list_pages(sequence)\n"
            "    sequence.fed = fed\n",
        ),
        "",
    ),
    "E12 a chunk may not end within an image": (
        (
            "core.planning.acts:Acts._wanted",
            "    return stop - start",
            "    room = start + self.step_size.budget\n"
            "    ends = [p.start for p in sequence.placeholders.all if p.start < room < p.stop]\n"
            "    return min([stop, *ends]) - start",
        ),
        "stuck",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("checkpoint"))


def picture(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (56, 56, 3), dtype=np.uint8)


async def serve(folder: Path, config: triolet.EngineConfig) -> Tokens:
    """The tokens of every request. Nothing may be held when all have ended."""
    answers: Tokens = {}
    stepped = trio.Event()

    def observe(event: triolet.Event) -> None:
        if isinstance(event, events.StepEnded):
            stepped.set()

    async with (
        triolet.Engine(folder, config=evolve(config, observer=observe)) as engine,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(watch, engine, answers)
        await ask_and_leave(engine, LEAVES, stepped)
        async with trio.open_nursery() as clients:
            for index in range(len(ASKS)):
                clients.start_soon(ask, engine, index, answers)
        while (now := engine.statistics().requests).waiting + now.running + now.leaving > 0:
            await trio.lowlevel.checkpoint()  # the last steps are answered
        nursery.cancel_scope.cancel()
        statistics = engine.statistics()
        assert statistics.encoder_cache.held == 0, "images are held when all requests have ended"
        assert statistics.requests.pages_free == statistics.requests.pages, "pages are left when all have ended"
    return answers


async def watch(engine: triolet.Engine, answers: Tokens) -> None:
    """Fails when nothing moves any more."""
    seen, since = None, 0
    while since < STILL:
        await trio.sleep(0.02)
        now = engine.statistics()
        since = since + 1 if now == seen and not now.requests.steps_in_flight else 0
        seen = now
    raise AssertionError(f"stuck: {len(answers)} of {len(ASKS)} requests have ended, {seen}")


def given(index: int) -> dict[str, object]:
    images = ASKS[index]
    prompt = "the cat and " * (index % 3 + 1) + " on ".join([IMAGE] * len(images)) + " saw"
    sampling = triolet.SamplingParams(max_tokens=10, ignore_eos=True)
    return {"prompt": prompt, "images": [picture(number) for number in images], "sampling": sampling}


async def ask(engine: triolet.Engine, index: int, answers: Tokens) -> None:
    answers[index] = (await engine.generate(**given(index))).token_ids


async def ask_and_leave(engine: triolet.Engine, index: int, stepped: trio.Event) -> None:
    """When a first step of it has been run: its prompt is longer than that."""
    async with engine.stream(**given(index)):
        await stepped.wait()


def scarce() -> triolet.EngineConfig:
    """Room for one image and, at a few tokens a step, for one long request."""
    return triolet.EngineConfig(
        dtype="float32",
        max_running=2,
        max_step_tokens=2,
        max_positions=144,
        self_kv_bytes=10 * 16 * 2 * 2 * 24 * 4,
        encoder_cache_bytes=16 * 48 * 4,
        verify=True,
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tokens:
    ample = triolet.EngineConfig(dtype="float32", prefix_caching=False, max_running=1, verify=True)
    return trio.run(serve, folder, ample)


def kill(folder: Path, expected: Tokens) -> None:
    assert trio.run(partial(serve, folder, scarce())) == expected, "other tokens than with room for everything"


def test_without_a_fault_the_tokens_are_those_of_an_engine_with_room_for_everything(
    folder: Path, expected: Tokens
) -> None:
    assert verdict(partial(kill, folder, expected)) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, folder: Path, expected: Tokens) -> None:
    """Within a few tries: some need two things to meet, and here are real threads. The simulation of the same faults
    needs one."""
    fault, reason = FAULTS[name]
    with planted(*fault):
        tries = (verdict(partial(kill, folder, expected)) for _ in range(TRIES))
        said = next(filter(None, tries), None)
    assert said is not None, "nobody notices the fault"
    assert reason in said, f"noticed, but not because of {reason!r}: {said[-2000:]}"
