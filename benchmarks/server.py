"""`triolet serve` under load and under attack, and its end.

::

    python benchmarks/server.py load      # 64 clients over HTTP and in process, in turns
    python benchmarks/server.py streams   # 500 completions are streamed at once
    python benchmarks/server.py sigterm   # SIGTERM while requests run, 50 times
    python benchmarks/server.py hostile   # 45 rounds of 400 hostile clients: does the server keep memory for them?
    python benchmarks/server.py storm     # 512 clients with the worst that is allowed at once: memory, and /health

``--count`` changes the number of turns, streams, times, rounds or clients. ``storm`` serves the demo and a small model
of images, and also ``--model NAME=FOLDER``, which may be repeated: ``speech``, ``chat`` and ``vlm`` are attacked.

``load``: each client asks again as soon as it has the text of one short recording, over HTTP and by `Engine.transcribe`
in the clients' own process. Both engines are open all the time and have turns of 5 s, since a virtual machine is a
third faster in one minute than in the next. The clients of HTTP take their part of the machine too.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import psutil
import trio
from claims import Claims
from tiny import make_checkpoint

from triolet import Engine, demo

Ask = Callable[[int], Awaitable[bool]]
EDGE = "edge-of-a-part"
FORM, JSON = f"multipart/form-data; boundary={EDGE}", "application/json"
SPEECH, CHAT = "/v1/audio/transcriptions", "/v1/chat/completions"
RECORDINGS = [sample.path for sample in demo.samples() if sample.path.stem.endswith("-command")]
HOST = "host: localhost\r\nconnection: close"
HEALTH = f"GET /health HTTP/1.1\r\n{HOST}\r\n\r\n".encode()
MB = 1e6
claim = Claims()


@contextmanager
def server(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Runs ``triolet serve`` with the demo checkpoint. Yields its process and port, and stops it with SIGTERM at the
    end."""
    command = [sys.executable, "-m", "triolet", "serve", "--model", "demo=demo", "--port", "0", "--no-access-log"]
    with NamedTemporaryFile("w+", encoding="utf-8") as log:  # a pipe that nobody reads would block the server
        process = subprocess.Popen([*command, *options], stderr=log, text=True)
        said = Path(log.name).read_text
        while not (found := re.search(r": serving demo.*:(\d+)\n", said())):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}: {said()}")
            time.sleep(0.02)
        yield process, int(found[1])
        process.terminate()
        process.wait(timeout=60)
        claim("Traceback" not in said(), "the server's log has no traceback")


