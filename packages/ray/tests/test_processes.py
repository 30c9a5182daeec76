"""A process that joins a Ray cluster: what it deploys ends with it, in order or not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import psutil
import pytest

from .processes import deployments, started, until

pytestmark = pytest.mark.real_time

PROGRAM = """
    import trio, triolet.demo
    from triolet import EngineConfig
    from triolet_ray import Cluster, deployment

    deployment._ASK_SECONDS = 86_400.0

    async def main():
        config, told = EngineConfig(device="cpu", threads=1, stage_seconds=86_400, drain_seconds=86_400), 0
        for _ in range(2):
            async with Cluster(triolet.demo.checkpoint(), config=config, cpus=0.5) as cluster:
                print("open", flush=True)
                await (trio.sleep_forever() if told else trio.sleep(0))
            told = len(cluster.departures)
            print(told, flush=True)

    trio.run(main)
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("machines")
def test_replicas_of_a_process_that_is_killed_are_not_left(tmp_path: Path) -> None:
    """Nobody else knows of them. Those that end in order are told of before, whoever has started Ray."""
    import ray

    machines, address = psutil.Process(), ray.get_runtime_context().gcs_address
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with started(str(program), ray=address) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["open\n", "1\n", "open\n"]
        until(lambda: len(deployments(machines)) == 1)
        process.kill()
        process.wait()
        until(lambda: not deployments(machines))
