"""``triolet serve`` before it serves: what cannot work is said at once, without a traceback, and no model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from triolet import Engines
from triolet.api.command_line.terminal import FAILED
from triolet.server.command import _run, serve
from triolet.server.listening import CannotListen, Listener
from triolet.server.server import Server
from triolet.server.settings import ServerSettings


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where somebody listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


def test_a_port_that_is_taken_is_named(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(ServerSettings(port=taken), Engines({"never": "loaded"}))
    assert _run(server, preload=True) == FAILED
    told = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{taken} (Address already in use); choose another port or host" in told
    assert "Traceback" not in told


def test_who_listens_first_has_the_port() -> None:
    """Both have bound it, and neither listened yet."""
    with Listener(ServerSettings(port=0)) as first:
        port = first._socket.getsockname()[1]
        with Listener(ServerSettings(port=port)) as second:
            assert first.listen() == f"http://127.0.0.1:{port}"
            with pytest.raises(CannotListen, match="Address already in use"):
                second.listen()


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("nothing")
    with pytest.raises(CannotListen, match=rf"the certificate {wrong} and the key {wrong} cannot be used \("):
        Listener(ServerSettings(port=0, certfile=str(wrong), keyfile=str(wrong)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--idle-seconds", "-1"], "idle_seconds=-1"),
        (["demo", "--memory-budget", "0"], "memory_budget=0"),
        (["demo", "--drain-seconds", "-1"], "drain_seconds=-1"),
        (["demo", "--host", "0.0.0.0"], "no API key is set"),
        ([], "no model; name one"),
        (["--model", "speech"], "--model 'speech'; allowed: NAME=MODEL"),
    ],
)
def test_a_value_that_cannot_work_is_a_wrong_use(words: list[str], message: str) -> None:
    result = CliRunner().invoke(serve, words)
    assert result.exit_code == 2
    assert message in result.output
