"""`triolet.web`: an application in it is called as a server calls it, on asyncio and on trio."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from triolet import EncodeFailed, InvalidRequest, Overloaded, UnsupportedAudio, demo
from triolet.web import EngineMiddleware, lifespan

ROOT = Path(__file__).resolve().parents[1]
Endpoint = Callable[[Request], Awaitable[Response]]
TIMELESS = {"asyncio": dict, "trio": lambda: {"clock": trio.testing.MockClock(autojump_threshold=0)}}


class Client:
    """The messages that an exchange gets, then silence until `hung_up`; and what it sends."""

    def __init__(self, *parts: bytes, ends: bool = True) -> None:
        more = [*([True] * (len(parts) - 1)), not ends]
        self.parts = [
            {"type": "http.request", "body": part, "more_body": on} for part, on in zip(parts, more, strict=True)
        ]
        self.hung_up, self.sent, self.status, self.body = anyio.Event(), 0, 0, b""
        self.headers: dict[bytes, bytes] = {}
        self.answered = self.unwound = False
        self.generator: AsyncGenerator[bytes, None] | None = None
        self.reads: Callable[[], Awaitable[object]] | None = None

    async def receive(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        if self.parts:
            self.sent += 1
            return self.parts.pop(0)
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        if self.reads is not None:
            await self.reads()
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        self.body += message["body"]
        self.answered = not message.get("more_body", False)
        if self.answered:
            self.hung_up.set()  # servers report the end of an answer like this


@pytest.fixture(params=[("asyncio", "2.3"), ("trio", "2.3"), ("trio", "2.4")], ids=" ".join)
def exchange(request):
    """Runs an application's one endpoint for a client that the caller makes within the loop, and returns the client.
    Before 2.4 of ASGI, Starlette's streams wait for the end of the connection themselves."""
    backend, version = request.param

    def run(endpoint: Endpoint, make: Callable[[], Client] = lambda: Client(b""), **limits: Any) -> Client:
        async def main() -> Client:
            client, middleware = make(), Middleware(EngineMiddleware, **limits)
            app = Starlette(routes=[Route("/", endpoint, methods=["POST"])], middleware=[middleware])
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/",
                "headers": [],
                "query_string": b"",
                "client": client,
            }
            scope |= {"asgi": {"version": "3.0", "spec_version": version}, "state": {}}
            await app(scope, client.receive, client.send)
            client.unwound = (
                client.generator is not None and client.generator.ag_frame is None
            )  # the loop's end unwinds
            return client

        return anyio.run(main, backend=backend, backend_options=TIMELESS[backend]())

    run.backend = backend
    return run


# -- a client that goes ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def group(kind: str):
    async with {"trio": trio.open_nursery, "asyncio": asyncio.TaskGroup, "anyio": anyio.create_task_group}[
        kind
    ]() as it:
        yield (lambda function: it.create_task(function())) if kind == "asyncio" else it.start_soon


