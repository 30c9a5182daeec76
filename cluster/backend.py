"""`RayBackend`: what runs the requests of a `triolet.cluster.cluster.Cluster`. Each goes to a replica of a Serve
deployment, and again to another one when its replica is lost.

Two threads: the trio loop of the caller owns the flights (`triolet.core.flights`); an asyncio loop in a thread of its
own reads the replicas' answers, since Ray's are asyncio's, and hands them over.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import ray
import trio
from attrs import define, evolve, field, frozen
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ..actors.messages import Aborted, Failed, Stream
from ..actors.supervisor import EngineStatistics
from ..core.config import EngineConfig
from ..core.errors import DeviceLost, EngineClosed, EngineError, EngineTeardownError, RunnerCrashed
from ..core.flights import Flight
from ..core.model import ModelDescription
from ..core.request import Request
from .content_router import ContentRouter
from .messages import News
from .replica import Replica

_LOST = (ActorUnavailableError, RayActorError)
_ENDING = (DeviceLost, EngineClosed, EngineTeardownError, RunnerCrashed)  # of the replica, not of the request
_PREFIXES = 8  # keys of a prompt's beginnings that the router is told


@frozen(kw_only=True)
class Deployment:
    """What `RayBackend` deploys. See `triolet.cluster.cluster.Cluster` for the meanings."""

    name: str
    model: str
    config: EngineConfig
    replicas: int
    cpus: float
    gpus: float
    drain_seconds: float
    most_requests: int = 1_024  # of one replica; the door of the ingress bounds them too


class AsyncioThread:
    """An asyncio loop in a thread, for the block. `spawn` starts tasks in it; those that are left are cancelled."""

    def __enter__(self) -> AsyncioThread:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="triolet cluster")
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._ready.set()
        await self._leave.wait()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def spawn(self, name: object, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts ``work()`` in the loop, by a name that is new."""
        self._loop.call_soon_threadsafe(self._begin, name, work)

    def cancel(self, name: object) -> None:
        """Cancels the task of this name, if it runs."""
        self._loop.call_soon_threadsafe(self._stop, name)

    def _begin(self, name: object, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._tasks[name] = self._loop.create_task(work())
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def _stop(self, name: object) -> None:
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()


@define(eq=False)
class _Running:
    flight: Flight
    stream: Stream


@define(eq=False)
class RayBackend:
    """See `triolet.api.hosts.backend.Backend`."""

    deployment: Deployment
    failure: str | None = field(default=None, init=False)
    _flights: dict[str, _Running] = field(factory=dict, init=False)  # by request id
    _accepting: bool = field(default=False, init=False)
    _drained: trio.Event = field(factory=trio.Event, init=False)
    _stop: trio.Event = field(factory=trio.Event, init=False)
    _stopped: trio.Event = field(factory=trio.Event, init=False)
    _body: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _prefix: str = field(factory=lambda: uuid4().hex[:8], init=False)
    _handle: DeploymentHandle[Any] = field(init=False)
    _thread: AsyncioThread = field(init=False)
    _token: trio.lowlevel.TrioToken = field(init=False)
    _identity: str = field(default="", init=False)

    # -- its life ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ModelDescription]:
        """See `Backend.running`. Deploys, and takes the deployment down again, whatever happens."""
        self._token = trio.lowlevel.current_trio_token()
        with AsyncioThread() as self._thread:
            try:
                self._handle = await trio.to_thread.run_sync(self._deploy)
                description = await trio.to_thread.run_sync(self._describe)
                self._accepting = True
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._take_down)
                    try:
                        with self._body:
                            yield description
                        await self._drain(self.deployment.drain_seconds)
                    finally:
                        self._stop.set()
            finally:
                self._accepting = False
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(partial(serve.delete, self.deployment.name))

    async def _take_down(self) -> None:
        await self._stop.wait()
        self._accepting = False
        for request_id in list(self._flights):
            self.abort(request_id)
        self._stopped.set()

    async def _drain(self, seconds: float) -> None:
        self._accepting = False
        if self._flights:
            with trio.move_on_after(seconds):
                await self._drained.wait()

    def _deploy(self) -> DeploymentHandle[Any]:
        chosen = self.deployment
        if not ray.is_initialized():
            ray.init(address="auto", logging_level="WARNING", log_to_driver=False)
        serve.start(proxy_location="Disabled")
        replica = serve.deployment(
            Replica,
            name="replica",
            num_replicas=chosen.replicas,
            max_ongoing_requests=chosen.most_requests,
            graceful_shutdown_timeout_s=chosen.drain_seconds + chosen.config.stage_seconds * 3,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=1.0,
            ray_actor_options={"num_cpus": chosen.cpus, "num_gpus": chosen.gpus},
            request_router_config=RequestRouterConfig(
                request_router_class=ContentRouter,
                request_router_kwargs={"places": chosen.config.max_running},
                request_routing_stats_period_s=1.0,
            ),
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        ).bind(chosen.model, chosen.config)
        return serve.run(replica, name=chosen.name, route_prefix=None, logging_config={"log_level": "WARNING"})

    def _describe(self) -> ModelDescription:
        description: ModelDescription = pickle.loads(self._handle.describe.remote().result())
        self._identity = description.processor_identity
        return description

    async def stop(self, drain_seconds: float) -> None:
        """See `Backend.stop`."""
        await self._drain(drain_seconds)
        self._stop.set()
        await self._stopped.wait()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, stream: Stream) -> None:
        """See `Backend.submit`."""
        if not self._accepting:
            raise EngineClosed("the cluster is stopping and takes no new requests; open a new one")
        self._flights[request.id] = running = _Running(Flight(request), stream)
        self._send(request.id, running)

    def abort(self, request_id: str) -> None:
        """See `Backend.abort`."""
        running = self._flights.get(request_id)
        if running is None:
            return
        self._thread.cancel((request_id, running.flight.attempt))
        running.flight.end(running.flight.attempt)
        self._end(request_id, Aborted())

    def _send(self, request_id: str, running: _Running) -> None:
        attempt, request = running.flight.send()
        name = (request_id, attempt)
        sent = evolve(request, id=f"{self._prefix}:{request_id}:{attempt}", sampling=_portable(request))
        self._thread.spawn(name, partial(self._fly, name, _keys(request), sent))

    def _took(self, name: tuple[str, int], news: News) -> None:
        running = self._flights.get(name[0])
        if running is None:
            return
        flight, (request_id, attempt) = running.flight, name
        if isinstance(news.end, Failed) and isinstance(news.end.error, _ENDING):
            self._lost(name, news.end.error)
            return
        if kept := flight.took(attempt, news.sampled):
            running.stream.put(kept)
        if news.end is not None and flight.end(attempt):
            self._end(request_id, news.end)

    def _lost(self, name: tuple[str, int], cause: BaseException) -> None:
        request_id, attempt = name
        running = self._flights.get(request_id)
        if running is None or running.flight.attempt != attempt:
            return
        refusal = running.flight.lost(attempt, cause)
        if refusal is not None:
            self._end(request_id, Failed(refusal))
        else:
            self._send(request_id, running)

    def _broke(self, name: tuple[str, int], error: Exception) -> None:
        running = self._flights.get(name[0])
        if running is not None and running.flight.end(name[1]):
            self._end(name[0], Failed(error))

    def _end(self, request_id: str, end: Any) -> None:
        self._flights.pop(request_id).stream.end(end)
        if not (self._flights or self._accepting):
            self._drained.set()

    # -- in the asyncio thread ---------------------------------------------------------------------------------------

    async def _fly(self, name: tuple[str, int], keys: tuple[str, ...], request: Request) -> None:
        """One attempt: reads the replica's answers and hands them over."""
        answers = self._handle.options(stream=True).run.remote(keys, request)
        try:
            async for news in answers:
                self._hand(self._took, name, news)
        except _LOST as error:
            self._hand(self._lost, name, error)
        except RayTaskError as error:
            self._hand(self._broke, name, _cause(error))

    def _hand(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self._token.run_sync_soon(call, *arguments)
        except trio.RunFinishedError:
            return

    # -- the rest of a backend ---------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """See `Backend.sleep`."""
        raise EngineError("a cluster does not sleep; scale it down instead")

    async def wake(self) -> None:
        """See `Backend.wake`."""
        raise EngineError("a cluster does not sleep")

    def statistics(self) -> EngineStatistics:
        """See `Backend.statistics`."""
        raise NotImplementedError


def _portable(request: Request) -> Any:
    """Sampling without the compiled form of its structure, which is made anew where it runs."""
    return request.sampling


def _keys(request: Request) -> tuple[str, ...]:
    """What the router is told of the contents: items, or else the beginnings of the prompt, the longest first."""
    if request.items:
        return tuple(item.key for item in request.items)
    return tuple(key.hex() for key in request.page_keys[: -_PREFIXES - 1 : -1])


def _cause(error: RayTaskError) -> Exception:
    cause = error.cause
    return cause if isinstance(cause, Exception) else error
