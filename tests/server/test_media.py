"""Images and audio by their address, over a real server of files."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
from PIL import Image

from triolet.core.budget import unlimited
from triolet.core.errors import InvalidRequest, RequestTooLarge
from triolet.server.endpoints.conversations import _Reader
from triolet.server.media import Media, from_base64
from triolet.server.problems import BadBody, Refusal
from triolet.server.schemas.chat import ChatMessage
from triolet.server.settings import ServerSettings

from .served import PATIENCE, Served, served

pytestmark = pytest.mark.real_time


class Files(BaseHTTPRequestHandler):
    """``/picture`` is there, ``/away?URL`` leads elsewhere, ``/round`` to itself."""

    def do_GET(self) -> None:
        path, _, there = self.path.partition("?")
        if path == "/picture":
            self._answer(200, b"pixels")
        elif path in ("/away", "/round"):
            self._answer(302, b"", location=there or "/round")
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def media(files: str, **settings: Any) -> Media:
    given = {"url_prefixes": (f"{files}/",), "private_urls": True, "url_seconds": PATIENCE, **settings}
    return Media(ServerSettings(**given))


async def test_an_address_with_an_allowed_prefix_is_fetched(files: str) -> None:
    assert await media(files).fetch(f"{files}/picture", "here", 1_000) == b"pixels"
    assert await media(files).fetch(f"{files}/away?{files}/picture", "here", 1_000) == b"pixels"


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/picture",
        "https://example.org/",
        "http://user@127.0.0.1/picture",
        "http://127.0.0.1\\@example.org/",
        "HTTP://EXAMPLE.ORG/",
        "http://127.0.0.1:99999/",
    ],
)
async def test_other_addresses_are_refused(files: str, url: str) -> None:
    with pytest.raises(Refusal, match="may not be fetched; allowed") as raised:
        await media(files).fetch(url, "here", 1_000)
    assert (raised.value.problem.status, raised.value.problem.param) == (403, "here")


async def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(Refusal, match="allowed: data: alone"):
        await Media(ServerSettings()).fetch("http://example.org/", "here", 1_000)


ELSEWHERE = ("../x", "a/%2e%2e/x", "a/%252e%252e/x", "./x", "\n/x", "\u00fc", "a\\b", "away?http://[")


@pytest.mark.parametrize(
    ("path", "message", "settings"),
    [
        *((path, "may not be fetched", {}) for path in ELSEWHERE),
        ("away?http://example.org/x", r"http://example\.org/x may not be fetched", {}),
        ("round", "more than 3 redirections", {}),
        ("nothing", "status was 404", {}),
        ("picture", r"127\.0\.0\.1, which is not a public address", {"private_urls": False}),
    ],
)
async def test_the_way_behind_an_allowed_prefix_leads_nowhere_else(
    files: str, path: str, message: str, settings: dict[str, Any]
) -> None:
    """A redirection is checked like the first address. Whatever a name is, what it resolves to counts."""
    with pytest.raises(Refusal, match=message):
        await media(files, **settings).fetch(f"{files}/{path}", "here", 1_000)


async def test_who_does_not_answer_is_told_and_what_is_too_large_is_not_read_to_its_end(files: str) -> None:
    with pytest.raises(Refusal, match="here cannot be fetched") as raised:
        await media("http://127.0.0.1:9").fetch("http://127.0.0.1:9/", "here", 1_000)
    assert (raised.value.problem.status, raised.value.problem.code) == (422, "address_failed")
    with pytest.raises(RequestTooLarge, match="the file has 6 bytes or more; allowed: up to 3 bytes"):
        await media(files, max_body_bytes=3).fetch(f"{files}/picture", "here", 3)


@pytest.mark.parametrize(
    ("url", "data"),
    [
        (f"data:image/png;base64,{base64.b64encode(b'pixels').decode()}", b"pixels"),
        ("data:text/plain,a%20b", b"a b"),
        ("DATA:;BASE64,YQ==", b"a"),
    ],
)
async def test_a_data_address_holds_what_it_names(url: str, data: bytes) -> None:
    assert await Media(ServerSettings()).fetch(url, "here", 1_000) == data


@pytest.mark.parametrize("piece", [1, 3, 76, 1 << 20])
def test_base64_may_have_line_ends_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr("triolet.server.media._PIECE", piece)
    for size in (0, 1, 2, 3, 100):
        data = bytes(range(size))
        told = base64.encodebytes(data).decode()
        assert from_base64(told, "audio") == from_base64(told.replace("\n", "\r\n"), "audio") == data
    for wrong in ("Zg==Zg==", "Z", "Z g=", "Zg=\n", "Zg==\nZm9v"):
        with pytest.raises(BadBody, match="audio is not base64"):
            from_base64(wrong, "audio")


@pytest.mark.parametrize("url", ["data:;base64,%%%", "data:image/png", "file:///etc/passwd", "ftp://x", "nonsense"])
async def test_what_is_no_address_is_told_so(url: str) -> None:
    with pytest.raises(BadBody, match="here"):
        await Media(ServerSettings()).fetch(url, "here", 1_000)


@pytest.mark.parametrize("prefix", ["https://good.example", "good.example/", "ftp://good.example/", "https:///x", ""])
def test_a_prefix_names_a_whole_host(prefix: str) -> None:
    with pytest.raises(InvalidRequest, match="a list of prefixes that have a whole host"):
        ServerSettings(url_prefixes=(prefix,))


async def test_all_that_a_request_names_has_no_more_bytes_than_a_request(files: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": f"{files}/picture"}}
    message = ChatMessage.model_validate({"role": "user", "content": [picture, picture]})
    told = await _Reader(media(files, max_body_bytes=12), unlimited()).message(message, "here")
    assert [part["image"] for part in told["content"]] == [b"pixels"] * 2
    with pytest.raises(RequestTooLarge, match=r"here\.1: the file has 6 bytes or more; allowed: up to 5 bytes"):
        await _Reader(media(files, max_body_bytes=11), unlimited()).message(message, "here")


# -- how much ----------------------------------------------------------------------------------------------------------


class SlowMedia(Media):
    """Every address takes 15 s."""

    async def _follow(self, *_: Any) -> bytes:
        await trio.sleep(15)
        return b"pixels"


async def test_all_addresses_of_a_request_have_one_time(autojump_clock: Any) -> None:
    picture = {"type": "image_url", "image_url": {"url": "http://example.org/"}}
    message = ChatMessage.model_validate({"role": "user", "content": [picture] * 3})
    began = trio.current_time()
    with pytest.raises(Refusal, match=r"here\.1 cannot be fetched: all addresses of a request together may take 20 s"):
        await _Reader(SlowMedia(ServerSettings()), unlimited()).message(message, "here")
    assert trio.current_time() - began == pytest.approx(20.0)


@pytest.fixture(scope="module")
def small(models: dict[str, str]) -> Iterator[Served]:
    """A server that reads little."""
    with served(
        {name: models[name] for name in ("qwen2_vl", "qwen2_audio")},
        max_audio_seconds=0.8,
        max_media=3,
        max_media_seconds=1.0,
        max_media_pixels=40_000,
    ) as running:
        yield running


def picture(width: int, height: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def silence(seconds: float) -> dict[str, Any]:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(seconds * 16_000), np.float32), 16_000, format="FLAC")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode()}}


def told_of(small: Served, model: str, *parts: dict[str, Any], **more: Any) -> tuple[int, str]:
    content = [*parts, {"type": "text", "text": "a"}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
    status, told = small.get("/v1/chat/completions", body)
    return status, "" if status == 200 else json.loads(told)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_has_as_much_audio_as_the_settings_allow(small: Served, stream: bool) -> None:
    assert told_of(small, "qwen2_audio", silence(0.5), silence(0.5), stream=stream) == (200, "")
    status, told = told_of(small, "qwen2_audio", silence(600), stream=stream)
    assert (status, told) == (
        413,
        "messages.0.content.0: the file is too long; allowed: up to 0.8 s, but it has 600 s or more. "
        "Cut it into pieces; allowed for all of a conversation: 1 s of audio and 40,000 pixels of images",
    )
    status, told = told_of(small, "qwen2_audio", silence(0.5), silence(0.7), stream=stream)
    assert (status, told.partition(", but")[0]) == (
        413,
        "messages.0.content.1: the file is too long; allowed: up to 0.5 s",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_has_as_many_pixels_as_the_settings_allow(small: Served, stream: bool) -> None:
    assert told_of(small, "qwen2_vl", picture(100, 100), picture(100, 200), stream=stream, n=2) == (200, "")
    status, told = told_of(small, "qwen2_vl", picture(100, 200), picture(100, 300), stream=stream)
    assert status == 413
    assert "content.1" in told
    assert "100 x 300 pixels; allowed: up to 20,000" in told
    parts = [{"type": "thinking", "thinking": "a"}, picture(100, 500)]
    body = {"model": "qwen2_vl", "messages": [{"role": "assistant", "content": parts}], "stream": stream}
    assert "messages.0.content.1: " in small.get("/v1/chat/completions", body)[1]


def test_a_conversation_has_as_many_images_and_audio_as_the_settings_allow(small: Served) -> None:
    assert told_of(small, "qwen2_vl", *[picture(28, 28)] * 3)[0] == 200
    assert told_of(small, "qwen2_vl", *[picture(28, 28)] * 4) == (
        413,
        "the conversation has 4 images and pieces of audio; allowed: up to 3",
    )


def test_what_a_model_does_not_read_is_refused_and_not_decoded(small: Served) -> None:
    status, told = told_of(small, "qwen2_vl", silence(600))
    assert (status, told.partition(";")[0]) == (
        400,
        "the request has audio, but Qwen2VLForConditionalGeneration reads only text and image",
    )
