"""Conversations as a checkpoint's chat template writes them.

Templates differ in what they take for a content. Those of text models know texts alone, many of the others know lists
of parts alone, and a content of the other kind they refuse, leave out, or write as a list of Python's. So a
conversation with media is given in several forms, and the one that tells all its texts is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import InvalidRequest

Message = Mapping[str, Any]


class Rendered(str):
    """A prompt that a chat template wrote. Its special tokens are in it already, and `TextPreparer` adds none.

    Changing it gives a plain `str`, to which the tokenizer's own special tokens are added.
    """

    __slots__ = ()


def render_texts(tokenizer: Any, messages: Sequence[Message]) -> Rendered:
    """What the tokenizer's chat template makes of ``messages``, which hold texts alone. Parts of text are joined by
    line ends, since templates of text models want texts; the few that refuse texts get parts.

    Raises:
        InvalidRequest: there is no template, or it refuses the messages.
    """
    try:
        return _render(tokenizer, _joined(messages), None)
    except InvalidRequest as error:
        try:
            return _render(tokenizer, _parted(messages), None)
        except InvalidRequest:
            raise error from error.__cause__


def render_parts(tokenizer: Any, messages: Sequence[Message], *, template: str | None) -> Rendered:
    """What ``template``, or else the tokenizer's own chat template, makes of ``messages``, which may hold images or
    audio. Texts become lists with one part, or lists of texts one text, where some text would be missing otherwise.

    Raises:
        InvalidRequest: there is no template, or it refuses the messages.
    """
    return _fullest(tokenizer, template, messages, [messages, _parted(messages), _joined(messages)])


def _fullest(
    tokenizer: Any, template: str | None, messages: Sequence[Message], forms: Sequence[Sequence[Message]]
) -> Rendered:
    """The first of ``forms`` that tells all texts, or else the first of those that tell most of them."""
    texts = [text for message in messages for text in _texts(message)]
    best, most, refusals = None, -1, list[InvalidRequest]()
    for form in forms:
        try:
            rendered = _render(tokenizer, form, template)
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


def _render(tokenizer: Any, messages: Sequence[Message], template: str | None) -> Rendered:
    """As the template has it, up to where the assistant's turn begins."""
    if not (template or tokenizer.chat_template):
        raise InvalidRequest("the checkpoint has no chat template; write the prompt as text")
    if not messages:
        raise InvalidRequest("no messages; a conversation has one or more")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs of others, and raise what they like
        raise InvalidRequest(
            f"the checkpoint's chat template refuses the messages: {type(error).__name__}: {error}"
        ) from error
    return Rendered(text)
