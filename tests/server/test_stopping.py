"""A server that is told to stop: who runs may end, who comes is sent away, and the process ends in time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .served import served

SECONDS = 60


def ask(url: str, **more: Any) -> tuple[int, str]:
    body = {"model": "llama", "messages": [{"role": "user", "content": "go"}], "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def requests_running(url: str) -> int:
    """Requests that run, by the server's word."""
    with urllib.request.urlopen(f"{url}/health") as answer:
        return int(json.loads(answer.read())["running"])


def asked_in_threads(url: str, count: int, answers: list[tuple[int, str]], **more: Any) -> list[threading.Thread]:
    def one() -> None:
        answers.append(ask(url, **more))

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_requests_that_run_may_end_when_the_server_stops(models: dict[str, str]) -> None:
    answers: list[tuple[int, str]] = []
    with served({"llama": models["llama"]}) as running:
        threads = asked_in_threads(running.url, 6, answers, max_tokens=30)
        running.until(lambda: len(running.server.exchanges) >= 6)
    for thread in threads:
        thread.join(SECONDS)
    assert [status for status, _ in answers] == [200] * 6


def test_requests_that_run_too_long_are_told(models: dict[str, str]) -> None:
    """Whole answers by their status, streams by a last event."""
    whole: list[tuple[int, str]] = []
    streams: list[tuple[int, str]] = []
    with served({"llama": models["llama"]}, drain_seconds=0.0) as running:
        threads = asked_in_threads(running.url, 2, whole, n=8) + asked_in_threads(running.url, 2, streams, stream=True)
        running.until(lambda: len(running.server.exchanges) >= 4)
    for thread in threads:
        thread.join(SECONDS)
    assert len(whole) == len(streams) == 2
    for status, text in whole:
        assert status in (200, 503)
        assert status == 200 or "the server stops" in text
    for status, text in streams:
        assert status == 503 or "[DONE]" in text or "the server stops" in text.splitlines()[-2]


# -- processes -------------------------------------------------------------------------------------------------------


def start(tmp_path: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A server of the demo checkpoint, and its address."""
    command = [sys.executable, "-m", "triolet", "serve", "demo", "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if " serving demo at " in line:
            return process, line.rpartition(" ")[2].strip()
    raise AssertionError(f"it ended with {process.wait()}")


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, log = process.communicate(timeout=SECONDS)
    return process.returncode, log


def test_a_terminated_server_lets_requests_end_and_leaves_with_0(tmp_path: Path, speech: Path) -> None:
    process, url = start(tmp_path)
    boundary = "edge"
    head = f'--{boundary}\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n--{boundary}\r\n'
    file = 'content-disposition: form-data; name="file"; filename="a.flac"\r\n\r\n'
    body = (head + file).encode() + speech.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    request = urllib.request.Request(
        f"{url}/v1/audio/transcriptions", body, {"content-type": f"multipart/form-data; boundary={boundary}"}
    )
    answers: list[dict[str, Any]] = []

    def send() -> None:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            answers.append(json.loads(answer.read()))

    thread = threading.Thread(target=send)
    thread.start()
    assert process.stderr is not None
    while requests_running(url) == 0:
        assert thread.is_alive() or answers, "it was never seen"
        if answers:
            break
    process.send_signal(signal.SIGTERM)
    status, log = end(process)
    thread.join(SECONDS)
    assert status == 0, log
    assert answers[0]["text"] == "Please set the temperature in the cellar to eighteen degrees."
    assert "unloaded" in log
    assert "Traceback" not in log


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    process, url = start(tmp_path, "--drain-seconds", "1000")
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        while requests_running(url) == 0:
            pass
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if "SIGINT: stopping" in line:
                break
        process.send_signal(signal.SIGINT)
        status, log = end(process)
    assert status == 130, log
    assert "Traceback" not in log


SLOW = """
    import sys, trio
    from contextlib import asynccontextmanager
    from triolet import Engine, Engines
    from triolet.api.model_spec import ModelSpec
    from triolet.server.command import _log_to_stderr, _run
    from triolet.server.server import Server
    from triolet.server.settings import ServerSettings

    class Slow(Engine):
        "It is loaded for ever, and says so."

        async def __aenter__(self):
            print("loading", file=sys.stderr, flush=True)
            try:
                await trio.sleep_forever()
            finally:
                print("given up", file=sys.stderr, flush=True)

    _log_to_stderr()
    engines = Engines({"slow": ModelSpec.from_parts(lambda: Slow("nothing"), 0)})
    sys.exit(_run(Server(ServerSettings(port=0), engines), preload=True))
"""


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_models_are_loaded_gives_them_up_in_order(number: int, expected: int) -> None:
    """What is begun elsewhere, on other machines say, would be left."""
    command = [sys.executable, "-c", textwrap.dedent(SLOW)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(number)
        status, log = end(process)
    assert status == expected, log
    assert log.endswith("given up\n")
    assert "stopping before all models are loaded" in log
    assert "Traceback" not in log


def test_a_killed_server_leaves_no_process(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    process.kill()
    assert end(process)[0] == -signal.SIGKILL
    for child in children.stdout.split():
        assert not Path(f"/proc/{child}").exists() or os.waitpid(int(child), os.WNOHANG)


def test_what_is_wrong_with_the_command_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    for options, told in (
        (["serve"], "no model; name one"),
        (["serve", "demo", "--host", "0.0.0.0"], "no API key is set"),
        (["serve", "--model", "demo"], "allowed: NAME=MODEL"),
        (["serve", "demo", "--memory-budget", "much"], "is no size"),
        (["serve", "demo", "--certfile", __file__], "certfile and keyfile go together"),
    ):
        found = subprocess.run(
            [sys.executable, "-m", "triolet", *options], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert found.returncode == 2, found.stderr
        assert told in found.stderr
