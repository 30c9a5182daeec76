"""Bodies of JSON: bounds come before what they bound is made, and what is left behind is given back."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from starlette.requests import Request
from trio.testing import wait_all_tasks_blocked

import triolet
from triolet.core.budget import unlimited
from triolet.core.errors import RequestTooLarge
from triolet.server import body, media
from triolet.server.heap import Leavings
from triolet.server.problems import BadBody
from triolet.server.schemas.base import MOST_TEXT
from triolet.server.schemas.chat import ChatRequest
from triolet.server.schemas.completions import CompletionRequest
from triolet.server.schemas.vectors import ClassifyRequest, EmbeddingRequest, RerankRequest

from .served import Served

pytestmark = pytest.mark.real_time

PLAIN: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
CHAT = "/v1/chat/completions"


def with_member(name: str, value: bytes) -> bytes:
    return json.dumps(PLAIN).encode()[:-1] + b', "%s": %s}' % (name.encode(), value)


# -- before anything is made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", b"{" + b",".join(b'"%d":1' % number for number in range(40_000)) + b"}"),
        ("metadata", b"{" + b",".join(b'"%d":1' % number for number in range(40_000)) + b"}"),
        ("messages", b"[" + b",".join([b'{"role":"user","content":"a"}'] * 20_000) + b"]"),
        ("seed", b"1" * 5_000_000),
        ("user", b'"' + b"\\u00e9" * 2_000_000 + b'"'),
        ("user", b'"' + b"a" * 8_400_000 + "é".encode() + b'"'),
        ("nothing", b"[" * 40_000),
    ],
    ids=["biases", "metadata", "messages", "digits", "escapes", "one letter", "nested"],
)
def test_a_body_over_a_bound_is_refused_before_anything_is_made_of_it(
    service: Served, monkeypatch: pytest.MonkeyPatch, name: str, value: bytes
) -> None:
    made: list[object] = []
    original = body._parse

    def parse(*given: Any) -> Any:
        made.append(given)
        return original(*given)

    monkeypatch.setattr(body, "_parse", parse)
    status, told = service.post(CHAT, with_member(name, value))
    assert (status, told["error"]["code"]) == (413, "request_too_large")
    assert "has more than" in told["error"]["message"]
    assert made == []
    assert service.post(CHAT, PLAIN)[0] == 200
    assert len(made) == 1


@pytest.mark.parametrize("size", [1, 7, 65_536, 65_537, 200_000])
async def test_a_body_is_whole_however_it_comes(size: int) -> None:
    text = "aé" * 1_000 * min(size, 50)
    told = json.dumps({**PLAIN, "messages": [{"role": "user", "content": text}]}).encode()
    parts = [told[start : start + size] for start in range(0, len(told), size)]
    messages = iter([{"type": "http.request", "body": part, "more_body": True} for part in parts])

    async def receive() -> Any:
        return next(messages, {"type": "http.request", "body": b"", "more_body": False})

    server = SimpleNamespace(reading=trio.CapacityLimiter(1), leavings=Leavings())
    app = SimpleNamespace(state=SimpleNamespace(server=server))
    exchange = SimpleNamespace(closing=ExitStack(), account=unlimited())
    scope = {"type": "http", "method": "POST", "headers": [], "app": app, "exchange": exchange}
    found = await body.read_json(Request(scope, receive), ChatRequest)
    assert found.messages[0].content == text


UNREAD = {"a": [1, {"b": "c"}]}


@pytest.mark.parametrize("value", [UNREAD, [UNREAD], "text", 1, 1.5, True, None])
def test_what_is_not_used_is_not_made(value: object) -> None:
    ignored = ("user", "metadata", "safety_identifier", "prompt_cache_key")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": value}}
    read_back = dict.fromkeys(("parsed", "provider_specific_fields", "annotations"), value)
    past = {"role": "assistant", "content": "a", "tool_calls": [call], **read_back}
    found = ChatRequest.model_validate_json(
        json.dumps({**PLAIN, "messages": [past], **dict.fromkeys(ignored, value)}), strict=True
    )
    message = found.messages[0]
    assert [getattr(found, name) for name in ignored] == [None] * 4
    assert [getattr(message, name) for name in read_back] == [None] * 3
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments is None


@pytest.mark.parametrize(("given", "kept"), [(-1, 0), (0, 0), (5, 5), (None, None)])
def test_minus_one_is_off_for_top_k_as_in_vllm(given: int | None, kept: int | None) -> None:
    found = ChatRequest.model_validate_json(json.dumps({**PLAIN, "top_k": given}), strict=True)
    assert found.top_k == kept


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (ChatRequest, {**PLAIN, "messages": [{"role": "user", "content": "a" * 3_000_000}] * 3}),
        (
            ChatRequest,
            {**PLAIN, "messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 900_000}] * 9}]},
        ),
        (CompletionRequest, {"model": "llama", "prompt": ["a" * 3_000_000] * 3}),
        (EmbeddingRequest, {"model": "bert", "input": ["a" * 3_000_000] * 3}),
        (ClassifyRequest, {"model": "bert", "input": ["a" * 3_000_000] * 3}),
        (RerankRequest, {"model": "bert", "query": "a" * 9_000, "documents": ["b", {"text": "c"}] * 500}),
    ],
)
def test_the_texts_of_a_request_have_a_bound_together(kind: Any, members: dict[str, Any]) -> None:
    with pytest.raises(RequestTooLarge, match=f"allowed: up to {MOST_TEXT:,}"):
        body._parse(kind, [json.dumps(members).encode()])


def _called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [call]}]


def _schema(count: int) -> dict[str, Any]:
    return {"properties": {f"p{number}": {"type": "string"} for number in range(count)}}


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [*_called("[" + "1," * 200_000), *_called("[" + "1," * 200_000)]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": _schema(11_000)}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "a" * 600_000}}] * 2},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _schema(3_000)}}},
        {"chat_template_kwargs": {"a": [1] * 20_001}},
    ],
    ids=["arguments", "tools", "descriptions", "schema", "variables"],
)
def test_what_is_walked_through_more_than_once_has_bounds_of_its_own(members: dict[str, Any]) -> None:
    with pytest.raises(RequestTooLarge, match="has more than"):
        body._parse(ChatRequest, [json.dumps({**PLAIN, **members}).encode()])


async def tokenizer_of(engine: triolet.Engine) -> Any:
    return engine.model.tokenizer


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_tokens_is_spelled_once_for_all_echoes(
    service: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """In a thread: a long one would hold up all others."""
    spelled: list[bool] = []
    tokenizer = service.engine("llama", tokenizer_of)
    kind = type(tokenizer)
    original = kind.decode
    text = original(tokenizer, [5, 6, 7])

    def decode(one: Any, tokens: Any, **more: Any) -> Any:
        if list(tokens) == [5, 6, 7]:
            spelled.append(trio.lowlevel.in_trio_run())
        return original(one, tokens, **more)

    monkeypatch.setattr(kind, "decode", decode)
    body = {"model": "llama", "prompt": [5, 6, 7], "echo": True, "n": 4, "max_tokens": 1, "stream": stream}
    _, answer = service.get("/v1/completions", body)
    assert answer.count(json.dumps(text, ensure_ascii=False)[1:-1]) == 4
    assert spelled == [False]


# -- media -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 5, 6, 7, 12, 100])
def test_base64_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(media, "_PIECE", 8)
    data = bytes(range(size))
    assert media.from_base64("data:," + base64.b64encode(data).decode(), "here", 6) == data


@pytest.mark.parametrize("text", ["QUE=QUFB", "QUFBQUE=QUFB", "QUFBQU==QUFBQUFB", "QUFBQUFBQ", "QUF%", "QUFBQUFBé"])
def test_what_is_no_base64_is_none_in_pieces(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(media, "_PIECE", 8)
    with pytest.raises(BadBody, match="here is not base64"):
        media.from_base64(text, "here")


def test_a_long_data_address_without_base64_is_refused() -> None:
    assert media._data("data:,%41b", "here") == b"Ab"
    with pytest.raises(BadBody, match=r"allowed: up to 262,144. Write a longer one as data:image/png;base64"):
        media._data("data:," + "%41" * 100_000, "here")


# -- what is left ----------------------------------------------------------------------------------------------------


async def test_what_large_requests_leave_is_given_back_each_time() -> None:
    trimmed = [trio.Event(), trio.Event()]
    waiting = iter(trimmed)
    leavings = Leavings(lambda: trio.from_thread.run_sync(next(waiting).set))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leavings.give_back)
            await wait_all_tasks_blocked()
            assert not trimmed[0].is_set()
            leavings.add()
            leavings.add()
            await trimmed[0].wait()
            leavings.add()
            await trimmed[1].wait()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("size", "given_back"), [(100, False), (2_000_000, True), (40_000_000, True)])
def test_a_large_request_is_followed_by_giving_back(
    service: Served, monkeypatch: pytest.MonkeyPatch, size: int, given_back: bool
) -> None:
    """One that is refused, too."""
    added: list[bool] = []
    monkeypatch.setattr(type(service.server.leavings), "add", lambda _: added.append(True))
    service.post(CHAT, {**PLAIN, "user": "a" * size})
    service.until(service.is_idle)
    assert len(added) == given_back
