"""Processes that join a Ray cluster: what they deploy ends with them, in order or not."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import psutil
import pytest

from .processes import SAMPLE, SECONDS, started, transcription, until, url_of

pytestmark = pytest.mark.usefixtures("machines")


def address() -> str:
    """Of the machines."""
    import ray

    found: str = ray.get_runtime_context().gcs_address
    return found


def ours() -> set[str]:
    """The deployments that have replicas on these machines."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline() or [""]
        except psutil.NoSuchProcess:
            continue
        if words[0].startswith("ray::ServeReplica:triolet-checkpoint-"):
            found.add(words[0].split(":")[3])
    return found


def test_a_server_of_two_models_has_a_deployment_for_each_and_leaves_neither() -> None:
    options = ("--cluster", "--replica-cpus", "0.5", "--port", "0", "--device", "cpu", "--preload")
    with started("-m", "triolet", "serve", "--model", "a=demo", "--model", "b=demo", *options, ray=address()) as server:
        url = url_of(server, "a, b")
        until(lambda: len(ours()) == 2)  # Ray names processes by what they do, and anew when that changes
        assert [transcription(url, model) for model in ("a", "b")] == [SAMPLE.text] * 2
        server.send_signal(signal.SIGTERM)
        log = server.communicate(timeout=SECONDS)[1]
    assert server.returncode == 0, log
    assert log.count("given back: the block ends") == 2, log
    until(lambda: not ours())


PROGRAM = """
    import trio, triolet.demo
    from triolet import EngineConfig
    from triolet.cluster import Cluster

    async def main():
        config, told = EngineConfig(device="cpu", threads=1), 0
        for _ in range(2):
            async with Cluster(triolet.demo.checkpoint(), config=config, cpus=0.5) as cluster:
                print("open", flush=True)
                await (trio.sleep_forever() if told else trio.sleep(0))
            told = len(cluster.departures)
            print(told, flush=True)

    trio.run(main)
"""


@pytest.mark.thorough
def test_replicas_of_a_process_that_is_killed_are_not_left(tmp_path: Path) -> None:
    """Nobody else knows of them. Those that end in order are told of before, whoever has started Ray."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with started(str(program), ray=address()) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["open\n", "1\n", "open\n"]
        until(lambda: len(ours()) == 1)
        process.kill()
        process.wait()
        until(lambda: not ours())
