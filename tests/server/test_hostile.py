"""Clients that are broken, slow, greedy or gone: no answer of 500 and above, nothing left behind.

A server may end a connection on which something of ours is unread by a reset: to send then fails, or to read, as the
two systems' packets meet. All of these are right answers."""

from __future__ import annotations

import base64
import io
import json
import logging
import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

import pytest
from trio.testing import MockClock

from .served import PATIENCE, Served, served

pytestmark = pytest.mark.real_time

ENDED = (BrokenPipeError, ConnectionResetError)
FORM = "multipart/form-data; boundary=edge"


@pytest.fixture(scope="module")
def patient(models: dict[str, str]) -> Iterator[Served]:
    """A server with small limits, and all the time in the world."""
    with served(
        {name: models[name] for name in ("whisper", "llama", "qwen2_vl")},
        max_body_bytes=2**20,
        spool_bytes=2**16,
    ) as running:
        yield running


@pytest.fixture
def still(models: dict[str, str]) -> Iterator[Served]:
    """A server whose time stands still."""
    with served({"llama": models["llama"]}, clock=MockClock()) as running:
        yield running
        nothing_is_left(running)


@pytest.fixture(autouse=True)
def _nothing_is_left(patient: Served) -> Iterator[None]:
    yield
    nothing_is_left(patient)


def nothing_is_left(running: Served) -> None:
    """The books are empty, and no connection is open."""
    running.until(lambda: running.is_idle() and not running.listener.connections)


def say(connection: socket.socket, data: bytes) -> None:
    """Sends ``data``, or as much of it as the server wants."""
    with suppress(*ENDED):
        connection.sendall(data)


def heard(connection: socket.socket) -> bytes:
    """All that comes, up to the connection's end."""
    parts: list[bytes] = []
    with suppress(*ENDED):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def talk(running: Served, data: bytes) -> bytes:
    """All that the server answers to ``data``."""
    with closing(running.connect()) as connection:
        say(connection, data)
        return heard(connection)


def head(path: str, length: int, kind: str = FORM) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode()
    )


def form(audio: bytes, **members: str) -> bytes:
    parts = [
        f'--edge\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in members.items()
    ]
    file = b'--edge\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + audio
    return "".join(parts).encode() + file + b"\r\n--edge--\r\n"


SPEECH = "/v1/audio/transcriptions"


# -- forms and bodies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", FORM, 400),
        (b"--edge", FORM, 400),
        (b"--edge\r\n\r\nno disposition\r\n--edge--", FORM, 400),
        (form(b"", model="whisper")[:60], FORM, 400),
        (form(b"noise", model="whisper"), "multipart/form-data", 400),
        (form(b"noise", model="whisper"), "text/plain", 415),
        (b"{}", "application/json", 415),
        (form(b"noise", model="whisper"), FORM, 415),
        (form(b"RIFF\xff\xff\xff\xffWAVEfmt ", model="whisper"), FORM, 415),
        (form(b"", model="whisper"), FORM, 415),
        (form(b"noise", model="nobody"), FORM, 404),
        (form(b"noise"), FORM, 400),
        (form(b"noise", model="whisper", temperature="warm"), FORM, 400),
        (form(b"noise", model="whisper", **{"a[b": "c"}), FORM, 400),
        (form(b"noise", model="whisper", tempreature="0"), FORM, 400),
        (form(b"noise", model="whisper", language="xx"), FORM, 400),
        (form(b"noise", model="\ud800".encode("utf-8", "surrogatepass").decode("latin-1")), FORM, 404),
    ],
)
def test_a_broken_form_is_refused_in_words(patient: Served, body: bytes, kind: str, status: int) -> None:
    found, told = patient.post(SPEECH, body, kind)
    assert found == status
    assert told["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"model": "llama"}',
        b'{"model": "llama", "messages": []}',
        b'{"model": "llama", "messages": [{"role": "user"}]}',
        b'{"model": "llama", "messages": [{"role": "king", "content": "a"}]}',
        b'{"model": "llama", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "llama", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"model": "llama", "messages": [{"role": "user", "content": "a"}], "n": 1e400}',
        b"[" * 20_000,
    ],
)
def test_broken_json_is_refused_in_words(patient: Served, body: bytes) -> None:
    status, told = patient.post("/v1/chat/completions", body)
    assert status == 400
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"]


@pytest.mark.parametrize("charset", ["punycode", "undefined", "idna", "utf-16", "latin-1", "x" * 300])
def test_the_codec_of_a_form_is_not_the_client_s_choice(patient: Served, charset: str) -> None:
    """Some take the square of the time, others fail on any text."""
    found, told = patient.post(SPEECH, form(b"noise", model="whisper", prompt="a-b"), f"{FORM}; charset={charset}")
    assert found == 415
    assert f"the form has the charset '{charset[:100]}'; allowed: utf-8" in told["error"]["message"]


@pytest.mark.parametrize("charset", ["utf-8", '"UTF8"'])
def test_a_form_may_say_that_it_is_unicode(patient: Served, charset: str) -> None:
    found, told = patient.post(SPEECH, form(b"noise", model="whisper"), f"{FORM}; charset={charset}")
    assert (found, told["error"]["code"]) == (415, "unsupported_audio")


