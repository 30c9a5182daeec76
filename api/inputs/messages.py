"""Conversations as callers write them: checked, and parted from their images and audio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.checks import shown
from ...core.errors import InvalidRequest

Message = Mapping[str, Any]

_MEDIA = ("image", "audio")
_MESSAGE = "{'role': 'user', 'content': a text, or a list of parts}"
_PARTS = "{'type': 'text', 'text': ...}, {'type': 'image', 'image': ...} or {'type': 'audio', 'audio': ...}"
_FETCHED = "addresses are not fetched: give a path, bytes, a PIL image or an array as {'type': 'image', 'image': ...}"
_ELSEWHERE = {
    "image_url": _FETCHED,
    "input_image": _FETCHED,
    "input_audio": "give a path, bytes or an array as {'type': 'audio', 'audio': ...}",
    "audio_url": "addresses are not fetched: give a path, bytes or an array as {'type': 'audio', 'audio': ...}",
    "input_text": "write {'type': 'text', 'text': ...}",
    "video": "videos are not read",
    "video_url": "videos are not read",
}
"""Types of parts that other programs have, and what to do instead."""


def check_messages(messages: object) -> None:
    """Raises `InvalidRequest` where ``messages``, if there are any, are no conversation: each has a role, and content
    that is a text or a list of parts. Content may be missing beside something else, such as ``tool_calls``."""
    if messages is None:
        return
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages={shown(messages)}; allowed: a list of {_MESSAGE}")
    for number, message in enumerate(messages, 1):
        _check_message(message, f"message {number} of {len(messages)}")


def _check_message(message: object, name: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name} is {shown(message)}; allowed: {_MESSAGE}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        told = f"has role={shown(role)}" if "role" in message else "has no role"
        raise InvalidRequest(f"{name} {told}; allowed: {_MESSAGE}; most chat templates know system, user and assistant")
    if content is None and not message.keys() - {"role", "content"}:
        raise InvalidRequest(f"{name} has no content; allowed: {_MESSAGE}")
    if content is not None and not isinstance(content, str | list | tuple):
        raise InvalidRequest(f"{name} has content={shown(content)}; allowed: a text, or a list of parts: {_PARTS}")
    for number, part in enumerate(() if isinstance(content, str) else content or (), 1):
        _check_part(part, f"part {number} of {name}")


def _check_part(part: object, name: str) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        told = "has no type" if isinstance(part, Mapping) else f"is {shown(part)}"
        raise InvalidRequest(f"{name} {told}; allowed: {_PARTS}")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{name} has text={shown(part.get('text'))}; allowed: a text")
    if kind in _MEDIA and kind not in part and len(part) > 1:
        others = ", ".join(sorted(map(str, part.keys() - {"type"})))
        allowed = f"{{'type': {kind!r}, {kind!r}: ...}}"
        raise InvalidRequest(f"{name} is of type {kind!r} and has {others}, but no {kind!r}; allowed: {allowed}")
    if kind not in ("text", *_MEDIA):
        raise InvalidRequest(f"{name} is of type {kind!r}; {_ELSEWHERE.get(kind, f'allowed: {_PARTS}')}")


def names_part(messages: Sequence[Message], kind: str) -> bool:
    """True if a message has a part of type ``kind``, be its image or audio in it or beside the messages."""
    contents = [message.get("content") for message in messages]
    return any(part["type"] == kind for parts in contents if isinstance(parts, list | tuple) for part in parts)


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    """All texts of ``messages`` that a chat template may read: of contents, of what the model thought, and of calls."""
    for message in messages:
        thought = message.get("reasoning_content")
        if isinstance(thought, str):
            yield thought
        yield from _arguments(message.get("tool_calls"))
        content = message.get("content")
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if part["type"] == "text")


def _arguments(calls: object) -> Iterator[str]:
    """The texts of the arguments of ``calls``, which nobody has checked yet."""
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        found = arguments.values() if isinstance(arguments, Mapping) else (arguments,)
        yield from (one for one in found if isinstance(one, str))


def without_media(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, Any]]]:
    """The messages as chat templates want them, and their images and audio, in order."""
    found: list[tuple[str, Any]] = []
    return [_without_media(message, found) for message in messages], found


def _without_media(message: Message, found: list[tuple[str, Any]]) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for part in content:
        kind = part["type"]
        if kind in _MEDIA and kind in part:
            found.append((kind, part[kind]))
            parts.append({"type": kind})
        else:
            parts.append(part)
    return {**message, "content": parts}
