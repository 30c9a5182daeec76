"""Who is let in, what counts towards the limits, and what is told of it: the whole application on virtual time, with a
client that is a script."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import trio
from attrs import define, field

from triolet.server.exchange import Cut, Exchange
from triolet.server.server import Server

from .talking import PaperEngine, app_of, paper_server, scope_of

KEY = {"authorization": "Bearer secret"}
PAGE = "https://app.example"


@define(eq=False)
class Asked:
    """A request over HTTP, whose body never ends where it ``hangs``."""

    server: Server
    method: str
    path: str
    headers: dict[str, str] = field(factory=dict)
    hangs: bool = False
    got: list[Any] = field(factory=list)
    leaves: trio.Event = field(factory=trio.Event)
    _parts: int = 0

    async def run(self) -> Asked:
        headers = {"host": "localhost", **({"content-length": "9"} if self.hangs else {}), **self.headers}
        scope = {**scope_of(self.path, headers), "type": "http", "method": self.method, "scheme": "http"}
        await app_of(self.server)(scope, self._hear, self._say)
        return self

    async def _hear(self) -> Any:
        self._parts += 1
        if self.hangs or self._parts > 1:
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _say(self, message: Any) -> None:
        self.got.append(message)
        await trio.lowlevel.checkpoint()

    @property
    def status(self) -> int | None:
        return next((one["status"] for one in self.got if one["type"] == "http.response.start"), None)

    @property
    def answer(self) -> dict[str, str]:
        """The headers of the answer."""
        return {name.decode().lower(): value.decode() for name, value in self.got[0]["headers"]}

    @property
    def message(self) -> str:
        told: str = json.loads(b"".join(one.get("body", b"") for one in self.got))["error"]["message"]
        return told


@pytest.fixture
def server() -> Server:
    """One that wants a key, and takes one request at a time."""
    return paper_server(PaperEngine(), api_keys=("secret",), max_requests=1, cors_origins=(PAGE,))


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("OPTIONS", "/v1/chat/completions"),
        ("POST", "/"),
        ("POST", "/health"),
        ("GET", "/health"),
        ("POST", "/favicon.ico"),
    ],
)
async def test_who_has_no_key_takes_no_place_of_those_who_have_one(
    server: Server, method: str, path: str, autojump_clock: Any
) -> None:
    """The answer does not wait for the request's body, nor the server's end for the client."""
    async with trio.open_nursery() as nursery:
        many = [Asked(server, method, path, hangs=True) for _ in range(5)]
        for one in many:
            nursery.start_soon(one.run)
        await trio.testing.wait_all_tasks_blocked()
        assert all(one.status in (200, 401, 404, 405) for one in many)
        keyed = await Asked(server, "POST", "/v1/chat/completions", KEY).run()
        assert keyed.status == 400, "it was let in, and has no body"
        server.stop()
        with trio.fail_after(0.1):
            await server.all_ended()
        nursery.cancel_scope.cancel()


async def test_a_request_that_works_takes_a_place_and_one_that_reads_takes_none(
    server: Server, autojump_clock: Any
) -> None:
    """But the server's end waits for both."""
    async with trio.open_nursery() as nursery:
        reads = Asked(server, "GET", "/v1/models", KEY, hangs=True)
        works = Asked(server, "POST", "/v1/chat/completions", KEY, hangs=True)
        for one, counts, status in ((reads, (1, 0), 400), (works, (2, 1), 429)):
            nursery.start_soon(one.run)
            await trio.testing.wait_all_tasks_blocked()
            assert (len(server.exchanges), len(server.counted)) == counts
            assert (await Asked(server, "POST", "/v1/chat/completions", KEY).run()).status == status
        reads.leaves.set()
        works.leaves.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (len(server.exchanges), len(server.counted)) == (0, 0)
        assert (await Asked(server, "POST", "/v1/chat/completions", KEY).run()).status == 400


