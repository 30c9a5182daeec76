"""Settings that every test shares; ``--times N``, which runs each test so often; and what only tests that are marked
``real_time`` may do."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, Phase, settings

# Tiny models gain nothing from a second thread of torch, and on a busy machine the two wait for each other: set before
# anybody imports it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for two threads, the second does not spin between what they compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell has background jobs (`make test &`) ignore ^C, and so would each process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Same examples in every run: a red test is red for everybody. `make soak` looks for new ones.
settings.register_profile(
    "repeatable",
    derandomize=True,
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "soak", deadline=None, max_examples=20_000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile(  # many runs of the same tests: see `tests/mutation.py`
    "mutation",
    derandomize=True,
    max_examples=50,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked ``thorough`` takes long: it runs in `make soak`, and where ``-m`` asks for it."""
    if settings.get_current_profile_name() == "soak" or "thorough" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.skip(reason="takes long; runs with -m thorough, and in `make soak`"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nearly all of what is made meanwhile stays: the collector would look at it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_last_file = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is there before the tests of a file stays, as a rule: what they import, and what those before did. Set
    apart, it need not be looked at by every collection and every count of live tensors, which would otherwise take up
    most of the time of the tests of memory."""
    if item.config.stash.get(_last_file, None) != item.path:
        item.config.stash[_last_file] = item.path
        gc.collect()
        gc.freeze()


# -- again and again -----------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", type=int, default=1, metavar="N", help="run each test N times and tell how often it passed"
    )


@pytest.fixture
def _again(request: pytest.FixtureRequest) -> None:
    """Its parameter is which time it is."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    times = metafunc.config.getoption("times")
    if times > 1:
        metafunc.fixturenames.append("_again")
        metafunc.parametrize("_again", range(times), indirect=True, ids=[f"time{number}" for number in range(times)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("times") == 1:
        return
    ran: defaultdict[str, set[str]] = defaultdict(set)
    red: defaultdict[str, set[str]] = defaultdict(set)
    for kind in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(kind):
            test = re.sub(r"\btime\d+-|-?\btime\d+(?=\])", "", report.nodeid).removesuffix("[]")
            ran[test].add(report.nodeid)  # which may fail in its setup, in itself and in its end
            if report.failed:
                red[test].add(report.nodeid)
    for test, ids in sorted(ran.items()):
        green = len(ids - red[test])
        terminalreporter.write_line(f"{green} of {len(ids)} green: {test}", red=bool(red[test]))


# -- what is left to the machine ------------------------------------------------------------------------------------

_REAL = {"os.fork", "os.kill", "signal.pthread_kill", "socket.bind", "socket.connect", "subprocess.Popen"}
_ROOT = str(Path(__file__).resolve().parent)
_MAIN = threading.main_thread().ident
_seen: set[str] = set()


def _see(event: str, _: object) -> None:
    """Hears of whatever the interpreter does, and notes what a test's own lines do in the main thread. Libraries ask
    the machine by a process what it is, wherever they are used first; a thread may be of an earlier test."""
    if event not in _REAL or threading.get_ident() != _MAIN:
        return
    stack = list(_stack(sys._getframe(1)))
    if event == "subprocess.Popen":
        stack = [frame for frame in stack if _package(frame) not in {"asyncio", "subprocess"}][:1]
    if any(map(_is_ours, stack)):
        _seen.add(event)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_ours(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_ROOT) and not path.startswith(sys.prefix) and "site-packages" not in path


sys.addaudithook(_see)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test that starts a process, sends a signal or opens a socket, and is not marked ``real_time``. What its
    fixtures do does not count: which test they begin with is the machine's choice."""
    _seen.clear()
    result = yield
    if _seen and item.get_closest_marker("real_time") is None:
        pytest.fail(f"{', '.join(sorted(_seen))}: mark it real_time, and see that it waits for events", pytrace=False)
    return result


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What engines remember of this machine is not the user's, and nothing of other runs is remembered."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Lets objects of the test die by reference count alone. Those of before are set apart: `gc.get_objects` leaves
    them out."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
