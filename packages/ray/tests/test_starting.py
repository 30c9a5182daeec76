"""A start of replicas that ends early: nothing is left of it, and the log has said what it waited for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio

from triolet.core.errors import EngineError
from triolet_ray import backend
from triolet_ray.backend import RayBackend

pytestmark = pytest.mark.real_time


class Deployed:
    """Stands for a `Deployment` and what it has begun. ``lacks`` answers for the replicas."""

    name = "a"

    def __init__(self, lacks: Callable[[], str | None]) -> None:
        self.lacks = lacks
        self.given_up = 0

    def begin(self) -> Deployed:
        return self

    def describe(self) -> Any:
        raise EngineError("no description")

    def give_up(self) -> None:
        self.given_up += 1


async def start(deployed: Deployed) -> None:
    async with RayBackend(deployed).running():  # type: ignore[arg-type]
        pytest.fail("it opened")


async def test_a_start_that_is_cancelled_is_given_up_after_it_said_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(backend, "_READY_SECONDS", 0.0)
    asked: list[int] = []

    def lacks() -> str:
        asked.append(1)
        if len(asked) == 3:
            trio.from_thread.run_sync(scope.cancel)
        return "replicas that are ready: 0."

    deployed = Deployed(lacks)
    with caplog.at_level(logging.INFO, logger="triolet_ray"), trio.CancelScope() as scope:
        await start(deployed)
    assert scope.cancelled_caught
    assert deployed.given_up == 1
    assert caplog.messages == ["waiting for a: replicas that are ready: 0."], "once, while nothing changes"


@pytest.mark.parametrize("says", ["no room", "no description"])
async def test_a_start_that_fails_is_given_up(says: str) -> None:
    def lacks() -> str | None:
        if says == "no room":
            raise EngineError("the replicas cannot be started: no room")
        return None

    deployed = Deployed(lacks)
    with pytest.raises(EngineError, match=says):
        await start(deployed)
    assert deployed.given_up == 1
