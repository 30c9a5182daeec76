"""A Ray that a cluster has started lives as long as the cluster. Linux ends its processes with the thread that started
them, and trio ends threads that are idle."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from .processes import SAMPLE, SECONDS, deployments, started, transcription, until, url_of

pytestmark = pytest.mark.real_time

IMPATIENT = str(Path(__file__).with_name("impatient.py"))


@pytest.mark.thorough
def test_a_cluster_answers_after_trio_has_ended_its_idle_threads() -> None:
    """And SIGTERM is the program's: nothing aborts it meanwhile."""
    with started(IMPATIENT, "program", ray=None) as program:
        said, errors = program.communicate(timeout=SECONDS)
    assert (program.returncode, said) == (0, f"{SAMPLE.text} SIGTERM: 1, an alarm in 0 s\n"), errors


def test_a_server_of_two_models_has_a_deployment_for_each_answers_when_it_was_idle_and_leaves_nothing() -> None:
    options = ("--cluster", "--replica-cpus", "0.5", "--port", "0", "--device", "cpu", "--preload")
    with started(IMPATIENT, "serve", "--model", "a=demo", "--model", "b=demo", *options, ray=None) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = url_of(server, "a, b")
        everything = psutil.Process(server.pid).children(recursive=True)
        until(lambda: len(deployments(psutil.Process(server.pid))) == 2)
        print(file=server.stdin, flush=True)
        assert server.stdout.readline() == "they have ended\n"
        assert [transcription(url, model) for model in ("a", "b")] == [SAMPLE.text] * 2
        server.send_signal(signal.SIGTERM)
        log = server.communicate(timeout=SECONDS)[1]
    assert server.returncode == 0, log
    assert log.count("given back: the block ends") == 2, log
    until(lambda: not any(process.is_running() for process in everything))
