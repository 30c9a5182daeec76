"""Requests whose end two readers might see in different places: each is refused with 400, and the connection closed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import h11
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from triolet.server.framing import LONGEST_LINE, UNREADABLE, Framing

from .connected import PATIENCE, Requests, answer, listening, said

pytestmark = pytest.mark.real_time

HOST = b"host: localhost\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
BEHIND = b"GET /behind HTTP/1.1\r\nhost: localhost\r\n\r\n"


def post(*fields: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST /first HTTP/" + version + b"\r\n" + HOST + b"".join(fields) + b"\r\n" + body


SMUGGLED = {
    "a length that differs": post(b"content-length: 5\r\n", b"content-length: 6\r\n", body=b"hello"),
    "a length given twice": post(b"content-length: 5\r\n", b"Content-Length: 5\r\n", body=b"hello"),
    "a list of lengths": post(b"content-length: 5, 5\r\n", body=b"hello"),
    "a negative length": post(b"content-length: -5\r\n", body=b"hello"),
    "a length with a plus": post(b"content-length: +5\r\n", body=b"hello"),
    "a length in hex": post(b"content-length: 0x5\r\n", body=b"hello"),
    "an empty length": post(b"content-length:\r\n", body=b"hello"),
    "length and coding": post(b"content-length: 5\r\n", CHUNKED, body=b"0\r\n\r\n"),
    "coding and length": post(CHUNKED, b"content-length: 5\r\n", body=b"0\r\n\r\n"),
    "two codings in two fields": post(CHUNKED, b"transfer-encoding: identity\r\n", body=b"0\r\n\r\n"),
    "chunked is not last": post(b"transfer-encoding: chunked, gzip\r\n", body=b"0\r\n\r\n"),
    "another coding": post(b"transfer-encoding: identity\r\n", b"content-length: 5\r\n", body=b"hello"),
    "a coding in quotes": post(b'transfer-encoding: "chunked"\r\n', body=b"0\r\n\r\n"),
    "a coding behind a vertical tab": post(b"transfer-encoding: \x0bchunked\r\n", body=b"0\r\n\r\n"),
    "an empty coding": post(b"transfer-encoding:\r\n", b"content-length: 5\r\n", body=b"hello"),
    "a coding in HTTP/1.0": post(CHUNKED, body=b"0\r\n\r\n", version=b"1.0"),
    "a blank before the colon": post(b"content-length : 5\r\n", body=b"hello"),
    "a blank before a name": post(b" content-length: 5\r\n", body=b"hello"),
    "a field without a name": post(b": 5\r\n", b"content-length: 5\r\n", body=b"hello"),
    "a bare LF behind a field": post(b"x: a\n", b"content-length: 5\r\n", body=b"hello"),
    "bare LFs alone": post(b"content-length: 5\r\n", body=b"hello").replace(b"\r\n", b"\n"),
    "a bare LF that ends the head": post(b"content-length: 5\r\n\n", body=b"hello"),
    "a bare LF behind the request line": post(b"content-length: 0\r\n").replace(b"1.1\r\n", b"1.1\n"),
    "a bare CR in a field": post(b"x: a\rcontent-length: 5\r\n", body=b"hello"),
    "CR CR LF": post(b"x: a\r\r\n", b"content-length: 0\r\n"),
    "a field in two lines": post(b"x: a\r\n b\r\n", b"content-length: 0\r\n"),
    "a line of blanks": post(b"content-length: 5\r\n \r\n", body=b"hello"),
    "NUL in a field": post(b"x: a\0b\r\n", b"content-length: 0\r\n"),
    "a control character in a field": post(b"x: a\x01b\r\n", b"content-length: 0\r\n"),
    "NUL in the request line": b"GET /\0 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a request line with more words": b"GET / x HTTP/1.1\r\n" + HOST + b"\r\n",
    "another protocol": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
    "an empty line first": b"\r\n" + post(b"content-length: 0\r\n"),
    "an empty chunk size": post(CHUNKED, body=b"\r\nhello\r\n0\r\n\r\n"),
    "a chunk size in 0x": post(CHUNKED, body=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk size with a blank behind": post(CHUNKED, body=b"5 \r\nhello\r\n0\r\n\r\n"),
    "a chunk size beyond 64 bits": post(CHUNKED, body=b"10000000000000005\r\nhello\r\n0\r\n\r\n"),
    "a chunk size with a bare LF": post(CHUNKED, body=b"5\nhello\r\n0\r\n\r\n"),
    "a chunk extension with a bare LF": post(CHUNKED, body=b"5;a\nxx\r\nhello\r\n0\r\n\r\n"),
    "a chunk extension with NUL": post(CHUNKED, body=b"5;a\0\r\nhello\r\n0\r\n\r\n"),
    "a chunk that is longer": post(CHUNKED, body=b"3\r\nhello\r\n0\r\n\r\n"),
    "a chunk that ends with LF": post(CHUNKED, body=b"5\r\nhello\n0\r\n\r\n"),
    "a last chunk that ends with LF": post(CHUNKED, body=b"5\r\nhello\r\n0\n\r\n"),
    "trailers that end with LF": post(CHUNKED, body=b"0\r\n\n"),
    "a trailer in two lines": post(CHUNKED, body=b"0\r\nx: a\r\n b\r\n\r\n"),
    "a trailer that is no field": post(CHUNKED, body=b"0\r\n" + b"GET /behind HTTP/1.1\r\n\r\n"),
}

SOUND = {
    "no body": b"GET /first HTTP/1.1\r\n" + HOST + b"\r\n",
    "a length": post(b"content-length: 5\r\n", body=b"hello"),
    "no length": post(b"content-length: 0\r\n"),
    "blanks around a length": post(b"Content-Length:\t 5 \t\r\n", body=b"\r\n\r\n\n"),
    "chunks": post(CHUNKED, body=b"5\r\nhello\r\n00A\r\n0123456789\r\n0\r\n\r\n"),
    "a coding in capitals": post(b"Transfer-Encoding:Chunked\r\n", body=b"1\r\na\r\n0\r\n\r\n"),
    "extensions": post(CHUNKED, body=b'5;a;b=c;d="e \\" f;"\r\nhello\r\n0;a\r\n\r\n'),
    "trailers": post(CHUNKED, body=b"5\r\nhello\r\n0\r\nx: a\r\ny:\r\n\r\n"),
    "bytes of 8 bits in a field": post(b"x: \xc3\xa4 \xff\r\n", b"content-length: 0\r\n"),
    "no chunk": post(CHUNKED, body=b"0\r\n\r\n"),
}


def in_pieces(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    """``data`` as a network might bring it."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [one for one in (*pieces, data[at:]) if one]


