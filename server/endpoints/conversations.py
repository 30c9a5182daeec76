"""From the messages of a request to those that the engine takes: images and audio are read, addresses fetched."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ..media import Media, decoded, from_base64
from ..schemas import chat
from .common import server_of

_UNUSED: Any = {"index": True, "function": {"parsed_arguments"}}


async def messages_of(request: Request, body: chat.ChatRequest) -> list[dict[str, Any]]:
    """The conversation of ``body``.

    Raises:
        BadBody: base64 that is none.
        Refusal: an address that is not allowed.
        RequestTooLarge: its images and audio have more bytes together than a request may have.
    """
    reader = _Reader(server_of(request).media)
    return [await reader.message(one, f"messages.{index}") for index, one in enumerate(body.messages)]


class _Reader:
    def __init__(self, media: Media) -> None:
        self._media = media
        self._most = media.settings.max_body_bytes

    async def message(self, message: chat.ChatMessage, where: str) -> dict[str, Any]:
        told: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        if isinstance(message.content, list):
            told["content"] = [
                await self._part(part, f"{where}.content.{index}") for index, part in enumerate(message.content)
            ]
        else:
            told["content"] = message.content
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(message, name) is not None:
                told[name] = getattr(message, name)
        if message.tool_calls is not None:
            told["tool_calls"] = [call.model_dump(exclude=_UNUSED) for call in message.tool_calls]
        return told

    async def _part(self, part: chat.Part, where: str) -> dict[str, Any]:
        match part:
            case chat.TextPart():
                return {"type": "text", "text": part.text}
            case chat.ImagePart():
                return {"type": "image", "image": await self._fetch(part.image_url.url, where)}
            case chat.AudioUrlPart():
                return {"type": "audio", "audio": await self._fetch(part.audio_url.url, where)}
        audio = await decoded(part.input_audio.data, f"{where}.input_audio.data", from_base64)
        return {"type": "audio", "audio": audio}

    async def _fetch(self, url: str, where: str) -> bytes:
        found = await self._media.fetch(url, where, self._most)
        self._most -= len(found)
        return found
