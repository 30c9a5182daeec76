"""How one request may end, on virtual time, with a client that is a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from attrs import define, field

from triolet.core.errors import RequestTooLarge
from triolet.server.exchange import Cut, Exchange
from triolet.server.problems import problem_answer, problem_of
from triolet.server.settings import ServerSettings

Work = Callable[[Any, Any, Any], Any]
GONE = {"type": "http.disconnect"}


def part(body: bytes = b"", *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


@define
class Client:
    """Sends each message at its time, and keeps what it gets. As hypercorn does, it says that it has gone when the
    answer is complete."""

    script: list[tuple[float, dict[str, Any]]]
    headers: list[tuple[bytes, bytes]] = field(factory=list)
    got: list[dict[str, Any]] = field(factory=list)
    answered: trio.Event = field(factory=trio.Event)

    async def hear(self) -> dict[str, Any]:
        if not self.script:
            await self.answered.wait()
            return GONE
        time, message = self.script.pop(0)
        await trio.sleep_until(time)
        return message

    async def say(self, message: Any) -> None:
        assert not self.answered.is_set(), "the answer is complete"
        self.got.append(message)
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.answered.set()

    async def ask(self, work: Work, **settings: Any) -> Exchange:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": self.headers}
        exchange = Exchange(scope, ServerSettings(**settings), "req-1", self.hear, self.say)
        scope["exchange"] = exchange
        await exchange.run(work)
        return exchange

    @property
    def status(self) -> int | None:
        return next((one["status"] for one in self.got if one["type"] == "http.response.start"), None)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.got)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def client(*script: tuple[float, dict[str, Any]], **given: Any) -> Client:
    start = trio.current_time()
    return Client([(start + time, message) for time, message in script], **given)


async def test_a_client_that_goes_away_cancels_the_work_whatever_it_waits_for(autojump_clock: Any) -> None:
    """And files of the request are closed."""
    asks, ended = client((0, part()), (3, GONE)), []

    async def work(scope: Any, *_: Any) -> None:
        scope["exchange"].closing.callback(lambda: ended.append(trio.current_time()))
        await trio.sleep(100)

    began = trio.current_time()
    exchange = await asks.ask(work)
    assert exchange.cut is Cut.CLIENT_GONE
    assert ended == [pytest.approx(began + 3)]
    assert asks.got == [], "nobody is there to be told"


@pytest.mark.parametrize("bytes_sent", [0, 5])
async def test_a_client_that_sends_too_slowly_is_told(autojump_clock: Any, bytes_sent: int) -> None:
    script = [(0, part(b"x", more=True))] * bytes_sent
    asks = client(*script, (1_000, part()))
    exchange = await asks.ask(hello, body_seconds=10)
    assert exchange.cut is Cut.TOO_SLOW
    assert asks.status == 408
    assert (b"connection", b"close") in asks.got[0]["headers"]


async def test_who_waits_for_a_slow_answer_is_not_slow(autojump_clock: Any) -> None:
    async def work(scope: Any, receive: Any, send: Any) -> None:
        await trio.sleep(1_000)
        await hello(scope, receive, send)

    asks = client((0, part()))
    await asks.ask(work, body_seconds=10)
    assert asks.status == 200


async def test_a_stream_that_is_cut_off_ends_with_its_last_words(autojump_clock: Any) -> None:
    async def work(scope: Any, receive: Any, send: Any) -> None:
        exchange = scope["exchange"]
        exchange.last_words = lambda problem: f"error {problem.status}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        exchange.end(Cut.STOPPING)
        await trio.sleep(1_000)

    asks = client((0, part()))
    await asks.ask(work)
    assert asks.body == b"one error 503"
    assert asks.answered.is_set()


async def test_a_part_is_sent_whole_even_if_the_work_is_cancelled_meanwhile(autojump_clock: Any) -> None:
    """hypercorn's state would be a step ahead of what was sent."""

    async def work(scope: Any, receive: Any, send: Any) -> None:
        scope["exchange"].end(Cut.STOPPING)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all", "more_body": False})

    asks = client((0, part()))
    exchange = await asks.ask(work)
    assert asks.body == b"all"
    assert exchange.status == 200


async def test_what_comes_after_the_answer_cuts_nothing(autojump_clock: Any) -> None:
    """hypercorn tells of the end of an answer as it tells of a client who has gone."""

    async def work(scope: Any, receive: Any, send: Any) -> None:
        await hello(scope, receive, send)
        await trio.sleep(5)
        done.append(True)

    done: list[bool] = []
    asks = client((0, part()))
    exchange = await asks.ask(work)
    assert exchange.cut is None
    assert done


@pytest.mark.parametrize(("size", "held"), [(2**16, 0), (2**16 + 1, 2**16 + 1)])
async def test_a_large_answer_takes_room_until_it_is_sent(autojump_clock: Any, size: int, held: int) -> None:
    async def work(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        length = (b"content-length", str(size).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        assert scope["exchange"].account.held == held
        await send({"type": "http.response.body", "body": bytes(size)})

    assert (await client((0, part())).ask(work)).status == 200


# -- too large -------------------------------------------------------------------------------------------------------


async def refuse_or_read(scope: Any, receive: Any, send: Any) -> None:
    try:
        await hello(scope, receive, send)
    except RequestTooLarge as error:
        await problem_answer(problem_of(error))(scope, receive, send)


@pytest.mark.parametrize(("last", "left"), [(part(b"x" * 10), "all of it is read"), (GONE, "or the client leaves")])
async def test_a_request_that_says_that_it_is_too_large_is_refused_at_once(
    autojump_clock: Any, last: dict[str, Any], left: str
) -> None:
    """And what still comes is read before the connection is closed, so that the client hears the answer."""
    asks = client((0, part(b"x" * 10, more=True)), (2, last), headers=[(b"content-length", b"20")])
    began = trio.current_time()
    await asks.ask(refuse_or_read, max_body_bytes=15)
    assert asks.status == 413
    assert trio.current_time() == pytest.approx(began + 2), left
    assert not asks.script


async def test_a_request_that_grows_too_large_is_refused_and_its_rest_not_awaited_for_ever(autojump_clock: Any) -> None:
    asks = client(*[(0, part(b"x" * 10, more=True))] * 3, *[(time, part(b"x", more=True)) for time in range(1, 500, 5)])
    began = trio.current_time()
    exchange = await asks.ask(refuse_or_read, max_body_bytes=25)
    assert asks.status == 413
    assert trio.current_time() - began <= 10
    assert exchange.account.held == 0, "what is dropped needs no room"
