"""Serve's request router. It asks `triolet_ray.routing.Router`, and passes on to it the news of the replicas that
Serve has.
"""

from __future__ import annotations

import random
from typing import Any

from attrs import frozen
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .replica_reports import ReplicaReport
from .routing import Router, RoutingLimits


@frozen(eq=False)
class _Sending:
    """A request that a replica has received and that has not ended."""

    replica: str
    keys: tuple[str, ...]


class ContentRouter(RequestRouter):
    """Sends a request to the replica that holds its content; `triolet_ray.routing` decides.

    The end of a sending is taken from its own result rather than from `RequestRouter.on_request_completed`. Serve calls
    that method with nothing but the id of the request. It does so for a refused attempt, too, and perhaps before it
    reports that the request was routed.
    """

    def initialize_state(self, places: int = 16) -> None:  # type: ignore[override]  # Serve hands on what we name
        """Makes the router. Serve calls it once, with the arguments that the deployment names."""
        self._router = Router(random.Random().randrange, RoutingLimits(places=places))
        self._heard: dict[str, int] = {}  # the number of the last report of each present replica
        self._under_way: dict[str, dict[_Sending, None]] = {}  # by replica, even an absent one

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Passes on which replicas there are, and their last reports. Serve calls it when replicas come, go or
        report."""
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
        """Removes a replica that Serve finds dead. If the controller still lists the replica in its next update, it is
        added again.
        """
        self._leave(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    def _join(self, name: str) -> None:
        """Adds a replica. If it was there before, its requests that still run count again."""
        self._heard[name] = 0
        self._router.joined(name)
        for sending in self._under_way.get(name, ()):
            self._router.sent(name, sending.keys)

    def _leave(self, name: str) -> None:
        self._heard.pop(name, None)
        self._router.left(name)

    def _hear(self, name: str, report: ReplicaReport) -> None:
        """Passes on a report, once. A second time it would hide the requests that were sent after it."""
        self._heard[name] = report["number"]
        if "keys" in report:
            self._router.told(name, report["keys"])
        self._router.told_total(name, report["requests"], report["encodings"])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Chooses one replica by content. The others follow in case the first one refuses."""
        if not candidate_replicas:
            return []
        able = {one.replica_id.unique_id: one for one in candidate_replicas}
        first = self._router.choose(_keys(pending_request), without=self._heard.keys() - able.keys())
        others = [one for name, one in able.items() if name != first]
        return [[able[first]], others] if others else [[able[first]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Notes that a replica has received the request. By now the request may have ended, or the replica may be
        gone."""
        sending = _Sending(replica_id.unique_id, _keys(pending_request))
        self._under_way.setdefault(sending.replica, {})[sending] = None
        if sending.replica in self._heard:
            self._router.sent(sending.replica, sending.keys)
        loop = self._event_loop  # Ray calls back in a thread of its own
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end, sending))

    def _end(self, sending: _Sending) -> None:
        """Notes that a sending has ended, successfully or not."""
        there = self._under_way[sending.replica]
        del there[sending]
        if not there:
            del self._under_way[sending.replica]
        if sending.replica in self._heard:
            self._router.ended(sending.replica, sending.keys)


def _keys(pending: PendingRequest | None) -> tuple[str, ...]:
    """Returns the keys of the contents of a call of `triolet_ray.replica.Replica.run`; empty for other calls."""
    keys = pending.args[0] if pending is not None and pending.args else ()
    return keys if isinstance(keys, tuple) else ()
