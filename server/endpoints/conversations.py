"""The messages of a request in the form that the engine reads: images and audio are decoded, and addresses are
fetched."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import trio
from attrs import define
from starlette.requests import Request

from ...api.engine import Engine
from ...api.inputs.audio import load_audio
from ...api.inputs.images import load_image
from ...api.inputs.threads import run_in_thread
from ...core.errors import RequestTooLarge
from ..media import Media, decoded, from_base64
from ..schemas import chat
from ..settings import ServerSettings
from .common import server_of

_GIVEN = ("name", "tool_call_id", "reasoning_content")
_UNUSED: Any = {"index": True, "function": {"parsed_arguments"}}


async def messages_of(request: Request, body: chat.ChatRequest) -> list[dict[str, Any]]:
    """Returns the conversation of ``body``.

    Raises:
        BadBody: a part has invalid base64.
        Refusal: an address that is not allowed.
        RequestTooLarge: the body has more images and audio than a request may have, or they have too many bytes
            together.
    """
    parts = [part for message in body.messages if isinstance(message.content, list) for part in message.content]
    count, most = sum(not isinstance(part, chat.TextPart) for part in parts), server_of(request).settings.max_media
    if count > most:
        raise RequestTooLarge(f"the conversation has {count:,} images and pieces of audio; allowed: up to {most:,}")
    reader = _Reader(server_of(request).media)
    messages = []
    for index, one in enumerate(body.messages):
        await trio.lowlevel.checkpoint()  # thousands of parts take a while: others get a turn
        messages.append(await reader.message(one, body.place_of(index)))
    return messages


class _Reader:
    def __init__(self, media: Media) -> None:
        self._media = media
        self._most = media.settings.max_body_bytes
        self._until = math.inf  # the time limit of all addresses together

    async def message(self, message: chat.ChatMessage, where: str) -> dict[str, Any]:
        told = {name: getattr(message, name) for name in _GIVEN if getattr(message, name) is not None}
        told["role"] = "system" if message.role == "developer" else message.role
        told["content"] = message.content
        if isinstance(message.content, list):
            parts = enumerate(message.content)
            told["content"] = [await self._part(part, f"{where}.{index}") for index, part in parts]
        if message.tool_calls is not None:
            told["tool_calls"] = [call.model_dump(exclude=_UNUSED) for call in message.tool_calls]
        return told

    async def _part(self, part: chat.Part, where: str) -> dict[str, Any]:
        match part:
            case chat.TextPart(text=text):
                return {"type": "text", "text": text}
            case chat.ImagePart(image_url=place):
                return {"type": "image", "image": await self._fetch(place.url, where)}
            case chat.AudioUrlPart(audio_url=place):
                return {"type": "audio", "audio": await self._fetch(place.url, where)}
        audio = await decoded(part.input_audio.data, f"{where}.input_audio.data", from_base64)
        return {"type": "audio", "audio": audio}

    async def _fetch(self, url: str, where: str) -> bytes:
        self._until = min(self._until, trio.current_time() + self._media.settings.url_seconds)
        found = await self._media.fetch(url, where, self._most, self._until)
        self._most -= len(found)
        return found


async def decode_media(
    engine: Engine, body: chat.ChatRequest, messages: list[dict[str, Any]], settings: ServerSettings
) -> None:
    """Replaces the files in ``messages``, which are those of ``body``, by images and samples, once for all answers. The
    engine itself would decode files of any size: a file of a kilobyte may hold a picture of a gigabyte. Kinds of files
    that the model does not read stay unchanged, and the engine refuses them.

    Raises:
        RequestTooLarge: there are more seconds or pixels than one conversation may have.
        UnsupportedAudio: a file is not audio.
        UnsupportedImage: a file is not an image.
    """
    preparer = engine.model.preparer
    room = _Room(settings, settings.max_media_seconds, settings.max_media_pixels)
    for index, message in enumerate(messages):
        for place, part in enumerate(message["content"] if isinstance(message["content"], list) else ()):
            kind = part["type"]
            if preparer is None or kind not in preparer.media:
                continue
            load = partial(room.image, part[kind]) if kind == "image" else partial(room.audio, part[kind], engine)
            try:
                part[kind] = await run_in_thread(load)
            except RequestTooLarge as error:
                raise RequestTooLarge(f"{body.place_of(index)}.{place}: {error}; {room}") from None


@define
class _Room:
    """The seconds and pixels of one conversation that may still be decoded."""

    settings: ServerSettings
    _seconds: float
    _pixels: int

    def audio(self, data: bytes, engine: Engine) -> Any:
        rate, most = engine.model.sampling_rate, min(self._seconds, self.settings.max_audio_seconds)
        samples = load_audio(data, sampling_rate=rate, most_seconds=most)
        self._seconds -= len(samples) / rate
        return samples

    def image(self, data: bytes) -> Any:
        image = load_image(data, most_pixels=self._pixels)
        self._pixels -= image.width * image.height
        return image

    def __str__(self) -> str:
        seconds, pixels = self.settings.max_media_seconds, self.settings.max_media_pixels
        return f"allowed for all of a conversation: {seconds:g} s of audio and {pixels:,} pixels of images"
