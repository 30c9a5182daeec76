"""WebSockets as bytes on a connection: what hypercorn would keep without a bound."""

from __future__ import annotations

import socket
import struct
from contextlib import closing

import pytest
from websockets.sync.client import connect

from .openai_client import PATIENT_SOCKET
from .served import Served, head_of
from .test_draining import OPENING

pytestmark = pytest.mark.real_time

TEXT, GOES_ON, PIECE = 0x1, 0x0, 1 << 20
MOST = 1 << 22  # characters of a message


def opened(service: Served) -> socket.socket:
    """A WebSocket that was accepted."""
    connection = service.connect()
    connection.sendall(OPENING)
    assert head_of(connection).startswith(b"HTTP/1.1 101")
    return connection


def frame(opcode: int, data: bytes, *, last: bool) -> bytes:
    """Masked with zeros, so that the data are themselves."""
    return struct.pack(">BBQ", opcode | (0x80 if last else 0), 0x80 | 127, len(data)) + bytes(4) + data


def close_code(connection: socket.socket) -> int:
    """Of the server's end of the WebSocket."""
    stream = connection.makefile("rb")
    while True:
        opcode, length = stream.read(2)
        if length == 126:
            (length,) = struct.unpack(">H", stream.read(2))
        payload = stream.read(length)
        if opcode & 0xF == 0x8:
            return int.from_bytes(payload[:2], "big")


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (b"\x81\x02{}", 1002),
        (b"\xc1\x82\0\0\0\0{}", 1002),
        (b"\x83\x80\0\0\0\0", 1002),
        (b"\x88\x82\0\0\0\0\x03\xed", 1002),
        (b"\x81\x82\0\0\0\0\xff\xfe", 1007),
    ],
    ids=["no mask", "a reserved bit", "an unknown opcode", "a reserved code", "broken text"],
)
def test_who_breaks_the_protocol_is_told_how(service: Served, frames: bytes, code: int) -> None:
    """RFC 6455, section 7.1.7: an endpoint that fails the connection sends a close frame first."""
    with closing(opened(service)) as connection:
        connection.sendall(frames)
        assert close_code(connection) == code


def test_messages_are_not_compressed(service: Served) -> None:
    """A compressed message would be unpacked, to whatever it grows, before anybody looks at its size."""
    with connect(service.url.replace("http", "ws") + "/v1/realtime", compression="deflate", **PATIENT_SOCKET) as client:
        assert client.protocol.extensions == []
        assert client.recv()


@pytest.mark.parametrize("count", [1, 8])
def test_a_message_that_is_too_large_ends_its_session_and_is_not_kept(service: Served, count: int) -> None:
    """In one frame or in many, and whatever the client goes on sending."""
    with closing(opened(service)) as connection:
        service.until(lambda: len(service.server.sockets) == 1)
        piece = b"x" * (8 * PIECE // count)
        for number in range(count):
            connection.sendall(frame(GOES_ON if number else TEXT, piece, last=False))
        assert close_code(connection) == 1009
        service.until(lambda: not service.server.sockets)
        connection.sendall(frame(GOES_ON, b"x" * PIECE, last=False))


def test_a_message_of_the_largest_size_is_read(service: Served) -> None:
    with connect(service.url.replace("http", "ws") + "/v1/realtime", max_size=None, **PATIENT_SOCKET) as client:
        client.recv()
        client.send("x" * MOST)
        assert '"type":"error"' in str(client.recv())
