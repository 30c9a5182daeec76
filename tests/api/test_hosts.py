"""One engine on trio, asyncio and anyio on both: every promise holds on each of them. Where
nothing is cancelled it holds in threads without an event loop too.

After each test, `Bench.run` checks that the device is released, that no thread and no task is left, that every
admission permit came back and every request heard its one end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

import triolet.demo
from triolet import (
    CheckpointError,
    Delta,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineError,
    EngineStateError,
    InvalidRequest,
    Overloaded,
    SamplingParams,
    Segment,
    SyncEngine,
    Transcript,
    TrioletError,
)
from triolet.actors.worker import Job
from triolet.core import events
from triolet.core.power import Power
from triolet_testing.sim import SimExecutor

from .hosts import (
    HOSTS,
    Bench,
    Handle,
    Host,
    SpeakingModel,
    SyncEngineInThreads,
    ThreadsHost,
    TrioHost,
    ask,
    audio,
    expected,
    on_bench,
    on_threads_too,
    query,
    read,
)

pytestmark = pytest.mark.real_time

# -- what is asked is answered ---------------------------------------------------------------------------------------


@on_threads_too
@on_bench
async def test_many_tasks_at_once_each_get_their_own_tokens(bench: Bench) -> None:
    async with bench.engine() as engine, bench.host.group() as group:
        for number in range(24):
            group.start(ask, engine, number, 1 + number % 17)
    assert bench.outcomes() == ["finished"] * 24


def speech() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Three windows."""
    return np.linspace(0, 0.01, 70 * 16_000, dtype=np.float32)


async def transcribe(engine: Engine, source: Any, **options: Any) -> tuple[Transcript, list[Segment], list[Any]]:
    """Returns the answers of both ways, and what the stream said of itself at each segment."""
    transcript = await engine.transcribe(source, **options)
    segments, seen = [], []
    async with engine.stream_transcription(source, **options) as stream:
        seen.append((stream.language, stream.language_probability, stream.duration, stream.position))
        async for segment in stream:
            segments.append(segment)
            seen.append(stream.position)
        assert stream.transcript() == transcript
    return transcript, segments, seen


ALL_OF_IT: dict[str, Any] = {
    "temperature": 0.0,
    "beam_size": 1,
    "no_speech_threshold": None,
    "voice_activity": "off",
}
"""Reads what the simulated model makes of samples that are no voice."""


async def demo_session(host: Host) -> dict[str, Any]:
    sample = next(sample for sample in triolet.demo.samples() if sample.path.stem == "en-command")
    prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    folder, config = triolet.demo.checkpoint(), EngineConfig(device="cpu", verify=True)
    made: Any = Engine(folder, config=config)
    if host.name == "threads":
        made = SyncEngineInThreads(SyncEngine(folder, config=config))
    async with made as engine:
        async with engine.stream(prompt, audio=sample.path) as stream:
            deltas: list[Delta] = [delta async for delta in stream]
        return {
            "model": (engine.model.name, engine.model.vocabulary_size),
            "generate": await engine.generate(prompt, audio=sample.path),
            "deltas": deltas,
            "transcribe": await transcribe(engine, sample.path),
            "bytes": engine.statistics().device.by_owner["weights"],
        }


def test_the_demo_checkpoint_says_the_same_on_all_hosts() -> None:
    first, *others = [Bench(host).run(partial(demo_session, host)) for host in (*HOSTS, ThreadsHost())]
    assert others == [first] * len(HOSTS)
    assert "".join(delta.text for delta in first["deltas"]) == first["generate"].text


