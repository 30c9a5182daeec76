"""Live audio without a network or a model: the whole application, a client that says and reads what a test wants, and
an engine whose text the test knows."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio
from attrs import define, field

from triolet import ModelSpec
from triolet.api.outputs.results import LiveText
from triolet.core.errors import UnknownModel
from triolet.server.app import make_app
from triolet.server.server import Server
from triolet.server.settings import ServerSettings

RATE = 24_000
app_of = cache(make_app)  # which is slow to make, and one for each server as in `serving`
COMPLETED = "conversation.item.input_audio_transcription.completed"
FAILED = "conversation.item.input_audio_transcription.failed"


@define
class Said:
    """A segment of a transcription."""

    text: str


@define(eq=False)
class PaperLive:
    """A live session of the engine. ``told`` is told as soon as anything was fed; `finish` ends it."""

    told: list[LiveText | Exception]
    fed: list[Any] = field(factory=list)
    _begun: trio.Event = field(factory=trio.Event)
    _finished: trio.Event = field(factory=trio.Event)

    async def feed(self, samples: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.fed.append(samples)
        self._begun.set()

    async def finish(self) -> None:
        self._finished.set()
        await trio.lowlevel.checkpoint()

    def __aiter__(self) -> PaperLive:
        return self

    async def __anext__(self) -> LiveText:
        await self._begun.wait()
        if not self.told:
            await self._finished.wait()
            raise StopAsyncIteration
        update = self.told.pop(0)
        if isinstance(update, Exception):
            raise update
        return update


@define
class Segments:
    """A transcription as the engine gives it, without any fault."""

    parts: AsyncIterator[Said]

    def __aiter__(self) -> AsyncIterator[Said]:
        return self.parts

    def transcript(self) -> Any:
        return SimpleNamespace(coverage=(), warnings=())


@define(eq=False)
class PaperEngine:
    """Its transcriptions say how many samples they are of. ``faults``: what they fail with, one after the other.
    ``may_answer``: until it is set, transcriptions wait."""

    faults: list[Exception] = field(factory=list)
    told: list[LiveText | Exception] = field(factory=list)
    may_answer: trio.Event = field(factory=trio.Event)
    heard: list[Any] = field(factory=list)  # the samples of each transcription
    lives: list[PaperLive] = field(factory=list)
    prompts: list[str | None] = field(factory=list)
    hotwords: list[Any] = field(factory=list)  # of each transcription and live session
    users: int = 0
    model: Any = field(factory=lambda: SimpleNamespace(structures=None))

    @asynccontextmanager
    async def stream_transcription(self, audio: Any, **options: Any) -> AsyncIterator[Any]:
        samples, _rate = audio
        self.heard.append(samples)
        self.prompts.append(options["initial_prompt"])
        self.hotwords.append(options["hotwords"])

        async def segments() -> AsyncIterator[Said]:
            await self.may_answer.wait()
            if self.faults:
                raise self.faults.pop(0)
            yield Said(f" {len(samples)} samples")

        yield Segments(segments())

    @asynccontextmanager
    async def live(self, *, hotwords: Any = None, **_: Any) -> AsyncIterator[PaperLive]:
        self.lives.append(PaperLive(self.told))
        self.hotwords.append(hotwords)
        yield self.lives[-1]


@define(eq=False)
class PaperEngines:
    """Has one model, ``whisper``."""

    engine: PaperEngine
    models: Mapping[str, ModelSpec] = field(factory=lambda: {"whisper": ModelSpec("whisper")})
    names: tuple[str, ...] = ("whisper",)
    load_seconds: float = 0.0

    def name_of(self, name: str) -> str:
        return name

    @asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[PaperEngine]:
        await trio.sleep(self.load_seconds)
        if model not in self.models:
            raise UnknownModel(f"no model {model!r}; allowed: whisper")
        self.engine.users += 1
        try:
            yield self.engine
        finally:
            self.engine.users -= 1

    def statistics(self) -> dict[str, Any]:
        return {}


@define(eq=False)
class Talk:
    """One WebSocket, from the client's side. ``sent``: what came from the server, as ASGI's messages. Without ``reads``
    nothing that the server sends goes through."""

    server: Server
    engine: PaperEngine
    sent: list[dict[str, Any]] = field(factory=list)
    over: trio.Event = field(factory=trio.Event)
    stays: bool = False  # whatever the server says
    _reads: trio.Event = field(factory=trio.Event)
    _give: Any = None
    _take: Any = None

    def __attrs_post_init__(self) -> None:
        self._give, self._take = trio.open_memory_channel[dict[str, Any]](1_000_000)
        self._reads.set()
        self._give.send_nowait({"type": "websocket.connect"})

    async def run(self) -> None:
        await app_of(self.server)(scope_of(), self._take.receive, self._send)
        self.over.set()

    async def _send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        await self._reads.wait()
        self.sent.append(message)
        if message["type"] == "websocket.close" and not self.stays:
            self.leave()  # as clients do

    def read_no_more(self) -> None:
        self._reads = trio.Event()

    def read_again(self) -> None:
        self._reads.set()

    def leave(self) -> None:
        self._give.send_nowait({"type": "websocket.disconnect", "code": 1000})

    def raw(self, text: str | None, data: bytes | None = None) -> None:
        self._give.send_nowait({"type": "websocket.receive", "text": text, "bytes": data})

    def say(self, kind: str, **members: Any) -> None:
        self.raw(json.dumps({"type": kind, **members}))

    def append(self, samples: int = 0, *, data: bytes | None = None) -> None:
        data = bytes(2 * samples) if data is None else data
        self.say("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def commit(self, **members: Any) -> None:
        self.say("input_audio_buffer.commit", **members)

    def update(self, turns: dict[str, Any] | None = None, rate: int = RATE, **heard: Any) -> None:
        given = {"format": {"type": "audio/pcm", "rate": rate}, "transcription": heard, "turn_detection": turns}
        self.say("session.update", session={"type": "transcription", "audio": {"input": given}})

    async def settled(self) -> list[dict[str, Any]]:
        """All events so far, when nothing moves any more."""
        await trio.testing.wait_all_tasks_blocked()
        return [json.loads(one["text"]) for one in self.sent if one["type"] == "websocket.send"]

    async def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind so far."""
        return [one for one in await self.settled() if one["type"] == kind]

    @property
    def closed(self) -> int | None:
        """The code that the server closed with."""
        codes = [one["code"] for one in self.sent if one["type"] == "websocket.close"]
        return codes[0] if codes else None


