"""A Ray that a cluster has started lives as long as the cluster. Linux ends its processes with the thread that started
them, and trio ends threads that are idle."""

from __future__ import annotations

import signal
from pathlib import Path

from .processes import SAMPLE, SECONDS, started, transcription, url_of

IMPATIENT = str(Path(__file__).with_name("impatient.py"))


def test_a_cluster_answers_after_trio_has_ended_its_idle_threads() -> None:
    """And SIGTERM is the program's: nothing aborts it meanwhile."""
    with started(IMPATIENT, "program", ray=None) as program:
        said, errors = program.communicate(timeout=SECONDS)
    assert (program.returncode, said) == (0, f"{SAMPLE.text} SIGTERM: 1, an alarm in 0 s\n"), errors


def test_a_server_answers_after_trio_has_ended_its_idle_threads() -> None:
    options = ("--cluster", "--replica-cpus", "0.5", "--port", "0", "--device", "cpu", "--preload")
    with started(IMPATIENT, "serve", "--model", "a=demo", *options, ray=None) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = url_of(server, "a")
        print(file=server.stdin, flush=True)
        assert server.stdout.readline() == "they have ended\n"
        assert transcription(url, "a") == SAMPLE.text
        server.send_signal(signal.SIGTERM)
        errors = server.communicate(timeout=SECONDS)[1]
    assert server.returncode == 0, errors
