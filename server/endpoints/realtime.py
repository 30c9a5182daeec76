"""``/v1/realtime``: live audio over a WebSocket, in the shape of OpenAI's realtime transcription.

::

    client -> `_Reader` -> commands -> `_Hearing` -> engine.live -> events -> client
              checks       bounded     one turn after another

A session begins with the first audio. Where the session changes, or the client ends a turn itself, the text of what was
heard is told to its end, and the next audio begins anew. When the server stops, it hears no more, tells what it has
heard, and closes.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
import secrets
from typing import Any, TypeAlias

import numpy as np
import trio
from attrs import define, evolve, field, frozen
from pydantic import TypeAdapter, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...api.engine import Engine
from ...api.outputs.results import LiveText
from ..body import parsed
from ..problems import BadBody, problem_of
from ..schemas import realtime as bodies
from ..server import Server
from .live_audio import Decoder, Samples

_log = logging.getLogger("triolet.server")
_WAITING = 64  # commands; a client that sends faster than the model hears has to wait
_MOST_TURN_SECONDS = 600.0
_CLOSED_BY_SERVER = 1001
_EVENTS: TypeAdapter[Any] = TypeAdapter(bodies.ClientEvent)


@frozen(kw_only=True)
class Settings:
    """What a session does: OpenAI's defaults, until the client changes them."""

    format: bodies.Pcm | bodies.G711 = field(factory=bodies.Pcm)
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    turns: bodies.TurnDetection | None = field(factory=bodies.TurnDetection)  # None: the client ends them
    include: tuple[str, ...] = ()

    def updated(self, session: bodies.Session) -> Settings:
        """These settings with what ``session`` says."""
        given: dict[str, Any] = {}
        said = session.audio.input if session.audio is not None else None
        if said is not None and said.format is not None:
            given["format"] = said.format
        if said is not None and said.transcription is not None:
            given.update(language=said.transcription.language, prompt=said.transcription.prompt)
            given["model"] = said.transcription.model or self.model
        if said is not None and "turn_detection" in said.model_fields_set:
            given["turns"] = said.turn_detection
        if session.include is not None:
            given["include"] = tuple(session.include)
        return evolve(self, **given)

    def told(self, name: str) -> dict[str, Any]:
        """As the session's events tell it."""
        heard = {"model": self.model, "language": self.language, "prompt": self.prompt}
        return {
            "id": name,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": self.format.model_dump(),
                    "transcription": heard,
                    "turn_detection": None
                    if self.turns is None
                    else self.turns.model_dump(exclude_unset=True) | {"type": self.turns.type},
                    "noise_reduction": None,
                }
            },
            "include": list(self.include) or None,
        }

    def options(self) -> dict[str, Any]:
        """The arguments of `Engine.live`."""
        silence = self.turns.silence_duration_ms if self.turns is not None else None
        given = {
            "language": self.language,
            "initial_prompt": self.prompt,
            "endpoint_silence": None if silence is None else silence / 1_000,
        }
        return {"rate": self.format.rate, **{name: value for name, value in given.items() if value is not None}}


@frozen
class _Audio:
    samples: Samples


@frozen
class _EndTurn:
    """``keep``: tell the text of what was heard. ``then``: the settings from now on."""

    keep: bool
    then: Settings | None = None


_Command: TypeAlias = _Audio | _EndTurn


