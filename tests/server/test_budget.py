"""One budget of bytes for all clients: what they make the server hold is taken from it before it is there, and given
back however they end. And their units, such as frames, fragments, chunks and fields, are bounded, and are handled a few
at a time."""

from __future__ import annotations

import base64
import io
import json
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
import trio.testing
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from trio.testing import MockClock

from triolet.core.budget import Budget
from triolet.core.errors import InvalidRequest, Overloaded
from triolet.models.sampling.structure import Compiled, Grammars
from triolet.server import http1
from triolet.server.exchange import Cut, Exchange
from triolet.server.framing import AT_ONCE, UNREADABLE, Framing
from triolet.server.server import Server
from triolet.server.settings import ServerSettings

from .served import PATIENCE, Served, head_of, served
from .talking import COMPLETED, PaperEngine, Talk, paper_server, talking
from .test_hostile import FORM, SPEECH, form, head, heard, nothing_is_left, png, say, talk
from .test_upgrades import close_code, opened

CHAT, JSON = "/v1/chat/completions", "application/json"
MEMORY = 2**24
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

needs_sockets = pytest.mark.real_time


# -- one exchange ------------------------------------------------------------------------------------------------------


@define
class Asks:
    """A client that sends parts of the given sizes, and then leaves, waits, or is done."""

    sizes: list[int]
    end: str
    _gone: trio.Event = field(factory=trio.Event)

    async def hear(self) -> Any:
        await trio.lowlevel.checkpoint()
        if self.sizes:
            return {"type": "http.request", "body": bytes(self.sizes.pop()), "more_body": True}
        if self.end == "whole":
            self.end = "waits"
            return {"type": "http.request", "body": b"", "more_body": False}
        if self.end == "waits":
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def say(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._gone.set()


ENDS = st.tuples(
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from(["whole", "waits", "gone"]),
    st.sampled_from(["answers", "fails", "early", "hangs", "large"]),
    st.sampled_from([None, Cut.STOPPING]),
)


@given(st.lists(ENDS, min_size=1, max_size=6))
def test_however_exchanges_end_the_budget_is_whole_again(plans: list[Any]) -> None:
    """Many at once, of a budget that is too small for them. Whatever is held was counted before."""
    budget = Budget(100)

    async def work(how: str, scope: Any, receive: Any, send: Any) -> None:
        while how not in ("early", "large"):
            if not (await receive()).get("more_body"):
                break
        if how == "fails":
            raise InvalidRequest("no")
        if how == "hangs":
            await trio.sleep_forever()
        size = 2**17 if how == "large" else 2
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})

    async def one(sizes: list[int], end: str, how: str, cut: Cut | None) -> None:
        asks = Asks(list(sizes), end)
        scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": []}
        with budget.account() as account:
            exchange = Exchange(scope, ServerSettings(body_seconds=5), "1", asks.hear, asks.say, account)

            async def working(scope: Any, receive: Any, send: Any) -> None:
                with suppress(InvalidRequest):
                    await work(how, scope, receive, send)

            async def cuts() -> None:
                await trio.sleep(3)
                exchange.end(cut or Cut.TOO_SLOW)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cuts)
                with suppress(InvalidRequest):
                    await exchange.run(working)
                nursery.cancel_scope.cancel()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for plan in plans:
                nursery.start_soon(one, *plan)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert budget.held == 0


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(models: dict[str, str]) -> Iterator[Served]:
    """A server with 16 MiB for all requests."""
    with served(
        {name: models[name] for name in ("whisper", "llama", "qwen2_vl", "qwen2_audio")}, request_memory=MEMORY
    ) as running:
        yield running


def is_whole(running: Served) -> None:
    nothing_is_left(running)
    running.until(lambda: running.server.budget.held == 0)


@needs_sockets
@pytest.mark.parametrize("kind", [JSON, FORM])
def test_bodies_of_many_together_are_bounded(small: Served, kind: str) -> None:
    """Who comes when the memory is used up gets 429 though the body has not ended, and everybody is served when it is
    free again."""
    path, length = (CHAT, 12 * 2**20) if kind == JSON else (SPEECH, 12 * 2**20)
    begun = b'{"model": "' if kind == JSON else form(b"", model="whisper").removesuffix(b"\r\n--edge--\r\n")
    with closing(small.connect()) as first, closing(small.connect()) as second:
        first.sendall(head(path, length, kind) + begun + b"a" * 9 * 2**20)
        small.until(lambda: small.server.budget.held >= 9 * 2**20)
        say(second, head(path, length, kind) + begun + b"a" * 9 * 2**20)
        refused = head_of(second).decode()
        assert refused.startswith("HTTP/1.1 429")
        assert "retry-after: 1" in refused
        assert small.get("/health")[0] == 200
        assert small.server.budget.held <= MEMORY
    is_whole(small)
    figures = small.get("/metrics")[1]
    assert "triolet_request_memory_bytes 0.0" in figures
    assert "triolet_request_memory_capacity_bytes 1.6777216e+07" in figures
    message = {"role": "user", "content": "a"}
    assert small.post(CHAT, {"model": "llama", "max_tokens": 1, "messages": [message]})[0] == 200


