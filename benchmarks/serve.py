"""The server under load, beside the engine in process; many streams; SIGTERM under load; kill -9 and a new start.

::

    python benchmarks/serve.py load [--seconds 60] [--clients 64] [--turns 12]
    python benchmarks/serve.py streams [--streams 500]
    python benchmarks/serve.py sigterm [--times 50]
    python benchmarks/serve.py kill [--times 5]
    python benchmarks/serve.py fuzz [--examples 200] [--seed 1]

``load``: clients that each ask again as soon as they have an answer, for the text of one short recording after another,
on the demo checkpoint: over HTTP on the loopback, and by `Engine.transcribe` in the clients' own process. Both engines
are open all the time, and have turns of a few seconds: a virtual machine is a third faster in one minute than in the
next. The claims: nothing is lost, and HTTP takes less than a tenth of the requests a second, the median of the turns.
The clients of HTTP take their part of the machine, too; they read no more of an answer than they must.

``streams``: so many completions are streamed at once; the longest time for which the server's event loop did not
turn is at most 50 ms.

``sigterm``: requests run when the server is told to stop; each is answered, and the server leaves with 0 in time.

``kill``: a server that was killed leaves no process, and a new one answers within 5 s.

``fuzz``: requests that schemathesis makes of ``/openapi.json``, good ones and bad ones, to a server of five small
checkpoints: no answer is 500 or above, and each is as the document says. That requests which fit the document are
accepted is not asked: a classifier embeds nothing. Needs the package schemathesis.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import click
import trio
import trio.abc
from attrs import define, field

from triolet import Engine, EngineConfig, Engines, ModelSpec, demo
from triolet.server.heap import Heap
from triolet.server.listening import Listener
from triolet.server.observers import Observers
from triolet.server.server import Server
from triolet.server.serving import serving
from triolet.server.settings import ServerSettings
from triolet.testing.families import make_checkpoint

SHORT = ("en-command", "de-command", "es-command")
EDGE = "edge-of-a-part"
SHARE, BLOCKED, START = 0.10, 0.050, 5.0


def recordings() -> list[Path]:
    """The shipped recordings of a few seconds."""
    return [Path(sample.path) for sample in demo.samples() if Path(sample.path).stem in SHORT]


def claim(holds: bool, told: str) -> None:
    """Prints whether a claim holds."""
    print(f"{'holds' if holds else 'FAILS'}: {told}", flush=True)


# -- the server ------------------------------------------------------------------------------------------------------


@define
class Running:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    _log: Any  # a file: the server would wait for a pipe that nobody reads

    def log(self) -> str:
        """What it has said so far."""
        return Path(self._log.name).read_text(encoding="utf-8")

    def end(self) -> None:
        """Tells it to stop, and waits."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def start(*options: str) -> Running:
    """``triolet serve`` of the demo checkpoint."""
    command = [sys.executable, "-m", "triolet", "serve", "--model", "demo=demo", "--port", "0", "--no-access-log"]
    log = NamedTemporaryFile("w")  # noqa: SIM115  (it is there as long as the server is known)
    process = subprocess.Popen([*command, *options], stderr=log, text=True)
    running = Running(process, 0, log)
    while process.poll() is None:
        told = re.search(r": serving demo.*:(\d+)\n", running.log())
        if told:
            running.port = int(told[1])
            return running
        time.sleep(0.02)
    raise SystemExit(f"the server ended with {process.returncode}: {running.log()}")


# -- clients ---------------------------------------------------------------------------------------------------------


def request_of(path: Path) -> bytes:
    """A whole request for the text of a file."""
    head = f'--{EDGE}\r\ncontent-disposition: form-data; name="model"\r\n\r\ndemo\r\n--{EDGE}\r\n'
    file = f'content-disposition: form-data; name="file"; filename="{path.name}"\r\n\r\n'
    body = (head + file).encode() + path.read_bytes() + f"\r\n--{EDGE}--\r\n".encode()
    return post("/v1/audio/transcriptions", body, f"multipart/form-data; boundary={EDGE}")