@on_threads_too
@on_bench
async def test_what_cannot_work_is_refused_and_the_next_request_is_served(bench: Bench) -> None:
    async with bench.engine() as engine:
        with pytest.raises(InvalidRequest, match="no tokens"):
            await engine.generate(prompt_token_ids=[], audio=audio(1))
        with pytest.raises(InvalidRequest, match="exactly one"):
            async with engine.stream("a", prompt_token_ids=[1], audio=audio(1)):
                raise AssertionError("entered")
        with pytest.raises(InvalidRequest, match="klingon"):
            await engine.transcribe(audio(1), language="klingon")
        with pytest.raises(InvalidRequest, match="klingon"):
            async with engine.stream_transcription(audio(1), language="klingon"):
                raise AssertionError("entered")
        await ask(engine, 2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"max_tokens": 3}}, r"sampling=\{'max_tokens': 3\}; allowed: SamplingParams\(max_tokens=...\)"),
    ({"sampling": {}}, r"sampling=\{\}; allowed: SamplingParams\(max_tokens=...\), or its fields by name"),
    ({"max_new_tokens": 5}, r"max_new_tokens= is not an option of a request; did you mean max_tokens\?"),
    ({"temprature": 1}, r"temprature= is not an option of a request; did you mean temperature\?"),
    ({"sampling": None, "max_tokens": 0}, "max_tokens=0; allowed: an integer, 1 to 2147483647"),
    ({"sampling": SamplingParams(), "stop": "."}, r"stop= and sampling= are both given; give it in"),
    ({"prompt_token_ids": 5}, "prompt_token_ids=5; allowed: a sequence of integers"),
    ({"prompt_token_ids": np.array([1, 64])}, "prompt_token_ids holds 64; allowed: integers from 0 to 63"),
    ({"images": bytes(1000)}, r"images=b'\\x00\\x00.{1,30}; allowed: a list of images"),
    ({"prompt": 7, "prompt_token_ids": None}, "prompt=7; allowed: a text, or use prompt_token_ids"),
    ({"request_id": 7}, "request_id=7; allowed: a text"),
    ({"wait": "no"}, "wait='no'; allowed: True or False"),
]


@on_bench
async def test_an_argument_of_another_kind_is_refused_with_what_is_allowed(bench: Bench) -> None:
    async with bench.engine() as engine:
        for wrong, told in WRONG:
            with pytest.raises(InvalidRequest, match=told):
                await engine.generate(**{**query(1), **wrong})
            with pytest.raises(InvalidRequest, match=told):
                async with engine.stream(**{**query(1), **wrong}):
                    raise AssertionError("entered")
        await ask(engine, 2)


@pytest.mark.parametrize("config", [{"max_running": 4}, {}, "cpu"])
def test_settings_that_are_none_are_refused_with_what_is_allowed(config: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"config=.*; allowed: EngineConfig\(...\)"):
        Engine(triolet.demo.checkpoint(), config=config)
    with pytest.raises(InvalidRequest, match=r"config=.*; allowed: EngineConfig\(...\)"):
        Engine.from_parts(SimExecutor, lambda: Bench(TrioHost()).worker, config=config)


@on_threads_too
@on_bench
async def test_a_full_queue_refuses_who_does_not_want_to_wait(bench: Bench) -> None:
    held = bench.hold()
    async with bench.engine(max_pending=1) as engine, bench.host.group() as group:
        group.start(ask, engine, 1)
        await held.reached.wait()
        with pytest.raises(Overloaded, match="1 requests"):
            await ask(engine, 2, wait=False)
        assert engine.statistics().requests.running == 1
        assert engine.model.name == "sim"
        bench.worker.end_hold(held)


@on_bench
async def test_an_observer_may_ask_for_statistics(bench: Bench) -> None:
    """It is called in the engine's own loop, which on asyncio is in another thread than the one that entered."""
    running: list[int] = []

    def observe(event: events.Event) -> None:
        bench._observe(event)
        if isinstance(event, events.RequestEnded):
            assert bench.made is not None
            running.append(bench.made.statistics().requests.running)

    async with bench.engine(observer=observe) as engine:
        await ask(engine, 1)
    assert len(running) == 1


# -- cancellation of requests ----------------------------------------------------------------------------------------