@pytest.mark.parametrize("how", ["waits", "streams", "runs its own group", "runs anyio's group"])
def test_a_hang_up_cancels_what_waits_streams_or_runs_in_a_group_and_unwinds_it(exchange, how, caplog):
    caplog.set_level(logging.INFO, "triolet.web")
    unwound = set()

    async def wait(name: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            unwound.add(name)

    async def endpoint(request: Request) -> Response:
        async def parts():
            yield b"a part"
            request.scope["client"].hung_up.set()
            await wait("a stream")

        if how == "streams":
            return StreamingResponse(parts())
        async with group(exchange.backend if how == "runs its own group" else "anyio") as start:
            if how != "waits":
                start(partial(wait, "a task"))
            request.scope["client"].hung_up.set()
            await wait("the endpoint")
        raise AssertionError

    client = exchange(endpoint)
    assert unwound == {"waits": {"the endpoint"}, "streams": {"a stream"}}.get(how, {"a task", "the endpoint"})
    assert client.status == (200 if how == "streams" else 499)
    assert caplog.messages == ["a client hung up; its request is withdrawn"]


def test_a_hang_up_while_a_part_is_sent_unwinds_the_generator_that_made_it(exchange):
    """Were the sending cancelled, the generator would be left to the collector, and its request run on."""

    async def endpoint(request: Request) -> Response:
        client = request.scope["client"]

        async def parts():
            while True:
                yield b"a part"
                await anyio.sleep_forever() if client.hung_up.is_set() else None

        async def reads() -> None:
            client.hung_up.set()
            for _ in range(9):
                await anyio.lowlevel.checkpoint()

        client.reads, client.generator = reads, parts()
        return StreamingResponse(client.generator)

    assert exchange(endpoint).unwound


def test_what_runs_after_the_answer_is_not_cancelled_by_the_end_of_the_connection(exchange):
    done = []

    async def later() -> None:
        for _ in range(9):
            await anyio.lowlevel.checkpoint()
        done.append("later")

    async def endpoint(_: Request) -> Response:
        return PlainTextResponse("at once", background=BackgroundTask(later))

    assert (exchange(endpoint, seconds=1).body, done) == (b"at once", ["later"])


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (UnsupportedAudio("no audio in /srv/uploads/secret.wav"), 415, "UnsupportedAudio"),
        (Overloaded("full"), 429, "Overloaded"),
        (ExceptionGroup("tasks", [InvalidRequest("a"), ExceptionGroup("", [EncodeFailed("b")])]), 500, "EncodeFailed"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_an_error_of_triolet_alone_in_groups_or_before_the_first_part_is_answered(
    exchange, error, status, named, streams
):
    async def endpoint(_: Request) -> Response:
        async def parts():
            raise error
            yield b""

        if streams:
            return StreamingResponse(parts())
        raise error

    client = exchange(endpoint)
    told = json.loads(client.body)
    assert (client.status, told["error"]) == (status, named)
    assert "secret" not in told["message"]
    assert (client.headers.get(b"retry-after") == b"1") == (status == 429)


@pytest.mark.parametrize("begun", [False, True])
def test_an_error_of_others_or_after_the_first_part_is_the_servers(exchange, begun):
    ours, mixed = Overloaded("full"), ExceptionGroup("tasks", [Overloaded("full"), LookupError("a bug")])

    async def endpoint(_: Request) -> Response:
        async def parts():
            yield b"a part"
            raise ours

        if begun:
            return StreamingResponse(parts())
        raise mixed

    with pytest.raises(Exception) as caught:
        exchange(endpoint)
    assert caught.value is (ours if begun else mixed)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_too_long_a_request_is_heard_for_as_much_again_and_answered(exchange):
    async def endpoint(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    assert exchange(endpoint, lambda: Client(b"12345", b"678"), max_body_bytes=8).body == b"8"
    client = exchange(endpoint, lambda: Client(*[b"1234"] * 4), max_body_bytes=8)
    assert (client.status, json.loads(client.body)["error"], client.sent) == (413, "RequestTooLarge", 4)
    client = exchange(endpoint, lambda: Client(*[b"1234"] * 99, ends=False), max_body_bytes=8)
    assert (client.status, client.answered) == (413, True)
    assert client.sent < 99


def test_an_answer_that_needs_nothing_of_the_request_reaches_a_client_that_sends_first(exchange):
    """The end of the answer waits for the rest, which would else fill the pipe."""

    async def endpoint(_: Request) -> Response:
        return PlainTextResponse("no", 403)

    client = exchange(endpoint, lambda: Client(*[b"1234"] * 99))
    assert (client.status, client.body, client.sent, client.answered) == (403, b"no", 99, True)


@pytest.mark.parametrize(("ends", "status"), [(True, 504), (False, 408)])
def test_what_takes_too_long_is_withdrawn_and_a_stream_that_has_begun_is_not(exchange, ends, status):
    async def slow(request: Request) -> Response:
        await request.body()
        await anyio.sleep_forever()
        raise AssertionError

    async def stream(_: Request) -> Response:
        async def parts():
            yield b"a part"
            await anyio.sleep(0.02)
            yield b", and another"

        return StreamingResponse(parts())

    client = exchange(slow, lambda: Client(b"1234", ends=ends), seconds=1e-3)
    assert (client.status, json.loads(client.body)["message"]) == (status, "no answer within 0.001 seconds")
    if exchange.backend == "trio":
        assert exchange(stream, seconds=0.01).body == b"a part, and another"


async def test_a_client_that_reads_nothing_is_gone_after_a_while(autojump_clock):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"a part", "more_body": True})

    client = Client(b"")
    client.reads = trio.sleep_forever
    await EngineMiddleware(app)({"type": "http"}, client.receive, client.send)
    assert trio.current_time() == 30


async def test_a_server_that_is_forced_to_stop_answers_503_and_is_not_held_up():
    client = Client(b"")

    async def app(*_: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(trio.sleep_forever)

    with trio.CancelScope() as scope:
        scope.cancel()
        await EngineMiddleware(app)({"type": "http"}, client.receive, client.send)
    assert scope.cancelled_caught
    assert (client.status, client.headers[b"retry-after"]) == (503, b"1")


@pytest.mark.parametrize("limit", [{"max_body_bytes": 0}, {"seconds": 0}])
def test_a_limit_is_checked(limit):
    with pytest.raises(InvalidRequest, match=f"{next(iter(limit))}=0; allowed: "):
        EngineMiddleware(Starlette(), **limit)


# -- an engine ---------------------------------------------------------------------------------------------------------


async def test_the_engine_lives_as_long_as_the_application():
    seen = []

    @asynccontextmanager
    async def engine():
        seen.append("open")
        yield "engine"
        seen.append("closed")

    async with lifespan(engine)(Starlette()) as state:
        assert (state, seen) == ({"engine": "engine"}, ["open"])
    assert seen == ["open", "closed"]


CODE = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "web_services.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", CODE)
def test_a_service_of_the_page_transcribes(code):
    """The toy in the place of the real model."""
    sample = demo.samples()[3]
    names: dict[str, Any] = {}
    exec(
        compile(code.replace('"openai/whisper-small"', repr(str(demo.checkpoint()))), "web_services.md", "exec"), names
    )

    async def main() -> bytes:
        app, client = names["app"], Client(sample.path.read_bytes())
        async with app.router.lifespan_context(app) as state:
            scope = {"type": "http", "method": "POST", "path": "/transcribe", "headers": [], "query_string": b""}
            await app(scope | {"state": state, "asgi": {"spec_version": "2.4"}}, client.receive, client.send)
        return client.body

    assert sample.text in asyncio.run(main()).decode()


@pytest.mark.triolet_sweep(runs=30)
async def test_whoever_leaves_costs_the_others_nothing(triolet_engine, triolet_client):
    """At every step of every task, with every fault: one waits, one streams, and two run in a nursery."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        prompt = (await receive())["body"].decode()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(triolet_engine.generate, f"{prompt}you", max_tokens=2))
            await triolet_engine.generate(prompt, max_tokens=2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with triolet_engine.stream(prompt, max_tokens=3) as deltas:
            async for delta in deltas:
                await send({"type": "http.response.body", "body": delta.text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask(served: trio.Nursery) -> int:
        client = Client(b"hello")
        try:
            done = trio.Event()

            async def serve() -> None:
                await EngineMiddleware(app)({"type": "http"}, client.receive, client.send)
                done.set()

            served.start_soon(serve)
            await done.wait()
        finally:
            client.hung_up.set()
        assert client.status == 200, client.body
        return client.status

    async with trio.open_nursery() as served:
        async with triolet_client():
            await ask(served)
        assert await ask(served) == 200
