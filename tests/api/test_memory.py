"""Memory that does not grow: no garbage on a request's way, nothing left of a request or an engine that has ended.

The garbage collector is off: what dies here dies by reference count. Here on a simulated device and virtual time, where
every way to end is tried; in `test_memory_real.py` on the demo checkpoint with its thread and its tensors.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import numpy as np
import pytest
import trio

from triolet import (
    CheckpointError,
    EncodeFailed,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineTeardownError,
    Event,
    InvalidRequest,
    Overloaded,
    PoisonRequest,
    RunnerCrashed,
    SamplingParams,
    Structure,
)
from triolet.actors.worker import Job, ThreadWorker
from triolet.api.inputs.audio import Samples
from triolet.core import events
from triolet.core.plan import StepPlan
from triolet.core.request import EncoderItem
from triolet_testing.sim import SimExecutor, SimWorker, sim_engine

from ..actors.shared import TextModel
from ..heap import (
    Births,
    Level,
    actors,
    assert_none,
    births,
    expected,
    garbage,
    kept,
    without_collector,
)

BROKEN, CRASHING = 90, 31  # the audio that no encoder takes, the prompt that no step survives
ROOM = 5  # encoder outputs that the simulated cache has room for

Life = Callable[[], Awaitable[None]]
Ending = Callable[[Engine, int], Awaitable[None]]  # makes requests, the number says which, and lets them end


class Mine(Exception):
    """The user's own."""


# -- the simulated device --------------------------------------------------------------------------------------------


def audio(number: int) -> Samples:
    return np.full(1600, number / 100, np.float32)


def fault(job: Job, argument: tuple[EncoderItem, ...] | StepPlan | tuple[str, ...] | None) -> Exception | None:
    if isinstance(argument, StepPlan):
        starts = {start.token_ids[1] for start in argument.started}
        return RuntimeError("crash") if CRASHING in starts else None
    if job is Job.ENCODE and isinstance(argument, tuple):
        clips = {float(part.payload[0]) for part in argument if isinstance(part, EncoderItem)}
        return RuntimeError("boom") if float(audio(BROKEN)[0]) in clips else None
    return None


def simulated(device: SimExecutor | None = None, **settings: object) -> Engine:
    config = {"verify": True, "encoder_cache_bytes": 100 * ROOM, **settings}
    return sim_engine(device or SimExecutor(fault=fault), config=EngineConfig(**config))


async def ask(engine: Engine, number: int, *, prompt: int = 2, tokens: int = 20, n: int = 1, wait: bool = True) -> None:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, n=n)
    await engine.generate(prompt_token_ids=[1, prompt], audio=audio(number), sampling=sampling, wait=wait)


async def settle() -> None:
    """A second of virtual time, in which the device ends whatever it was given."""
    await trio.sleep(1.0)


async def many_finished(engine: Engine, number: int) -> None:
    async with trio.open_nursery() as nursery:
        for turn in range(8):
            nursery.start_soon(ask, engine, number + turn % 3)


def failing_with(error: type[Exception], **asked: int) -> Ending:
    async def ending(engine: Engine, number: int) -> None:
        with expected(error):
            await ask(engine, **{"number": number, **asked})

    return ending


def cancelled_after(seconds: float, **asked: int) -> Ending:
    async def ending(engine: Engine, number: int) -> None:
        with trio.move_on_after(seconds):
            await ask(engine, number, **asked)

    return ending


async def cancelled_with_its_nursery(engine: Engine, number: int) -> None:
    with pytest.RaisesGroup(Mine):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, number)
            await trio.sleep(0.4)
            raise Mine


def streamed(leaves: bool) -> Ending:
    async def ending(engine: Engine, number: int) -> None:
        async with engine.stream(prompt_token_ids=[1, 2], audio=audio(number)) as deltas:
            async for _ in deltas:
                if leaves:
                    break

    return ending


async def refused_structure(engine: Engine, number: int) -> None:
    with expected(InvalidRequest):
        await engine.generate(
            prompt_token_ids=[1, 2],
            audio=audio(number),
            sampling=SamplingParams(structure=Structure(kind="regex", text="([")),
        )


REFUSED = failing_with(InvalidRequest, tokens=1000)
ENCODING, DECODING = cancelled_after(0.1), cancelled_after(0.4)
ENDINGS: dict[str, Ending] = {
    "finished": ask,
    "many finished": many_finished,
    "encode failed": failing_with(EncodeFailed, number=BROKEN),
    "poisoned": failing_with(PoisonRequest, prompt=CRASHING),
    "refused": REFUSED,
    "cancelled while it is encoded": ENCODING,
    "cancelled while it decodes": DECODING,
    "cancelled with its nursery": cancelled_with_its_nursery,
    "streamed": streamed(leaves=False),
    "stream left early": streamed(leaves=True),
    "several completions": partial(ask, n=3),
    "several cancelled while they decode": cancelled_after(0.5, n=3),
}
PARTS = ("request", "payload", "sequence", "mailbox")


