"""The processes of replicas, as listed in Ray's own books."""

from __future__ import annotations

from typing import Any

import ray
from ray._private.state import state
from ray.core.generated import gcs_pb2

_ROWS: Any = gcs_pb2  # its classes are made at its import: type checkers do not know them


def are_left(applications: tuple[str, ...]) -> bool:
    """True if a replica of ``applications`` has a process, or will have one. Blocks.

    Serve reports a replica as stopped when it has told Ray to end the process. The process ends a moment later, and
    only then are the device's context and the memory free. On a machine that is lost, no process counts.
    """
    books = state._connect_and_get_accessor()  # the public function needs the dashboard
    machines = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    workers = [_ROWS.WorkerTableData.FromString(row) for row in books.get_worker_table()]
    live = {
        worker.worker_address.worker_id
        for worker in workers
        if worker.is_alive and worker.worker_address.node_id.hex() in machines
    }
    actors = [_ROWS.ActorTableData.FromString(row) for row in books.get_actor_table(None, None)]
    beginnings = tuple(f"SERVE_REPLICA::{name}#" for name in applications)
    ours = [actor for actor in actors if actor.name.startswith(beginnings)]
    return any(actor.state != _ROWS.ActorTableData.DEAD or actor.address.worker_id in live for actor in ours)
