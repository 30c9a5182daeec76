"""Live sessions of engines: on all four hosts, beside other requests, with the demo checkpoint, and cancelled."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from triolet import EncodeFailed, Engine, EngineClosed, EngineConfig, EngineStateError, InvalidRequest, demo
from triolet.actors.gpu_runner import torch_executor
from triolet.actors.worker import Job
from triolet.api.inputs.audio import Samples, load_audio
from triolet_testing.sim import SimExecutor, SimWorker, sim_engine
from triolet_testing.trio_tools import run_virtually

from .hosts import Bench, SpeakingModel, ask

RATE = 16_000
COMMAND = next(sample for sample in demo.samples() if Path(sample.path).name == "en-command.flac")
MANY = next(sample for sample in demo.samples() if Path(sample.path).name == "en-many.flac")


def speech(seconds: float) -> Samples:
    """Some seconds of a voice."""
    return load_audio(MANY.path)[: round(seconds * RATE)]


async def feed(session: Any, samples: Samples) -> None:
    for start in range(0, len(samples), RATE // 2):
        await session.feed(samples[start : start + RATE // 2])
    await session.finish()


# ---- four hosts ------------------------------------------------------------------------------------------------------


def speaking(bench: Bench) -> Bench:
    bench.executor = SimExecutor(SpeakingModel())
    return bench


def test_a_session_is_fed_by_one_task_and_read_by_another(bench: Bench) -> None:
    async def main() -> None:
        async with bench.engine() as engine, bench.host.group() as group:
            async with engine.live(no_speech_threshold=None) as session:
                group.start(feed, session, speech(8.0))
                updates = [update async for update in session]
            assert any(update.stable for update in updates)
            assert updates[-1].ends_utterance
            assert not updates[-1].provisional
            numbers = [update.utterance for update in updates if update.ends_utterance]
            assert numbers == list(range(len(numbers)))

    speaking(bench).run(main)
    assert set(bench.outcomes()) == {"finished"}


def test_leaving_the_block_early_withdraws_what_runs(bench: Bench) -> None:
    async def main() -> None:
        hold = bench.hold(Job.ENCODE)
        async with bench.engine() as engine:
            async with engine.live() as session:
                await session.feed(speech(8.0))
                await hold.reached.wait()
            with pytest.raises(EngineStateError, match=r"block has ended|not open"):
                await session.feed(speech(1.0))
            bench.worker.end_hold(hold)
            await ask(engine, 1)

    speaking(bench).run(main)
    assert "aborted" in bench.outcomes()


def test_a_reader_or_feeder_that_is_cancelled_costs_the_session_nothing(bench: Bench) -> None:
    async def main() -> None:
        hold = bench.hold(Job.ENCODE)
        async with bench.engine() as engine, engine.live(max_backlog=2.0) as session:
            async with bench.host.group() as group:
                feeder = group.start(session.feed, speech(60.0))
                reader = group.start(anext, session)
                await hold.reached.wait()
                for handle in (feeder, reader):
                    handle.cancel()
                    await handle.ended()
                    assert handle.cancelled
            bench.worker.end_hold(hold)
            await session.finish()
            assert [update async for update in session][-1].ends_utterance

    speaking(bench).run(main)


def test_a_fault_of_the_device_reaches_the_reader_unwrapped_and_the_engine_goes_on(bench: Bench) -> None:
    async def main() -> None:
        async with bench.engine() as engine:
            async with engine.live() as session:
                bench.executor.fault = lambda job, _: RuntimeError("broken") if job is Job.ENCODE else None
                await session.feed(speech(8.0))
                with pytest.raises(EncodeFailed, match="broken"):
                    await anext(session)
                with pytest.raises(EngineStateError, match=r"has failed .EncodeFailed"):
                    await session.finish()
                bench.executor.fault = None
            await ask(engine, 1)

    speaking(bench).run(main)


def test_a_session_that_waits_hears_of_the_engines_end(bench: Bench) -> None:
    """Nobody speaks, so that no request could tell."""

    async def main() -> None:
        async with bench.engine() as engine, engine.live() as session, bench.host.group() as group:
            group.start(engine.aclose)
            with pytest.raises((EngineClosed, EngineStateError), match=r"ended|closed"):
                await anext(session)

    bench.run(main)


def test_a_model_that_reads_no_audio_has_no_live_sessions(bench: Bench) -> None:
    from triolet.core.model import Kind
    from triolet_testing.sim_model import SimModel

    bench.executor = SimExecutor(SimModel(kind=Kind.DECODER))

    async def main() -> None:
        async with bench.engine() as engine:
            with pytest.raises(InvalidRequest, match="cannot transcribe"):
                async with engine.live():
                    raise AssertionError("entered")

    bench.run(main)


# ---- virtual time ----------------------------------------------------------------------------------------------------


async def play(session: Any, samples: Samples) -> None:
    begun = trio.current_time()
    for start in range(0, len(samples), RATE // 10):
        await trio.sleep_until(begun + (start + RATE // 10) / RATE)
        await session.feed(samples[start : start + RATE // 10])
    await session.finish()


def plain(text: str) -> list[str]:
    return "".join(character for character in text.lower() if character.isalnum() or character == " ").split()


def test_the_demo_checkpoint_writes_while_somebody_speaks() -> None:
    """A recording in real time, on virtual time: an encoding takes 0.3 s. Its words are those that were said, and each
    utterance is final within 1.5 s of its end."""
    config = EngineConfig(device="cpu", verify=True)
    seconds = dict.fromkeys(Job, 0.0) | {Job.ENCODE: 0.3, Job.STEP: 0.01}

    async def main() -> None:
        engine = Engine.from_parts(
            partial(torch_executor, demo.checkpoint(), config), partial(SimWorker, seconds=seconds), config=config
        )
        async with engine, engine.live(step=1.0) as session, trio.open_nursery() as nursery:
            nursery.start_soon(play, session, load_audio(COMMAND.path))
            begun = trio.current_time()
            updates = [(trio.current_time() - begun, update) async for update in session]
        said = "".join(update.stable for _, update in updates)
        assert plain(said) == plain(COMMAND.text)
        assert {update.language for _, update in updates} == {"en"}
        last: dict[int, float] = {}
        for at, update in updates:
            last[update.utterance] = update.end if update.end is not None else last.get(update.utterance, 0.0)
            if update.ends_utterance:
                assert at - last[update.utterance] < 1.5

    run_virtually(main)


@pytest.mark.parametrize("seed", range(6))
def test_sessions_beside_other_requests_disturb_nobody_and_leave_nothing(seed: int) -> None:
    """Two sessions, one of which is cancelled at some moment, beside forty requests. Each request gets the tokens that
    it gets alone; pages, slots and places come back."""
    chance = random.Random(seed)

    async def one(engine: Engine, patience: float) -> None:
        with trio.move_on_after(patience):
            async with engine.live(no_speech_threshold=None) as session, trio.open_nursery() as nursery:
                nursery.start_soon(play, session, speech(12.0))
                updates = [update async for update in session]
            assert updates[-1].ends_utterance

    async def others(engine: Engine) -> None:
        for number in range(40):
            await ask(engine, number % 7, 1 + number % 9)

    async def main() -> None:
        config = EngineConfig(verify=True, max_running=3)
        async with sim_engine(SimExecutor(SpeakingModel()), config=config) as engine:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(others, engine)
                nursery.start_soon(one, engine, 1_000.0)
                nursery.start_soon(one, engine, chance.uniform(0.0, 15.0))
            told = engine.statistics().requests
            assert (told.running, told.waiting) == (0, 0)
            assert engine.inside.pending == 0

    run_virtually(main)


def test_the_example_of_the_page_writes_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/speech_live.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/speech_live.md", "exec"), {})
    assert capsys.readouterr().out.strip() == demo.samples()[3].text