@needs_sockets
def test_a_body_that_alone_needs_more_than_there_is_gets_413(small: Served) -> None:
    status, told = small.post(SPEECH, form(bytes(MEMORY), model="whisper"), FORM)
    assert status == 413
    assert told["error"]["message"].endswith("allowed for all requests together: 16,777,216. Send less at once")
    is_whole(small)


def picture(side: int, kind: str = "PNG") -> dict[str, Any]:
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, kind)
    return shown(data.getvalue())


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def looks(*pictures: dict[str, Any]) -> dict[str, Any]:
    return {"model": "qwen2_vl", "max_tokens": 1, "messages": [{"role": "user", "content": [*pictures]}]}


@needs_sockets
def test_pictures_count_by_their_pixels_before_they_are_decoded(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one after the other: their pixels are not held together."""
    loaded = Counter[tuple[int, int]]()
    load = Image.Image.load
    monkeypatch.setattr(Image.Image, "load", lambda self: loaded.update([self.size]) or load(self))
    status, told = small.post(CHAT, looks(shown(png(800, 800))))
    assert status == 413
    assert "allowed for all requests together: 16,777,216" in told["error"]["message"]
    assert (800, 800) not in loaded
    assert small.post(CHAT, looks(*[picture(60)] * 3))[0] == 200
    is_whole(small)


def sound() -> dict[str, Any]:
    data = io.BytesIO()
    soundfile.write(data, np.zeros(1_600, np.float32), 16_000, format="FLAC")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data.getvalue()).decode()}}


@needs_sockets
@pytest.mark.parametrize(
    ("model", "part"), [("qwen2_vl", picture(60)), ("qwen2_audio", sound())], ids=["image", "audio"]
)
def test_a_picture_or_audio_waits_for_the_memory_of_others(small: Served, model: str, part: dict[str, Any]) -> None:
    other = small.ask(small.server.budget.account)
    small.ask(lambda: other.take(MEMORY - 2**20))
    with closing(small.connect()) as connection:
        body = json.dumps({**looks(part), "model": model}).encode()
        connection.sendall(head(CHAT, len(body), JSON) + body)
        small.until(small.server._first.locked)
        small.ask(other.close)
        assert head_of(connection).startswith(b"HTTP/1.1 200")
    is_whole(small)


@needs_sockets
def test_an_icon_which_may_hide_a_larger_picture_is_not_read(small: Served) -> None:
    status, told = small.post(CHAT, looks(picture(32, "ICO")))
    assert (status, told["error"]["code"]) == (415, "unsupported_image")


# -- live audio --------------------------------------------------------------------------------------------------------


async def test_live_audio_counts_while_it_waits_and_while_its_turn_lasts(autojump_clock: Any) -> None:
    async with talking(request_memory=100_000) as talk:
        budget = talk.server.budget
        talk.append(1_000)
        await talk.settled()
        assert budget.held >= 2_000
        talk.commit()
        assert len(await talk.of(COMPLETED)) == 1
        assert budget.held == 0


async def test_a_session_without_memory_is_closed_in_words(autojump_clock: Any) -> None:
    server = paper_server(PaperEngine(), request_memory=100_000)
    with server.budget.account() as others:
        talk = Talk(server, server.engines.engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk.run)
            talk.update(None)
            await talk.settled()
            others.take(95_000)
            talk.append(5_000)
            [error] = await talk.of("error")
            assert error["error"]["code"] == "overloaded"
            assert "Try again later" in error["error"]["message"]
            await talk.over.wait()
    assert talk.closed == 1013
    assert server.budget.held == 0


@pytest.mark.parametrize("models", [1, 2])
async def test_what_models_keep_leaves_the_requests_their_memory(models: int) -> None:
    """They kept all of a budget of 128 MiB, and each image was answered 429 for ever."""
    engine = PaperEngine()
    server = paper_server(engine, request_memory=MEMORY)
    server.engines.models = {str(index): server.engines.models["whisper"] for index in range(models)}
    kept = engine.model.structures = Grammars(lambda: None, 10, (1,))
    async with server.use("0"):
        for text in map(str, range(20)):
            matcher: Any = None
            kept.keep(Compiled(kind="regex", text=text, matcher=matcher, size=MEMORY // 64))
    assert len(kept._compiled) == 8 // models - 1, "their texts count, too"
    assert server.budget.held == 0


async def test_small_parts_pass_a_large_one_that_waits_for_memory(autojump_clock: Any) -> None:
    server, got = paper_server(PaperEngine(), request_memory=1_000), list[Any]()

    async def ask(size: int) -> None:
        with server.budget.account() as account:
            try:
                await server.wait_for_memory(account, size)
            except Overloaded:
                got.append(f"{size} refused")
            else:
                got.append(size)
                await trio.sleep(10)

    async with trio.open_nursery() as nursery:
        others = server.budget.account()
        others.take(500)
        for size in (600, 550, 40, 30):
            nursery.start_soon(ask, size)
            await trio.testing.wait_all_tasks_blocked()
        assert got == [40, 30]
        await trio.sleep(15)
        others.close()
        await trio.sleep(5)
        nursery.start_soon(ask, 60)
        await trio.sleep(20)
        assert got == [40, 30, 600, 60, 550]
        others = server.budget.account()
        others.take(500)
        nursery.start_soon(ask, 700)
        await trio.sleep(31)
        assert got[-1] == "700 refused"
        others.close()
    assert server.budget.held == 0


# -- units -------------------------------------------------------------------------------------------------------------


@needs_sockets
def test_health_is_answered_before_most_that_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """All come while the event loop is held, each with the whole of a request, and in each round one of them begins."""
    go_on, ended = threading.Event(), list[str]()
    over = Server.exchange_over

    def note(server: Server, exchange: Exchange) -> None:
        ended.append(exchange.scope["path"])
        over(server, exchange)

    monkeypatch.setattr(Server, "exchange_over", note)
    with served({"none": "nowhere"}) as service, ExitStack() as clients:
        held = threading.Thread(target=service.ask, args=(lambda: go_on.wait(PATIENCE),))
        held.start()
        connections = [clients.enter_context(closing(service.connect())) for _ in range(301)]
        for connection in connections[:-1]:
            connection.sendall(HEALTH.replace(b"/health", b"/metrics"))
        connections[-1].sendall(HEALTH)
        go_on.set()
        held.join()
        for connection in connections:
            assert b" 200 " in head_of(connection)
    assert Counter(ended) == {"/metrics": 300, "/health": 1}
    assert ended.index("/health") < 100


@given(st.integers(0, 600), st.integers(1, 700))
def test_lines_pass_a_few_at_a_time(chunks: int, size: int) -> None:
    data = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * chunks + b"0\r\n\r\n"
    framing, passed = Framing(), b""
    for start in range(0, len(data), size):
        piece = framing.passed(data[start : start + size])
        while True:
            assert piece.count(b"\n") <= AT_ONCE
            passed += piece
            if not framing.has_more:
                break
            piece = framing.passed(b"")
    assert passed == data


def all_passed(data: bytes) -> tuple[str | None, bytes]:
    framing = Framing()
    passed = framing.passed(data)
    while framing.has_more:
        passed += framing.passed(b"")
    return framing.fault, passed


CHUNKED = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 256 + b"\r\n", None),
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 257 + b"\r\n", "more than 256 fields"),
        (CHUNKED + b"1\r\na\r\n" * 4_096 + b"0\r\n\r\n", None),
        (CHUNKED + b"1\r\na\r\n" * 4_200 + b"0\r\n\r\n", "more than 4,096 chunks, of less than 64 bytes"),
        (CHUNKED + (b"40\r\n" + b"a" * 64 + b"\r\n") * 5_000 + b"0\r\n\r\n", None),
        (CHUNKED + b"0\r\n" + b"a:\r\n" * 256 + b"\r\n", None),
        (CHUNKED + b"0\r\n" + b"a:\r\n" * 257 + b"\r\n", "more than 256 fields"),
    ],
)
def test_fields_and_chunks_are_bounded(data: bytes, fault: str | None) -> None:
    found, passed = all_passed(data)
    assert found == fault
    assert passed.endswith(UNREADABLE) == (fault is not None)


@pytest.fixture(scope="module")
def plain(models: dict[str, str]) -> Iterator[Served]:
    with served({"whisper": models["whisper"]}, request_memory=2**20) as running:
        yield running


def tiny(opcode: int, data: bytes = b"", *, last: bool = False) -> bytes:
    return bytes([opcode | (0x80 if last else 0), 0x80 | len(data)]) + bytes(4) + data


FRAMES = {
    "fragments": tiny(1) + tiny(0, b"a") * 9_000,
    "empty fragments": tiny(1) + tiny(0) * 9_000,
    "pings": tiny(9, last=True) * 9_000,
    "events": tiny(1, b"{}", last=True) * 9_000,
}


@needs_sockets
@pytest.mark.parametrize("name", FRAMES)
def test_tiny_frames_are_bounded_and_handled_a_few_at_a_time(
    plain: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get a turn after 16 of them, and the client is closed when there are too many."""
    frames = _Frames()
    monkeypatch.setattr(http1, "_MOST_FRAMES", 2_000)
    monkeypatch.setattr(http1.RateLimit, "seconds_to_wait", frames.counted)
    plain.ask(lambda: trio.lowlevel.add_instrument(frames))
    with closing(opened(plain)) as connection, ThreadPoolExecutor(1) as beside:
        code = beside.submit(_code, connection)
        say(connection, FRAMES[name])
        assert code.result() in (1008, None)
    plain.ask(lambda: trio.lowlevel.remove_instrument(frames))
    assert 1_000 < frames.all < 9_000, "the rest is not read"
    assert frames.most <= 16
    is_whole(plain)


@define(eq=False)
class _Frames(trio.abc.Instrument):
    """Counts the frames in all, and the most in one step of a task."""

    all: int = 0
    most: int = 0
    _now: int = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._now = 0

    @property
    def counted(self) -> Any:
        original = http1.RateLimit.seconds_to_wait

        def seconds_to_wait(limit: Any, who: str, now: float) -> float:
            self.all, self._now = self.all + 1, self._now + 1
            self.most = max(self.most, self._now)
            return original(limit, who, now)

        return seconds_to_wait


def _code(connection: socket.socket) -> int | None:
    """The code of the server's close; ``None``: the connection was reset behind it."""
    try:
        return close_code(connection)
    except (OSError, ValueError):
        return None


@needs_sockets
def test_messages_that_have_not_wholly_come_count(plain: Served) -> None:
    piece = b"\x01\xff" + (2**20).to_bytes(8, "big") + bytes(4)
    with closing(opened(plain)) as first, closing(opened(plain)) as second:
        first.sendall(piece + b"a" * 700_000)
        plain.until(lambda: plain.server.budget.held >= 600_000)
        say(second, piece + b"a" * 700_000)
        assert close_code(second) == 1013
    is_whole(plain)


# -- connections -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(models: dict[str, str]) -> Iterator[Served]:
    """A server with places for five connections."""
    with served({"llama": models["llama"]}, max_connections=5) as running:
        yield running


@needs_sockets
@pytest.mark.parametrize("begun", [b"", b"GET / HT", head(CHAT, 100, JSON) + b"{"], ids=["idle", "head", "body"])
def test_who_sends_nothing_or_slowly_gives_way_to_who_comes(crowded: Served, begun: bytes) -> None:
    slow = [crowded.connect() for _ in range(5)]
    for one in slow:
        one.sendall(begun)
    crowded.until(lambda: len(crowded.listener.connections) == 5)
    crowded.until(lambda: not begun.startswith(b"POST") or len(crowded.server.exchanges) == 5)
    for _ in range(3):
        assert talk(crowded, HEALTH).startswith(b"HTTP/1.1 200")
    ended, _, _ = select.select(slow, [], [], PATIENCE)
    assert len(ended) <= 3, "no more than had to"
    assert {heard(one)[:12] for one in ended} <= {b"HTTP/1.1 503", b""}
    for one in slow:
        one.close()
    is_whole(crowded)


@needs_sockets
def test_when_all_clients_wait_for_the_server_there_is_room_to_ask_how_it_is(crowded: Served) -> None:
    """For ``/health`` and ``/metrics`` alone."""
    watching = [crowded.connect() for _ in range(5)]
    for one in watching:
        one.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head_of(one)
    assert talk(crowded, HEALTH).startswith(b"HTTP/1.1 200")
    assert talk(crowded, HEALTH.replace(b"/health", b"/metrics")).startswith(b"HTTP/1.1 200")
    refused = talk(crowded, HEALTH.replace(b"/health", b"/v1/models"))
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"all 5 connections are in use" in refused
    for one in watching:
        one.close()
    is_whole(crowded)
