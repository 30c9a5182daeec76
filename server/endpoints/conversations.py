"""The messages of a request in the form that the engine reads: images and audio are decoded, and addresses are
fetched."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from attrs import define, field
from starlette.requests import Request

from ...api.engine import Engine
from ...api.inputs.audio import load_audio, promised_seconds
from ...api.inputs.images import load_image, pixels_of
from ...api.inputs.threads import run_in_thread
from ...core.budget import Account
from ...core.errors import RequestTooLarge
from ..heap import trim
from ..media import Media, decoded, from_base64
from ..schemas import chat
from ..server import Server
from .common import exchange_of, server_of

_GIVEN = ("name", "tool_call_id")
_OF_PIXEL, _OF_IMAGE = 24, 2**22  # bytes while an image is decoded and read, for each pixel and for the image
_OF_SAMPLE = 16  # bytes while audio is
_LARGE = 2**24  # bytes: the memory of larger work is given back to the system at once
_SLACK_SECONDS = 5.0  # of audio beyond what its header promises
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
    count, most = sum(not isinstance(part, chat.SpokenPart) for part in parts), server_of(request).settings.max_media
    if count > most:
        raise RequestTooLarge(f"the conversation has {count:,} images and pieces of audio; allowed: up to {most:,}")
    reader = _Reader(server_of(request).media, exchange_of(request).account)
    messages = []
    for index, one in enumerate(body.messages):
        await trio.lowlevel.checkpoint()  # thousands of parts take a while: others get a turn
        messages.append(await reader.message(one, body.place_of(index)))
    return messages


class _Reader:
    def __init__(self, media: Media, account: Account) -> None:
        self._media = media
        self._account = account
        self._most = media.settings.max_body_bytes
        self._until = math.inf  # the time limit of all addresses together

    async def message(self, message: chat.ChatMessage, where: str) -> dict[str, Any]:
        told = {name: getattr(message, name) for name in _GIVEN if getattr(message, name) is not None}
        told["role"] = "system" if message.role == "developer" else message.role
        told["content"] = message.refusal if message.content is None else message.content
        thought = [message.reasoning_content or message.reasoning]
        if isinstance(message.content, list):
            thought += [part.text for part in message.content if isinstance(part, chat.ThinkingPart)]
            parts = _without_thinking(message.content)
            told["content"] = [await self._part(part, f"{where}.{index}") for index, part in parts] or ""
        if any(thought):
            told["reasoning_content"] = "\n".join(filter(None, thought))
        if message.tool_calls is not None:
            told["tool_calls"] = [call.model_dump(exclude=_UNUSED) for call in message.tool_calls]
        return told

    async def _part(self, part: chat.ContentPart, where: str) -> dict[str, Any]:
        match part:
            case chat.TextPart(text=text) | chat.RefusalPart(text=text) | chat.ThinkingPart(text=text):
                return {"type": "text", "text": text}
            case chat.ImagePart(image_url=place):
                return {"type": "image", "image": await self._fetch(place.url, where)}
            case chat.AudioUrlPart(audio_url=place):
                return {"type": "audio", "audio": await self._fetch(place.url, where)}
        audio = await decoded(part.input_audio.data, f"{where}.input_audio.data", from_base64, self._account)
        return {"type": "audio", "audio": audio}

    async def _fetch(self, url: str, where: str) -> bytes:
        self._until = min(self._until, trio.current_time() + self._media.settings.url_seconds)
        found = await self._media.fetch(url, where, self._most, self._until, self._account)
        self._most -= len(found)
        return found


def _without_thinking(content: object) -> list[tuple[int, chat.ContentPart]]:
    """Returns the parts of ``content`` that the chat template gets in its place, each with its place in the request."""
    parts = content if isinstance(content, list) else ()
    return [(place, part) for place, part in enumerate(parts) if not isinstance(part, chat.ThinkingPart)]


async def decode_media(
    engine: Engine, body: chat.ChatRequest, messages: list[dict[str, Any]], request: Request
) -> None:
    """Replaces the files in ``messages``, which are those of ``body``, by what the model reads, once for all answers.
    The engine itself would decode files of any size: a file of a kilobyte may hold a picture of a gigabyte. Here the
    memory for a picture is taken before it is decoded, and given back but for what the model needs of it. Kinds of
    files that the model does not read stay unchanged, and the engine refuses them.

    Raises:
        Overloaded: there is no memory for an image or audio.
        RequestTooLarge: there are more seconds or pixels than one conversation may have.
        UnsupportedAudio: a file is not audio.
        UnsupportedImage: a file is not an image.
    """
    preparer, server = engine.model.preparer, server_of(request)
    room = _Room(engine, server, exchange_of(request).account)
    for index, message in enumerate(messages):
        sent = _without_thinking(body.messages[index].content)
        for (place, _), part in zip(sent, message["content"] if sent else (), strict=True):
            kind = part["type"]
            if preparer is None or kind not in preparer.media:
                continue
            try:
                part[kind] = await (room.image if kind == "image" else room.audio)(part[kind])
            except RequestTooLarge as error:
                raise RequestTooLarge(f"{body.place_of(index)}.{place}: {error}; {room}") from None


@define
class _Room:
    """The seconds and pixels of one conversation that may still be decoded, and its memory."""

    engine: Engine
    server: Server
    account: Account
    _seconds: float = field(init=False)
    _pixels: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._seconds, self._pixels = self.server.settings.max_media_seconds, self.server.settings.max_media_pixels

    async def audio(self, data: bytes) -> Any:
        rate, most = self.engine.model.sampling_rate, min(self._seconds, self.server.settings.max_audio_seconds)
        promised = await run_in_thread(partial(promised_seconds, data, rate))
        likely = min(most, promised + _SLACK_SECONDS)
        for seconds in (likely, most):  # a header may promise too little
            load = partial(load_audio, data, sampling_rate=rate, most_seconds=seconds)
            try:
                read, samples = await self._read(load, math.ceil(_OF_SAMPLE * rate * seconds))
                break
            except RequestTooLarge:
                if seconds == most:
                    raise
        self._seconds -= samples / rate
        return read

    async def image(self, data: bytes) -> Any:
        pixels = await run_in_thread(partial(pixels_of, data, self._pixels))
        self._pixels -= pixels
        read, _ = await self._read(partial(load_image, data), _OF_PIXEL * pixels + _OF_IMAGE)
        return read

    async def _read(self, load: Callable[[], Any], size: int) -> tuple[Any, Any]:
        """Returns what the model reads of what ``load`` returns, and its size. ``size``: the bytes that the work
        takes meanwhile."""
        preparer: Any = self.engine.model.preparer

        def work() -> tuple[Any, Any]:
            loaded = load()
            [read], length = preparer.read_media([loaded]), loaded.size
            del loaded
            if size > _LARGE:
                trim()
            return read, length

        await self.server.wait_for_memory(self.account, size)
        try:
            found = await run_in_thread(work)
        finally:
            self.account.give(size)
        self.account.take(sum(one.nbytes for one in found[0].payload.values()))
        return found

    def __str__(self) -> str:
        settings = self.server.settings
        seconds, pixels = settings.max_media_seconds, settings.max_media_pixels
        return f"allowed for all of a conversation: {seconds:g} s of audio and {pixels:,} pixels of images"