@on_bench
async def test_a_request_that_is_cancelled_leaves_the_others_alone(bench: Bench) -> None:
    held = bench.hold(after=2)
    async with bench.engine() as engine, bench.host.group() as group:
        victim = group.start(ask, engine, 1)
        await held.reached.wait()
        group.start(ask, engine, 2)
        group.start(ask, engine, 3)
        victim.cancel()
        await victim.ended()
        assert victim.cancelled
        bench.worker.end_hold(held)
    assert sorted(bench.outcomes()) == ["aborted", "finished", "finished"]


async def left_early(engine: Engine) -> None:
    async with engine.stream(**query(1)) as deltas:
        async for _ in deltas:
            break


async def left_by_an_error(engine: Engine) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with engine.stream(**query(1)) as deltas:
            await anext(deltas)
            raise error
    assert caught.value is error


async def closed_with_the_generator_around_it(engine: Engine) -> None:
    async def tokens() -> AsyncIterator[Delta]:
        async with engine.stream(**query(1)) as deltas:
            async for delta in deltas:
                yield delta

    generator: Any = tokens()
    await anext(generator)
    await generator.aclose()


@on_threads_too
@pytest.mark.parametrize("way", [left_early, left_by_an_error, closed_with_the_generator_around_it])
@on_bench
async def test_whatever_ends_a_streams_block_withdraws_the_request(bench: Bench, way: Any) -> None:
    held = bench.hold(after=3)
    async with bench.engine() as engine:
        await way(engine)
        bench.worker.end_hold(held)
        await ask(engine, 2)
        assert engine.inside.pending == 0, "the permits are back when the requests have ended"
    assert bench.outcomes() == ["aborted", "finished"]


@on_bench
async def test_a_stream_that_is_cancelled_while_it_opens_takes_nothing_with_it(bench: Bench) -> None:
    """It waits for a permit."""
    held = bench.hold()
    async with bench.engine(max_pending=1) as engine, bench.host.group() as group:
        group.start(ask, engine, 1)
        await held.reached.wait()
        waiting = group.start(read, engine, 2, [])
        assert not await bench.host.within(0.02, lambda: read(engine, 3, []))
        waiting.cancel()
        await waiting.ended()
        bench.worker.end_hold(held)
    assert bench.outcomes() == ["finished"]


@on_bench
async def test_a_turn_that_is_cancelled_loses_nothing_of_the_stream(bench: Bench) -> None:
    held = bench.hold(after=3)
    found: list[int] = []

    async def turn() -> None:
        found.extend((await anext(deltas)).token_ids)

    async with bench.engine() as engine, bench.host.group() as group:
        async with engine.stream(**query(1)) as deltas:
            handles: list[Handle] = []
            while not handles or not handles[-1].cancelled:
                handles.append(group.start(turn))
                if len(found) == 3:  # this turn waits for a step that is held
                    await held.reached.wait()
                    handles[-1].cancel()
                await handles[-1].ended()
            bench.worker.end_hold(held)
            async for delta in deltas:
                found += delta.token_ids
    assert tuple(found) == expected(1)


@on_bench
async def test_windows_of_a_transcription_can_be_asked_again_after_a_cancellation(bench: Bench) -> None:
    held = bench.hold(after=1)
    bench.executor = SimExecutor(SpeakingModel())
    options = ALL_OF_IT
    async with bench.engine() as engine:
        async with engine.stream_transcription(speech(), **options) as stream:

            async def turn() -> None:
                await anext(stream)

            assert not await bench.host.within(0.02, turn)
            assert stream.position == 0.0
            assert [(one.kind, one.end) for one in stream.transcript().coverage] == [("unread", 70)]
            bench.worker.end_hold(held)
            segments = [segment async for segment in stream]
        assert len(segments) == 3
        assert tuple(segments) == (await engine.transcribe(speech(), **options)).segments


