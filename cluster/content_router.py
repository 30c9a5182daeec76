"""Serve's request router: asks `triolet.core.routing.Router`, and tells it what Serve learns of the replicas."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..core.routing import Router, RoutingLimits


class ContentRouter(RequestRouter):
    """A request goes to the replica that holds its content; see `triolet.core.routing`."""

    def initialize_state(self, places: int = 16) -> None:  # type: ignore[override]  # Serve hands on what we name
        """Serve calls it once, with the arguments that the deployment names."""
        self._router = Router(random.Random().randrange, RoutingLimits(places=places))
        self._by_name: dict[str, ReplicaID] = {}
        self._sent: dict[str, tuple[str, tuple[str, ...]]] = {}  # by Serve's id of the request
        self._own: dict[str, int] = {}  # requests of this router at each replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls it when replicas come, go, or tell what they hold."""
        there = {one.replica_id.unique_id: one for one in replicas}
        for name in set(self._by_name) - set(there):
            self._router.left(name)
        for name, one in there.items():
            self._router.joined(name)
            told = one.routing_stats
            if told:
                self._router.told(name, told["keys"], max(0, told["requests"] - self._own.get(name, 0)))
        self._by_name = {name: one.replica_id for name, one in there.items()}
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica, by content; the others behind it, in case it refuses."""
        if not candidate_replicas:
            return []
        able = {one.replica_id.unique_id: one for one in candidate_replicas}
        keys = _keys(pending_request)
        first = self._router.choose(keys, without=set(self._router.replicas) - set(able))
        others = [one for name, one in able.items() if name != first]
        return [[able[first]], others] if others else [[able[first]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve calls it when a replica has got the request."""
        del result
        name, keys = replica_id.unique_id, _keys(pending_request)
        if name in self._by_name:
            self._sent[pending_request.metadata.internal_request_id] = (name, keys)
            self._own[name] = self._own.get(name, 0) + 1
            self._router.sent(name, keys)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve calls it when the request has ended, however."""
        del replica_id
        name, keys = self._sent.pop(internal_request_id, ("", ()))
        if name:
            self._own[name] -= 1
            self._router.ended(name, keys)


def _keys(pending: PendingRequest | None) -> tuple[str, ...]:
    """The contents of a call of `triolet.cluster.replica.Replica.run`; other calls have none."""
    keys = pending.args[0] if pending is not None and pending.args else ()
    return keys if isinstance(keys, tuple) else ()