def requests_of_h11(data: bytes) -> list[tuple[bytes, bytes]] | str:
    """Targets and bodies as h11 reads them; "refused" where it does not."""
    connection, found = h11.Connection(h11.SERVER), []
    connection.receive_data(data)
    body = b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return "refused"
        if isinstance(event, h11.Request):
            target, body = event.target, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            found.append((target, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                return found
            connection.start_next_cycle()
        else:
            return found


# -- bytes -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(sorted(SOUND)), max_size=4), st.lists(st.integers(1, 9), max_size=20))
def test_what_is_sound_passes_as_it_came(names: list[str], sizes: list[int]) -> None:
    data = b"".join(SOUND[name] for name in names)
    framing = Framing()
    assert b"".join(map(framing.passed, in_pieces(data, sizes))) == data
    assert framing.fault is None
    assert len(requests_of_h11(data)) == len(names)


@given(
    st.lists(st.sampled_from(sorted(SOUND)), max_size=2),
    st.sampled_from(sorted(SMUGGLED)),
    st.lists(st.integers(1, 40), max_size=20),
)
def test_behind_a_fault_nothing_passes(before: list[str], name: str, sizes: list[int]) -> None:
    """However the bytes come in pieces; and what passes h11 refuses where the fault is."""
    sound, framing = b"".join(SOUND[one] for one in before), Framing()
    passed = b"".join(map(framing.passed, in_pieces(sound + SMUGGLED[name] + BEHIND, sizes)))
    assert framing.fault
    assert passed.startswith(sound)
    assert passed.endswith(UNREADABLE)
    assert b"/behind HTTP" not in passed
    assert requests_of_h11(passed) == "refused"
    assert framing.passed(BEHIND) == b""


@given(st.binary(max_size=30), st.lists(st.integers(1, 9), max_size=30))
def test_pieces_change_nothing(data: bytes, sizes: list[int]) -> None:
    whole, pieces = Framing(), Framing()
    assert whole.passed(data) == b"".join(map(pieces.passed, in_pieces(data, sizes)))
    assert whole.fault == pieces.fault


def test_a_line_without_an_end_is_kept_no_longer_than_h11_would() -> None:
    for beginning in (b"GET /", b"GET / HTTP/1.1\r\nx: ", post(CHUNKED), post(CHUNKED, body=b"0\r\nx: ")):
        framing = Framing()
        passed = framing.passed(beginning)
        for _ in range(2 + LONGEST_LINE // 1_000):
            passed += framing.passed(b"a" * 1_000)
        assert framing.fault == "a line of more than 16,384 bytes"
        assert len(passed) > LONGEST_LINE, "h11 says that it is too long"
        assert framing.passed(b"\r\n\r\n") == b""


@pytest.mark.parametrize(
    "first",
    [
        BEHIND,
        post(b"content-length: 0\r\n"),
        post(b"content-length: 5\r\n", body=b"hello"),
        post(CHUNKED, body=b"5\r\nhello\r\n0\r\n\r\n"),
    ],
)
def test_the_next_request_begins_at_the_first_byte_behind_one(first: bytes) -> None:
    """A byte that is taken for the body's would be seen by one reader alone."""
    framing = Framing()
    assert framing.passed(first) == first
    assert framing.passed(b" ") == UNREADABLE
    assert framing.fault == "bytes that cannot begin a request"


@pytest.mark.parametrize(
    "line", [b"x:" + b" " * 16_000 + b"\0", b"5" + b";a" * 8_000 + b"\0", b'5;a="' + b"\\a" * 8_000]
)
def test_a_line_is_read_in_one_pass(line: bytes) -> None:
    """An expression that goes back over blanks would take seconds, and nobody else would be served meanwhile."""
    for beginning in (b"GET / HTTP/1.1\r\n", post(CHUNKED), post(CHUNKED, body=b"0\r\n")):
        framing = Framing()
        framing.passed(beginning + line + b"\r\n")
        assert framing.fault


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SMUGGLED)[::4])
async def test_smuggling_is_answered_400_behind_what_came_before_and_the_connection_closed(name: str) -> None:
    """The client keeps its side open; what stands behind is no request."""
    app = Requests()
    async with listening(app) as place:
        found = await place.told(SOUND["chunks"] + SMUGGLED[name] + BEHIND)
    _, first, last = found.split(b"HTTP/1.1 ")
    assert (first[:3], last[:3]) == (b"200", b"400")
    assert b"connection: close" in last.lower()
    assert app.heard == [("POST", "/first", b"hello0123456789")]


@pytest.mark.parametrize("name", list(SOUND)[::3])
async def test_a_sound_request_is_answered_and_the_connection_kept(name: str) -> None:
    """Byte by byte, too."""
    app = Requests()
    async with listening(app) as place, await place.connect() as stream:
        with trio.fail_after(PATIENCE):
            assert (await answer(stream, SOUND[name])).startswith(b"HTTP/1.1 200")
            for byte in SOUND[name][:-1]:
                await stream.send_all(bytes([byte]))
            assert (await answer(stream, SOUND[name][-1:])).startswith(b"HTTP/1.1 200")
    assert len(app.heard) == 2
    assert app.heard[0] == app.heard[1]


async def test_a_last_answer_is_whole_though_the_client_has_sent_another_request() -> None:
    """h11 reads nothing behind such an answer, and takes it for a fault that something comes."""
    heard = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        while not heard or heard[-1].get("more_body"):
            heard.append(await receive())
        await trio.testing.wait_all_tasks_blocked()
        await send({"type": "http.response.body", "body": b"k"})

    async with listening(app) as place, await place.connect() as stream:
        with trio.fail_after(PATIENCE):
            await stream.send_all(post(b"content-length: 5\r\n"))
            begun = await stream.receive_some()
            found = begun + await said(stream, b"hello" + BEHIND)
    assert [one["type"] for one in heard] == ["http.request"] * len(heard)
    assert found.endswith(b"\r\n\r\nok")
    assert found.count(b"HTTP/1.1") == 1
