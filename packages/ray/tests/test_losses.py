"""`RayBackend` over replicas that a test plays: where a request goes when its replica is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from tests.actors.shared import Reader
from triolet import EngineConfig
from triolet.actors.messages import Failed, Finished
from triolet.core.errors import DeviceLost, PoisonRequest
from triolet.core.plan import SampledToken
from triolet.core.request import FinishReason, Request
from triolet.core.timings import Timings
from triolet_ray import backend
from triolet_ray.backend import RayBackend
from triolet_ray.messages import News

pytestmark = pytest.mark.real_time

DIES, PREEMPTED, DEVICE_LOST, WELL = "dies", "preempted", "device lost", "well"
NO_ROOM, GIVEN_UP = "no room", "given up"
MAIN, QUARANTINE = "main", "quarantine"


class Answers:
    """What a replica answers, as Serve gives it."""

    def __init__(self, answers: AsyncIterator[News]) -> None:
        self.answers, self.cancelled = answers, False

    def __aiter__(self) -> AsyncIterator[News]:
        return self.answers

    async def __anext__(self) -> News:
        return await anext(self.answers)

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """Handles of the replicas and of the quarantine. ``fates`` has what becomes of each sending, in their order; each
    gives a token at first, where it comes so far."""

    def __init__(self, *fates: str) -> None:
        self.fates = list(fates)
        self.sent: list[tuple[str, bool]] = []  # where, and whether to run in steps of its own
        self.answers: list[Answers] = []

    def handle(self, where: str) -> Any:
        call = SimpleNamespace(remote=lambda keys, request: self.send(where, request))
        silence = SimpleNamespace(results_async=say_nothing)
        return SimpleNamespace(
            options=lambda *, stream: SimpleNamespace(run=call, run_suspect=call), broadcast=lambda _: silence
        )

    def send(self, where: str, request: Request) -> Answers:
        self.sent.append((where, request.suspect))
        self.answers.append(Answers(self.play(where, request, self.fates.pop(0))))
        return self.answers[-1]

    async def play(self, where: str, request: Request, fate: str) -> AsyncIterator[News]:
        if fate == GIVEN_UP:
            raise DeploymentUnavailableError(DeploymentID("replica"))
        if fate == NO_ROOM:
            await asyncio.get_running_loop().create_future()
        if where == QUARANTINE:
            yield News()
        if fate == DEVICE_LOST:
            yield News(end=Failed(DeviceLost("gone")))
            return
        yield News((SampledToken(token_id=len(request.committed)),))
        if fate == WELL:
            yield News(end=Finished(FinishReason.LENGTH, Timings(queued=0, encoder_wait=0, first_token=0, total=0)))
            return
        error = ActorDiedError()
        error._preempted = fate == PREEMPTED
        raise error


async def run(monkeypatch: pytest.MonkeyPatch, replicas: Replicas) -> Reader:
    """One request, to its end."""
    monkeypatch.setattr(backend, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(backend, "_ROOM_SECONDS", 0.1 if NO_ROOM in replicas.fates else 60.0)
    running = SimpleNamespace(
        lacks=lambda: None,
        describe=lambda: (None, None),
        handle=replicas.handle(MAIN),
        quarantine=replicas.handle(QUARANTINE),
        quarantine_loads=lambda: False,
        register=SimpleNamespace(read=SimpleNamespace(remote=no_departures)),
        end=list,
    )
    deployed: Any = SimpleNamespace(begin=lambda: running, config=EngineConfig(), name="a")
    engine, reader = RayBackend(deployed), Reader()
    with trio.fail_after(300):
        async with engine.running():
            engine.submit(Request(id="r", prompt_token_ids=(1,), max_tokens=9), reader)
            await reader.ended.wait()
    return reader


async def say_nothing(*, timeout_s: float) -> list[Any]:
    raise TimeoutError(timeout_s)


async def no_departures(_: int) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("fates", "sent"),
    [
        ((WELL,), [(MAIN, False)]),
        ((DIES, WELL), [(MAIN, False), (QUARANTINE, False)]),
        ((PREEMPTED, PREEMPTED, WELL), [(MAIN, False)] * 3),
        ((DEVICE_LOST, WELL), [(MAIN, False), (QUARANTINE, False)]),
        ((DIES, NO_ROOM, WELL), [(MAIN, False), (QUARANTINE, False), (MAIN, True)]),
        ((DIES, NO_ROOM, DIES, WELL), [(MAIN, False), (QUARANTINE, False), (MAIN, True), (MAIN, True)]),
        ((DIES, GIVEN_UP, WELL), [(MAIN, False), (QUARANTINE, False), (MAIN, True)]),
        ((DIES, DIES, WELL), [(MAIN, False), (QUARANTINE, False), (QUARANTINE, False)]),
        ((DIES, PREEMPTED, WELL), [(MAIN, False), (QUARANTINE, False), (QUARANTINE, False)]),
    ],
)
async def test_a_request_goes_on_elsewhere_by_what_it_was_lost_to(
    monkeypatch: pytest.MonkeyPatch, fates: tuple[str, ...], sent: list[tuple[str, bool]]
) -> None:
    replicas = Replicas(*fates)
    reader = await run(monkeypatch, replicas)
    assert replicas.sent == sent
    assert isinstance(reader.told, Finished)
    told = sum(fate in (DIES, PREEMPTED, WELL) for fate in fates)
    assert reader.token_ids == list(range(told)), "no gap and no duplicate"


@pytest.mark.parametrize(
    ("fates", "says"), [((DIES, DIES, DIES), "alone on the last"), ((DIES, NO_ROOM, DIES, DIES), "in steps of its own")]
)
async def test_what_ends_replicas_again_and_again_is_poison(
    monkeypatch: pytest.MonkeyPatch, fates: tuple[str, ...], says: str
) -> None:
    """Alone in quarantine, or apart from others, where another one may have ended the first of them."""
    replicas = Replicas(*fates)
    reader = await run(monkeypatch, replicas)
    assert replicas.fates == []
    assert isinstance(reader.told, Failed)
    assert isinstance(reader.told.error, PoisonRequest)
    assert says in str(reader.told.error)


async def test_what_quarantine_has_no_room_for_is_withdrawn_there(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(DIES, NO_ROOM, WELL)
    await run(monkeypatch, replicas)
    _, unplaced, went_well = replicas.answers
    assert unplaced.cancelled
    assert not went_well.cancelled
