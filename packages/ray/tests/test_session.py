"""`RaySession` over a Ray that a test stands for."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

from triolet import EngineConfig
from triolet.core.errors import EngineError
from triolet_ray import deployment, session
from triolet_ray.deployment import Deployment
from triolet_ray.session import RaySession

pytestmark = pytest.mark.real_time

IGNORED = 1  # SIG_IGN


class Ray:
    """As much of Ray and of Serve as a session uses."""

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.left = 0
        self.runs = False
        self.fault: Exception | None = None
        self.threads: list[threading.Thread] = []  # of the calls that start and end processes
        self.takes_signals: Callable[[], object] = lambda: None

    def is_initialized(self) -> bool:
        return self.runs

    def init(self, address: str, **_: Any) -> None:
        self.threads.append(threading.current_thread())
        self.takes_signals()
        if self.fault is not None:
            raise self.fault
        self.joined.append(address)
        self.runs = True

    def shutdown(self, *, wait_for_processes: bool) -> None:
        assert wait_for_processes
        self.threads.append(threading.current_thread())
        self.left += 1
        self.runs = False

    def start(self, **_: Any) -> None:
        """Serve's."""


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake = Ray()
    monkeypatch.setattr(session, "ray", fake)
    monkeypatch.setattr(session, "serve", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


def test_several_clusters_have_one_ray_which_ends_with_the_last_of_them(ray: Ray) -> None:
    """In whatever order they end."""
    ours = RaySession()
    for _ in range(3):
        ours.join(None)
    assert ray.joined == ["local"], "a Ray that somebody else has started here is not taken"
    ours.leave()
    ours.leave()
    assert ray.runs, "one cluster is left"
    ours.leave()
    assert not ray.runs
    ours.join(None)
    assert len(ray.joined) == 2


def test_a_ray_that_the_program_has_joined_is_used_and_stays(ray: Ray) -> None:
    ray.runs = True
    ours = RaySession()
    ours.join(None)
    ours.leave()
    assert (ray.joined, ray.left, ray.threads) == ([], 0, [])


def test_a_process_has_one_ray(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = RaySession()
    ours.join("auto")
    with pytest.raises(
        EngineError, match="has joined the Ray at auto, so it cannot join the Ray at local; allowed: one Ray"
    ):
        ours.join("local")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    ours.join(None)
    assert ray.joined == ["auto"]


def test_what_serve_could_not_start_is_left(ray: Ray) -> None:
    ours = RaySession()
    ray.start = lambda **_: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        ours.join(None)
    assert not ray.runs


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("ray://head:10001", "Ray's client does not stream"),
        ("head", "this is not an address"),
        ("head:port", "this is not an address"),
        ("127.0.0.1:{}", "Connection refused"),
    ],
)
def test_an_address_that_cannot_be_is_told_at_once(ray: Ray, address: str, told: str) -> None:
    """Ray would try for minutes."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else gets the port meanwhile
        address = address.format(closed.getsockname()[1])
        with pytest.raises(EngineError, match=rf"{told}; allowed: host:port \(such as head:6379\)"):
            RaySession().join(address)
    assert ray.joined == []


def test_ray_is_started_and_ended_in_one_thread_that_lives_as_long(ray: Ray) -> None:
    """Linux ends what a thread has started, such as Ray's processes, with that thread."""
    ours = RaySession()
    for _ in range(2):
        caller = threading.Thread(target=ours.join, args=(None,))
        caller.start()
        caller.join()
        ours.join(None)
        (started,) = ray.threads
        assert started.is_alive()
        ours.leave()
        assert ray.threads == [started]
        ours.leave()
        assert ray.threads == [started] * 2
        assert not started.is_alive()
        ray.threads.clear()


def test_what_ray_has_started_before_it_failed_is_ended(ray: Ray) -> None:
    ray.fault = ConnectionError("half of it runs")
    ours = RaySession()
    with pytest.raises(EngineError, match="Ray on this machine cannot be reached: half of it runs; allowed: "):
        ours.join(None)
    assert ray.left == 1
    assert not any(thread.is_alive() for thread in ray.threads)
    ray.fault = None
    ours.join(None)
    assert ray.runs


def test_an_error_of_the_end_reaches_who_leaves_and_ray_is_joined_anew(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = RaySession()
    ours.join(None)
    with monkeypatch.context() as patch:
        patch.setattr(ray, "shutdown", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours.leave()
    ray.runs = False
    ours.join(None)
    assert len(ray.joined) == 2


@pytest.mark.parametrize("told_to_end", [False, True])
def test_signals_stay_with_the_program(ray: Ray, *, told_to_end: bool) -> None:
    """Ray's handler of SIGTERM has an alarm abort the process three seconds after it."""
    before = [session._GET_HANDLER(one) for one in (signal.SIGTERM, signal.SIGALRM)]

    def take() -> None:
        session._SET_HANDLER(signal.SIGTERM, ctypes.c_void_p(IGNORED))
        if told_to_end:
            session._SET_HANDLER(signal.SIGALRM, ctypes.c_void_p(IGNORED))
            signal.alarm(100)

    ray.takes_signals = take
    RaySession().join(None)
    assert [session._GET_HANDLER(one) for one in (signal.SIGTERM, signal.SIGALRM)] == before
    assert signal.alarm(0) == 0


def test_a_signal_that_comes_while_the_handlers_are_put_back_leaves_no_alarm(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to Ray's handler of SIGTERM, right after the alarm's was looked at, if Ray's is still there."""
    get_handler, alarms = session._GET_HANDLER, session._GET_HANDLER(signal.SIGALRM)

    def get_and_hear(one: int) -> Any:
        found = get_handler(one)
        if one == signal.SIGALRM and get_handler(signal.SIGTERM) == IGNORED:
            session._SET_HANDLER(signal.SIGALRM, ctypes.c_void_p(IGNORED))
            signal.alarm(100)
        return found

    ray.takes_signals = lambda: session._SET_HANDLER(signal.SIGTERM, ctypes.c_void_p(IGNORED))
    monkeypatch.setattr(session, "_GET_HANDLER", get_and_hear)
    RaySession().join(None)
    assert signal.alarm(0) == 0
    assert get_handler(signal.SIGALRM) == alarms


def test_a_ray_that_another_thread_joins_meanwhile_is_not_ended(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_check", lambda _: setattr(ray, "runs", True))
    ray.fault = RuntimeError("Maybe you called ray.init twice by accident?")
    with pytest.raises(EngineError, match="another thread has joined Ray meanwhile; enter the cluster again"):
        RaySession().join(None)
    assert (ray.runs, ray.left) == (True, 0)


def test_a_program_may_end_inside_of_the_block() -> None:
    """The thread does not keep it."""
    code = """
        from types import SimpleNamespace
        from triolet_ray import session

        session.ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: None)
        session.serve = SimpleNamespace(start=lambda **_: None)
        session.RaySession().join("local")
        print("joined")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "joined\n"), done.stderr


def test_one_cluster_is_deployed_at_a_time(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's making of a deployment fails in two threads at once: "is not registered for pickle by value"."""
    free: list[bool] = []

    def begun(_: Deployment) -> None:
        thread = threading.Thread(target=lambda: free.append(deployment.SESSION.lock.acquire(blocking=False)))
        thread.start()
        thread.join()

    monkeypatch.setattr(deployment, "SESSION", RaySession())
    monkeypatch.setattr(Deployment, "_begun", begun)
    Deployment(name="a", model="m", config=EngineConfig(), replicas=1, cpus=1.0, gpus=0.0, address=None).begin()
    assert free == [False]
    assert ray.joined == ["local"]
