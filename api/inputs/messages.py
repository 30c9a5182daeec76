"""Conversations as callers write them: each message is checked once, and separated from its images and audio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from attrs import define, field

from ...core.checks import shown
from ...core.errors import InvalidRequest

Message = Mapping[str, Any]

_MEDIA = ("image", "audio")
_WRITTEN = ("assistant", "tool")  # roles whose messages may be empty, since models and functions write them
_MESSAGE = "{'role': 'user', 'content': a text, or a list of parts}"
_PARTS = "{'type': 'text', 'text': ...}, {'type': 'image', 'image': ...} or {'type': 'audio', 'audio': ...}"
_FETCHED = "URLs are not fetched; give a path, bytes, a PIL image or an array as {'type': 'image', 'image': ...}"
_ELSEWHERE = {
    "image_url": _FETCHED,
    "input_image": _FETCHED,
    "input_audio": "give a path, bytes or an array as {'type': 'audio', 'audio': ...}",
    "audio_url": "URLs are not fetched; give a path, bytes or an array as {'type': 'audio', 'audio': ...}",
    "input_text": "write {'type': 'text', 'text': ...}",
    "video": "videos are not read",
    "video_url": "videos are not read",
}
"""Types of parts in other programs, each with what to do instead."""


@define
class Conversation:
    """The messages of a caller, checked.

    Attributes:
        messages: the messages as chat templates need them, without their images and audio.
        media: the images and audio, each with its type, in order.
        texts: all texts that a chat template may read: contents, earlier reasoning of the model, and arguments of tool
            calls.
        types: the types of all parts, including parts that hold no image or audio.
    """

    messages: list[Message] = field(factory=list, init=False)
    media: list[tuple[str, Any]] = field(factory=list, init=False)
    texts: list[str] = field(factory=list, init=False)
    types: set[str] = field(factory=set, init=False)

    @classmethod
    def of(cls, messages: object) -> Self:
        """Returns the conversation of ``messages``, an empty one for ``None``. Each message has a role, and content
        that is a text or a list of parts. The content may be missing if the message has something else, such as
        ``tool_calls``.

        Raises:
            InvalidRequest: ``messages`` are not a conversation.
        """
        found = cls()
        if messages is None:
            return found
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise InvalidRequest(f"messages={shown(messages)}; allowed: a list of {_MESSAGE}")
        for number, message in enumerate(messages, 1):
            found.messages.append(found._message(message, f"message {number} of {len(messages)}"))
        return found

    def _message(self, message: object, name: str) -> Message:
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{name} is {shown(message)}; allowed: {_MESSAGE}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            fault = f"has role={shown(role)}" if "role" in message else "has no role"
            raise InvalidRequest(
                f"{name} {fault}; allowed: {_MESSAGE}; most chat templates know system, user and assistant"
            )
        if not message.get("tool_calls"):
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            if content is None and role in _WRITTEN:  # templates would write "None"
                message["content"] = content = ""
        if content is None and not message.keys() - {"role", "content"}:
            raise InvalidRequest(f"{name} has no content; allowed: {_MESSAGE}")
        if content is not None and not isinstance(content, str | list | tuple):
            raise InvalidRequest(f"{name} has content={shown(content)}; allowed: a text, or a list of parts: {_PARTS}")
        thought = message.get("reasoning_content")
        self.texts += [text for text in (content, thought) if isinstance(text, str)]
        self.texts += _arguments(message.get("tool_calls"))
        if not isinstance(content, list | tuple):
            return message
        parts = [self._part(part, f"part {number} of {name}") for number, part in enumerate(content, 1)]
        return {**message, "content": parts}

    def _part(self, part: object, name: str) -> Mapping[str, Any]:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            fault = "has no type" if isinstance(part, Mapping) else f"is {shown(part)}"
            raise InvalidRequest(f"{name} {fault}; allowed: {_PARTS}")
        kind, text = part["type"], part.get("text")
        self.types.add(kind)
        if kind == "text":
            if not isinstance(text, str):
                raise InvalidRequest(f"{name} has text={shown(text)}; allowed: a text")
            self.texts.append(text)
            return part
        if kind not in _MEDIA:
            raise InvalidRequest(f"{name} is of type {kind!r}; {_ELSEWHERE.get(kind, f'allowed: {_PARTS}')}")
        if kind in part:
            self.media.append((kind, part[kind]))
            return {"type": kind}
        if len(part) > 1:
            others = ", ".join(sorted(map(str, part.keys() - {"type"})))
            allowed = f"{{'type': {kind!r}, {kind!r}: ...}}"
            raise InvalidRequest(f"{name} is of type {kind!r} and has {others}, but no {kind!r}; allowed: {allowed}")
        return part


def _arguments(calls: object) -> Iterator[str]:
    """Yields the texts in the arguments of ``calls``, which are not checked yet."""
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        found = arguments.values() if isinstance(arguments, Mapping) else (arguments,)
        yield from (one for one in found if isinstance(one, str))
