"""`RayBackend`: runs the requests of a `triolet_ray.cluster.Cluster`.

Each request is sent to a replica of a Serve deployment. If that replica is lost, the request is sent to another one.

The requests of a lost replica go on in quarantine: on a replica that runs only suspects and is started when it is
needed.

Two threads work. The caller's trio loop owns the flights and the trials (`triolet_ray.flights`). An asyncio loop in a
thread of its own reads the replicas' answers and passes them to the trio loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import trio
from attrs import define, evolve, field, frozen
from ray.exceptions import LocalRayletDiedError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from triolet.actors.messages import Aborted, End, Failed, Stream
from triolet.actors.process import Process
from triolet.actors.statistics import EngineStatistics
from triolet.core.errors import (
    DeviceLost,
    EngineClosed,
    EngineError,
    EngineStateError,
    EngineTeardownError,
    InvalidRequest,
    RunnerCrashed,
    caused,
)
from triolet.core.model import ModelDescription
from triolet.core.request import Request, Structure

from .asyncio_thread import AsyncioThread, NamedTasks
from .deployment import Deployment, Running
from .flights import Flight, Place, SuspectTrials
from .messages import News
from .register import Departure
from .statistics import total

_log = logging.getLogger("triolet_ray")
_GONE = (LocalRayletDiedError, ObjectLostError, RayActorError)  # the replica's process or machine is lost
_ENDED = (DeviceLost, EngineClosed, EngineTeardownError, RunnerCrashed)  # its engine has ended
_PREFIXES = 8  # keys of a prompt's beginnings that the router gets
_READY_SECONDS = 0.2  # between two checks of readiness
_TELL_SECONDS = 10.0  # before the log says what is missing, and between two such lines
_LOOK_SECONDS = 2.0  # between two requests for the replicas' statistics
_PAUSE_SECONDS = 0.2  # after a loss: Serve drops the replica, and all its requests become known
_APART_SECONDS = 60.0  # without room in quarantine: until suspects are sent there again
_ROOM_SECONDS = 60.0  # for Ray to find room for the quarantine; after that suspects run among others


@frozen
class _Attempt:
    """One attempt to run a request. It is also the name of the task that reads the answers."""

    request_id: str
    number: int


@frozen(eq=False)
class _Client:
    flight: Flight
    stream: Stream


@define(eq=False)
class RayBackend:
    """The `triolet.api.hosts.backend.Backend` of a cluster."""

    deployment: Deployment
    failure: str | None = field(default=None, init=False)
    departures: list[Departure] = field(factory=list, init=False)
    """The reports of replicas that have left in order, the latest last. At the end of the block all replicas leave."""
    _clients: dict[str, _Client] = field(factory=dict, init=False)  # by request id
    _trials: SuspectTrials = field(factory=SuspectTrials, init=False)
    _accepting: bool = field(default=False, init=False)
    _no_room_until: float = field(default=-math.inf, init=False)  # until then suspects are not sent to quarantine
    _is_down: bool = field(default=False, init=False)
    _idle: trio.Event = field(factory=trio.Event, init=False)  # set when none is accepted and none is left
    _ingress: str = field(factory=lambda: uuid4().hex[:8], init=False)  # other ingresses use the same request ids
    _statistics: EngineStatistics = field(init=False)  # the latest
    _process: Process = field(factory=Process, init=False)
    _running: Running = field(init=False)
    _tasks: NamedTasks = field(init=False)
    _token: trio.lowlevel.TrioToken = field(init=False)

    # -- its life ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def running(self) -> AsyncIterator[ModelDescription]:
        """Deploys the replicas for the block, and takes the deployment down however the block ends."""
        self._token = trio.lowlevel.current_trio_token()
        self._running = await trio.to_thread.run_sync(self.deployment.begin)
        description, self._statistics = await self._ready()
        try:
            with AsyncioThread() as self._tasks:
                try:
                    self._tasks.start("statistics", self._look)
                    self._accepting = True
                    yield description
                    await self.stop(self.deployment.config.drain_seconds)
                finally:
                    self._give_up()
        finally:
            await self._take_down_after(sys.exception())

    async def _ready(self) -> tuple[ModelDescription, EngineStatistics]:
        """Returns when every replica is ready. If that fails, the replicas are ended before the error is raised."""
        try:
            await self._lacks_nothing()
            return await trio.to_thread.run_sync(self._running.describe)
        except BaseException:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._running.give_up)
            raise

    async def _lacks_nothing(self) -> None:
        """Returns when every replica is ready. Logs what is missing if that takes long."""
        told, tell_at = "", trio.current_time() + _TELL_SECONDS
        while (lack := await trio.to_thread.run_sync(self._running.lacks)) is not None:
            if lack != told and trio.current_time() >= tell_at:
                told, tell_at = lack, trio.current_time() + _TELL_SECONDS
                _log.info("waiting for %s: %s", self.deployment.name, lack)
            await trio.sleep(_READY_SECONDS)

    async def _take_down_after(self, body_error: BaseException | None) -> None:
        """Takes the deployment down. If the block raised ``body_error``, an error of taking down becomes a note of that
        error."""
        try:
            await self._take_down()
        except EngineTeardownError as error:
            if body_error is None:
                raise
            body_error.add_note(f"the cluster's end failed too: {error}")
        finally:
            del body_error  # a frame in its own error's traceback would be a reference cycle

    async def _take_down(self) -> None:
        """Takes the deployment down; does nothing if that was done before."""
        if self._is_down or self._process.is_forked:
            return
        self._is_down = True
        with trio.CancelScope(shield=True):
            self.departures = await trio.to_thread.run_sync(self._running.end)

    async def stop(self, drain_seconds: float) -> None:
        """Waits up to ``drain_seconds`` for requests to end, and takes the deployment down."""
        self._accepting = False
        if self._clients and not self._process.is_forked:
            with trio.move_on_after(drain_seconds):
                await self._idle.wait()
        self._give_up()
        self._tasks.cancel("statistics")
        await self._take_down()

    def _give_up(self) -> None:
        self._accepting = False
        for request_id in list(self._clients):
            self.abort(request_id)

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, stream: Stream) -> None:
        """Sends a request to a replica. The tokens are put into ``stream``."""
        if not self._accepting:
            raise EngineClosed("the cluster is stopping and takes no new requests; open a new cluster")
        self._clients[request.id] = client = _Client(Flight(request), stream)
        self._send(request.id, client)

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """Withdraws a request; does nothing if the request is not known. Its replica counts it as aborted."""
        del stopped
        client = self._clients.get(request_id)
        if client is None:
            return
        attempt = client.flight.attempt
        client.flight.end(attempt)
        self._tasks.cancel(_Attempt(request_id, attempt))
        self._end(request_id, Aborted())

    def _send(self, request_id: str, client: _Client) -> None:
        quarantined = client.flight.place is not Place.AMONG_OTHERS
        apart = quarantined and trio.current_time() < self._no_room_until
        number, request = client.flight.send(apart=apart)
        attempt = _Attempt(request_id, number)
        sent = evolve(request, id=f"{self._ingress}:{request_id}:{number}", sampling=_plain(request).sampling)
        fly = partial(self._fly, attempt, _keys(request), sent, quarantined=quarantined and not apart)
        self._tasks.start(attempt, fly)

    def _begin_trials(self) -> None:
        for request_id in self._trials.begin():
            self._send(request_id, self._clients[request_id])

    def _took(self, attempt: _Attempt, news: News) -> None:
        if isinstance(news.end, Failed) and isinstance(news.end.error, _ENDED):
            self._lost(attempt, news.end.error)
            return
        client = self._clients.get(attempt.request_id)
        if client is None:
            return
        if kept := client.flight.took(attempt.number, news.sampled):
            client.stream.put(kept)
        if news.end is not None and client.flight.end(attempt.number):
            self._end(attempt.request_id, news.end)
        elif kept and client.flight.cleared:
            self._trials.cleared(attempt.request_id)
            self._begin_trials()

    def _lost(self, attempt: _Attempt, cause: BaseException) -> None:
        client = self._clients.get(attempt.request_id)
        if client is None or client.flight.attempt != attempt.number:
            return
        alone = self._trials.gone(attempt.request_id)
        refusal = client.flight.lost(attempt.number, cause, alone=alone, blameless=_is_blameless(cause))
        if refusal is not None:
            self._end(attempt.request_id, Failed(refusal))
        elif client.flight.place is Place.AMONG_OTHERS:
            self._later(partial(self._send_again, attempt.request_id, client))
        else:
            self._trials.add(attempt.request_id, client.flight.place)
            self._later(self._begin_trials)

    def _send_again(self, request_id: str, client: _Client) -> None:
        if self._clients.get(request_id) is client:
            self._send(request_id, client)

    def _unplaced(self, attempt: _Attempt) -> None:
        """Sends a suspect to another replica, since the quarantine has no room or cannot be started."""
        client = self._clients.get(attempt.request_id)
        if client is not None and client.flight.attempt == attempt.number:
            self._no_room_until = trio.current_time() + _APART_SECONDS
            self._send(attempt.request_id, client)

    def _broke(self, attempt: _Attempt, error: Exception) -> None:
        """Ends a request whose attempt failed by a fault in Triolet or Serve rather than by the end of the replica."""
        client = self._clients.get(attempt.request_id)
        if client is not None and client.flight.end(attempt.number):
            self._end(attempt.request_id, Failed(error))

    def _end(self, request_id: str, end: End) -> None:
        self._clients.pop(request_id).stream.end(end)
        self._trials.gone(request_id)
        self._begin_trials()
        if not (self._clients or self._accepting):
            self._idle.set()

    # -- in the asyncio thread ---------------------------------------------------------------------------------------

    async def _fly(self, attempt: _Attempt, keys: tuple[str, ...], request: Request, *, quarantined: bool) -> None:
        """Reads the answers of one attempt and passes them to the trio loop. However the attempt ends, the trio loop
        learns of its end."""
        try:
            await self._read(attempt, self._call(keys, request, quarantined=quarantined), quarantined=quarantined)
        except _GONE as error:
            self._hand(self._lost, attempt, error)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, _ENDED):
                self._hand(self._lost, attempt, cause)
            else:
                self._hand(self._broke, attempt, _failed(cause))
        except asyncio.CancelledError:
            self._hand(self._broke, attempt, EngineClosed("the cluster ended before the request did"))
            raise
        except Exception as error:  # noqa: BLE001  (an error of Serve; the client gets it)
            self._hand(self._broke, attempt, _failed(error))
        else:
            self._hand(self._lost, attempt, EngineClosed("the replica ended before the request did"))

    def _call(self, keys: tuple[str, ...], request: Request, *, quarantined: bool) -> Any:
        if quarantined:
            return self._running.quarantine.options(stream=True).run_suspect.remote(keys, request)
        return self._running.handle.options(stream=True).run.remote(keys, request)

    async def _read(self, attempt: _Attempt, answers: Any, *, quarantined: bool) -> None:
        try:
            if quarantined and not await self._is_placed(answers):
                answers.cancel()
                self._hand(self._unplaced, attempt)
                return
            async for news in answers:
                self._hand(self._took, attempt, news)
        except BaseException:
            with suppress(Exception):  # a call that was never sent raises its error again
                answers.cancel()  # otherwise the replica would go on, for nobody
            raise

    async def _is_placed(self, answers: Any) -> bool:
        """True when a replica in quarantine has the request. False if there is no room for such a replica."""
        first = asyncio.ensure_future(anext(answers))
        try:
            while not first.done():
                await asyncio.wait([first], timeout=_ROOM_SECONDS)
                if not (first.done() or await asyncio.to_thread(self._running.quarantine_loads)):
                    return False
            first.result()
        except DeploymentUnavailableError:  # Serve has given it up
            return False
        finally:
            first.cancel()
        return True

    async def _look(self) -> None:
        """Asks the replicas for their statistics, again and again. Never returns."""
        while True:
            try:
                await self._look_once()
            except RayError:
                _log.warning("the replicas cannot be asked for their statistics; they are asked again", exc_info=True)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look_once(self) -> None:
        told = await _statistics_of(self._running.handle)
        in_quarantine = await _statistics_of(self._running.quarantine)  # mostly empty
        departures = []
        with suppress(*_GONE):
            departures = await self._running.register.read.remote(len(self.departures))
        self._hand(self._looked, total([*told, *in_quarantine]) if told else None, departures)

    def _looked(self, statistics: EngineStatistics | None, departures: list[Departure]) -> None:
        self._statistics = statistics or self._statistics
        if not self._is_down:  # otherwise all departures are known already
            self.departures += departures

    async def scale(self, replicas: int) -> None:
        """Orders a new number of replicas."""
        if not isinstance(self.deployment.replicas, int):
            raise InvalidRequest(
                f"replicas={self.deployment.replicas} follows demand, so the number cannot be set; allowed: a "
                "cluster that was made with a number"
            )
        await trio.to_thread.run_sync(self._running.scale, replicas)

    def _later(self, call: Callable[[], object]) -> None:
        """Calls ``call`` in the trio loop after a pause. The pause lets the losses of all requests of a replica arrive
        first.
        """

        async def wait() -> None:
            await asyncio.sleep(_PAUSE_SECONDS)
            self._hand(call)

        self._tasks.start(object(), wait)

    def _hand(self, call: Callable[..., object], *arguments: object) -> None:
        """Calls ``call`` in the trio loop."""
        with suppress(trio.RunFinishedError):  # the trio loop has ended: nobody waits
            self._token.run_sync_soon(call, *arguments)

    # -- the rest of a backend ---------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Raises `EngineStateError`."""
        raise EngineStateError("a cluster cannot sleep; scale it down, or end its block")

    async def wake(self) -> None:
        """Raises `EngineStateError`."""
        raise EngineStateError("a cluster cannot sleep, so it cannot be woken")

    async def load_adapter(self, folder: str) -> str:
        """Raises `EngineStateError`."""
        raise EngineStateError(f"a cluster loads no adapters, and {folder} is one; use an Engine on one machine")

    def unload_adapter(self, key: str) -> None:
        """Does nothing: none is loaded."""

    def statistics(self) -> EngineStatistics:
        """Returns the sums over the replicas, a few seconds old."""
        return self._statistics


