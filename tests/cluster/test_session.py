"""`RaySession` over a Ray that a test stands for."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from triolet import EngineConfig
from triolet.cluster import deployment, session
from triolet.cluster.deployment import Deployment
from triolet.cluster.session import RaySession
from triolet.core.errors import EngineError


class Ray:
    """As much of Ray and of Serve as a session uses."""

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.left = 0
        self.runs = False
        self.fault: Exception | None = None

    def is_initialized(self) -> bool:
        return self.runs

    def init(self, address: str, **_: Any) -> None:
        if self.fault is not None:
            raise self.fault
        self.joined.append(address)
        self.runs = True

    def shutdown(self, *, wait_for_processes: bool) -> None:
        assert wait_for_processes
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
    assert (ray.joined, ray.left) == ([], 0)


def test_a_process_has_one_ray(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = RaySession()
    ours.join("auto")
    with pytest.raises(EngineError, match="has joined Ray at auto, and not at local; allowed: one Ray"):
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
        ("head", "that is no address"),
        ("head:port", "that is no address"),
        ("127.0.0.1:{}", "Connection refused"),
    ],
)
def test_an_address_that_cannot_be_is_told_at_once(ray: Ray, address: str, told: str) -> None:
    """Ray would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = address.format(closed.getsockname()[1])
    with pytest.raises(EngineError, match=f"{told}; allowed: host:port, such as head:6379"):
        RaySession().join(address)
    assert ray.joined == []


def test_the_error_of_ray_is_told_with_what_is_allowed(ray: Ray) -> None:
    ray.fault = ConnectionError("none runs")
    with pytest.raises(EngineError, match="Ray at auto cannot be reached: none runs; allowed: "):
        RaySession().join("auto")


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
