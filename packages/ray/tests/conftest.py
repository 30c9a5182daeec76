"""A small Ray cluster on this machine: a head and another node, each a raylet of its own."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import trio

from triolet import EngineConfig
from triolet.core.plan import StepPlan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    pytest.importorskip("ray.serve", reason="needs Ray; pip install triolet-ray")

UNHURRIED = {"stage_seconds": 86_400.0, "drain_seconds": 86_400.0}
"""Nothing is cut off since the machine is slow."""
CONFIG = EngineConfig(device="cpu", threads=1, **UNHURRIED)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _replicas_have_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from triolet_ray import deployment

    monkeypatch.setattr(deployment, "_ASK_SECONDS", 86_400.0)


@pytest.fixture(scope="session")
def machines() -> Iterator[None]:
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster as Machines

    sizes = {"num_cpus": 2, "object_store_memory": 80 << 20}
    # Ray would try a port that has a number, and leave a socket open where another Ray has it: tests run side by side.
    head = {
        "include_dashboard": False,
        "dashboard_port": None,
        "_system_config": {"prestart_worker_first_driver": False},
    }
    several = Machines(initialize_head=True, head_node_args={**sizes, **head})
    several.add_node(**sizes)
    planted = {"worker_process_setup_hook": plant_poison}
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the processes cannot import it
    ray.init(address=several.address, log_to_driver=False, logging_level="ERROR", runtime_env=planted)
    yield
    ray.shutdown()
    several.shutdown()


POISON = 666  # the seed of a request that ends the process which feeds its token at this position
POISON_POSITION = 9


def plant_poison() -> None:
    """Ray calls it in each process. Only replicas import the executor."""
    from triolet.actors import gpu_runner

    make_executor = gpu_runner.torch_executor

    def make_vulnerable_executor(*args: Any) -> Any:
        from triolet.models.executor import TorchExecutor

        step, poisonous = TorchExecutor.step, set[int]()

        def deadly_step(self: TorchExecutor, plan: StepPlan) -> Any:
            poisonous.update(start.sequence_id for start in plan.started if start.sampling.seed == POISON)
            poisonous.difference_update(plan.ended)
            for chunk in plan.chunks:
                if chunk.sequence_id in poisonous and chunk.start + chunk.length > POISON_POSITION:
                    os.kill(os.getpid(), signal.SIGKILL)
            return step(self, plan)

        TorchExecutor.step = deadly_step  # type: ignore[method-assign]
        return make_executor(*args)

    gpu_runner.torch_executor = make_vulnerable_executor


NAME = f"test-{os.getpid()}"  # of the application: other tests may run beside, with a cluster of their own


def replicas(name: str = NAME) -> list[psutil.Process]:
    """The processes of the replicas of ``name`` that live."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0].startswith(f"ray::ServeReplica:{name}:"):
            found.append(process)
    return found


QUARANTINE = f"{NAME}-quarantine"


async def until(condition: Callable[[], bool]) -> None:
    """Of what nobody tells. The deadline is for what hangs."""
    with trio.fail_after(300):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.1)


async def assert_given_back() -> None:
    """No replica of `NAME` has a process, nor will have one: by Ray's books, and by the kernel's."""
    from triolet_ray.processes import are_left

    await until(lambda: not are_left((NAME, QUARANTINE)))
    await until(lambda: not (replicas(NAME) or replicas(QUARANTINE)))


def kill(process: psutil.Process) -> None:
    """As the kernel does when memory runs out."""
    os.kill(process.pid, signal.SIGKILL)
