"""A replica: the actors of one engine, in a process of Ray, for the lifetime of a Serve replica.

Serve calls the replica on asyncio. The actors run in a trio loop, in a thread of its own that begins and ends with the
replica. Serve awaits `Replica.__del__` when it scales down: the engine drains, everything is freed in order, and the
thread is joined.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import outcome
import ray
import trio
from attrs import define, evolve, field
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from triolet.actors.gpu_runner import torch_executor
from triolet.actors.messages import End, Failed
from triolet.actors.statistics import EngineStatistics
from triolet.actors.supervisor import Supervisor
from triolet.actors.worker import ThreadWorker
from triolet.core.config import EngineConfig
from triolet.core.errors import CallerError, EngineClosed
from triolet.core.events import error_text
from triolet.core.model import ModelDescription
from triolet.core.plan import SampledToken
from triolet.core.request import Request

from .autoscaling import ENCODINGS
from .messages import News
from .register import NAMESPACE, Departure, quarantine_of
from .replica_reports import ReplicaReport, Reporter

_log = logging.getLogger("triolet_ray")
Told = TypeVar("Told")
KEYS_SECONDS = 5.0  # between two reports of held keys; more often gains no hits (docs/fleet.md)
_AGAIN_SECONDS = 1.0  # before a register that may be restarting is asked again


@define(eq=False)
class _Stream:
    """The stream of one request. The scheduler puts tokens here, and the stream passes them to the replica's asyncio
    loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[News] = field(factory=asyncio.Queue)

    def put(self, sampled: tuple[SampledToken, ...]) -> None:
        self._hand(News(sampled))

    def end(self, end: End) -> None:
        self._hand(News(end=end))

    def _hand(self, news: News) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody reads
            self.loop.call_soon_threadsafe(self.queue.put_nowait, news)