def assert_nothing_is_left(born: Births, *kinds: str) -> None:
    assert born.kinds >= set(kinds)
    assert not born.alive, f"still alive: {born.alive}"


@pytest.mark.parametrize("ending", [*ENDINGS.values(), refused_structure], ids=[*ENDINGS, "refused structure"])
async def test_whatever_ends_a_request_nothing_of_it_stays(ending: Ending, autojump_clock: object) -> None:
    """R1: the request, its payload, its place in the planner and its mailbox die with their last user, and there is no
    garbage."""
    async with simulated() as engine:
        await ending(engine, 1)
        await settle()
        with births() as born, garbage() as found:
            for number in range(2, 5):
                await ending(engine, number)
            await settle()
            assert_nothing_is_left(born, *([] if ending in (REFUSED, refused_structure) else PARTS))
    assert_none(found)


async def test_a_request_that_a_stop_string_ends_leaves_nothing_and_makes_no_garbage(autojump_clock: object) -> None:
    """Read, left, or never read: the scheduler's task ends it in each case."""

    async def stopped_thrice(engine: Engine, number: int) -> None:
        arguments = {"prompt_token_ids": [1, 2], "audio": audio(number)}
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        text = (await engine.generate(**arguments, sampling=sampling)).text
        sampling = attrs.evolve(sampling, stop=text[3:5])
        assert (await engine.generate(**arguments, sampling=sampling)).text == text[: text.index(text[3:5])]
        async with engine.stream(**arguments, sampling=sampling) as deltas:
            async for _ in deltas:
                break
        async with engine.stream(**arguments, sampling=sampling):
            await settle()

    with without_collector(), births() as born:
        async with simulated(SimExecutor(TextModel())) as engine:
            await stopped_thrice(engine, 1)
            await settle()
            assert_nothing_is_left(born, *PARTS)
            with garbage() as found:
                await stopped_thrice(engine, 2)
                await settle()
    assert_none(found)


@pytest.mark.parametrize("ending", [ENCODING, cancelled_with_its_nursery])
async def test_a_request_that_waits_for_admission_leaves_nothing_either(ending: Ending, autojump_clock: object) -> None:
    """Cancelled while it waits, alone or with a nursery that fails; and one that does not want to wait."""
    with without_collector(), births() as born:
        async with simulated(max_pending=1) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 3)
            await trio.sleep(0.1)
            with expected(Overloaded):
                await ask(engine, 1, wait=False)
            await ending(engine, 2)
            await trio.lowlevel.checkpoint()  # until then trio's loop holds what it woke this task with
            assert born.alive == {"request": 1, "payload": 1, "sequence": 1, "mailbox": 1}, "of the one that runs"


@pytest.mark.parametrize("drain", [0.0, 0.2, 30.0])
async def test_a_request_that_the_end_of_the_engine_ends_leaves_nothing(drain: float, autojump_clock: object) -> None:
    """Aborted at once, at the deadline, or drained. The engine itself, which its user still has, keeps nothing."""

    async def outsider(engine: Engine) -> None:
        if drain > 1:
            return await ask(engine, 1)
        with expected(EngineClosed):
            await ask(engine, 1)
        return None

    with without_collector(), births() as born:
        engine = simulated(drain_seconds=drain)
        async with trio.open_nursery() as nursery:
            async with engine:
                nursery.start_soon(outsider, engine)
                await trio.sleep(0.35)
        assert_nothing_is_left(born, *PARTS)


async def test_while_a_request_decodes_nobody_but_itself_holds_its_payload(autojump_clock: object) -> None:
    """It may have to be encoded again, so the request keeps it. The runner was done with it when it was encoded, the
    ledger when the step that reads the encoder's output was done."""
    payloads: list[Samples] = []

    def watch(job: Job, argument: tuple[EncoderItem, ...] | StepPlan | tuple[str, ...] | None) -> None:
        if job is Job.ENCODE:
            payloads.extend(part.payload for part in argument or () if isinstance(part, EncoderItem))

    async with simulated(SimExecutor(fault=watch)) as engine:
        async with engine.stream(prompt_token_ids=[1, 2], audio=audio(1)) as deltas:
            await anext(deltas)
            await anext(deltas)
            held_by = [type(holder) for holder in gc.get_referrers(payloads.pop())]
        assert [kind for kind in held_by if kind.__module__.startswith("triolet")] == [EncoderItem]


async def test_an_engine_that_serves_keeps_no_more_than_before(autojump_clock: object) -> None:
    """R2: what is listed for others is taken from the list. The first round fills the caches. Each round asks for the
    same, so that the same is cached after it."""
    sizes = []
    device = SimExecutor(fault=fault)
    async with simulated(device) as engine:
        for _ in range(6):
            for number, ending in enumerate([*ENDINGS.values()] * 2):
                await ending(engine, number)
            await settle()
            device.calls.clear()  # its own diary
            sizes.append(kept(engine, *actors()))
    assert sizes[1:] == sizes[1:2] * 5, f"elements kept, round by round: {sizes}"