def post(path: str, body: bytes, kind: str) -> bytes:
    """A request over HTTP/1.1."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def answer_to(stream: trio.abc.Stream, request: bytes) -> tuple[int, bytes]:
    """The status and body of an answer with a known length."""
    await stream.send_all(request)
    got = bytearray()
    while (end := got.find(b"\r\n\r\n")) < 0:
        got += await some_of(stream)
    head = bytes(got[:end]).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    while len(got) < end + 4 + length:
        got += await some_of(stream)
    return int(head.split()[1]), bytes(got[end + 4 :])


async def some_of(stream: trio.abc.Stream) -> bytes:
    """The next bytes.

    Raises:
        trio.BrokenResourceError: there are none.
    """
    data = await stream.receive_some()
    if not data:
        raise trio.BrokenResourceError("the server closed the connection")
    return bytes(data)


async def in_a_row(
    clients: int, seconds: float, ask: Callable[[int, int], Awaitable[bool]]
) -> tuple[list[float], int, float]:
    """Each client asks again as soon as it has an answer. Returns the seconds of each answer, how many were none, and
    the seconds of all together."""
    times: list[float] = []
    lost = 0
    begun = time.perf_counter()

    async def client(number: int) -> None:
        nonlocal lost
        turn = 0
        while time.perf_counter() - begun < seconds:
            asked = time.perf_counter()
            if await ask(number, turn):
                times.append(time.perf_counter() - asked)
            else:
                lost += 1
            turn += 1

    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number)
    return times, lost, time.perf_counter() - begun


Ask = Callable[[int, int], Awaitable[bool]]


@asynccontextmanager
async def over_http(port: int, clients: int) -> AsyncIterator[Ask]:
    """Clients of a server."""
    requests = [request_of(path) for path in recordings()]
    streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(clients)]

    async def ask(number: int, turn: int) -> bool:
        status, body = await answer_to(streams[number], requests[(number + turn) % len(requests)])
        return status == 200 and b'"text"' in body

    yield ask
    for stream in streams:
        await stream.aclose()


@asynccontextmanager
async def in_process() -> AsyncIterator[Ask]:
    """The same without a server."""
    files = [path.read_bytes() for path in recordings()]
    async with Engine(demo.checkpoint()) as engine:

        async def ask(number: int, turn: int) -> bool:
            transcript = await engine.transcribe(files[(number + turn) % len(files)], seed=None)
            return bool(transcript.text)

        yield ask


@define
class Run:
    """What one way of asking reached, over all its turns."""

    times: list[float] = field(factory=list)
    lost: int = 0
    rates: list[float] = field(factory=list)  # answers a second, of each turn

    async def turn(self, ask: Ask, clients: int, seconds: float) -> None:
        """Asks for ``seconds``, until each has its answer."""
        times, lost, took = await in_a_row(clients, seconds, ask)
        self.times += times
        self.lost += lost
        self.rates.append(len(times) / took)

    def row(self, name: str) -> str:
        """A row of the table."""
        cuts = quantiles(self.times, n=100)
        told = [f"{value:.3g}" for value in (median(self.rates), cuts[49], cuts[94], cuts[98])]
        return f"| {name} | {len(self.times)} | {self.lost} | {' | '.join(told)} |"


# -- the benchmarks --------------------------------------------------------------------------------------------------


@click.group()
def cli() -> None:
    """See the module."""


@cli.command()
@click.option("--seconds", default=60.0)
@click.option("--clients", default=64)
@click.option("--turns", default=12)
def load(seconds: float, clients: int, turns: int) -> None:
    """The server beside the engine in process."""
    print(f"load {os.getloadavg()}")
    running = start()
    alone, served = trio.run(_turns, running.port, clients, seconds / turns, turns)
    running.end()
    print("| how | answers | lost | a second | p50 s | p95 s | p99 s |\n|---|---|---|---|---|---|---|")
    print(alone.row("in process"), served.row("HTTP"), sep="\n")
    shares = [1.0 - http / own for http, own in zip(served.rates, alone.rates, strict=True)]
    told = f"{turns} turns, {min(shares):.1%} to {max(shares):.1%}"
    claim(not alone.lost + served.lost, f"{alone.lost + served.lost} requests were lost")
    claim(median(shares) < SHARE, f"HTTP takes {median(shares):.1%} of the requests a second, median of {told}")
    print(f"load {os.getloadavg()}")


async def _turns(port: int, clients: int, seconds: float, turns: int) -> tuple[Run, Run]:
    alone, served = Run(), Run()
    async with in_process() as ask_engine:
        for one, other in ((Run(), Run()), *((alone, served) for _ in range(turns))):  # the first turns are slower
            await one.turn(ask_engine, clients, seconds)
            async with over_http(port, clients) as ask_server:  # the server closes connections that idle
                await other.turn(ask_server, clients, seconds)
    return alone, served


class Longest(trio.abc.Instrument):
    """The longest step of a task: so long nobody else has a turn."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = math.inf

    def before_task_step(self, task: Any) -> None:  # noqa: ARG002
        """See trio."""
        self._begun = time.perf_counter()

    def after_task_step(self, task: Any) -> None:  # noqa: ARG002
        """See trio."""
        self.seconds = max(self.seconds, time.perf_counter() - self._begun)


