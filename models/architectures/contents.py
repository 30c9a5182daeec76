"""Contents of messages in the form that a chat template reads.

Templates differ in the contents that they accept. Templates of text models accept only texts, and many others accept
only lists of parts. They refuse contents of the other kind, leave them out, or write them as a Python list. Therefore a
conversation with media is rendered in several forms, and the first rendering that shows all its texts is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...core.errors import InvalidRequest
from .conversations import Rendered, render

Message = Mapping[str, Any]
_Write = Callable[[Sequence[Message]], Rendered]
"""Renders messages by the template."""


def render_texts(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Rendered:
    """Renders ``messages`` that hold texts alone by the tokenizer's chat template. Text parts are joined by line ends,
    since templates of text models expect a text; the few templates that refuse texts get parts. ``options`` and errors
    are as in `render`."""
    write: _Write = partial(render, tokenizer, **options)
    try:
        return write(_joined(messages))
    except InvalidRequest as error:
        try:
            return write(_parted(messages))
        except InvalidRequest:
            raise error from error.__cause__


def render_parts(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Rendered:
    """Renders ``messages`` that may hold images or audio. If a text is missing from the prompt, renders them again,
    with each text as a list of one part, or each list of texts as one text. ``options`` and errors are as in `render`.
    """
    return _fullest(partial(render, tokenizer, **options), messages, [messages, _parted(messages), _joined(messages)])


def _fullest(write: _Write, messages: Sequence[Message], forms: Sequence[Sequence[Message]]) -> Rendered:
    """Returns the rendering of the first of ``forms`` that shows all texts. If none does, returns the first rendering
    that shows the most texts."""
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
    """True if the template wrote a list of parts as a Python list."""
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
    """Returns the messages with each text replaced by a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _joined(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns the messages with each list of texts replaced by one text."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list | tuple) and all(map(_is_text, message["content"]))
        else message
        for message in messages
    ]
