"""Single pieces between us and Ray, over stand-ins."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from triolet import EngineConfig
from triolet.actors.messages import End, Failed
from triolet.core.errors import CheckpointError, EngineClosed, EngineError
from triolet.core.request import Request
from triolet_ray import deployment
from triolet_ray.backend import RayBackend, _Attempt
from triolet_ray.deployment import Deployment, Running
from triolet_ray.replica import Replica
from triolet_ray.replica_reports import Reporter


class Answers:
    """Serve's answers of a replica that says nothing."""

    cancelled = False

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> Any:
        await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        self.cancelled = True


def test_a_request_that_is_withdrawn_is_withdrawn_at_its_replica() -> None:
    """Serve goes on with a stream that nobody reads."""
    answers = Answers()

    async def read() -> None:
        backend = RayBackend(deployment=None)  # type: ignore[arg-type]
        reading = asyncio.create_task(backend._read(_Attempt("request", 1), answers, quarantined=False))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()

    asyncio.run(read())
    assert answers.cancelled


class Asked(Replica):
    """A replica that Serve has not made, and does not end."""

    __init__ = object.__init__  # type: ignore[assignment]

    def __del__(self) -> None:  # type: ignore[override]
        pass


def test_a_replica_whose_engine_has_ended_says_so() -> None:
    """Serve sends it requests until it finds out; they are sent again."""

    async def run() -> None:
        replica = Asked()
        replica._loop, replica._token = asyncio.get_running_loop(), await asyncio.to_thread(trio.run, ended_token)
        with pytest.raises(EngineClosed, match="has ended"):
            await anext(replica.run((), Request(id="r", prompt_token_ids=(1,), max_tokens=1)))

    asyncio.run(run())


def test_a_request_that_reaches_an_engine_that_is_stopping_ends_with_its_refusal() -> None:
    refusal, ends = EngineClosed("it is stopping"), list[End]()

    def submit(*_: object) -> None:
        raise refusal

    replica = Asked()
    replica._supervisor = SimpleNamespace(submit=submit)  # type: ignore[assignment]
    replica._submit(Request(id="r", prompt_token_ids=(1,), max_tokens=1), SimpleNamespace(end=ends.append))  # type: ignore[arg-type]
    assert ends == [Failed(refusal)]


async def ended_token() -> trio.lowlevel.TrioToken:
    """Of a loop that has ended, when it is used."""
    return trio.lowlevel.current_trio_token()


class Handle:
    """A handle of Serve's that has heard of more replicas each time it is asked."""

    def __init__(self, *told: list[Any]) -> None:
        self.told = list(told)

    def broadcast(self, _: str) -> Any:
        answers = self.told.pop(0)
        if not answers:
            raise DeploymentUnavailableError(DeploymentID("replica"))
        return SimpleNamespace(results=lambda timeout_s: answers)


DEPLOYED = Deployment(name="a", model="m", config=EngineConfig(), replicas=2, cpus=1.0, gpus=0.0, address=None)


def tells(status: ApplicationStatus) -> Any:
    """Serve, whose one application has this status."""
    found = SimpleNamespace(status=status, message="it ended", deployments={})
    return SimpleNamespace(status=lambda: SimpleNamespace(applications={"a": found}))


def test_what_one_replica_of_several_cannot_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, and however late the handle hears of it, and the cluster is not open then."""
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "serve", tells(ApplicationStatus.RUNNING))
    handle = Handle([], [None], [None, CheckpointError("not on this machine")])
    running = Running(DEPLOYED, handle, None, register=None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="not on this machine"):
        running.describe()
    assert handle.told == []


def test_replicas_that_serve_gives_up_after_they_were_ready_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the time for an answer is over."""
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "serve", tells(ApplicationStatus.DEPLOY_FAILED))
    handle = Handle([])
    running = Running(DEPLOYED, handle, None, register=None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="the replicas cannot be started: it ended"):
        running.describe()
    assert handle.told == []


def test_a_handle_that_never_hears_of_the_replicas_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_ASK_SECONDS", 0.1)
    handle = SimpleNamespace(broadcast=lambda _: SimpleNamespace(results=lambda timeout_s: [None]))
    running = Running(DEPLOYED, handle, None, register=None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"2 replicas were ready, but fewer answered within 0.1 s"):
        running.describe()


