"""From the messages of a request to those that the engine takes: images and audio are read, addresses fetched."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from starlette.requests import Request

from ..problems import BadBody
from ..schemas import chat
from .common import server_of

_UNUSED: Any = {"index": True, "function": {"parsed_arguments"}}


async def messages_of(request: Request, body: chat.ChatRequest) -> list[dict[str, Any]]:
    """The conversation of ``body``.

    Raises:
        BadBody: base64 that is none.
        Refusal: an address that is not allowed.
    """
    return [await _message(request, one, f"messages.{index}") for index, one in enumerate(body.messages)]


async def _message(request: Request, message: chat.ChatMessage, where: str) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list):
        parts = [await _part(request, part, f"{where}.content.{index}") for index, part in enumerate(message.content)]
        told["content"] = _plain(parts)
    else:
        told["content"] = message.content
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            told[name] = getattr(message, name)
    if message.tool_calls is not None:
        told["tool_calls"] = [call.model_dump(exclude=_UNUSED) for call in message.tool_calls]
    return told


def _plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A text where there is nothing but text: many templates read no lists."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


async def _part(request: Request, part: chat.Part, where: str) -> dict[str, Any]:
    if isinstance(part, chat.TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, chat.ImagePart):
        return {"type": "image", "image": await server_of(request).media.fetch(part.image_url.url, where)}
    if isinstance(part, chat.AudioUrlPart):
        return {"type": "audio", "audio": await server_of(request).media.fetch(part.audio_url.url, where)}
    return {"type": "audio", "audio": _base64(part.input_audio.data, f"{where}.input_audio.data")}


def _base64(data: str, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadBody(f"{where} is no base64: {error}", where) from None