@on_threads_too
@on_bench
async def test_who_leaves_a_transcription_early_keeps_its_text_and_knows_what_is_missing(bench: Bench) -> None:
    """After the block, too, when the audio is closed."""
    bench.executor = SimExecutor(SpeakingModel())
    async with bench.engine() as engine:
        whole = await engine.transcribe(speech(), **ALL_OF_IT)
        async with engine.stream_transcription(speech(), **ALL_OF_IT) as stream:
            first = await anext(aiter(stream))
    so_far = stream.transcript()
    assert so_far.segments == (first,) == whole.segments[:1]
    assert (so_far.text, so_far.duration) == (first.text.strip(), 70)
    assert [(one.kind, one.end) for one in so_far.coverage][-1] == ("unread", 70)


# -- states ----------------------------------------------------------------------------------------------------------


@on_bench
async def test_an_engine_is_used_inside_its_block_and_entered_once(bench: Bench) -> None:
    engine = bench.engine()
    with pytest.raises(EngineStateError, match="not entered yet"):
        await ask(engine, 1)
    async with engine:
        with pytest.raises(EngineStateError, match="open, and an engine can be entered only once"):
            await engine.__aenter__()
    for use in (ask(engine, 1), read(engine, 1, []), engine.transcribe(audio(1))):
        with pytest.raises(EngineStateError, match=r"closed: its block has ended.* Open a new engine"):
            await use
    with pytest.raises(EngineStateError, match="closed, and an engine can be entered only once"):
        await engine.__aenter__()
    with pytest.raises(EngineStateError, match="closed"):
        engine.statistics()
    with pytest.raises(EngineStateError, match="closed"):
        _ = engine.model
    await engine.aclose()


@on_bench
async def test_aclose_releases_the_device_before_the_block_ends(bench: Bench) -> None:
    held = bench.hold()

    async def client(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1)

    async with bench.engine() as engine, bench.host.group() as group:
        task = group.start(client, engine)
        await held.reached.wait()
        with pytest.raises(InvalidRequest, match="drain=-1"):
            await engine.aclose(drain=-1)
        with pytest.raises(InvalidRequest, match="drain='now'; allowed: a number"):
            await engine.aclose(drain="now")  # type: ignore[arg-type]
        await engine.aclose(drain=0)
        assert not bench.executor.is_open
        await task.ended()
        with pytest.raises(EngineStateError, match=r"closed: .*aclose\(\) was called.* Open a new engine"):
            await ask(engine, 2)


@on_threads_too
@on_bench
async def test_a_generator_around_the_engine_has_released_the_device_when_it_is_closed(bench: Bench) -> None:
    async def session() -> AsyncIterator[Engine]:
        async with bench.engine() as engine:
            yield engine

    generator: Any = session()
    await ask(await anext(generator), 1)
    await generator.aclose()
    bench.check()


@on_threads_too
@on_bench
async def test_a_stream_sleeps_with_the_engine_and_goes_on_when_it_wakes(bench: Bench) -> None:
    found: list[int] = []
    held = bench.hold(Job.STEP, after=3)
    async with bench.engine() as engine, bench.host.group() as group:
        reader = group.start(read, engine, 1, found)
        await held.reached.wait()
        sleeper = group.start(engine.sleep)
        while engine.statistics().power is Power.AWAKE:  # the order is on its way
            await anyio.lowlevel.checkpoint()
        bench.worker.end_hold(held)
        await sleeper.ended()
        assert bench.executor.is_asleep
        assert engine.statistics().device.by_owner.keys() <= {"parked_weights"}
        assert len(found) < len(expected(1))
        await engine.wake()
        await reader.ended()
    assert tuple(found) == expected(1)


def test_under_no_event_loop_the_error_says_what_is_allowed() -> None:
    enter = Bench(TrioHost()).engine().__aenter__()
    with pytest.raises(EngineStateError, match=r"no event loop.*trio or asyncio"):
        enter.send(None)