def post(path: str, body: bytes, kind: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\n{HOST}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def hear(number: int) -> bytes:
    """Returns a complete HTTP request for the text of a recording."""
    path = RECORDINGS[number % len(RECORDINGS)]
    head = f'--{EDGE}\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n--{EDGE}\r\n'
    file = f'content-disposition: form-data; name="file"; filename="{path.name}"\r\n\r\n'
    return post(SPEECH, (head + file).encode() + path.read_bytes() + f"\r\n--{EDGE}--\r\n".encode(), FORM)


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    """Returns the status and the body of an answer. Status 0: the server closed the connection without an answer."""
    stream, got = await trio.open_tcp_stream("127.0.0.1", port), b""
    async with stream:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(request)
        with suppress(trio.BrokenResourceError):
            async for more in stream:
                got += more
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


async def at_once(count: int, one: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Returns the results of ``one`` for each number below ``count``, in the order in which they come."""
    found = []

    async def note(number: int) -> None:
        found.append(await one(number))

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(note, number)
    return found


# -- load ------------------------------------------------------------------------------------------------------------


async def turn(one: Ask, seconds: float) -> tuple[float, list[float], int]:
    """Lets 64 clients ask for ``seconds``. Returns the answers a second, the seconds of each answer, and the number of
    lost requests."""
    begun, times, lost = time.perf_counter(), [], 0

    async def client(number: int) -> None:
        nonlocal lost
        while (asked := time.perf_counter()) < begun + seconds:
            right = await one(number)
            times.append(time.perf_counter() - asked)
            lost += not right

    await at_once(64, client)
    return len(times) / (time.perf_counter() - begun), times, lost


async def turns(port: int, count: int, seconds: float = 5.0) -> None:
    async with Engine(demo.checkpoint()) as engine:

        async def in_process(number: int) -> bool:
            return bool((await engine.transcribe(RECORDINGS[number % 3].read_bytes(), seed=None)).text)

        async def over_http(number: int) -> bool:
            status, body = await ask(port, hear(number))
            return status == 200 and b'"text"' in body

        found = [[await turn(one, seconds) for one in (in_process, over_http)] for _ in range(count + 1)][1:]
    for way, played in zip(("in process", "over HTTP"), zip(*found, strict=True), strict=True):
        times = sorted(second for _, some, _ in played for second in some)
        at = [times[int(len(times) * share)] for share in (0.5, 0.95, 0.99)]
        told = ", ".join(f"{second:.2f}" for second in at)
        print(f"{way}: {median(rate for rate, _, _ in played):.1f} answers a second, p50, p95, p99: {told} s")
    shares = [1 - http[0] / own[0] for own, http in found]
    claim(not sum(lost for pair in found for *_, lost in pair), "no request was lost")
    claim(median(shares) < 0.1, f"HTTP takes {median(shares):.1%} of the requests a second, median of {count} turns")


def load(count: int) -> None:
    with server() as (_, port):
        trio.run(turns, port, count)


def streams(count: int) -> None:
    def stream(port: int, number: int) -> Awaitable[tuple[int, bytes]]:
        asked = {"model": "lm", "prompt": f"{number}", "max_tokens": 100, "stream": True, "ignore_eos": True}
        return ask(port, post("/v1/completions", json.dumps(asked).encode(), JSON))

    with TemporaryDirectory() as folder:
        options = ("--model", f"lm={make_checkpoint('llama', folder)}", "--preload")
        with server(*options, "--max-requests", str(count)) as (_, port):
            begun = time.perf_counter()
            found = trio.run(at_once, count, partial(stream, port))
            seconds = time.perf_counter() - begun
    ended = sum(b"[DONE]" in body for _, body in found)
    print(f"{count} streams of 100 tokens in {seconds:.1f} s, {100 * count / seconds:.0f} tokens a second")
    claim(ended == count, f"{ended} of {count} streams came to their end")


# -- the end ---------------------------------------------------------------------------------------------------------


async def interrupt(process: subprocess.Popen[str], port: int, after: float) -> list[int]:
    """Sends SIGTERM while 8 clients ask. Returns the status of every request, from before and after the signal."""
    statuses = []

    async def client(number: int) -> None:
        with suppress(OSError):  # the server has stopped listening
            while not statuses or statuses[-1] == 200:
                statuses.append((await ask(port, hear(number)))[0])

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(client, number)
        await trio.sleep(after)
        process.terminate()
    return statuses


def sigterm(count: int) -> None:
    good, slowest = 0, 0.0
    for number in range(count):
        with server("--drain-seconds", "20") as (process, port):
            statuses = trio.run(interrupt, process, port, 0.02 + 0.5 * number / count)  # another moment each time
            begun = time.perf_counter()
            process.wait(timeout=50)
            slowest = max(slowest, time.perf_counter() - begun)
        good += process.returncode == 0 and set(statuses) <= {200, 503}
    told = f"each request was answered, and the server left with 0; the slowest end took {slowest:.1f} s"
    claim(good == count, f"{good} of {count} times {told}")


# -- hostile clients -------------------------------------------------------------------------------------------------


async def attack(port: int) -> Counter[tuple[bool, int]]:
    """Runs 400 clients at once. Returns the counts of the answers, by whether the request was a good one and by
    status."""
    good, statuses = hear(0), Counter[tuple[bool, int]]()
    huge = f"POST {SPEECH} HTTP/1.1\r\n{HOST}\r\ncontent-type: {FORM}\r\ncontent-length: {2**30}\r\n\r\n"
    upgrade = "GET /v1/realtime?model=demo HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    upgrade += "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"

    async def leaves(parts: list[bytes], pause: float) -> None:
        """Sends the parts, and closes without waiting for an answer."""
        with suppress(trio.BrokenResourceError):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                for part in parts:
                    await stream.send_all(part)
                    await trio.sleep(pause)

    async def hears(request: bytes) -> None:
        statuses[request is good, (await ask(port, request))[0]] += 1

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(leaves, [good[: len(good) * number // 200]], 0.0)
        for number in range(50):
            nursery.start_soon(leaves, [bytes([letter]) for letter in good[: 20 + number]], 0.01)
            nursery.start_soon(leaves, [good + good[:number]], 0.01 * number)
            nursery.start_soon(hears, post(SPEECH, f"--{EDGE}\r\n".encode() * number + bytes(range(number)), FORM))
        for number in range(20):
            frames = b"\x82\xfe\x00\x10" + bytes(20) + bytes([0x81, 0x80 | number]) + bytes(4 + number)
            nursery.start_soon(leaves, [upgrade.encode(), frames], 0.1)
            nursery.start_soon(hears, good)
        for _ in range(10):
            nursery.start_soon(hears, huge.encode() + b"x" * 2**20)
    return statuses


def picture(side: int) -> bytes:
    """Returns a PNG of one colour, a bit a pixel: kilobytes that become gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    rows = b"".join([*(packer.compress(row) for _ in range(side)), packer.flush()])
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def worst(models: tuple[str, ...]) -> list[bytes]:
    """Returns the requests of the storm: each is allowed, as large as it may be, or in as many units."""
    speech, chat, vlm = models
    said = {"model": chat, "max_tokens": 4, "messages": [{"role": "user", "content": "a" * 3_900_000}] * 8}
    shown = {"url": "data:image/png;base64," + base64.b64encode(picture(7_900)).decode()}
    pictures = [{"type": "image_url", "image_url": shown}] * 4
    seen = {"model": vlm, "max_tokens": 4, "messages": [{"role": "user", "content": pictures}]}
    begun = f'--{EDGE}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{speech}\r\n--{EDGE}\r\n'
    begun += 'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    tiny = f"POST {CHAT} HTTP/1.1\r\n{HOST}\r\ncontent-type: {JSON}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    opening = (
        f"GET /v1/realtime?model={speech} HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade"
    )
    opening += "\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    audio = {"type": "input_audio_buffer.append", "audio": base64.b64encode(bytes(2_800_000)).decode()}
    turns = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    event, update = (json.dumps(one).encode() for one in (audio, {"type": "session.update", "session": turns}))
    frame = struct.Struct(">BBQ")
    live = frame.pack(0x81, 0xFF, len(update)) + bytes(4) + update
    live += (frame.pack(0x81, 0xFF, len(event)) + bytes(4) + event) * 9
    return [
        post(CHAT, json.dumps(said).encode(), JSON),
        post(CHAT, json.dumps(seen).encode(), JSON),
        post(SPEECH, begun.encode() + bytes(48 * 2**20) + f"\r\n--{EDGE}--\r\n".encode(), FORM),
        tiny + b"1\r\n \r\n" * 500_000,
        opening.encode() + b"|" + live,
        opening.encode() + b"|" + b"\x01\x81\0\0\0\0a" + b"\x00\x81\0\0\0\0a" * 500_000,
        opening.encode() + b"|" + b"\x89\x80\0\0\0\0" * 500_000,
        opening.encode() + b"|" + frame.pack(0x81, 0xFF, 2**22) + bytes(4) + b"a" * (2**22 - 1),
    ]


async def rage(port: int, count: int, models: tuple[str, ...], seen: psutil.Process) -> float:
    """Runs ``count`` clients at once, for a minute at most. Returns the largest size of the server."""
    requests, sizes, ended = worst(models), [0.0], trio.Event()

    async def client(number: int) -> None:
        begun, _, then = requests[number % len(requests)].partition(b"|")
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(hears, stream, nursery.cancel_scope)
            with suppress(trio.BrokenResourceError), trio.move_on_after(40):
                await stream.send_all(begun)
                await trio.sleep(0.5)
                await stream.send_all(then)
                await trio.sleep(20)
            nursery.cancel_scope.cancel()

    async def hears(stream: trio.SocketStream, both: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError):
            async for _ in stream:
                pass
        both.cancel()

    async def clients() -> None:
        await at_once(count, client)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(clients)
        with trio.move_on_after(60):
            while not ended.is_set():
                sizes.append(seen.memory_info().rss)
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    return max(sizes)


def ask_health(port: int, stop: Any, waits: Any) -> None:
    """Asks for ``/health`` until told to stop, in a process of its own."""
    while not stop.is_set():
        begun = time.perf_counter()
        status, _ = trio.run(ask, port, HEALTH)
        waits.put((time.perf_counter() - begun, status))
        time.sleep(0.02)


def storm(count: int, given: tuple[str, ...] = ()) -> None:
    with TemporaryDirectory() as folder:
        named = dict(one.split("=", 1) for one in given)
        models = {"vlm": make_checkpoint("llava", folder), "chat": "demo", "speech": "demo", **named}
        options = [part for name, path in models.items() if path != "demo" for part in ("--model", f"{name}={path}")]
        names = tuple(name if models[name] != "demo" else "demo" for name in ("speech", "chat", "vlm"))
        with server("--preload", *options) as (process, port):
            rest(process, port, count, names)


def rest(process: subprocess.Popen[str], port: int, count: int, names: tuple[str, ...]) -> None:
    seen, stop, told = psutil.Process(process.pid), multiprocessing.Event(), multiprocessing.Queue()
    idle = seen.memory_info().rss
    asks = multiprocessing.Process(target=ask_health, args=(port, stop, told))
    asks.start()
    size = trio.run(rage, port, count, names, seen)
    begun = time.perf_counter()
    while (left := held(port)) and time.perf_counter() < begun + 30:
        time.sleep(0.1)
    ended = time.perf_counter() - begun
    stop.set()
    waits = [told.get() for _ in range(told.qsize())]
    asks.join()
    slow = max(wait for wait, _ in waits)
    load = os.getloadavg()[0]
    usual = median(wait for wait, _ in waits)
    print(f"{count} clients, load of the machine {load:.1f}: /health {len(waits)} times, median {usual:.3f} s")
    claim({status for _, status in waits} == {200}, "/health was always answered with 200")
    claim(slow <= 0.25, f"the slowest /health took {slow:.3f} s; claimed: 0.25 s")
    claim(size - idle <= 3 * 2**30, f"the size grew by {(size - idle) / MB:.0f} MB above idle; claimed: 3 GiB")
    claim(
        not left and ended <= 10,
        f"{left} bytes were held {ended:.1f} s after the last client; claimed: none after 10 s",
    )
    time.sleep(2)
    print(f"{(seen.memory_info().rss - idle) / MB:.0f} MB above idle are left")


def held(port: int) -> int:
    """Returns the bytes that the server holds for requests."""
    _, body = trio.run(ask, port, f"GET /metrics HTTP/1.1\r\n{HOST}\r\n\r\n".encode())
    found = re.search(rb"^triolet_request_memory_bytes (\S+)$", body, re.MULTILINE)
    return int(float(found[1])) if found else 1


async def quiet(port: int) -> None:
    """Waits until the server runs no request any more."""
    with trio.fail_after(10):
        while json.loads((await ask(port, HEALTH))[1])["running"]:  # noqa: ASYNC110
            await trio.sleep(0.1)


def hostile(count: int) -> None:
    sizes, statuses = [], Counter[tuple[bool, int]]()
    with server("--preload") as (process, port):
        for number in range(count):
            statuses += trio.run(attack, port)
            trio.run(quiet, port)
            seen = psutil.Process(process.pid)
            sizes.append(seen.memory_info().rss)
            print(f"round {number + 1}: {sizes[-1] / MB:.0f} MB, {seen.num_fds()} file descriptors", flush=True)
    growth = sizes[-1] / sizes[2 * count // 3] - 1
    claim(max(status for _, status in statuses) < 500, f"no answer was 500 or above: {dict(statuses)}")
    claim(statuses[True, 200] == 20 * count, "every good request was answered")
    claim(growth <= 0.01, f"in the last third of the rounds the size grew by {growth:.1%}; claimed: at most 1 %")


def main() -> None:
    parts: dict[str, tuple[Callable[..., None], int]] = {
        "load": (load, 12),
        "streams": (streams, 500),
        "sigterm": (sigterm, 50),
        "hostile": (hostile, 45),
        "storm": (storm, 512),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=parts)
    parser.add_argument("--count", type=int)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    asked = parser.parse_args()
    measure, default = parts[asked.what]
    measure(asked.count or default, *([tuple(asked.model)] if asked.model else []))
    claim.exit()


if __name__ == "__main__":
    main()
