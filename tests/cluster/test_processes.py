"""Processes that join a Ray cluster: what they deploy ends with them, in order or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import triolet.demo

pytestmark = pytest.mark.usefixtures("machines")
SECONDS = 60
SAMPLE = triolet.demo.samples()[0]


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of Python that knows where Ray is."""
    import ray

    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as one:
        try:
            yield one
        finally:
            one.kill()


def ours() -> list[psutil.Process]:
    """The replicas on the machines of this test."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline() or [""]
        except psutil.NoSuchProcess:
            continue
        if words[0].startswith("ray::ServeReplica:triolet-checkpoint-"):
            found.append(process)
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def transcription(url: str, model: str) -> str:
    form = b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    body = form % (b"model", b"", model.encode())
    body += form % (b"file", b'; filename="a.flac"', SAMPLE.path.read_bytes()) + b"--x--\r\n"
    request = urllib.request.Request(
        f"{url}/v1/audio/transcriptions", body, {"content-type": "multipart/form-data; boundary=x"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text: str = json.loads(answer.read())["text"]
    return text


def test_a_server_of_two_models_has_a_deployment_for_each_and_leaves_neither() -> None:
    options = ("--cluster", "--replica-cpus", "0.5", "--port", "0", "--device", "cpu", "--preload")
    with started("-m", "triolet", "serve", "--model", "a=demo", "--model", "b=demo", *options) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if " serving a, b at " in line)
        url = line.rpartition(" ")[2].strip()
        assert len({process.cmdline()[0] for process in ours()}) == 2
        assert [transcription(url, model) for model in ("a", "b")] == [SAMPLE.text] * 2
        server.send_signal(signal.SIGTERM)
        log = server.communicate(timeout=SECONDS)[1]
    assert server.returncode == 0, log
    assert log.count("given back: the block ends") == 2, log
    assert ours() == []


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
    with started(str(program)) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["open\n", "1\n", "open\n"]
        assert ours() != []
        process.kill()
        process.wait()
        until(lambda: ours() == [])