class Replica:
    """The actors of one engine. Serve makes one for each replica, and calls it on asyncio.

    If one of the first replicas cannot load the model, `fault` returns the error. If the constructor raised it, Serve
    would try again for minutes, and the type of the error would be lost. If a later replica cannot load the model, the
    constructor raises: the replica gets no requests, and Serve tries again.

    Args:
        model: a folder with a checkpoint on this machine, or a hub id.
        config: the settings of the engine.
        register: the name of the `Register` that gets the report of the replica's end.
    """

    async def __init__(self, model: str, config: EngineConfig, register: str) -> None:  # type: ignore[misc]  # awaited by Serve
        self._loop = asyncio.get_running_loop()
        self._register = register
        self._reporter = Reporter(KEYS_SECONDS)
        self._fault: CallerError | None = None
        self._supervisor: Supervisor | None = None
        self._description: ModelDescription | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._leave = trio.Event()
        self._loading = trio.CancelScope()
        self._thread = threading.Thread(target=self._live, args=(model, config), name="triolet replica")
        self._thread.start()
        self._watch = self._loop.create_task(self._leave_with_its_process())
        await self._begun
        try:
            await self._opened
        except CallerError as error:
            if await self._is_late():
                raise
            self._fault = error

    # -- the thread of the actors ------------------------------------------------------------------------------------

    def _live(self, model: str, config: EngineConfig) -> None:
        ended = outcome.capture(trio.run, self._run, model, config)
        self._loop.call_soon_threadsafe(self._over, ended)

    async def _run(self, model: str, config: EngineConfig) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._loop.call_soon_threadsafe(self._begun.set_result, None)
        supervisor = Supervisor(config, partial(torch_executor, model, config), ThreadWorker())
        with self._loading:
            async with supervisor.running() as description:
                self._supervisor, self._description = supervisor, description
                self._loop.call_soon_threadsafe(self._opened.set_result, None)
                await self._leave.wait()

    def _end(self) -> None:
        """Ends the engine in order, or cancels its loading. Called in the trio loop."""
        self._leave.set()
        if self._supervisor is None:
            self._loading.cancel()

    def _over(self, ended: outcome.Outcome[None]) -> None:
        for future in (self._opened, self._ended):
            if future.done():
                continue
            if isinstance(ended, outcome.Error):
                future.set_exception(ended.error)
                future.exception()  # marks it as seen: `check_health` reports it
            else:
                future.set_result(None)

    # -- what Serve calls --------------------------------------------------------------------------------------------

    async def fault(self) -> CallerError | None:
        """Returns the reason why the model cannot be loaded; ``None``: the model is loaded."""
        return self._fault

    async def describe(self) -> bytes:
        """Returns the model's description, pickled. It lacks the compiler of structures, since replicas compile
        them.
        """
        self._running()
        assert self._description is not None, "an engine that has opened has a description"
        return pickle.dumps(evolve(self._description, structures=None))

    async def run(self, keys: tuple[str, ...], request: Request) -> AsyncIterator[News]:
        """Runs a request and yields its news. ``keys`` are the keys of its content, for the router. If the reader goes
        away, the request is aborted."""
        del keys
        stream, news = _Stream(self._loop), News()
        try:
            self._token.run_sync_soon(self._submit, _owned(request), stream)
        except trio.RunFinishedError:  # Serve notices within seconds
            raise EngineClosed("the engine of this replica has ended") from None
        try:
            while news.end is None:
                news = await stream.queue.get()
                while news.end is None and not stream.queue.empty():
                    more = stream.queue.get_nowait()
                    news = News(news.sampled + more.sampled, more.end)
                yield news
        finally:
            if news.end is None:
                self._in_trio(partial(self._running().abort, request.id))

    async def run_suspect(self, keys: tuple[str, ...], request: Request) -> AsyncIterator[News]:
        """Runs a request as `run` does, but first yields empty news when the request has arrived. The caller has to
        wait for that, since a replica in quarantine may have to be started.
        """
        yield News()
        async for news in self.run(keys, request):
            yield news

    async def statistics(self) -> EngineStatistics:
        """Returns the statistics of the engine."""
        return await self._told(self._running().statistics)

    async def check_health(self) -> None:
        """Raises if the engine has ended, so that Serve starts another replica."""
        if self._fault is not None:
            return
        if self._ended.done():
            self._ended.result()
            raise EngineClosed("the engine of this replica has ended")

    async def record_routing_stats(self) -> ReplicaReport | dict[str, Any]:
        """Returns the report to the routers. Serve asks for it every second."""
        return {} if self._fault is not None else await self._told(self._report)

    def _report(self) -> ReplicaReport:
        engine = self._running()
        found = engine.statistics().requests
        return self._reporter.report(
            now=self._loop.time(),
            requests=found.waiting + found.running,
            encodings=len(engine.keys_to_come()),
            keys=engine.held_keys(),
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the number of encodings that wait, for the autoscaling. Serve itself counts requests."""
        if self._fault is not None:
            return {}
        found = await self._told(self._running().statistics)
        return {ENCODINGS: float(found.encoder_cache.waiting)}

    async def __del__(self) -> None:
        """Ends the engine in order. Requests have ended by then: Serve waits for them first. Serve may call it while
        the model is being loaded."""
        self._watch.cancel()
        self._in_trio(self._end)
        await asyncio.wait([self._ended])
        self._thread.join()
        if self._supervisor is not None:
            await self._say_goodbye(self._supervisor.statistics())

    async def _leave_with_its_process(self) -> None:
        """Waits until the process that has deployed this replica is dead, and then takes the deployment down. Otherwise
        Serve would keep it for ever.
        """
        while True:
            try:
                await ray.get_actor(self._register, NAMESPACE).watch.remote()
            except ActorUnavailableError:
                await asyncio.sleep(_AGAIN_SECONDS)
            except (RayActorError, ValueError):
                break
            except RayError:
                _log.warning("the register cannot be watched, and is asked again", exc_info=True)
                await asyncio.sleep(_AGAIN_SECONDS)
        name = serve.get_replica_context().app_name
        for application in (name, quarantine_of(name)):  # the quarantine may have no replica that does it
            await asyncio.to_thread(serve.delete, application, _blocking=False)

    async def _is_late(self) -> bool:
        """True if every replica has loaded the model before this one, so that the cluster is open already."""
        try:
            register: Any = ray.get_actor(self._register, NAMESPACE)
            return bool(await register.is_open.remote())
        except (RayActorError, ValueError):
            return True  # the deployment ends

    async def _say_goodbye(self, left: EngineStatistics) -> None:
        error = self._ended.exception()
        departure = Departure(
            replica=serve.get_replica_context().replica_id.unique_id,
            bytes_held=left.device.total,
            outputs_held=left.encoder_cache.entries,
            error=None if error is None else error_text(error),
        )
        with suppress(RayActorError, ValueError):  # the deployment ends: nobody waits for the report
            await ray.get_actor(self._register, NAMESPACE).note.remote(departure)

    # -- between the threads -----------------------------------------------------------------------------------------

    def _submit(self, request: Request, stream: _Stream) -> None:
        try:
            self._running().submit(request, stream)
        except EngineClosed as error:
            stream.end(Failed(error))

    async def _told(self, question: Callable[[], Told]) -> Told:
        """Calls ``question`` in the trio loop and returns its answer, since no other thread may read the engine's books
        while they change. After the end of the trio loop they do not change, and ``question`` is called here.
        """
        answer: asyncio.Future[outcome.Outcome[Told]] = self._loop.create_future()
        self._in_trio(lambda: self._loop.call_soon_threadsafe(answer.set_result, outcome.capture(question)))
        either: list[asyncio.Future[Any]] = [answer, self._ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return answer.result().unwrap() if answer.done() else question()

    def _in_trio(self, call: Any) -> None:
        with suppress(trio.RunFinishedError):  # the engine has ended, and everything is freed
            self._token.run_sync_soon(call)

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise EngineClosed("the engine of this replica never opened")
        return self._supervisor


def _owned(request: Request) -> Request:
    """Copies the payloads into this process. Payloads that came through the object store would otherwise stay there,
    read-only, as long as they are used."""
    return evolve(request, items=tuple(evolve(item, payload=_copied(item.payload)) for item in request.items))


def _copied(payload: Any) -> Any:
    return payload.copy() if isinstance(payload, np.ndarray) and not payload.flags.writeable else payload