def scope_of(path: str = "/v1/realtime", headers: dict[str, str] | None = None) -> dict[str, Any]:
    """What hypercorn says of a client that wants a WebSocket."""
    given = {"host": "localhost", **(headers or {})}
    return {
        "type": "websocket",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "ws",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }


def paper_server(engine: PaperEngine, **settings: Any) -> Server:
    """A server of ``engine`` alone."""
    engines: Any = PaperEngines(engine)
    return Server(ServerSettings(**settings), engines)


@asynccontextmanager
async def talking(turns: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Talk]:
    """A client that is connected; without ``turns`` it says itself where they end. The client leaves with
    the block, and nothing of it is left."""
    engine = PaperEngine()
    engine.may_answer.set()
    server = paper_server(engine, **settings)
    talk = Talk(server, engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk.run)
        talk.update(turns)
        await talk.settled()
        yield talk
        talk.leave()
        await talk.over.wait()
    assert (len(server.sockets), engine.users) == (0, 0)


async def answered(server: Server, scope: dict[str, Any]) -> list[Any]:
    """What the server sends to a client that only asks for a WebSocket."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app_of(server)(scope, receive, send)
    return sent


def tone(count: int) -> bytes:
    """Samples that differ."""
    return np.arange(count, dtype="<i2").tobytes()


def update(position: float, **told: Any) -> LiveText:
    """What the engine knows when it has read up to ``position``."""
    given = {"utterance": 0, "stable": "", "provisional": "", "words": (), "start": None, "end": None, "language": "en"}
    return LiveText(**{**given, "position": position, **told})
