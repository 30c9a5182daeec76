"""`are_left` over books of Ray's that a test writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData, WorkerTableData

from triolet_ray import processes

pytestmark = pytest.mark.real_time

HERE, LOST = b"\x01" * 4, b"\x02" * 4  # machines


def actor(state: int, name: str = "SERVE_REPLICA::a#replica#x") -> bytes:
    row: Any = ActorTableData(state=state, name=name)
    row.address.worker_id = b"w"
    return bytes(row.SerializeToString())


def worker(machine: bytes, *, lives: bool) -> bytes:
    row: Any = WorkerTableData(is_alive=lives)
    row.worker_address.worker_id, row.worker_address.node_id = b"w", machine
    return bytes(row.SerializeToString())


@pytest.mark.parametrize(
    ("actors", "workers", "left"),
    [
        ([], [], False),
        ([actor(ActorTableData.ALIVE)], [worker(HERE, lives=True)], True),
        ([actor(ActorTableData.PENDING_CREATION)], [], True),
        ([actor(ActorTableData.DEAD)], [worker(HERE, lives=True)], True),
        ([actor(ActorTableData.DEAD)], [worker(HERE, lives=False)], False),
        ([actor(ActorTableData.DEAD)], [worker(LOST, lives=True)], False),
        ([actor(ActorTableData.DEAD)], [], False),
        ([actor(ActorTableData.ALIVE, "SERVE_REPLICA::ab#replica#x")], [worker(HERE, lives=True)], False),
    ],
)
def test_a_replica_is_left_while_its_process_is(
    monkeypatch: pytest.MonkeyPatch, actors: list[bytes], workers: list[bytes], *, left: bool
) -> None:
    """Ray calls it dead when the process is told to end. Of a lost machine the books say no more."""
    books = SimpleNamespace(get_actor_table=lambda *_: actors, get_worker_table=lambda: workers)
    machines = [{"NodeID": HERE.hex(), "Alive": True}, {"NodeID": LOST.hex(), "Alive": False}]
    monkeypatch.setattr(processes, "state", SimpleNamespace(_connect_and_get_accessor=lambda: books))
    monkeypatch.setattr(processes, "ray", SimpleNamespace(nodes=lambda: machines))
    assert processes.are_left(("a", "a-quarantine")) is left
