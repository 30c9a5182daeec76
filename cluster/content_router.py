"""Serve's request router: asks `triolet.core.routing.Router`, and tells it what Serve learns of the replicas."""

from __future__ import annotations

import random
from typing import Any

from attrs import frozen
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..core.replica_reports import ReplicaReport
from ..core.routing import Router, RoutingLimits


@frozen(eq=False)
class _Sending:
    """A request that a replica has got, and that has not ended."""

    replica: str
    keys: tuple[str, ...]


class ContentRouter(RequestRouter):
    """A request goes to the replica that holds its content; `triolet.core.routing` decides.

    A sending ends with its own result, and not with `RequestRouter.on_request_completed`. Serve calls that by the id of
    the request alone: of an attempt that was refused too, and maybe before it says that the request was routed.
    """

    def initialize_state(self, places: int = 16) -> None:  # type: ignore[override]  # Serve hands on what we name
        """Serve calls it once, with the arguments that the deployment names."""
        self._router = Router(random.Random().randrange, RoutingLimits(places=places))
        self._heard: dict[str, int] = {}  # the number of the last report of each replica that is there
        self._under_way: dict[str, dict[_Sending, None]] = {}  # by replica, also of those that are not there

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls it when replicas come, go, or report: with all replicas, and the last report of each."""
        there: dict[str, Any] = {one.replica_id.unique_id: one.routing_stats for one in replicas}
        for name in self._heard.keys() - there.keys():
            self._leave(name)
        for name, report in there.items():
            if name not in self._heard:
                self._join(name)
            if report and report["number"] != self._heard[name]:
                self._hear(name, report)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve calls it when it finds a replica dead. The controller may tell of it once more: it comes again then."""
        self._leave(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    def _join(self, name: str) -> None:
        """Adds a replica. One that comes again still has what runs there."""
        self._heard[name] = 0
        self._router.joined(name)
        for sending in self._under_way.get(name, ()):
            self._router.sent(name, sending.keys)

    def _leave(self, name: str) -> None:
        self._heard.pop(name, None)
        self._router.left(name)

    def _hear(self, name: str, report: ReplicaReport) -> None:
        """Counts each report once: what was sent since is not in it."""
        self._heard[name] = report["number"]
        if "keys" in report:
            self._router.told(name, report["keys"])
        self._router.told_total(name, report["requests"], report["encodings"])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Chooses one replica, by content; the others follow, in case it refuses."""
        if not candidate_replicas:
            return []
        able = {one.replica_id.unique_id: one for one in candidate_replicas}
        first = self._router.choose(_keys(pending_request), without=self._heard.keys() - able.keys())
        others = [one for name, one in able.items() if name != first]
        return [[able[first]], others] if others else [[able[first]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve calls it when a replica has got the request, which may have ended since, or the replica be gone."""
        sending = _Sending(replica_id.unique_id, _keys(pending_request))
        self._under_way.setdefault(sending.replica, {})[sending] = None
        if sending.replica in self._heard:
            self._router.sent(sending.replica, sending.keys)
        loop = self._event_loop  # Ray calls back in a thread of its own
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end, sending))

    def _end(self, sending: _Sending) -> None:
        """Notes the end of a sending, however it has ended."""
        there = self._under_way[sending.replica]
        del there[sending]
        if not there:
            del self._under_way[sending.replica]
        if sending.replica in self._heard:
            self._router.ended(sending.replica, sending.keys)


def _keys(pending: PendingRequest | None) -> tuple[str, ...]:
    """Returns the contents of a call of `triolet.cluster.replica.Replica.run`; other calls have none."""
    keys = pending.args[0] if pending is not None and pending.args else ()
    return keys if isinstance(keys, tuple) else ()
