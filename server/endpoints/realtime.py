"""``/v1/realtime``: live audio over a WebSocket, in the shape of OpenAI's realtime transcription.

::

    client -> `_Session` -> `Backlog` -> `Turns` -> engine -> events -> `LiveClient.write` -> client
              checks        bounded      one after another    bounded

A session begins with the first audio. If the settings change, or the client ends a turn itself, the rest of the text of
the audio so far is sent, and the next audio begins a new turn. When the server stops, a session takes no more audio,
sends the text of the audio that it has, and closes. At any time the session notices at once if the client goes away.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import trio
from attrs import define, field
from pydantic import TypeAdapter, ValidationError
from starlette.websockets import WebSocket

from ...core.errors import Overloaded
from ..body import parsed
from ..media import from_base64
from ..problems import BadBody, Problem, problem_of
from ..schemas import realtime as bodies
from ..server import Server
from .live_turns import MOST_SAMPLES, Backlog, EndTurn, LiveClient, LiveSettings, MoreAudio, Samples, TooMuch, Turns

_GOING_AWAY, _POLICY, _LATER = 1001, 1008, 1013  # RFC 6455, section 7.4.1, and IANA's registry
_CLOSE_SECONDS = 5.0  # for the client's answer: an earlier close might lose the last events
_TIME_IS_OVER = Problem(503, "the server is stopping, and the time for open sessions is over; connect again later")
_MOST_TURN_SECONDS = 600
_MOST_EVENT = 1 << 17  # characters of events without audio: parsing longer ones would delay all other sessions
_MOST_MEMBERS = 16  # signs that begin a member, an item or an object; an event with audio has fewer
_EVENTS: TypeAdapter[Any] = TypeAdapter(bodies.ClientEvent)
_CODECS = {"audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}  # FFmpeg's names


async def listen(socket: WebSocket) -> None:
    """Serves one WebSocket to its end."""
    server: Server = socket.app.state.server
    models = tuple(server.engines.models)
    model = socket.query_params.get("model") or (models[0] if len(models) == 1 else None)
    settings = LiveSettings(heard=bodies.LiveModel.model_construct(model=model))  # a turn says if it is none
    account = server.budget.account()
    client, backlog = LiveClient(socket, socket.scope["request_id"], account), Backlog(account)
    session = _Session(client, settings, backlog, Turns(server, client, settings, backlog))

    async def close_on_stop() -> None:
        await server.stop_called.wait()
        backlog.close()

    outcome = "failed"
    try:
        with account, server.socket_open(session.cut_off):
            await socket.accept("realtime" if "realtime" in socket.scope.get("subprotocols", ()) else None)
            await client.tell("session.created", session=settings.told(client.name))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.read, nursery.cancel_scope)
                nursery.start_soon(session.hear)
                nursery.start_soon(close_on_stop)
                await client.write()
                await trio.sleep(_CLOSE_SECONDS)
                nursery.cancel_scope.cancel()
        outcome = session.turns.outcome
    finally:
        if session.turns.has_audio:
            server.one_ended(session.settings.heard.model, outcome)


@define(eq=False)
class _Session:
    """One client's session. It always reads from the client, and never waits for anything else."""

    client: LiveClient
    settings: LiveSettings
    backlog: Backlog
    turns: Turns
    _decoder: SampleDecoder = field(init=False)
    _turn: int = field(default=0, init=False)  # samples since the client last ended a turn
    _hears: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    def __attrs_post_init__(self) -> None:
        self._decoder = SampleDecoder(self.settings.format)

    async def read(self, whole_session: trio.CancelScope) -> None:
        """Reads until the client has gone, and then cancels ``whole_session``."""
        try:
            await self._read_all()
        except TooMuch as error:
            self._give_up(_POLICY, Problem(429, str(error)))
            await self._read_all()
        except Overloaded as error:
            self._give_up(_LATER, problem_of(error))
            await self._read_all()
        whole_session.cancel()

    async def hear(self) -> None:
        """Passes turns to the engine until the server stops."""
        with self._hears:
            try:
                await self.turns.run()
            except Overloaded as error:  # there is not even memory to tell of it
                self._give_up(_LATER, problem_of(error))
        self.client.end(_GOING_AWAY, "the server is stopping")

    def cut_off(self) -> None:
        """Ends the session at once, since the server waits no longer."""
        self._give_up(_GOING_AWAY, _TIME_IS_OVER)

    def _give_up(self, code: int, why: Problem) -> None:
        self.turns.has_failed = True
        self.client.end(code, why.message, why)
        self.backlog.close()
        self._hears.cancel()

    async def _read_all(self) -> None:
        message = await self.client.socket.receive()
        while message["type"] != "websocket.disconnect":
            if not self.backlog.is_closed:
                self._read(message.get("text"))
            message = await self.client.socket.receive()

    def _read(self, text: str | None) -> None:
        event_id = None
        try:
            event = _event_of(text)
            event_id = event.event_id
            self._obey(event)
        except BadBody as error:
            self.client.answer("error", error={**self.client.explained(error), "event_id": event_id or _id_of(text)})

    def _obey(self, event: Any) -> None:
        match event:
            case bodies.Append(audio=audio):
                self._append(from_base64(audio, "audio"))
            case bodies.Commit():
                if not self._turn:
                    raise BadBody("there is no audio to commit; append audio first")
                self._end_turn(keep=True)
            case bodies.Clear():
                self._end_turn(keep=False)
                self.client.answer("input_audio_buffer.cleared")
            case bodies.Update(session=session):
                self.settings = self.settings.updated(session)
                self._end_turn(keep=True, then=self.settings)
                self.client.answer("session.updated", session=self.settings.told(self.client.name))

    def _append(self, data: bytes) -> None:
        length = self._decoder.length(data)
        most = min(_MOST_TURN_SECONDS * self.settings.format.rate, MOST_SAMPLES)
        if self.settings.turns is None and self._turn + length > most:
            raise BadBody(
                f"with this audio the turn would have more than {most:,} samples; allowed: up to {MOST_SAMPLES:,} "
                f"samples and {_MOST_TURN_SECONDS} s. Commit the audio so far, then append this",
                "audio",
            )
        samples = self._decoder.decode(data)
        if length:
            self.backlog.put(MoreAudio(samples), length)
            self._turn += length

    def _end_turn(self, *, keep: bool, then: LiveSettings | None = None) -> None:
        self.backlog.put(EndTurn(keep, then), 0 if then is None else then.length)
        self._turn = 0
        self._decoder = SampleDecoder(self.settings.format)


