"""Contents of messages in the form that a chat template reads.

Templates differ in what they take for a content. Those of text models know texts alone, many of the others know lists
of parts alone, and a content of the other kind they refuse, leave out, or write as a list of Python's. So a
conversation with media is given in several forms, and the one that shows all its texts is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...core.errors import InvalidRequest
from .conversations import Rendered, render

Message = Mapping[str, Any]
_Write = Callable[[Sequence[Message]], Rendered]
"""Gives messages to the template."""


def render_texts(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Rendered:
    """Renders ``messages`` that hold texts alone by the tokenizer's chat template. Parts of text are joined by
    line ends, since templates of text models want texts; the few that refuse texts get parts. ``options`` and errors
    are those of `render`."""
    return _fullest(partial(render, tokenizer, **options), messages, [_joined(messages), _parted(messages)])


def render_parts(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Rendered:
    """Renders ``messages`` that may hold images or audio. Texts become lists with one part, or lists of texts one text,
    where some text would be missing otherwise. ``options`` and errors are those of `render`."""
    return _fullest(partial(render, tokenizer, **options), messages, [messages, _parted(messages), _joined(messages)])


def _fullest(write: _Write, messages: Sequence[Message], forms: Sequence[Sequence[Message]]) -> Rendered:
    """The first of ``forms`` that shows all texts, or else the first of those that show most of them."""
    texts = [text for message in messages for text in _texts(message)]
    best, most, refusals = None, -1, list[InvalidRequest]()
    for form in forms:
        try:
            rendered = write(form)
        except InvalidRequest as error:
            refusals.append(error)
            continue
        told = 0 if _has_python(rendered, form) else sum(text in rendered for text in texts)
        if told == len(texts):
            return rendered
        if told > most:
            best, most = rendered, told
    if best is not None:
        return best
    try:
        raise refusals[0]
    finally:
        del refusals  # a frame in its own error's traceback would be a reference cycle


def _has_python(rendered: str, messages: Sequence[Message]) -> bool:
    """True if a list of parts was written as Python writes it."""
    contents = [message.get("content") for message in messages]
    return any(content and not isinstance(content, str) and str(content) in rendered for content in contents)


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content.strip()]
    parts = content if isinstance(content, list | tuple) else ()
    return [str(part["text"]).strip() for part in parts if _is_text(part)]


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _parted(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with a list of one part in place of a text."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _joined(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with one text in place of a list of texts."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list | tuple) and all(map(_is_text, message["content"]))
        else message
        for message in messages
    ]
