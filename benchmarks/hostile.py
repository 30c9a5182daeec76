"""Whether a server keeps memory for hostile clients, and whether one body of theirs holds up all others.

::

    python benchmarks/hostile.py clients [--rounds 45]
    python benchmarks/hostile.py bodies [--model FOLDER] [--only NAME] [--repeat 1]

``clients``: in each round: 200 connections that close half-way, 50 that send a head letter by letter, 50 that pipeline
and hang up, 50 broken forms, 5 small files that are huge pictures, 5 uploads of a gigabyte that are cut off where they
are refused, 20 WebSockets that send nonsense, and 20 good requests. Printed is the server's resident size after each
round. The claims: every answer is below 500, good requests are answered, nothing runs afterwards, and over the last
third of the rounds the size grows by at most a hundredth. Before it grows, since the engine writes its pages for the
first time.

``bodies``: each of `hostile_bodies.py` is sent twice: once the answer is awaited, once the client leaves as soon as all
is sent. Meanwhile a process of its own asks for /health all the time, and reads the server's resident size. Printed is
the longest time that it waited for an answer, the longest for which the server itself computed in such a wait (on a
machine with neighbours the rest is theirs), how much the size grew, and by how much 5 s later. The claims: nobody
waited for longer than 100 ms, the size grew by at most four times the largest body of JSON, and after bodies of
a megabyte or more all but a twentieth of that came back. Before, each is sent once: the engine writes pages, and keeps
what it compiled; after small bodies that ask for many answers it still writes pages for the first time.
``--repeat``: of so many times that with the shortest wait is told.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import zlib
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from struct import pack
from tempfile import TemporaryDirectory

import click
import psutil
import trio
from attrs import frozen
from hostile_bodies import MOST, Made, bodies
from serve import EDGE, answer_to, claim, post, recordings, request_of, start

from triolet.testing.families import make_checkpoint

FORM = f"multipart/form-data; boundary={EDGE}"
SPEECH = "/v1/audio/transcriptions"
GIGABYTE = 2**30
SIDE = 20_000  # pixels
GROWTH = 0.01
WAITED, GROWN, LEFT, PATIENCE = 0.100, 4 * MOST / 2**20, MOST / 5 / 2**20, 5.0  # seconds, MiB, MiB, seconds


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


# -- bodies ----------------------------------------------------------------------------------------------------------


@frozen
class Seen:
    """One look at the server: when, how long it took to answer, how long it computed meanwhile, and its resident size
    in MiB."""

    at: float
    waited: float
    computed: float
    size: float

    @property
    def own(self) -> float:
        """How long it would have taken on a machine where nobody else computes."""
        return min(self.waited, self.computed)


class Watch:
    """A process that looks at a server all the time."""

    def __init__(self, port: int, pid: int, folder: Path) -> None:
        self._path = folder / "seen"
        command = [sys.executable, __file__, "watch", str(port), str(pid)]
        self.process = subprocess.Popen(command, stdout=self._path.open("w"))

    def seen(self, since: float) -> list[Seen]:
        """What it saw since then, at least once."""
        for _ in count():
            lines = self._path.read_text().rpartition("\n")[0].splitlines()
            found = [one for one in (Seen(*map(float, line.split())) for line in lines) if one.at >= since]
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError


@frozen
class Effect:
    """What a body of ``size`` bytes did."""

    size: int
    status: int
    waited: float
    own: float
    grown: float
    left: float


async def send(port: int, made: Made, *, leaves: bool) -> int:
    """Sends a body. Returns the status of the answer, or 0."""
    path, kind, body = made
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    got = b""
    async with stream:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(post(path, body, kind))
            if leaves:
                return 0
            while b"\r\n\r\n" not in got:
                got += await stream.receive_some() or b"\r\n\r\n"
            if b"transfer-encoding: chunked" in got:
                while not got.endswith(b"0\r\n\r\n"):
                    got = got[-2_000:] + (await stream.receive_some() or b"0\r\n\r\n")
                return 200
    return int(got.split(b" ")[1]) if got.startswith(b"HTTP") else 0


def effect(watch: Watch, port: int, made: Made, *, leaves: bool) -> Effect:
    """Sends a body, and waits for what it leaves behind."""
    before = watch.seen(time.monotonic())[-1].size
    begun = time.monotonic()
    status = trio.run(lambda: send(port, made, leaves=leaves))
    ended = time.monotonic()
    left = watch.seen(time.monotonic())[-1].size - before
    while time.monotonic() < ended + PATIENCE and (left > LEFT or time.monotonic() < ended + 1.0):
        left = watch.seen(time.monotonic())[-1].size - before
    seen = watch.seen(begun)
    grown = max(one.size for one in seen) - before
    return Effect(len(made[2]), status, max(one.waited for one in seen), max(one.own for one in seen), grown, left)


@click.group()
def main() -> None:
    """See the module."""


@main.command(hidden=True)
@click.argument("port", type=int)
@click.argument("pid", type=int)
def watch(port: int, pid: int) -> None:
    """Looks at the server until it is gone."""

    async def look() -> None:
        process = psutil.Process(pid)
        while True:
            begun, computed = time.monotonic(), sum(process.cpu_times()[:2])
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            async with stream:
                await answer_to(stream, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            waited, computed = time.monotonic() - begun, sum(process.cpu_times()[:2]) - computed
            print(begun, waited, computed, process.memory_info().rss / 2**20, flush=True)
            await trio.sleep(0.01)

    with suppress(OSError, trio.BrokenResourceError, psutil.Error):
        trio.run(look)


@main.command("bodies")
@click.option("--model", help="a checkpoint that converses; by default a small one of random weights")
@click.option("--only", default="", help="bodies with this in their names")
@click.option("--repeat", default=1)
def send_bodies(model: str | None, only: str, repeat: int) -> None:
    """See the module."""
    with TemporaryDirectory() as folder:
        vectors = make_checkpoint("bert", Path(folder) / "vectors")
        talks = model or make_checkpoint("llama", Path(folder) / "chat")
        running = start("--model", f"chat={talks}", "--model", f"vectors={vectors}", "--preload")
        watched = Watch(running.port, running.process.pid, Path(folder))
        for _, made in bodies(only):
            trio.run(partial(send, running.port, made, leaves=False))
        found = []
        print("| body | MB | client | status | longest wait, ms | the server's own, ms | grown, MiB | left, MiB |")
        print("|---|---|---|---|---|---|---|---|")
        for name, made in bodies(only):
            for leaves in (False, True):
                several = [effect(watched, running.port, made, leaves=leaves) for _ in range(repeat)]
                one = min(several, key=lambda one: one.own)
                found.append(one)
                print(
                    f"| {name} | {len(made[2]) / 1e6:.1f} | {'leaves' if leaves else 'waits'} | {one.status or '-'} | "
                    f"{1e3 * one.waited:.0f} | {1e3 * one.own:.0f} | {one.grown:.0f} | {one.left:.0f} |",
                    flush=True,
                )
        running.end()
        watched.process.wait()
    claim(max(one.status for one in found) < 500, "no answer was 500 or above")
    claim(max(one.own for one in found) <= WAITED, f"nobody waited for the server longer than {1e3 * WAITED:.0f} ms")
    claim(max(one.grown for one in found) <= GROWN, f"the size grew by at most {GROWN:.0f} MiB")
    large = [one.left for one in found if one.size >= 1e6]
    claim(max(large, default=0.0) <= LEFT, f"{PATIENCE:.0f} s later it was within {LEFT:.0f} MiB of before")


# -- clients ---------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--rounds", default=45)
def clients(rounds: int) -> None:
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
