"""A server that is told to stop: who runs may end, who comes is sent away, and the process ends in time."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

import pytest
import trio

from triolet import Engine, Engines, ModelSpec
from triolet.server.listening import Listener
from triolet.server.server import Server
from triolet.server.serving import _tell_manager, until_told
from triolet.server.settings import ServerSettings

from .processes import Running, running
from .served import PATIENCE, head_of
from .talking import PaperEngine, paper_server

pytestmark = pytest.mark.real_time


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


@contextmanager
def manager_at(place: str) -> Iterator[socket.socket]:
    """A service manager that hears what is sent to ``place``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(PATIENCE)
        manager.bind(f"\0{place[1:]}" if place.startswith("@") else place)
        yield manager


@pytest.mark.parametrize("place", ["manager", f"@triolet manager {os.getpid()}"], ids=["path", "abstract"])
def test_a_service_manager_is_told_at_a_path_and_at_an_abstract_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot be told is a line of the log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTIFY_SOCKET", place)
    with manager_at(place) as manager:
        _tell_manager("READY=1")
        assert manager.recv(64) == b"READY=1"
    monkeypatch.setenv("NOTIFY_SOCKET", "absent")
    _tell_manager("READY=1")
    told = "the service manager at NOTIFY_SOCKET=absent cannot be told READY=1: [Errno 2] No such file or directory"
    assert caplog.messages == [told]


def test_a_terminated_server_lets_requests_end_and_leaves_with_0(
    tmp_path: Path, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the request comes when the server is stopping already. A service manager is told when the server is
    ready, and when it stops."""
    place = f"@triolet {tmp_path.name} {os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", place)
    head = b'--edge\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n--edge\r\n'
    file = b'content-disposition: form-data; name="file"; filename="a.flac"\r\n\r\n'
    body = head + file + speech.read_bytes() + b"\r\n--edge--\r\n"
    with (
        manager_at(place) as manager,
        started(tmp_path) as (process, url),
        begin(url, body, "multipart/form-data; boundary=edge") as connection,
    ):
        assert manager.recv(64) == b"READY=1"
        listed = ["ps", "-o", "pid=", "--ppid", str(process.process.pid)]
        children = subprocess.run(listed, capture_output=True, text=True, check=False).stdout
        assert children == "", "the engine is a thread: a server that is killed leaves no process"
        process.signal(signal.SIGTERM)
        assert manager.recv(64) == b"STOPPING=1"
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
    assert all(re.match(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: ", line) for line in log.splitlines()), log
    assert 'INFO triolet.access: POST "/v1/audio/transcriptions" 200 ' in log


# -- in this process ---------------------------------------------------------------------------------------------------


async def stopped(server: Server, signals: int, *, preload: bool) -> int:
    """The status of a server that gets ``signals``, each when it has done all that it can before."""
    found: list[int] = []
    with Listener(server.settings) as listener, trio.fail_after(PATIENCE):

        async def serve() -> None:
            found.append(await until_told(server, listener, preload=preload))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            for _ in range(signals):
                await trio.testing.wait_all_tasks_blocked()
                signal.raise_signal(signal.SIGINT)
    return found[0]


async def test_a_second_signal_does_not_wait() -> None:
    server = paper_server(PaperEngine(), port=0, drain_seconds=900.0)
    server.sockets.add(bool)  # one that does not end
    assert await stopped(server, 2, preload=False) == 130


class Slow(Engine):
    """It is loaded for ever, and notes when that is given up."""

    told: ClassVar[list[str]] = []

    async def __aenter__(self) -> Self:
        self.told.append("loading")
        try:
            await trio.sleep_forever()
        finally:
            self.told.append("given up")


async def test_a_signal_while_models_are_loaded_gives_them_up_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """What is begun elsewhere, on other machines say, would be left."""
    caplog.set_level(logging.INFO)
    async with Engines({"slow": ModelSpec.from_parts(lambda: Slow("nothing"), 0)}) as engines:
        server = Server(ServerSettings(port=0), engines)
        assert await stopped(server, 1, preload=True) == 130
    assert Slow.told == ["loading", "given up"]
    assert "SIGINT: stopping before all models are loaded" in caplog.messages
