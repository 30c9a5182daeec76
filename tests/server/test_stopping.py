"""A server that is told to stop: who runs may end, who comes is sent away, and the process ends in time."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .processes import Running, running
from .served import PATIENCE, head_of

pytestmark = pytest.mark.real_time


# -- processes -------------------------------------------------------------------------------------------------------


COMMAND = """
    from triolet.server import settings

    class Patient(settings.ServerSettings):
        def __init__(self, **given):
            super().__init__(body_seconds=900.0, keep_alive_seconds=900.0, **given)

    settings.ServerSettings = Patient
    from triolet.__main__ import main

    main()
"""


@contextmanager
def started(tmp_path: Path) -> Iterator[tuple[Running, str]]:
    """`triolet serve` with the demo checkpoint, and its address. However slow the test is, it is not given up."""
    options = ["serve", "demo", "--port", "0", "--device", "cpu", "--drain-seconds", "900"]
    with running([sys.executable, "-c", textwrap.dedent(COMMAND), *options], tmp_path) as process:
        yield process, process.until(" serving demo at ").rpartition(" ")[2].strip()


def begin(url: str, body: bytes, kind: str) -> socket.socket:
    """A connection with a request whose body is all to come; the server has begun it when it asks for the body."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nexpect: 100-continue\r\n"
        + f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    )
    assert head_of(connection).startswith(b"HTTP/1.1 100 ")
    return connection


def test_a_terminated_server_lets_requests_end_and_leaves_with_0(tmp_path: Path, speech: Path) -> None:
    """Most of the request comes when the server is stopping already."""
    head = b'--edge\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n--edge\r\n'
    file = b'content-disposition: form-data; name="file"; filename="a.flac"\r\n\r\n'
    body = head + file + speech.read_bytes() + b"\r\n--edge--\r\n"
    with started(tmp_path) as (process, url), begin(url, body, "multipart/form-data; boundary=edge") as connection:
        process.signal(signal.SIGTERM)
        process.until("SIGTERM: stopping")
        connection.sendall(body)
        with connection.makefile("rb") as stream:
            answer = stream.read()
        status, log = process.end()
    assert status == 0, log
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Please set the temperature in the cellar to eighteen degrees." in answer
    assert "unloaded" in log
    assert "Traceback" not in log


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with started(tmp_path) as (process, url), begin(url, b"{}", "application/json"):
        listed = ["ps", "-o", "pid=", "--ppid", str(process.process.pid)]
        children = subprocess.run(listed, capture_output=True, text=True, check=False).stdout
        assert children == "", "the engine is a thread: a server that is killed leaves no process"
        process.signal(signal.SIGINT)
        process.until("SIGINT: stopping")
        process.signal(signal.SIGINT)
        status, log = process.end()
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


def test_a_signal_while_models_are_loaded_gives_them_up_in_order(tmp_path: Path) -> None:
    """What is begun elsewhere, on other machines say, would be left."""
    with running([sys.executable, "-c", textwrap.dedent(SLOW)], tmp_path) as process:
        process.until("loading")
        process.signal(signal.SIGTERM)
        status, log = process.end()
    assert status == 143, log
    assert "given up\n" in log
    assert "stopped before all models were loaded" in log
    assert "Traceback" not in log
