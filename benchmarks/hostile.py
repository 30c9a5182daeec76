"""Whether a server keeps memory for hostile clients.

::

    python benchmarks/hostile.py [--rounds 45]

In each round: 200 connections that close half-way, 50 that send a head letter by letter, 50 that pipeline and hang up,
50 broken forms, 5 small files that are huge pictures, 5 uploads of a gigabyte that are cut off where they are refused,
20 WebSockets that send nonsense, and 20 good requests. Printed is the server's resident size after each round. The
claims: every answer is below 500, good requests are answered, nothing runs afterwards, and over the last third of the
rounds the size grows by at most a hundredth. Before it grows, since the engine writes its pages for the first time.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from pathlib import Path
from struct import pack
from tempfile import TemporaryDirectory

import click
import psutil
import trio
from serve import EDGE, answer_to, claim, post, recordings, request_of, start

from triolet.testing.families import make_checkpoint

FORM = f"multipart/form-data; boundary={EDGE}"
SPEECH = "/v1/audio/transcriptions"
GIGABYTE = 2**30
SIDE = 20_000  # pixels
GROWTH = 0.01


def huge_picture() -> bytes:
    """A conversation with a picture of 400 million pixels, in half a megabyte."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\0" * (SIDE + 1) * SIDE, 9)
    head = pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "eyes", "messages": [{"role": "user", "content": content}]}
    return post("/v1/chat/completions", json.dumps(body).encode(), "application/json")


class Hostility:
    """The clients of one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[int] = Counter()
        self.lost = 0
        self._good = request_of(recordings()[0])
        self._picture = huge_picture()

    async def round(self) -> None:
        """All of them at once."""
        kinds = (
            (200, self._closes_half_way),
            (50, self._sends_letters),
            (50, self._pipelines),
            (50, self._breaks_its_form),
            (5, self._sends_a_picture),
            (5, self._sends_a_gigabyte),
            (20, self._opens_a_socket),
            (20, self._asks),
        )
        async with trio.open_nursery() as nursery:
            for count, kind in kinds:
                for number in range(count):
                    nursery.start_soon(self._meet, kind, number)

    async def _meet(self, kind, number: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with stream:
            try:
                await kind(stream, number)
            except trio.BrokenResourceError:
                self.lost += kind == self._asks

    async def _hears(self, stream: trio.SocketStream, request: bytes) -> None:
        status, _ = await answer_to(stream, request)
        self.statuses[status] += 1

    async def _closes_half_way(self, stream: trio.SocketStream, number: int) -> None:
        await stream.send_all(self._good[: len(self._good) * number // 200])

    async def _sends_letters(self, stream: trio.SocketStream, number: int) -> None:
        for letter in self._good[: 20 + number]:
            await stream.send_all(bytes([letter]))
            await trio.sleep(0.01)

    async def _pipelines(self, stream: trio.SocketStream, number: int) -> None:
        await stream.send_all(self._good + self._good[:number])
        await trio.sleep(0.01 * number)

    async def _breaks_its_form(self, stream: trio.SocketStream, number: int) -> None:
        body = f"--{EDGE}\r\n".encode() * number + bytes(range(number))
        await self._hears(stream, post(SPEECH, body, FORM))

    async def _sends_a_picture(self, stream: trio.SocketStream, number: int) -> None:  # noqa: ARG002
        await self._hears(stream, self._picture)

    async def _sends_a_gigabyte(self, stream: trio.SocketStream, number: int) -> None:  # noqa: ARG002
        head = f"POST {SPEECH} HTTP/1.1\r\nhost: a\r\ncontent-type: {FORM}\r\ncontent-length: {GIGABYTE}\r\n\r\n"
        await self._hears(stream, head.replace("host: a", "host: localhost").encode() + b"x" * 2**20)

    async def _opens_a_socket(self, stream: trio.SocketStream, number: int) -> None:
        head = (
            "GET /v1/realtime?model=demo HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        await stream.send_all(head.encode())
        await stream.receive_some()
        await stream.send_all(b"\x82\xfe\x00\x10" + bytes(4 + 16) + bytes([0x81, 0x80 | number]) + bytes(4 + number))
        await trio.sleep(0.1)

    async def _asks(self, stream: trio.SocketStream, number: int) -> None:  # noqa: ARG002
        await self._hears(stream, self._good)

    async def is_quiet(self) -> bool:
        """Whether nothing runs any more."""
        for _ in range(100):
            stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            async with stream:
                _, body = await answer_to(stream, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            if not json.loads(body)["running"]:
                return True
            await trio.sleep(0.1)
        return False


@click.command()
@click.option("--rounds", default=45)
def main(rounds: int) -> None:
    """See the module."""
    with TemporaryDirectory() as folder:
        make_checkpoint("qwen2_vl", folder)
        running = start("--model", f"eyes={folder}", "--preload")
        process = running.process
        hostility, sizes, quiet = Hostility(running.port), [], True
        for number in range(rounds):
            trio.run(hostility.round)
            quiet = trio.run(hostility.is_quiet) and quiet
            sizes.append(psutil.Process(process.pid).memory_info().rss / 2**20)
            descriptors = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            print(f"round {number + 1}: {sizes[-1]:.0f} MiB, {descriptors} file descriptors", flush=True)
        running.end()
    print(f"answers by status: {dict(sorted(hostility.statuses.items()))}")
    claim(max(hostility.statuses) < 500, "no answer was 500 or above")
    claim(hostility.statuses[200] == 20 * rounds and not hostility.lost, "every good request was answered")
    claim(quiet, "after each round nothing ran")
    growth = sizes[-1] / sizes[2 * rounds // 3] - 1.0
    claim(growth <= GROWTH, f"over the last third of the rounds the resident size grew by {growth:.1%}")
    claim(
        process.returncode == 0 and "Traceback" not in running.log(),
        "the server's log has no traceback, and it left with 0",
    )


if __name__ == "__main__":
    main()