async def test_a_request_cancelled_while_it_is_added_leaves_nothing_with_the_engine(autojump_clock: object) -> None:
    """R3: neither its place nor its stream; the next one, which does not want to wait, is admitted at once."""
    async with simulated(max_pending=1) as engine:
        await ask(engine, 1)
        for checkpoints, seconds in itertools.product(range(12), (0.0, 0.2, 0.4)):
            with births() as born:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, engine, checkpoints)
                    for _ in range(checkpoints):
                        await trio.lowlevel.checkpoint()
                    await trio.sleep(seconds)
                    nursery.cancel_scope.cancel()
                await settle()
                assert not born.alive, f"after {checkpoints} checkpoints and {seconds} s: {born.alive}"
            await ask(engine, 1, tokens=1, wait=False)


# -- lives of engines ------------------------------------------------------------------------------------------------


async def left() -> None:
    async with simulated() as engine:
        await ask(engine, 1)


async def left_by_an_error() -> None:
    with pytest.RaisesGroup(Mine):
        async with simulated() as engine, trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 1)
            nursery.start_soon(ask, engine, 2)
            await trio.sleep(0.4)
            raise Mine


def cancelled(seconds: float) -> Life:
    """While it opens, or while it serves."""

    async def life() -> None:
        with trio.move_on_after(seconds):
            await left()

    return life


async def closed_early() -> None:
    async with simulated() as engine:
        await ask(engine, 1)
        await engine.aclose()


def failing(job: Job, fault: type[BaseException], error: type[Exception], **settings: object) -> Life:
    """``fault`` is new for each call: one that a device kept would keep whoever is in its traceback."""

    async def life() -> None:
        device = SimExecutor(fault=lambda which, _: fault("always") if which is job else None)
        with expected(error):
            async with simulated(device, **settings) as engine:
                await ask(engine, 1)
                await settle()

    return life


async def a_restart() -> None:
    once = iter([RuntimeError])
    device = SimExecutor(fault=lambda job, _: next(once, lambda _: None)("once") if job is Job.FREE else None)
    async with sim_engine(device, config=EngineConfig(encoder_idle_seconds=0.1)) as engine:
        await ask(engine, 1)
        await settle()
        await ask(engine, 2)


async def a_hung_step() -> None:
    worker = SimWorker(hangs=lambda job: job is Job.STEP)
    engine = sim_engine(config=EngineConfig(stage_seconds=1.0, drain_seconds=1.0), worker=worker)
    with expected(EngineTeardownError), trio.fail_after(60):
        async with engine:
            with trio.move_on_after(1.0):
                await ask(engine, 1)


LIVES: tuple[Life, ...] = (
    left,
    left_by_an_error,
    cancelled(0.5),
    cancelled(1.4),
    closed_early,
    failing(Job.OPEN, CheckpointError, CheckpointError),
    failing(Job.STEP, SystemExit, RunnerCrashed),
    failing(Job.CLOSE, RuntimeError, EngineTeardownError),
    failing(Job.FREE, RuntimeError, RunnerCrashed, encoder_idle_seconds=0.1, restarts=0),
    a_restart,
    a_hung_step,
)


async def test_engines_come_and_go_without_garbage_and_leave_nothing(autojump_clock: object) -> None:
    """However they end: threads, descriptors, our objects and trio's are those of the second round."""
    levels = []
    for _ in range(3):
        with garbage() as found:
            for life in LIVES:
                await life()
            await settle()
            levels.append(Level.now())
        if len(levels) > 1:
            assert_none(found)
    assert levels[2] == levels[1]


@pytest.mark.real_time
def test_the_thread_of_an_idle_runner_holds_no_payload() -> None:
    """R4, on the real worker: a request is cancelled while the device encodes its audio, and nothing comes after."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(job: Job, _: object) -> None:
        if job is Job.ENCODE:
            begun.set()
            assert go_on.wait(300), "nobody lets the encoder go on"

    async def main() -> None:
        encoded = trio.Event()

        def observe(event: Event) -> None:
            if isinstance(event, events.EncodeDone):
                encoded.set()

        device = SimExecutor(fault=slow)
        config = EngineConfig(verify=True, observer=observe)
        async with Engine.from_parts(lambda: device, ThreadWorker, config=config) as engine:
            with births() as born:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, engine, 1)
                    await trio.to_thread.run_sync(begun.wait)
                    nursery.cancel_scope.cancel()
                go_on.set()
                await encoded.wait()
                assert_nothing_is_left(born, *PARTS)

    with without_collector():
        trio.run(main)
