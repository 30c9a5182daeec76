"""`Reader`: what the client of a live session says, as commands."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from attrs import define, field
from pydantic import TypeAdapter, ValidationError

from ..body import parsed
from ..problems import BadBody
from ..schemas import realtime as bodies
from .live_audio import Decoder
from .live_backlog import MOST_SAMPLES, Audio, Backlog, EndTurn
from .live_client import Client
from .live_settings import Settings

_MOST_TURN_SECONDS = 600
_MOST_EVENT = 1 << 17  # characters, but for audio: reading more would hold up all other sessions
_MOST_MEMBERS = 16  # of an event with audio: one of three members needs fewer marks
_EVENTS: TypeAdapter[Any] = TypeAdapter(bodies.ClientEvent)


@define(eq=False)
class Reader:
    """Reads all the time, and waits for nobody but the client."""

    client: Client
    settings: Settings
    backlog: Backlog
    _decoder: Decoder = field(init=False)
    _turn: int = field(default=0, init=False)  # samples since the client ended a turn

    def __attrs_post_init__(self) -> None:
        self._decoder = Decoder(self.settings.format)

    async def run(self) -> None:
        """Returns when the client has gone.

        Raises:
            TooMuch: the client says too much, or reads too little.
        """
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
            told = {**self.client.explained(error), "event_id": event_id or _id_of(text)}
            self.client.answer("error", error=told)

    def _obey(self, event: Any) -> None:
        match event:
            case bodies.Append(audio=audio):
                self._append(_decoded(audio))
            case bodies.Commit():
                if not self._turn:
                    raise BadBody("there is no audio to commit; append some first")
                self._end_turn(keep=True)
            case bodies.Clear():
                self._end_turn(keep=False)
                self.client.answer("input_audio_buffer.cleared")
            case bodies.Update(session=session):
                self._update(session, "session.updated")
            case bodies.OldUpdate(session=session):
                self._update(session.renewed(), "transcription_session.updated")

    def _append(self, data: bytes) -> None:
        length = self._decoder.length(data)
        most = min(_MOST_TURN_SECONDS * self.settings.format.rate, MOST_SAMPLES)
        if self.settings.turns is None and self._turn + length > most:
            raise BadBody(
                f"with this a turn would have more than {most:,} samples; allowed: {MOST_SAMPLES:,}, and "
                f"{_MOST_TURN_SECONDS} s. Commit what there is, then append this",
                "audio",
            )
        samples = self._decoder.decode(data)
        if length:
            self.backlog.put(Audio(samples), length)
            self._turn += length

    def _update(self, session: bodies.Session, answer: str) -> None:
        self.settings = self.settings.updated(session)
        self._end_turn(keep=True, then=self.settings)
        self.client.answer(answer, session=self.settings.told(self.client.name))

    def _end_turn(self, *, keep: bool, then: Settings | None = None) -> None:
        self.backlog.put(EndTurn(keep, then), 0 if then is None else len(then.prompt or ""))
        self._turn = 0
        self._decoder = Decoder(self.settings.format)


def _event_of(text: str | None) -> Any:
    if text is None:
        raise BadBody("a message of bytes; allowed: events, which are texts of JSON. Audio goes into one as base64")
    if _is_long_to_read(text):
        raise _too_long(text)
    try:
        event = _EVENTS.validate_json(text)
    except ValidationError as error:
        raise BadBody.of(error, parsed(text)) from None
    if len(text) > _MOST_EVENT and not isinstance(event, bodies.Append):
        raise _too_long(text)
    return event


def _is_long_to_read(text: str) -> bool:
    """Whether ``text`` is large, and has more in it than audio has: one long text, which is read at once."""
    return len(text) > _MOST_EVENT and sum(map(text.count, ",[{")) > _MOST_MEMBERS


def _too_long(text: str) -> BadBody:
    return BadBody(
        f"an event of {len(text):,} characters; allowed: up to {_MOST_EVENT:,}, and more for the base64 of "
        "input_audio_buffer.append alone"
    )


def _id_of(text: str | None) -> str | None:
    """What a client calls its event, even if that is none."""
    event = None if text is None or _is_long_to_read(text) else parsed(text)
    named = event.get("event_id") if isinstance(event, dict) else None
    return named if isinstance(named, str) else None


def _decoded(audio: str) -> bytes:
    try:
        return base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadBody(f"audio is no base64: {error}", "audio") from None