@cli.command()
@click.option("--streams", "count", default=500)
@click.option("--tokens", default=100)
def streams(count: int, tokens: int) -> None:
    """Many streams at once, and how long the event loop stands still."""
    print(f"load {os.getloadavg()}")
    longest = Longest()
    with TemporaryDirectory() as folder:
        make_checkpoint("llama", folder)
        ended, seconds = trio.run(_streams, folder, count, tokens, longest)
    print(f"{count} streams of {tokens} tokens in {seconds:.1f} s, {count * tokens / seconds:.0f} tokens a second")
    claim(ended == count, f"{ended} of {count} streams came to their end")
    claim(longest.seconds <= BLOCKED, f"the event loop stood still for at most {1_000 * longest.seconds:.0f} ms")


async def _streams(folder: str, count: int, tokens: int, longest: Longest) -> tuple[int, float]:
    observers = Observers([Heap().heard])
    config = EngineConfig(device="cpu", max_pending=max(count, 256), observer=observers.of("lm"))
    async with Engines({"lm": ModelSpec(folder, config=config)}) as engines:
        await engines.load("lm")
        server = Server(ServerSettings(port=0, max_requests=count, access_log=False), engines, observers)
        with Listener(server.settings) as listener:
            async with serving(server, listener) as address:
                port = address.rpartition(":")[2]
                trio.lowlevel.add_instrument(longest)
                command = [sys.executable, __file__, "readers", port, str(count), str(tokens)]
                found = await trio.run_process(command, capture_stdout=True)
                trio.lowlevel.remove_instrument(longest)
    ended, seconds = json.loads(found.stdout)
    return ended, seconds


@cli.command("readers", hidden=True)
@click.argument("port", type=int)
@click.argument("count", type=int)
@click.argument("tokens", type=int)
def readers(port: int, count: int, tokens: int) -> None:
    """The clients of ``streams``."""
    print(json.dumps(trio.run(_readers, port, count, tokens)))