async def test_a_connection_is_kept_where_there_is_no_body(server: Server) -> None:
    assert "connection" not in (await Asked(server, "GET", "/health").run()).answer


# -- pages of other origins --------------------------------------------------------------------------------------------


async def test_an_allowed_page_may_read_why_it_is_refused(server: Server, autojump_clock: Any) -> None:
    origin = {"origin": PAGE}
    wrong = await Asked(server, "POST", "/v1/chat/completions", origin).run()
    late = await Asked(server, "POST", "/v1/chat/completions", {**origin, **KEY}, hangs=True).run()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Asked(server, "POST", "/v1/chat/completions", KEY, hangs=True).run)
        await trio.testing.wait_all_tasks_blocked()
        full = await Asked(server, "POST", "/v1/chat/completions", {**origin, **KEY}).run()
        nursery.cancel_scope.cancel()
    server.stop()
    stopping = await Asked(server, "POST", "/v1/chat/completions", {**origin, **KEY}).run()
    assert [one.status for one in (wrong, late, full, stopping)] == [401, 408, 429, 503]
    for one in (wrong, late, full, stopping):
        assert one.answer["access-control-allow-origin"] == PAGE
        assert "retry-after" in one.answer["access-control-expose-headers"]


async def test_an_allowed_page_may_ask_what_it_may_and_another_may_not(server: Server) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    may = await Asked(server, "OPTIONS", "/v1/chat/completions", {"origin": PAGE, **asks}).run()
    may_not = await Asked(server, "OPTIONS", "/v1/chat/completions", {"origin": "https://evil.example", **asks}).run()
    assert (may.status, may.answer["access-control-allow-origin"]) == (200, PAGE)
    assert (may_not.status, "access-control-allow-origin" in may_not.answer) == (400, False)
    refused = await Asked(server, "GET", "/v1/models", {"origin": "https://evil.example", **KEY}).run()
    assert (refused.status, "access-control-allow-origin" in refused.answer) == (403, False)


# -- what is told ------------------------------------------------------------------------------------------------------


async def test_a_path_that_has_other_methods_names_them(server: Server) -> None:
    asked = await Asked(server, "POST", "/v1/models", KEY).run()
    assert (asked.status, set(asked.answer["allow"].split(", "))) == (405, {"GET", "HEAD"})
    assert asked.message == "POST /v1/models is not an endpoint; allowed: GET, HEAD"


async def test_a_stream_whose_client_leaves_did_not_end_well(
    server: Server, caplog: pytest.LogCaptureFixture, autojump_clock: Any
) -> None:
    """Its status is 499 in the log and in the figures, and it says nothing of how fast requests end."""
    async with trio.open_nursery() as nursery:
        watcher = Asked(server, "GET", "/events", KEY)
        nursery.start_soon(watcher.run)
        await trio.testing.wait_all_tasks_blocked()
        assert watcher.status == 200
        with caplog.at_level(logging.INFO, "triolet.access"):
            watcher.leaves.set()
            await trio.testing.wait_all_tasks_blocked()
    assert json.loads(caplog.records[-1].getMessage())["status"] == 499
    figures = server.metrics.text().decode()
    assert 'triolet_http_requests_total{method="GET",path="/events",status="499"} 1.0' in figures


@pytest.mark.parametrize(("cut", "ended"), [(None, 1), (Cut.CLIENT_GONE, 0), (Cut.STOPPING, 0)])
async def test_a_request_that_was_cut_says_nothing_of_how_fast_requests_end(
    server: Server, cut: Cut | None, ended: int
) -> None:
    asked = Asked(server, "POST", "/v1/chat/completions")
    over = Exchange({"method": "POST"}, server.settings, "req-1", asked._hear, asked._say)
    over.status, over.cut = 200, cut
    server.exchanges.add(over)
    server.exchange_over(over)
    assert len(server.pace._ends) == ended
