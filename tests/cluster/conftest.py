"""A small Ray cluster on this machine: one head and two nodes, each a raylet of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("ray", reason="needs Ray; pip install 'triolet[cluster]'")


@pytest.fixture(scope="session")
def machines() -> Iterator[None]:
    import ray
    from ray.cluster_utils import Cluster as Machines

    sizes = {"num_cpus": 1, "object_store_memory": 80 << 20}
    several = Machines(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    for _ in range(2):
        several.add_node(**sizes)
    ray.init(address=several.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    several.shutdown()


NAME = f"test-{os.getpid()}"  # of the application: other tests may run beside, with a cluster of their own


def replicas() -> list[psutil.Process]:
    """The processes of the replicas of `NAME` that live."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0].startswith(f"ray::ServeReplica:{NAME}:"):
            found.append(process)
    return found


def kill(process: psutil.Process) -> None:
    """As the kernel does when memory runs out."""
    os.kill(process.pid, signal.SIGKILL)