async def _readers(port: int, count: int, tokens: int) -> tuple[int, float]:
    ended = 0
    begun = time.perf_counter()

    async def read(number: int) -> None:
        nonlocal ended
        asked = {"model": "lm", "prompt": f"stream {number}", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(post("/v1/completions", json.dumps(asked).encode(), "application/json"))
            last = b""
            while b"[DONE]" not in last:
                last = last[-10:] + await some_of(stream)
        ended += 1

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(read, number)
    return ended, time.perf_counter() - begun


@cli.command()
@click.option("--times", default=50)
@click.option("--clients", default=8)
@click.option("--drain", default=20.0)
def sigterm(times: int, clients: int, drain: float) -> None:
    """Requests run when the server is told to stop."""
    good, slowest, answered = 0, 0.0, {}
    for number in range(times):
        running = start("--drain-seconds", str(drain))
        process = running.process
        delay = 0.02 + 0.5 * number / times  # another moment of the requests each time
        statuses = trio.run(_interrupted, process, running.port, clients, delay)
        begun = time.perf_counter()
        process.wait(timeout=drain + 30)
        slowest = max(slowest, time.perf_counter() - begun)
        for status in statuses:
            answered[status] = answered.get(status, 0) + 1
        good += process.returncode == 0 and all(status in (200, 503) for status in statuses)
        print(f"{number + 1}: exit {process.returncode}, answers {statuses}", flush=True)
    print(f"answers by status: {answered}; the slowest end took {slowest:.1f} s")
    claim(good == times, f"{good} of {times} times each request was answered, and the server left with 0 in time")


async def _interrupted(process: subprocess.Popen[str], port: int, clients: int, delay: float) -> list[int]:
    """The status of each request; 0: the connection was made, and no answer came."""
    statuses: list[int] = []
    requests = [request_of(path) for path in recordings()]

    async def client(number: int) -> None:
        for request in islice(cycle(requests), number, number + 50):
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:  # the server listens no more
                return
            async with stream:
                try:
                    status, _ = await answer_to(stream, request)
                except trio.BrokenResourceError:
                    status = 0
            statuses.append(status)
            if status != 200:
                return

    async with trio.open_nursery() as nursery:
        for number in range(clients):
            nursery.start_soon(client, number)
        await trio.sleep(delay)
        process.send_signal(signal.SIGTERM)
    return statuses


@cli.command()
@click.option("--times", default=5)
def kill(times: int) -> None:
    """A server that was killed, and a new one."""
    starts = []
    for _ in range(times):
        begun = time.perf_counter()
        running = start()
        process = running.process
        status, _ = trio.run(_once, running.port)
        starts.append(time.perf_counter() - begun)
        assert status == 200, status
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        orphans = [child for child in children if Path(f"/proc/{child}").exists()]
        claim(not orphans, f"a killed server left {len(orphans)} processes")
    told = ", ".join(f"{one:.1f}" for one in starts)
    claim(median(starts) < START, f"from the start to the first answer: {told} s, median {median(starts):.1f} s")


FUZZED = ("llama", "bert", "bert_reranker", "bert_classifier", "qwen2_vl")


@cli.command()
@click.option("--examples", default=200)
@click.option("--seed", default=1)
def fuzz(examples: int, seed: int) -> None:
    """Requests that somebody makes up."""
    with TemporaryDirectory() as folder:
        models = []
        for family in FUZZED:
            make_checkpoint(family, Path(folder) / family)
            models += ["--model", f"{family}={Path(folder) / family}"]
        running = start(*models, "--preload")
        options = ["--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure"]
        options += ["--exclude-checks", "positive_data_acceptance"]
        command = [
            str(Path(sys.executable).parent / "st"),
            "run",
            f"http://127.0.0.1:{running.port}/openapi.json",
            *options,
        ]
        found = subprocess.run(command, text=True, capture_output=True, check=False, cwd=folder)
        running.end()
    print(found.stdout[-3_000:])
    claim(found.returncode == 0, "each answer was as the document says, and none was 500 or above")
    claim(
        running.process.returncode == 0 and "Traceback" not in running.log(),
        "the server's log has no traceback, and it left with 0",
    )


async def _once(port: int) -> tuple[int, bytes]:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        return await answer_to(stream, request_of(recordings()[0]))


if __name__ == "__main__":
    cli()