def _event_of(text: str | None) -> Any:
    if text is None:
        raise BadBody(
            "the message is bytes; allowed: events, which are JSON as text. Put audio into an event as base64"
        )
    try:
        event = None if _is_long_to_read(text) else _EVENTS.validate_json(text)
    except ValidationError as error:
        raise BadBody.of(error, parsed(text)) from None
    if event is None or (len(text) > _MOST_EVENT and not isinstance(event, bodies.Append)):
        raise BadBody(
            f"the event has {len(text):,} characters; allowed: up to {_MOST_EVENT:,}, and more only for the base64 "
            "of input_audio_buffer.append"
        )
    return event


def _is_long_to_read(text: str) -> bool:
    """True if parsing ``text`` takes long: it is large and has many parts. Audio is a single long text, which is parsed
    fast."""
    return len(text) > _MOST_EVENT and sum(map(text.count, ",[{")) > _MOST_MEMBERS


def _id_of(text: str | None) -> str | None:
    """Returns the id that a client gave its event, even if the event is invalid."""
    event = None if text is None or _is_long_to_read(text) else parsed(text)
    named = event.get("event_id") if isinstance(event, dict) else None
    return named if isinstance(named, str) else None


@define(eq=False)
class SampleDecoder:
    """Decodes bytes of one format to samples. A sample may be cut between two pieces of bytes."""

    format: bodies.Pcm | bodies.G711
    _rest: bytes = field(default=b"", init=False)

    def length(self, data: bytes) -> int:
        """Returns the number of samples that `decode` would return for ``data``."""
        return len(data) if isinstance(self.format, bodies.G711) else (len(self._rest) + len(data)) // 2

    def decode(self, data: bytes) -> Samples:
        """Decodes ``data``. Returns int16 samples, mono, at the format's rate."""
        if isinstance(self.format, bodies.Pcm):
            data = self._rest + data
            whole = len(data) - len(data) % 2
            self._rest = data[whole:]
            return np.frombuffer(data[:whole], "<i2").astype(np.int16)
        if not data:
            return np.zeros(0, np.int16)
        import av

        context: Any = av.CodecContext.create(_CODECS[self.format.type], "r")
        context.sample_rate, context.layout = 8_000, "mono"
        return np.concatenate([frame.to_ndarray().reshape(-1) for frame in context.decode(av.Packet(data))])