def test_the_members_of_a_form_are_bounded(patient: Served) -> None:
    """Before they are all there."""
    many = {f"timestamp_granularities{'[]'}{' ' * index}": "word" for index in range(128)}
    for members, why in (
        (many, "Too many fields. Maximum number of fields is 128."),
        ({"prompt": "x" * (2**18 + 1)}, "Part exceeded maximum size of 256KB."),
    ):
        found, told = patient.post(SPEECH, form(b"noise", model="whisper", **members), FORM)
        assert (found, told["error"]["message"]) == (400, f"the form cannot be read: {why}")


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_a_file_that_was_spooled_is_told_by_no_path_of_the_server(patient: Served) -> None:
    status, told = patient.post(SPEECH, form(b"noise" * 20_000, model="whisper"), FORM)
    assert status == 415
    assert told["error"]["message"].startswith("the file is not audio that can be decoded")


def png(width: int, height: int) -> bytes:
    """A picture of one bit a pixel, all of one colour: a megabyte of it is a kilobyte."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    rows = io.BytesIO()
    for _ in range(height):
        rows.write(packer.compress(b"\0" * (1 + width // 8)))
    rows.write(packer.flush())
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows.getvalue()) + chunk(b"IEND", b"")


def test_a_small_file_that_is_a_huge_picture_is_refused(patient: Served) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(9_000, 9_000)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "qwen2_vl", "messages": [{"role": "user", "content": content}]}
    status, told = patient.post("/v1/chat/completions", body)
    assert status == 415
    assert "pixels" in told["error"]["message"]


# -- connections -----------------------------------------------------------------------------------------------------


def test_who_does_not_end_the_head_of_a_request_is_given_up(still: Served) -> None:
    """The client hears the end, though it may send on."""
    with closing(still.connect()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: lo")
        still.until(lambda: bool(still.listener.connections))
        still.let_pass(still.server.settings.keep_alive_seconds)
        assert heard(connection) == b""
        still.until(lambda: not still.listener.connections)


@pytest.mark.parametrize("cut", [0, 10, 80, 200, 100_000])
def test_connections_that_close_half_way_leave_nothing(patient: Served, cut: int) -> None:
    whole = head(SPEECH, 100_000) + form(b"x" * 99_800, model="whisper")
    for _ in range(40):
        with closing(patient.connect()) as connection:
            connection.sendall(whole[:cut])


def test_a_client_that_hangs_up_while_its_answer_is_made_withdraws_it(
    patient: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A long text, streamed and whole: both are withdrawn, as the engine's books and the log show. The client hangs up
    in the server's loop, so that the answer cannot end before."""
    caplog.set_level(logging.INFO, "triolet.access")
    for stream in (True, False):
        message = {"role": "user", "content": "go on"}
        asked = {"model": "llama", "messages": [message], "stream": stream, "ignore_eos": True, "n": 4}
        body = json.dumps(asked).encode()
        connection = patient.connect()
        with patient.when(patient.works, connection.close):
            connection.sendall(head("/v1/chat/completions", len(body), "application/json") + body)
        nothing_is_left(patient)
    told = [json.loads(one.getMessage()) for one in caplog.records if one.name == "triolet.access"]
    assert [one["status"] for one in told] == [499, 499]


def test_who_sends_more_before_the_answer_is_heard_when_it_hangs_up(patient: Served) -> None:
    asked = {"model": "llama", "messages": [{"role": "user", "content": "go on"}], "ignore_eos": True, "n": 4}
    body = json.dumps(asked).encode()
    first = head("/v1/chat/completions", len(body), "application/json") + body
    for more in (b"G", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100):
        for at_once in (True, False):
            connection = patient.connect()
            with patient.when(patient.works, partial(leave, connection, more)):
                connection.sendall(first + more if at_once else first)
            nothing_is_left(patient)


def leave(connection: socket.socket, last: bytes) -> None:
    """Says something more, and goes."""
    with closing(connection):
        connection.sendall(last)


def test_who_sends_more_before_the_answer_gets_all_answers(patient: Served) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n%s\r\n"
    answers = talk(patient, request % b"" * 4 + request % b"connection: close\r\n")
    assert answers.count(b"HTTP/1.1 200") == 5


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings, close\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n",
        b"POST /health HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    ],
)
def test_protocol_nonsense_ends_its_connection_alone_which_stays_http_1(patient: Served, nonsense: bytes) -> None:
    with closing(patient.connect()) as connection:
        say(connection, nonsense)
        with suppress(OSError):  # ENOTCONN: the server has reset it already
            connection.shutdown(socket.SHUT_WR)
        answer = heard(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert not answer.startswith(b"HTTP/1.1 101")
    assert patient.get("/health")[0] == 200


def test_who_goes_on_sending_and_reads_nothing_is_let_go(still: Served) -> None:
    """What such a client sends is heard to its end, or hypercorn would wait for room for ever."""
    still.get("/openapi.json")  # made by a thread, for which no time passes
    held = [socket.socket() for _ in range(3)]
    for connection in held:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", int(still.url.rpartition(":")[2])))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.sendall(b"1\r\nx\r\n" * 40)
    still.until(lambda: [one.bytes_in for one in still.server.exchanges] == [40] * len(held))
    still.until(lambda: all(one.bytes_out for one in still.server.exchanges))  # what the thread has made is sent
    for _ in range(3):  # to read the answer, and then to end what is sent
        still.let_pass(still.server.settings.send_seconds)
    still.until(lambda: not still.server.exchanges)
    for connection in held:
        connection.close()


def test_head_of_a_stream_ends(patient: Served) -> None:
    answer = talk(patient, b"HEAD /events HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "members", [{"prompt": "x", "prompt[a]": "y"}, {"a[]": "x", "a[b]": "y"}, {"a[b]": "x", "a": "y"}]
)
def test_a_member_that_is_given_in_two_ways_is_refused(patient: Served, members: dict[str, str]) -> None:
    status, told = patient.post(SPEECH, form(b"noise", model="whisper", **members), FORM)
    assert status == 400
    assert "is given twice" in told["error"]["message"]
