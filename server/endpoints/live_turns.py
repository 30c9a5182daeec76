"""The turns of a live session: the `LiveSettings`, the `Backlog` of commands from the client, the `LiveClient`, which
receives events, and `Turns`, which passes audio to an engine and the text to the client."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import trio
from attrs import define, evolve, field, frozen
from starlette.websockets import WebSocket

from ...api.engine import Engine
from ...api.outputs.results import LiveText
from ...core.budget import Account, unlimited
from ...core.errors import Overloaded
from ..problems import Problem
from ..schemas import realtime as bodies
from ..server import Server
from .speech import warnings_of

MOST_SAMPLES = 14_400_000  # 28.8 MB: 600 s at 24,000 Hz
_OF_SAMPLE = 2  # bytes
_OF_EVENT = 128  # samples for which each command counts in addition: else empty commands would have no bound
_MOST_UNREAD = 1 << 20  # characters
_OF_TURN = 6  # bytes of a sample's copies, as it came and as float32
_PAUSE_SECONDS = 1.0  # of audio that is skipped after a failure of the engine

Samples: TypeAlias = npt.NDArray[np.int16]
Item = TypeVar("Item")


@frozen(kw_only=True)
class LiveSettings:
    """The settings of a session. They are OpenAI's defaults until the client changes them."""

    format: bodies.Pcm | bodies.G711 = field(factory=bodies.Pcm)
    heard: bodies.LiveModel = field(factory=bodies.LiveModel)
    turns: bodies.TurnDetection | None = field(factory=bodies.TurnDetection)  # None: the client ends turns
    include: tuple[str, ...] = ()

    def updated(self, session: bodies.Session) -> LiveSettings:
        """Returns these settings with the changes of ``session``."""
        given: dict[str, Any] = {}
        said = (session.audio and session.audio.input) or bodies.AudioInput()
        if said.format is not None:
            given["format"] = said.format
        if said.transcription is not None:
            model = said.transcription.model or self.heard.model
            given["heard"] = said.transcription.model_copy(update={"model": model})
        if "turn_detection" in said.model_fields_set:
            given["turns"] = said.turn_detection
        if session.include is not None:
            given["include"] = tuple(session.include)
        return evolve(self, **given)

    def told(self, name: str) -> dict[str, Any]:
        """Returns the settings in the form in which events of the session contain them."""
        turns = self.turns
        told = {
            "format": self.format.model_dump(),
            "transcription": {**self.heard.model_dump(exclude={"delay"}), "keywords": self.heard.keywords or None},
            "turn_detection": turns and {**turns.model_dump(exclude_unset=True), "type": turns.type},
            "noise_reduction": None,
        }
        return {
            "id": name,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {"input": told},
            "include": list(self.include) or None,
        }

    @property
    def length(self) -> int:
        """The number of characters in the texts that the model reads before the audio."""
        return sum(map(len, (self.heard.prompt or "", *(self.heard.keywords or ()))))

    def texts(self) -> dict[str, Any]:
        """Returns the arguments that `Engine.live` and `Engine.stream_transcription` share."""
        heard = self.heard
        return {"language": heard.language, "initial_prompt": heard.prompt, "hotwords": heard.keywords or None}

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `Engine.live`."""
        silence = self.turns.silence_duration_ms if self.turns is not None else None
        given = {"rate": self.format.rate, "endpoint_silence": silence and silence / 1_000, **self.texts()}
        return {name: value for name, value in given.items() if value is not None}


@frozen
class MoreAudio:
    """A command: more audio of the turn, at least one sample."""

    samples: Samples


@frozen
class EndTurn:
    """A command: the turn ends. ``keep``: the client wants the text of the turn. ``then``: the settings of the next
    turns."""

    keep: bool
    then: LiveSettings | None = None


Command: TypeAlias = MoreAudio | EndTurn


class TooMuch(Exception):
    """The client sends too much, or reads too little, so that its session ends."""


@define(eq=False)
class _Counted(Generic[Item]):
    """Items that wait, in order, and their memory. An item counts until `done`, or until the next one is taken. `put`
    never waits.

    Args:
        account: the memory of the session.
    """

    account: Account = field(factory=unlimited)
    held: int = field(default=0, init=False)  # bytes
    is_closed: bool = field(default=False, init=False)
    _taken: int = field(default=0, init=False)  # bytes of the item that was taken last
    _give: trio.MemorySendChannel[tuple[Item, int]] = field(init=False)
    _take: trio.MemoryReceiveChannel[tuple[Item, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._give, self._take = trio.open_memory_channel(math.inf)

    def put(self, item: Item, size: int) -> None:
        """Adds an item of ``size`` bytes.

        Raises:
            Overloaded: the server has no memory for it.
        """
        self.account.take(size)
        self.held += size
        self._give.send_nowait((item, size))

    async def take(self) -> Item | None:
        """Returns the next item; ``None``: no more items will come."""
        self.done()
        try:
            item, self._taken = await self._take.receive()
        except trio.EndOfChannel:
            return None
        return item

    def done(self) -> None:
        """Notes that the item that was taken last is not needed any more."""
        taken, self._taken = self._taken, 0
        self.held -= taken
        self.account.give(taken)

    def close(self) -> None:
        """Ends the items: no more can be added."""
        self.is_closed = True
        self._give.close()


@define(eq=False)
class Backlog(_Counted[Command]):
    """The commands that wait. A reader that waits for room would not notice that the client has gone."""

    def put(self, command: Command, size: int) -> None:
        """Adds a command. ``size``: its number of samples, or of characters of its settings.

        Raises:
            Overloaded: the server has no memory for it.
            TooMuch: with this command more than `MOST_SAMPLES` would wait.
        """
        size = _OF_SAMPLE * (size + _OF_EVENT)
        if self.held + size > _OF_SAMPLE * MOST_SAMPLES:
            raise TooMuch(
                f"more than {MOST_SAMPLES:,} samples wait to be read; send audio no faster than the model reads it"
            )
        super().put(command, size)


@define(eq=False)
class LiveClient:
    """The client of a session, which receives events. Only the task of `write` sends. So the task that reads from the
    client never waits for the client to read.
    """

    socket: WebSocket
    name: str
    account: Account = field(factory=unlimited)
    _end: tuple[int, str] | None = field(default=None, init=False)
    _unread: _Counted[str] = field(init=False)
    _room: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)

    def __attrs_post_init__(self) -> None:
        self._unread = _Counted(self.account)

    async def tell(self, kind: str, **members: Any) -> None:
        """Sends an event. Waits while the client has too much unread."""
        await trio.lowlevel.checkpoint()
        while self._unread.held > _MOST_UNREAD:
            await self._room.park()
        self._put(kind, members)

    def answer(self, kind: str, **members: Any) -> None:
        """Sends an event without waiting.

        Raises:
            TooMuch: the client has too much unread.
        """
        if self._unread.held > _MOST_UNREAD:
            raise TooMuch(
                f"more than {_MOST_UNREAD:,} characters of the server's events were not read; read the events"
            )
        self._put(kind, members)

    def end(self, code: int, reason: str, last_words: Problem | None = None) -> None:
        """Lets `write` close the connection after the events so far. Only the first call counts."""
        if self._end is not None:
            return
        if last_words is not None:
            with suppress(Overloaded):  # then the code says it
                self._put("error", {"error": {**last_words.as_object()["error"], "event_id": None}})
        self._end = code, reason
        self._unread.close()

    def explained(self, error: Exception) -> dict[str, Any]:
        """Returns ``error``, or the first error of a group, in OpenAI's shape and words. A fault of the server is
        logged."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        told: dict[str, Any] = self.socket.app.state.server.explain(error, self.name, {}).as_object()["error"]
        return {**told, "message": told["message"].replace("hotwords", "keywords")}

    async def write(self) -> None:
        """Sends events until `end` is called, and then closes the connection."""
        while (text := await self._unread.take()) is not None:
            await self.socket.send({"type": "websocket.send", "text": text})
            self._unread.done()
            self._room.unpark_all()
        assert self._end is not None, "nobody but `end` closes the channel"
        await self.socket.close(*self._end)

    def _put(self, kind: str, members: dict[str, Any]) -> None:
        if self._end is not None:
            return
        event = {"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **members}
        text = json.dumps(event, separators=(",", ":"), ensure_ascii=False)
        self._unread.put(text, len(text))


@define(eq=False)
class Turns:
    """Passes the client's audio to the engine, turn by turn, and sends the text to the client."""

    server: Server
    client: LiveClient
    settings: LiveSettings
    backlog: Backlog
    has_failed: bool = field(default=False, init=False)  # a turn, or the session
    _now: Command | None = field(default=None, init=False)  # the latest command that was taken
    _taken: float = field(default=0.0, init=False)  # seconds of audio that were taken
    _before: float = field(default=0.0, init=False)  # the part of them before this turn
    _start: float = field(default=0.0, init=False)  # the start of the utterance
    _end: float | None = field(default=None, init=False)  # the end of its last word so far
    _item: str | None = field(default=None, init=False)
    _last: str | None = field(default=None, init=False)  # the previous item
    _text: str = field(default="", init=False)
    _owes: bool = field(default=False, init=False)  # an answer to the client's commit

    async def run(self) -> None:
        """Handles all commands. Returns when there are no more, and the text of all turns is sent."""
        await self._next()
        while self._now is not None:
            if isinstance(self._now, MoreAudio):
                try:
                    await self._turn()
                except Exception as error:  # noqa: BLE001  (the client gets it; the next turn may succeed)
                    await self._failed(error)
            else:
                if self._owes:  # nobody has spoken
                    await self._commit(_new_item(), "")
                    await self._complete(0.0)
                self.settings = self._now.then or self.settings
                await self._next()

    async def _next(self) -> None:
        self._now = await self.backlog.take()
        self._owes = isinstance(self._now, EndTurn) and self._now.keep and self._now.then is None
        if isinstance(self._now, MoreAudio):
            self._taken += len(self._now.samples) / self.settings.format.rate

    @property
    def has_audio(self) -> bool:
        """True if the client has sent audio."""
        return self._taken > 0

    @property
    def outcome(self) -> str:
        """The outcome of a session that ends now: ``failed``, or ``aborted`` if audio of it has no text yet. Where the
        server finds the turns, silence after them needs none."""
        if self.has_failed:
            return "failed"
        waits = self.settings.turns is None and isinstance(self._now, MoreAudio)
        return "aborted" if waits or self._item is not None or self.backlog.held else "finished"

    @property
    def _is_unwanted(self) -> bool:
        """True if the client has ended the turn and does not want its text."""
        return isinstance(self._now, EndTurn) and not self._now.keep

    async def _turn(self) -> None:
        """Transcribes the present audio and all audio that follows, until another command comes."""
        assert isinstance(self._now, MoreAudio), "a turn begins with audio"
        self._before = self._taken - len(self._now.samples) / self.settings.format.rate
        async with self.server.use(self.settings.heard.model or "") as engine:
            if self.settings.turns is None:
                await self._collected(engine)
            else:
                await self._heard(engine)

    # -- the server finds where somebody speaks ------------------------------------------------------------------------

    async def _heard(self, engine: Engine) -> None:
        session = engine.live(request_id=self.client.name, **self.settings.options())
        async with session as live, trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, live)
            while isinstance(self._now, MoreAudio):
                await live.feed(self._now.samples)
                await self._next()
            if self._is_unwanted:
                nursery.cancel_scope.cancel()
            else:
                await live.finish()
        self._forget()

    async def _tell(self, live: Any) -> None:
        update: LiveText
        async for update in live:
            start = self._before + (update.position if update.start is None else update.start)
            if self._item is None:
                self._item, self._start = _new_item(), start
                began = round(start * 1_000)
                await self.client.tell("input_audio_buffer.speech_started", audio_start_ms=began, item_id=self._item)
            self._start = min(self._start, start)
            self._end = self._end if update.end is None else self._before + update.end
            if update.stable:
                await self._add(update.stable)
            if "triolet.provisional" in self.settings.include:
                await self.client.tell("triolet.provisional", item_id=self._item, text=update.provisional)
            if update.ends_utterance:
                item, end = self._item, self._before + update.position if self._end is None else self._end
                ended = round(end * 1_000)
                await self.client.tell("input_audio_buffer.speech_stopped", audio_end_ms=ended, item_id=item)
                await self._commit(item, self._text.strip())
                await self._complete(end - self._start)

    # -- the client says where the turn ends ---------------------------------------------------------------------------

    async def _collected(self, engine: Engine) -> None:
        with self.server.budget.account() as account:
            collected = bytearray()  # not a list of pieces, each of which may be a single sample
            while isinstance(self._now, MoreAudio):
                account.take((_OF_SAMPLE + _OF_TURN) * len(self._now.samples))
                collected += self._now.samples.tobytes()
                await self._next()
            if not self._is_unwanted:
                await self._transcribed(engine, np.frombuffer(collected, np.int16))

    async def _transcribed(self, engine: Engine, samples: Samples) -> None:
        rate = self.settings.format.rate
        await self._commit(_new_item(), None)
        async with engine.stream_transcription(
            (samples, rate), request_id=self.client.name, beam_size=1, **self.settings.texts()
        ) as segments:
            async for segment in segments:
                await self._add(segment.text)
            warnings = warnings_of(segments.transcript(), bodies.LiveModel.model_fields)
        await self._complete(self._taken - self._before, warnings)

    # -- what is told --------------------------------------------------------------------------------------------------

    async def _add(self, text: str) -> None:
        text = text if self._text else text.lstrip()  # the joined texts are the transcript
        self._text += text
        await self.client.tell(
            "conversation.item.input_audio_transcription.delta", item_id=self._item, content_index=0, delta=text
        )

    async def _commit(self, item: str, text: str | None) -> None:
        """Tells the client that the audio of the turn is complete."""
        before, self._last, self._item, self._owes = self._last, item, item, False
        await self.client.tell("input_audio_buffer.committed", item_id=item, previous_item_id=before)
        content = [{"type": "input_audio", "transcript": text}]
        told = {"id": item, "type": "message", "status": "completed", "role": "user", "content": content}
        await self.client.tell("conversation.item.added", item=told, previous_item_id=before)

    async def _complete(self, seconds: float, warnings: Sequence[str] = ()) -> None:
        """Sends the whole text of the turn."""
        item, text = self._item, self._text.strip()
        self._forget()
        await self.client.tell(
            "conversation.item.input_audio_transcription.completed",
            item_id=item,
            content_index=0,
            transcript=text,
            usage={"type": "duration", "seconds": math.ceil(max(seconds, 0.0))},
            **({"warnings": warnings} if warnings else {}),
        )

    async def _failed(self, error: Exception) -> None:
        """Sends ``error`` to the client, for the present item if the client knows one. Skips some seconds of the audio
        that follows. If that audio would fail in the same way, or if the client ends turns itself, all audio up to the
        end of the turn is skipped. A commit of such a turn is answered with an item that fails."""
        self.has_failed = True
        told = self.client.explained(error)
        if self._item is None and not self._owes:
            await self.client.tell("error", error={**told, "event_id": None})
        else:
            await self._fail(told)
        fails_alike = told["type"] == "invalid_request_error"
        until = self._taken + (math.inf if fails_alike or self.settings.turns is None else _PAUSE_SECONDS)
        while isinstance(self._now, MoreAudio) and self._taken <= until:
            await self._next()
        if self._owes:
            await self._fail(told)

    async def _fail(self, told: dict[str, Any]) -> None:
        """Sends the error ``told`` for the present item, or for the one that the client has committed."""
        if self._owes:
            await self._commit(self._item or _new_item(), None)
        kind = "conversation.item.input_audio_transcription.failed"
        await self.client.tell(kind, item_id=self._item, content_index=0, error=told)
        self._forget()

    def _forget(self) -> None:
        self._item, self._text, self._end = None, "", None


def _new_item() -> str:
    return f"item_{secrets.token_hex(8)}"