@define(eq=False)
class _Client:
    """What is sent to the client."""

    socket: WebSocket
    name: str

    async def tell(self, kind: str, **members: Any) -> None:
        """Sends an event."""
        await self.socket.send_json({"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **members})

    async def complain(self, error: Exception, event_id: str | None = None) -> None:
        """Tells an error; the session goes on."""
        problem = problem_of(error)
        if problem.status == 500:
            _log.error("%s failed: %r", self.name, error)
        await self.tell("error", error={**problem.as_object()["error"], "event_id": event_id})


async def listen(socket: WebSocket) -> None:
    """Serves one WebSocket to its end."""
    server: Server = socket.app.state.server
    subprotocol = "realtime" if "realtime" in socket.scope.get("subprotocols", ()) else None
    await socket.accept(subprotocol)
    client = _Client(socket, socket.scope["request_id"])
    settings = Settings(model=socket.query_params.get("model") or _only(server))
    with server.socket_open():
        await client.tell("session.created", session=settings.told(client.name))
        send, receive = trio.open_memory_channel[_Command](_WAITING)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_hearing, server, send)
            nursery.start_soon(_read, client, settings, send, nursery.cancel_scope)
            await _Hearing(server, client, settings).run(receive)
            await _close(socket)
            nursery.cancel_scope.cancel()


def _only(server: Server) -> str | None:
    """The model of a server that has one."""
    return next(iter(server.engines.models)) if len(server.engines.models) == 1 else None


async def _stop_hearing(server: Server, commands: trio.MemorySendChannel[_Command]) -> None:
    """Ends the commands when the server stops."""
    await server.stop_called.wait()
    await commands.aclose()


async def _close(socket: WebSocket) -> None:
    try:
        await socket.close(_CLOSED_BY_SERVER, "the server stops")
    except (RuntimeError, WebSocketDisconnect):  # the client has closed it
        return


# -- what the client says ----------------------------------------------------------------------------------------------


async def _read(
    client: _Client, settings: Settings, commands: trio.MemorySendChannel[_Command], scope: trio.CancelScope
) -> None:
    """Turns the client's events into commands, until the client goes."""
    decoder = Decoder(settings.format)
    while True:
        try:
            text = await client.socket.receive_text()
        except (WebSocketDisconnect, KeyError):  # KeyError: a message of bytes is none of the protocol
            scope.cancel()
            return
        event_id = None
        try:
            event = _event_of(text)
            event_id = event.event_id
            settings, decoder = await _obey(event, client, settings, decoder, commands)
        except BadBody as error:
            await client.complain(error, event_id or _id_of(text))
        except trio.ClosedResourceError:  # the server stops, and hears no more
            continue


def _event_of(text: str) -> Any:
    try:
        return _EVENTS.validate_json(text)
    except ValidationError as error:
        raise BadBody.of(error, parsed(text)) from None


def _id_of(text: str) -> str | None:
    """What a client calls its event, even if that is none."""
    event = parsed(text)
    named = event.get("event_id") if isinstance(event, dict) else None
    return named if isinstance(named, str) else None


async def _obey(
    event: Any,
    client: _Client,
    settings: Settings,
    decoder: Decoder,
    commands: trio.MemorySendChannel[_Command],
) -> tuple[Settings, Decoder]:
    match event:
        case bodies.Append(audio=audio):
            await commands.send(_Audio(decoder.decode(_decoded(audio))))
        case bodies.Commit():
            await commands.send(_EndTurn(keep=True))
        case bodies.Clear():
            await commands.send(_EndTurn(keep=False))
            await client.tell("input_audio_buffer.cleared")
        case bodies.Update() | bodies.OldUpdate():
            old = isinstance(event, bodies.OldUpdate)
            settings = settings.updated(
                event.session.renewed() if isinstance(event, bodies.OldUpdate) else event.session
            )
            await commands.send(_EndTurn(keep=True, then=settings))
            kind = "transcription_session.updated" if old else "session.updated"
            await client.tell(kind, session=settings.told(client.name))
            decoder = Decoder(settings.format)
    return settings, decoder


def _decoded(audio: str) -> bytes:
    try:
        return base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadBody(f"audio is no base64: {error}", "audio") from None


# -- what is heard -----------------------------------------------------------------------------------------------------


@define(eq=False)
class _Hearing:
    """Hears the client's audio, turn by turn."""

    server: Server
    client: _Client
    settings: Settings
    _seconds: float = field(default=0.0, init=False)  # of audio before this turn
    _item: str | None = field(default=None, init=False)
    _before: str | None = field(default=None, init=False)
    _text: str = field(default="", init=False)

    async def run(self, commands: trio.MemoryReceiveChannel[_Command]) -> None:
        """Returns when no more commands come."""
        command = await _next(commands)
        while command is not None:
            if isinstance(command, _EndTurn):
                self.settings = command.then or self.settings
                command = await _next(commands)
                if isinstance(command, _EndTurn) and command.keep and command.then is None:
                    await self.client.complain(BadBody("there is no audio to commit; append some first"))
                continue
            try:
                command = await self._turn(command, commands)
            except Exception as error:  # noqa: BLE001  (told; the next turn may go better)
                await self._failed(error)
                command = await _next(commands)

    async def _turn(self, first: _Audio, commands: trio.MemoryReceiveChannel[_Command]) -> _Command | None:
        """Hears from ``first`` on. Returns the command that ended it."""
        async with self.server.engines.use(self.settings.model or "") as engine:
            if self.settings.turns is None:
                return await self._collected(engine, first, commands)
            return await self._heard(engine, first, commands)

    async def _heard(
        self, engine: Engine, first: _Audio, commands: trio.MemoryReceiveChannel[_Command]
    ) -> _Command | None:
        """The server finds where somebody speaks."""
        fed = 0
        session = engine.live(request_id=self.client.name, **self.settings.options())
        async with session as live, trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_all, live)
            command: _Command | None = first
            while isinstance(command, _Audio):
                await live.feed(command.samples)
                fed += len(command.samples)
                command = await _next(commands)
            if isinstance(command, _EndTurn) and not command.keep:
                nursery.cancel_scope.cancel()
                self._forget()
            else:
                await live.finish()
        self._seconds += fed / self.settings.format.rate
        return command

    async def _tell_all(self, live: Any) -> None:
        async for update in live:
            await self._tell(update)

    async def _tell(self, update: LiveText) -> None:
        start = self._seconds + (update.position if update.start is None else update.start)
        if self._item is None:
            self._item = f"item_{secrets.token_hex(8)}"
            await self.client.tell(
                "input_audio_buffer.speech_started", audio_start_ms=_milliseconds(start), item_id=self._item
            )
        if update.stable:
            await self._add(update.stable)
        if "triolet.provisional" in self.settings.include:
            await self.client.tell("triolet.provisional", item_id=self._item, text=update.provisional)
        if update.ends_utterance:
            end = self._seconds + (update.position if update.end is None else update.end)
            await self.client.tell(
                "input_audio_buffer.speech_stopped", audio_end_ms=_milliseconds(end), item_id=self._item
            )
            await self._commit(self._item, self._text.strip())
            await self._complete(end - start)

    async def _collected(
        self, engine: Engine, first: _Audio, commands: trio.MemoryReceiveChannel[_Command]
    ) -> _Command | None:
        """The client says where the turn ends."""
        parts, length, most = [first.samples], len(first.samples), _MOST_TURN_SECONDS * self.settings.format.rate
        command = await _next(commands)
        while isinstance(command, _Audio):
            parts.append(command.samples)
            length += len(command.samples)
            if length > most:
                raise BadBody(f"a turn of more than {_MOST_TURN_SECONDS:g} s of audio; commit it earlier", "audio")
            command = await _next(commands)
        if command is None or (isinstance(command, _EndTurn) and not command.keep):
            return command
        rate = self.settings.format.rate
        await self._commit(f"item_{secrets.token_hex(8)}", None)
        async with engine.stream_transcription(
            (np.concatenate(parts), rate),
            request_id=self.client.name,
            beam_size=1,
            language=self.settings.language,
            initial_prompt=self.settings.prompt,
        ) as segments:
            async for segment in segments:
                await self._add(segment.text)
        self._seconds += length / rate
        await self._complete(length / rate)
        return command

    async def _add(self, text: str) -> None:
        text = text if self._text else text.lstrip()  # joined they are the transcript
        self._text += text
        await self.client.tell(
            "conversation.item.input_audio_transcription.delta", item_id=self._item, content_index=0, delta=text
        )

    async def _commit(self, item: str, text: str | None) -> None:
        """The turn's audio is complete."""
        before, self._before, self._item = self._before, item, item
        await self.client.tell("input_audio_buffer.committed", item_id=item, previous_item_id=before)
        content = [{"type": "input_audio", "transcript": text}]
        told = {"id": item, "type": "message", "status": "completed", "role": "user", "content": content}
        await self.client.tell("conversation.item.added", item=told, previous_item_id=before)

    async def _complete(self, seconds: float) -> None:
        """The turn's text is whole."""
        item, text = self._item, self._text.strip()
        self._forget()
        await self.client.tell(
            "conversation.item.input_audio_transcription.completed",
            item_id=item,
            content_index=0,
            transcript=text,
            usage={"type": "duration", "seconds": math.ceil(max(seconds, 0.0))},
        )

    async def _failed(self, error: Exception) -> None:
        item = self._item or f"item_{secrets.token_hex(8)}"
        self._forget()
        await self.client.complain(error)
        await self.client.tell(
            "conversation.item.input_audio_transcription.failed",
            item_id=item,
            content_index=0,
            error=problem_of(error).as_object()["error"],
        )

    def _forget(self) -> None:
        self._item, self._text = None, ""


async def _next(commands: trio.MemoryReceiveChannel[_Command]) -> _Command | None:
    try:
        return await commands.receive()
    except trio.EndOfChannel:
        return None


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1_000)