@on_bench
async def test_an_engine_belongs_to_the_loop_that_entered_it(bench: Bench) -> None:
    """A use in another thread, with no loop or with one, is refused, and the error says what is allowed."""

    def without_a_loop(engine: Engine) -> None:
        with pytest.raises(EngineStateError, match=r"outside of the event loop.*from_thread|run_coroutine_threadsafe"):
            engine.statistics()

    def with_another_loop(engine: Engine) -> None:
        async def use() -> None:
            with pytest.raises(EngineStateError, match="open another engine"):
                await ask(engine, 1)
            with pytest.raises(EngineStateError, match="open another engine"):
                await read(engine, 1, [])

        Bench(bench.host).host.run(use)

    async with bench.engine() as engine:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(without_a_loop, engine).result()
            pool.submit(with_another_loop, engine).result()
        await ask(engine, 1)


@pytest.mark.parametrize("elsewhere", HOSTS[:2], ids=lambda host: f"left in {host.name}")
@on_bench
async def test_an_engine_that_is_left_in_another_loop_says_so_and_releases_the_device(
    bench: Bench, elsewhere: Host
) -> None:
    """A test framework may give every fixture and every test a loop of its own."""
    engine = bench.engine()
    released = bench.stage("device released")
    await engine.__aenter__()

    async def leave() -> None:
        with pytest.raises(EngineStateError, match="open another engine"):
            await engine.__aexit__(None, None, None)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere.run, leave).result()
    await released.wait()
    await engine.__aexit__(None, None, None)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", [Job.OPEN, Job.CLOSE])
def test_the_error_of_an_engine_dies_with_its_last_user_and_no_collector(
    bench: Bench, job: Job, no_collector: None, caplog: pytest.LogCaptureFixture
) -> None:
    """No loop, thread or frame that the error came through keeps it, and with it whatever those frames refer to."""
    errors: list[weakref.ref[BaseException]] = []
    bench.executor.fault = lambda which, _: CheckpointError("boom") if which is job else None

    async def main() -> None:
        try:
            async with bench.engine():
                pass
        except TrioletError as error:
            errors.append(weakref.ref(error))

    bench.host.run(main)
    caplog.clear()  # which keeps what was logged
    assert [error() for error in errors] == [None]


@pytest.mark.parametrize("ending", ["finished", "failed", "cancelled", "left early"])
def test_a_request_dies_with_its_last_user_and_no_collector(bench: Bench, ending: str, no_collector: None) -> None:
    """No reference cycle on the request's path: neither the engine's copy nor the caller's audio is kept alive."""
    payloads: list[weakref.ref[Any]] = []

    def watch(job: Job, argument: Any) -> Exception | None:
        if job is not Job.ENCODE:
            return None
        payloads.extend(weakref.ref(encoding.payload) for encoding in argument)
        return RuntimeError("boom") if ending == "failed" else None

    bench.executor.fault = watch

    async def one(engine: Engine, arguments: dict[str, Any]) -> None:
        if ending == "left early":
            async with engine.stream(**arguments) as deltas:
                await anext(deltas)
            return
        if ending == "failed":
            with pytest.raises(EngineError):
                async with engine.stream(**arguments) as deltas:
                    await anext(deltas)
        try:
            await engine.generate(**arguments)
        except EngineError:
            assert ending == "failed"

    async def main() -> None:
        held = bench.hold(after=3) if ending == "cancelled" else None
        async with bench.engine() as engine, bench.host.group() as group:
            arguments = query(1)
            payloads.append(weakref.ref(arguments["audio"]))
            task = group.start(one, engine, arguments)
            del arguments
            if held is not None:
                await held.reached.wait()
                task.cancel()
                await task.ended()
                bench.worker.end_hold(held)
            await task.ended()
            del task
            with contextlib.suppress(EngineError):
                await ask(engine, 2)  # until it has ended, the actors have forgotten the first one
            engine.statistics()  # on asyncio: what the engine's thread did last, is done
            alive = [number for number, payload in enumerate(payloads[:2]) if payload() is not None]
            assert not alive, f"{alive} of the caller's audio and the engine's copy are alive"

    bench.run(main)