async def _statistics_of(handle: DeploymentHandle[Any]) -> list[EngineStatistics]:
    """Returns the statistics of the replicas of ``handle``; an empty list if there is no replica, or if one does not
    answer."""
    try:
        return await handle.broadcast("statistics").results_async(timeout_s=_LOOK_SECONDS)
    except (*_GONE, RayServeException, RayTaskError, TimeoutError):
        return []


def _plain(request: Request) -> Request:
    """Returns ``request`` without the compiled form of its structure, which only one process can use."""
    structure = request.sampling.structure
    if structure is None or type(structure) is Structure:
        return request
    plain = Structure(kind=structure.kind, text=structure.text)
    return evolve(request, sampling=evolve(request.sampling, structure=plain))


def _keys(request: Request) -> tuple[str, ...]:
    """Returns the keys for the router: those of the items, or else those of the prompt's prefixes, the longest
    first.
    """
    if request.items:
        return tuple(item.key for item in request.items)
    return tuple(key.hex() for key in request.page_keys[: -_PREFIXES - 1 : -1])


def _is_blameless(cause: BaseException) -> bool:
    """True if no request can have caused the end of the replica: it ended in order, or its machine was taken away."""
    return isinstance(cause, EngineClosed) or (isinstance(cause, RayActorError) and cause.preempted)


def _failed(cause: Exception) -> EngineError:
    told = f"the cluster failed ({type(cause).__name__}: {cause}); the request is not at fault"
    return caused(EngineError(told), cause)
