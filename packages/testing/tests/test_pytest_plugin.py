"""The plugin of pytest finds what is wrong in a service, shows how to see it again, and leaves other tests alone."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from triolet_testing.service import ENGINE_PROMISES

pytest_plugins = ["pytester"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "test_your_service.md"
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:schemathesis", "--triolet-runs=30")
HEAD = """
import pytest
import trio

"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs a test file in this process, and returns what pytest found."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def run(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=HEAD + text)
        return pytester.runpytest_inprocess(*OPTIONS, *options)

    return run


def failures(result: pytest.RunResult) -> list[str]:
    """The broken promises that a run has told of."""
    told = "\n".join(result.outlines)
    return re.findall(r"^\d+\. (.+)\n  Why it matters", told, re.MULTILINE)


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_leak_of_the_page_is_found_as_it_says_and_the_mended_service_passes(pytester: pytest.Pytester):
    text = PAGE.read_text(encoding="utf-8")
    files = re.findall(r'^```python title="(\w+\.py)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    (told,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    leaking, test, mended = (code for _, code in files)
    pytester.makepyfile(service=leaking, test_service=test)
    found = pytester.runpytest_inprocess(*OPTIONS)
    found.assert_outcomes(failed=1)
    assert told.strip() in failures(found)
    sys.modules.pop("service", None)
    pytester.makepyfile(service=mended)
    pytester.runpytest_inprocess(*OPTIONS).assert_outcomes(passed=1)


def test_the_page_has_every_promise_and_every_fault_and_option():
    text = PAGE.read_text(encoding="utf-8")
    from triolet_testing import pytest_plugin

    assert all(f"| {promise} |" in text for promise in ENGINE_PROMISES)
    assert all(f'| `"{fault}"` |' in text for fault in pytest_plugin._FAULTS)
    assert f"{pytest_plugin._THOROUGH:,} runs of each test instead of {pytest_plugin._QUICK}" in text


# -- services with a planted fault, and the promise that each breaks ---------------------------------------------------

SERVICES = {
    "a request that goes on in a task of the service": (
        "no orphaned request",
        """
@pytest.mark.triolet_sweep
async def test_it(triolet_engine, triolet_client):
    async with trio.open_nursery() as service:

        async def ask():
            send, receive = trio.open_memory_channel(99)

            async def pump():
                async with send, triolet_engine.stream("abc", max_tokens=4) as deltas:
                    async for delta in deltas:
                        send.send_nowait(delta)

            service.start_soon(pump)
            async for _ in receive:
                pass

        async with triolet_client():
            await ask()
""",
    ),
    "an engine that is not closed on every way out": (
        "everything is given back",
        """
@pytest.mark.triolet_sweep
async def test_it(triolet_make_engine):
    engine = triolet_make_engine()
    await engine.__aenter__()
    await engine.generate("abc", max_tokens=2)
    await engine.__aexit__(None, None, None)
""",
    ),
    "a stream in a generator that nobody closes": (
        "generators are closed",
        """
@pytest.mark.triolet_sweep
async def test_it(triolet_engine):
    async def body():
        async with triolet_engine.stream("abc", max_tokens=3) as deltas:
            async for delta in deltas:
                yield delta

    async for _ in body():
        await trio.sleep(0.01)
""",
    ),
    "a limit that is not given back when the device fails": (
        "it ends",
        """
from triolet import TrioletError


@pytest.mark.triolet_sweep(faults=["device"])
async def test_it(triolet_engine):
    places = trio.Semaphore(1)

    async def ask():
        await places.acquire()
        try:
            await triolet_engine.generate("abc", max_tokens=2)
        except TrioletError:
            return
        places.release()

    await ask()
    await ask()
""",
    ),
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_planted_fault_is_found_and_the_command_of_its_failure_shows_it_again(run, name):
    promise, test = SERVICES[name]
    found = run(test)
    found.assert_outcomes(failed=1)
    told = [number for number, line in enumerate(found.outlines) if re.match(rf"\d+\. {re.escape(promise)}: ", line)]
    assert told, "\n".join(found.outlines)
    lines = found.outlines[told[0] :]
    command = next(line for line in lines if line.startswith("  again: "))
    again = run(test, *shlex.split(command)[2:])
    again.assert_outcomes(failed=1)
    assert f"{promise}: " in "\n".join(again.outlines)


SOUND = """
from contextlib import aclosing
from triolet import TrioletError


@pytest.mark.triolet_sweep
async def test_answers(triolet_engine, triolet_client):
    async with triolet_client():
        async with triolet_engine.stream("abc", max_tokens=4) as deltas:
            async for _ in deltas:
                pass
    assert await triolet_engine.generate("abc", max_tokens=2)


@pytest.mark.triolet_sweep
async def test_a_generator_that_is_closed(triolet_engine):
    async def body():
        async with triolet_engine.stream("abc", max_tokens=3) as deltas:
            async for delta in deltas:
                yield delta

    async with aclosing(body()) as read:
        async for _ in read:
            await trio.sleep(0.01)


@pytest.mark.triolet_sweep
async def test_an_engine_of_its_own(triolet_make_engine):
    async with triolet_make_engine(max_pending=2) as engine:
        assert engine.inside.config.max_pending == 2
        await engine.generate("abc", max_tokens=2)


@pytest.mark.triolet_sweep
async def test_two_clients(triolet_engine, triolet_client):
    async def ask():
        async with triolet_client():
            try:
                await triolet_engine.generate("abc", max_tokens=3)
            except TrioletError:
                pass  # an answer of the service

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        nursery.start_soon(ask)


@pytest.mark.triolet_sweep
async def test_a_client_that_comes_as_another_leaves(triolet_engine, triolet_client):
    left = trio.Event()

    async def first():
        async with triolet_client():
            try:
                await triolet_engine.generate("abc", max_tokens=3)
            finally:
                left.set()

    async def second():
        await left.wait()
        async with triolet_client():
            await triolet_engine.generate("abc", max_tokens=3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        nursery.start_soon(second)
"""


def test_sound_services_have_no_finding(run):
    result = run(SOUND, "--triolet-runs=20", "--triolet-verify")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["triolet: 5 tests, 100 runs, * faults"])


def test_a_thorough_run_is_as_long_whatever_a_mark_says(pytester, monkeypatch):
    """Without the option, the mark counts."""
    from triolet_testing import pytest_plugin

    monkeypatch.setattr(pytest_plugin, "_THOROUGH", 30)
    text = "@pytest.mark.triolet_schedules(runs=20)\nasync def test_it():\n    await trio.sleep(1)\n"
    pytester.makepyfile(test_it=HEAD + text)
    result = pytester.runpytest_inprocess(*OPTIONS[:-1], "--triolet-verify")
    result.stdout.fnmatch_lines(["triolet: 1 tests, 4 runs, 0 faults"])


# -- beside others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["trio_mode = true", "anyio_mode = auto", ""])
def test_other_plugins_leave_its_tests_alone_and_it_leaves_theirs(run, pytester, mode):
    pytester.makeini(f"[pytest]\n{mode}\n")
    others = {
        "trio_mode = true": "async def test_other(autojump_clock):\n    await trio.sleep(9)\n",
        "anyio_mode = auto": "async def test_other(anyio_backend):\n    pass\n",
        "": "@pytest.mark.trio\nasync def test_other():\n    await trio.sleep(0)\n",
    }
    swept = """
class TestClass:
    @pytest.mark.parametrize("number", [1, 2])
    @pytest.mark.triolet_schedules(runs=10)
    async def test_own(self, number, tmp_path):
        assert number in {1, 2} and tmp_path.exists()
        await trio.sleep(1)


def test_plain():
    pass

"""
    result = run(swept + others[mode], "-p", "no:randomly")
    assert result.parseoutcomes()["passed"] >= 4
    assert "failed" not in result.parseoutcomes()


def test_a_test_that_skips_itself_is_skipped(run):
    result = run("@pytest.mark.triolet_sweep\nasync def test_it():\n    pytest.skip('not here')\n")
    result.assert_outcomes(skipped=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("@pytest.mark.triolet_sweep\ndef test_it():\n    pass\n", "has to be an async def"),
        ("@pytest.mark.triolet_sweep(faults=['rain'])\nasync def test_it():\n    pass\n", "allowed: cancel, leave"),
        ("@pytest.mark.triolet_schedules(faults=[])\nasync def test_it():\n    pass\n", "allowed: runs, ignore"),
        ("def test_it(triolet_engine):\n    pass\n", "triolet_engine needs a test with"),
        (
            "@pytest.fixture\ndef app(triolet_engine):\n    return triolet_engine.config\n\n"
            "@pytest.mark.triolet_sweep\nasync def test_it(app):\n    pass\n",
            "make your service in the test itself",
        ),
    ],
)
def test_what_cannot_be_swept_is_told(run, text, says):
    result = run(text)
    assert result.ret != 0
    assert says in "\n".join(result.outlines + result.errlines)


def test_a_case_that_is_none_is_told(run):
    result = run("@pytest.mark.triolet_sweep\nasync def test_it():\n    pass\n", "--triolet-replay", "Case(1)")
    assert "--triolet-replay" in "\n".join(result.outlines + result.errlines)
    assert result.ret != 0


def test_fixtures_for_the_model_and_the_settings_may_be_overridden(run):
    run("""
import numpy as np
from triolet import EngineConfig
from triolet_testing import SimModel


@pytest.fixture
def triolet_model():
    return SimModel()


@pytest.fixture
def triolet_config():
    return EngineConfig(max_pending=3)


@pytest.mark.triolet_sweep(runs=20)
async def test_it(triolet_engine):
    assert triolet_engine.inside.config.max_pending == 3
    await triolet_engine.generate(prompt_token_ids=[1], audio=np.zeros(1600, np.float32), max_tokens=2)
""").assert_outcomes(passed=1)


@pytest.mark.real_time
def test_the_plugin_costs_suites_without_its_marks_nothing():
    """Neither the engine nor the tools are imported."""
    code = "import triolet_testing.pytest_plugin, sys; print([name for name in sys.modules if name.startswith('trio')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(done.stdout) == ["triolet_testing", "triolet_testing.pytest_plugin"]