class Serve:
    """Says of a deployment that it is there, ``times`` times after it was deleted."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.deleted: list[str] = []

    def delete(self, name: str, *, _blocking: bool) -> None:
        assert not _blocking
        self.deleted.append(name)

    def status(self) -> Any:
        self.times -= 1
        return SimpleNamespace(applications={"a": None} if self.times >= 0 else {})


def test_a_deployment_has_ended_when_its_processes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve says so when it has told Ray to end them. Ray's books are long: they are read when Serve has said it."""
    applications, left, looks = Serve(3), [True, True, False], []

    def are_left(names: tuple[str, ...]) -> bool:
        looks.append(applications.times)
        return left.pop(0)

    monkeypatch.setattr(deployment, "serve", applications)
    monkeypatch.setattr(deployment, "are_left", are_left)
    monkeypatch.setattr(deployment, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(deployment, "_BOOKS_SECONDS", 0.0)
    assert Running(DEPLOYED, None, None, register=None)._deleted(60.0)  # type: ignore[arg-type]
    assert (applications.deleted, looks, left) == (["a", "a-quarantine"], [-1, -1, -1], [])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a deployment knows of its machine: the clock, which its pauses move, and since when no process is left."""
    one = SimpleNamespace(now=0.0, gone=0.0, left=0)

    def sleep(seconds: float) -> None:
        one.now += seconds

    def leave() -> None:
        one.left += 1

    handle = SimpleNamespace(shutdown=lambda: None)
    one.running = Running(DEPLOYED, handle, handle, register=None)  # type: ignore[arg-type]
    monkeypatch.setattr(deployment, "time", SimpleNamespace(monotonic=lambda: one.now, sleep=sleep))
    monkeypatch.setattr(deployment, "serve", Serve(0))
    monkeypatch.setattr(deployment, "are_left", lambda _: one.now < one.gone)
    monkeypatch.setattr(deployment, "ray", SimpleNamespace(kill=lambda _: None))
    monkeypatch.setattr(deployment, "SESSION", SimpleNamespace(leave=leave))
    return one


@pytest.mark.parametrize(
    ("gone", "told"), [(35.0, []), (600.0, ["replicas of a that were not ready have not ended in 40 s"])]
)
def test_a_start_that_is_given_up_awaits_the_end_of_replicas_that_load(
    machine: SimpleNamespace, caplog: pytest.LogCaptureFixture, gone: float, told: list[str]
) -> None:
    """Each of its stages has the time that the settings give. What Ray finds no room for, Serve ends in ten minutes."""
    machine.gone = gone
    machine.running.give_up()
    end = min(gone, 40.0)
    assert end <= machine.now < end + 1.0
    assert (machine.left, caplog.messages) == (1, told)


class Books:
    """A supervisor that says in which thread it is asked."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def statistics(self) -> Any:
        self.threads.append(threading.current_thread())
        counted = SimpleNamespace(waiting=1, running=2)
        return SimpleNamespace(requests=counted, encoder_cache=counted)

    def keys_to_come(self) -> frozenset[str]:
        return frozenset("a")

    def held_keys(self) -> tuple[str, ...]:
        return ("a", "b")


def test_a_replicas_books_are_read_where_they_change() -> None:
    """Serve asks in another thread, in which they would change while they are read."""
    books = Books()

    async def ask() -> threading.Thread:
        replica, opened = Asked(), asyncio.get_running_loop().create_future()
        replica._loop, replica._ended = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        replica._fault, replica._supervisor, replica._reporter = None, books, Reporter(5.0)  # type: ignore[assignment]
        leave = trio.Event()

        async def live() -> None:
            replica._token = trio.lowlevel.current_trio_token()
            replica._loop.call_soon_threadsafe(opened.set_result, None)
            await leave.wait()

        thread = threading.Thread(target=trio.run, args=(live,))
        thread.start()
        await opened
        word = {"number": 1, "requests": 3, "encodings": 1, "keys": ["a", "b"]}
        assert await replica.record_routing_stats() == word
        assert await replica.record_autoscaling_stats() == {"encodings": 1.0}
        await replica.statistics()
        replica._token.run_sync_soon(leave.set)
        thread.join()
        replica._ended.set_result(None)
        await replica.statistics()  # nothing changes any more
        return thread

    thread = asyncio.run(ask())
    assert books.threads == [thread] * 3 + [threading.main_thread()]
