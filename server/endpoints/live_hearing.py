"""`Turns`: the audio of a live session on its way to text, turn by turn."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
import trio
from attrs import define, field

from ...api.engine import Engine
from ...api.outputs.results import LiveText
from ..server import Server
from .live_backlog import Audio, Backlog, Command, EndTurn
from .live_client import Client
from .live_settings import Settings

_PAUSE_SECONDS = 1.0  # of audio, after a failure of the engine


@define(eq=False)
class Turns:
    """Hears the client's audio, turn by turn."""

    server: Server
    client: Client
    settings: Settings
    backlog: Backlog
    _now: Command | None = field(default=None, init=False)  # what the client said last, of what was taken
    _taken: float = field(default=0.0, init=False)  # seconds of audio
    _before: float = field(default=0.0, init=False)  # of these, before this turn
    _start: float = field(default=0.0, init=False)  # of the utterance
    _end: float | None = field(default=None, init=False)  # of its last word so far
    _item: str | None = field(default=None, init=False)
    _last: str | None = field(default=None, init=False)  # the item before
    _text: str = field(default="", init=False)

    async def run(self) -> None:
        """Returns when no more comes, and all that came is told."""
        await self._next()
        while self._now is not None:
            if isinstance(self._now, Audio):
                await self._turn_or_failure()
            else:
                self.settings = self._now.then or self.settings
                await self._next()

    async def _next(self) -> None:
        self._now = await self.backlog.take()
        if isinstance(self._now, Audio):
            self._taken += len(self._now.samples) / self.settings.format.rate

    @property
    def _is_unwanted(self) -> bool:
        """Whether the client has ended the turn and does not want its text."""
        return isinstance(self._now, EndTurn) and not self._now.keep

    async def _turn_or_failure(self) -> None:
        try:
            await self._turn()
        except Exception as error:  # noqa: BLE001  (told; the next turn may go better)
            again = await self._failed(error)
            await self._skip(again)

    async def _turn(self) -> None:
        """Hears the audio that there is now, and what follows, until there is something else."""
        assert isinstance(self._now, Audio), "a turn begins with audio"
        self._before = self._taken - len(self._now.samples) / self.settings.format.rate
        async with self.server.use(self.settings.model or "") as engine:
            if self.settings.turns is None:
                await self._collected(engine)
            else:
                await self._heard(engine)

    async def _skip(self, seconds: float) -> None:
        """What follows of a turn that has failed is not heard, for ``seconds`` or up to the turn's end."""
        until = self._taken + seconds
        while isinstance(self._now, Audio) and self._taken <= until:
            await self._next()

    # -- the server finds where somebody speaks ------------------------------------------------------------------------

    async def _heard(self, engine: Engine) -> None:
        session = engine.live(request_id=self.client.name, **self.settings.options())
        async with session as live, trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_all, live)
            while isinstance(self._now, Audio):
                await live.feed(self._now.samples)
                await self._next()
            if self._is_unwanted:
                nursery.cancel_scope.cancel()
            else:
                await live.finish()
        self._forget()

    async def _tell_all(self, live: Any) -> None:
        async for update in live:
            await self._tell(update)

    async def _tell(self, update: LiveText) -> None:
        start = self._before + (update.position if update.start is None else update.start)
        if self._item is None:
            self._item, self._start = _new_item(), start
            await self.client.tell(
                "input_audio_buffer.speech_started", audio_start_ms=_milliseconds(start), item_id=self._item
            )
        self._start = min(self._start, start)
        self._end = self._end if update.end is None else self._before + update.end
        if update.stable:
            await self._add(update.stable)
        if "triolet.provisional" in self.settings.include:
            await self.client.tell("triolet.provisional", item_id=self._item, text=update.provisional)
        if update.ends_utterance:
            await self._end_utterance(self._item, self._before + update.position if self._end is None else self._end)

    async def _end_utterance(self, item: str, end: float) -> None:
        await self.client.tell("input_audio_buffer.speech_stopped", audio_end_ms=_milliseconds(end), item_id=item)
        await self._commit(item, self._text.strip())
        await self._complete(end - self._start)

    # -- the client says where the turn ends ---------------------------------------------------------------------------

    async def _collected(self, engine: Engine) -> None:
        parts = []
        while isinstance(self._now, Audio):
            parts.append(self._now.samples)
            await self._next()
        if self._is_unwanted:
            return
        rate = self.settings.format.rate
        await self._commit(_new_item(), None)
        async with engine.stream_transcription(
            (np.concatenate(parts), rate),
            request_id=self.client.name,
            beam_size=1,
            language=self.settings.language,
            initial_prompt=self.settings.prompt,
        ) as segments:
            async for segment in segments:
                await self._add(segment.text)
        await self._complete(self._taken - self._before)

    # -- what is told --------------------------------------------------------------------------------------------------

    async def _add(self, text: str) -> None:
        text = text if self._text else text.lstrip()  # joined they are the transcript
        self._text += text
        await self.client.tell(
            "conversation.item.input_audio_transcription.delta", item_id=self._item, content_index=0, delta=text
        )

    async def _commit(self, item: str, text: str | None) -> None:
        """The turn's audio is complete."""
        before, self._last, self._item = self._last, item, item
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

    async def _failed(self, error: Exception) -> float:
        """Tells ``error``, of the item if the client knows one. Returns how many seconds of audio go by before another
        attempt: without end where it would fail alike, or where the client says when the turn is over."""
        item, told = self._item, self.client.explained(error)
        self._forget()
        if item is None:
            await self.client.tell("error", error={**told, "event_id": None})
        else:
            await self.client.tell(
                "conversation.item.input_audio_transcription.failed", item_id=item, content_index=0, error=told
            )
        fails_alike = told["type"] == "invalid_request_error"
        return math.inf if fails_alike or self.settings.turns is None else _PAUSE_SECONDS

    def _forget(self) -> None:
        self._item, self._text, self._end = None, "", None


def _new_item() -> str:
    return f"item_{secrets.token_hex(8)}"


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1_000)
