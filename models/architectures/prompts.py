"""Prompts as the model reads them: text becomes tokens, a conversation becomes text, and each placeholder of an image
or audio becomes as many tokens as the item has embeddings.

Chat templates differ in the contents that they accept. Templates of text models accept only texts, and many others
accept only lists of parts. They refuse contents of the other kind, leave them out, or write them as a Python list.
Therefore a conversation with media is rendered in several forms, and the first rendering that shows all its texts is
taken.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen
from torch import Tensor

from ...core.checks import check_characters
from ...core.errors import InvalidRequest
from ...core.model import Prepared
from ...core.request import EncoderItem
from ...core.tools import Tool
from ..checkpoints.gguf_tokenizer import GgufTokenizer
from ..machine.defaults import OwnDefaults
from .conversations import Rendered, render, template_of

# -- contents of messages ----------------------------------------------------------------------------------------------


Message = Mapping[str, Any]
Form = Callable[[Sequence[Message]], Sequence[Message]]
"""Writes messages anew, with the same texts."""


def render_fullest(tokenizer: Any, messages: Sequence[Message], forms: Sequence[Form], **options: Any) -> Rendered:
    """Renders ``messages`` in the first of ``forms`` in which the chat template shows all texts. If there is none, in
    the first that shows the most texts. ``options`` and errors are as in `render`."""
    texts = [text for message in messages for text in _texts(message)]
    best, most, refusals = None, -1, list[InvalidRequest]()
    for form in forms:
        formed = form(messages)
        try:
            rendered = render(tokenizer, formed, **options)
        except InvalidRequest as error:
            refusals.append(error)
            continue
        told = 0 if _has_python(rendered, formed) else sum(text in rendered for text in texts)
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


TEXTS: tuple[Form, ...] = (_joined, _parted)
"""The forms of conversations of texts alone: templates of text models expect a text, and a few refuse texts."""
PARTS: tuple[Form, ...] = (list, _parted, _joined)
"""The forms of conversations that may have images or audio, or whose template itself reads parts."""
_LOOP = re.compile(r"""\bfor\s+\w+\s+in\s+(?:\w+(?:\.|\[["']))?content\b""")


def _told_apart(value: Any, marks: tuple[str, ...]) -> Any:
    """Returns ``value``, a part of a conversation, in whose texts each of ``marks`` has a blank of no width behind its
    first character, so that it is no mark."""
    if isinstance(value, Mapping):
        return {name: _told_apart(one, marks) for name, one in value.items()} if marks else value
    if isinstance(value, list | tuple):
        return [_told_apart(one, marks) for one in value]
    if isinstance(value, str):
        for mark in marks:
            value = value.replace(mark, f"{mark[0]}\u200b{mark[1:]}")
    return value


# -- prompts -----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class TextPreparer:
    """Prompts of models that read text alone."""

    tokenizer: Any
    types: int = 0  # of tokens, which an encoder has; 0: it reads none
    media: frozenset[str] = frozenset()
    needs_prompt: bool = True
    chat_template: str | None = field(default=None, repr=False)  # a chat template that overrides the tokenizer's own
    forms: ClassVar[tuple[Form, ...]] = TEXTS

    @classmethod
    def of(cls, tokenizer: Any, types: int = 0) -> TextPreparer:
        """Makes the preparer for a transformers tokenizer."""
        return cls(tokenizer=settled(tokenizer), types=types)

    @property
    def converses(self) -> bool:
        """True if there is a chat template."""
        return bool(self.chat_template or self.tokenizer.chat_template)

    def with_items(self, prompt: str, count: int) -> str:  # noqa: ARG002  (see `Preparer`)
        """Returns ``prompt`` unchanged, since text models have no items."""
        return prompt

    def read_media(self, given: Sequence[Any]) -> Sequence[Any]:
        """Returns ``given`` unread, since `prepare` refuses all media."""
        return given

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Returns the tokens of ``prompt``: the same as ``tokenizer(prompt)`` or, for a rendered conversation, as
        ``tokenizer.apply_chat_template``.

        Raises:
            InvalidRequest: there are images or audio, which this model does not read.
        """
        _refuse("images", images, "reads text only")
        _refuse("audio", audio, "reads text only")
        if not isinstance(prompt, str):
            return Prepared(token_ids=tuple(prompt))
        return Prepared(token_ids=tokenize(self.tokenizer, prompt, special=not isinstance(prompt, Rendered)))

    def prepare_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int | None]:
        """Returns the tokens of two texts, the same as ``tokenizer(first, second)``, and the index of the first token
        of type 1.

        Raises:
            InvalidRequest: the model has no type 1.
        """
        check_characters(first)
        check_characters(second)
        encoded = self.tokenizer(first, second, verbose=False)
        types = encoded.get("token_type_ids") or []
        if 1 in types and self.types == 1:
            raise InvalidRequest(
                "the tokenizer gives the second text of a pair the type 1, and the model has type 0 alone "
                "(type_vocab_size=1); allowed: a tokenizer without token_type_ids in model_input_names of its "
                "tokenizer_config.json"
            )
        return tuple(encoded["input_ids"]), types.index(1) if 1 in types else None

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that stand for items in a prompt."""
        return ()

    def template(self, *, tools: bool) -> str:
        """Returns the chat template that renders conversations, with ``tools`` or without."""
        return template_of(self.tokenizer, self.chat_template, tools=tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        placed: bool = False,
    ) -> str:
        """Renders a conversation as a prompt by the chat template, up to the beginning of the assistant's turn. Unless
        they are ``placed``, the placeholders in its texts are text.

        Raises:
            InvalidRequest: there is no template, or it refuses the messages or ignores tools, tool calls or an option.
        """
        if not placed:
            messages = [_told_apart(message, self.marks) for message in messages]
        given = {"template": self.chat_template, "tools": tools, "options": options}
        reads_parts = _LOOP.search(self.template(tools=bool(tools)))
        return render_fullest(self.tokenizer, messages, PARTS if reads_parts else self.forms, **given)


@frozen(kw_only=True)
class ReadItem:
    """One image or audio after the family has read it."""

    payload: Mapping[str, Tensor] = field(repr=False)  # the input of `Family.encode`, on the CPU
    text: str = field(repr=False)  # its text in the prompt: ``embeddings`` placeholders, and texts around
    embeddings: int
    grid: tuple[int, ...] = ()  # see `Placeholder`
    key: str = ""  # the key of its payload, if it is known
    notes: Mapping[str, str] = field(factory=dict)  # each text of the prompt that the item replaces, the first time
    beside: ReadItem | None = field(default=None, repr=False)  # the item as one of several in a prompt, if that differs


@frozen(kw_only=True)
class MediaPreparer(TextPreparer):
    """Prompts with images, or with audio, placed among the tokens."""

    sampling_rate: int  # of the audio, in Hz; 0 for images
    placeholder: str  # stands for one item in a prompt
    placeholder_id: int
    embedded_id: int  # stands for one embedding
    written: str  # an item that we place ourselves: the placeholder, with the texts around it
    identity: str  # hash of all that an encoder output depends on, except the item
    embedding_bytes: int
    unread: tuple[tuple[str, int], ...]  # tokens of media that are not read, such as videos, with ids
    medium: str  # "image" or "audio"
    processor: Any = field(repr=False)  # as `Family.processor` returns it
    needs_item: bool = False  # the weights are right for prompts with items alone
    start: tuple[int, ...] = ()  # see `Family.start`
    _read: Callable[[Any], ReadItem]  # see `Family.read`
    forms: ClassVar[tuple[Form, ...]] = PARTS

    @property
    def marks(self) -> tuple[str, ...]:
        """The placeholder, and the marks of media that are not read."""
        return (self.placeholder, *(text for text, _ in self.unread))

    def with_items(self, prompt: str, count: int) -> str:
        """Returns ``prompt`` with the placeholders of ``count`` items in front of it, unless it has placeholders
        already.
        """
        return prompt if self.placeholder in prompt else self.written * count + prompt

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Returns the same tokens and items as the checkpoint's own processor; see `Preparer`.

        Raises:
            InvalidRequest: placeholders and items do not match, or an item cannot be read.
        """
        given, other = (images, ("audio", audio)) if self.medium == "image" else (audio, ("images", images))
        _refuse(*other, f"reads text and {self.medium}")
        if self.needs_item and not given:
            raise InvalidRequest(
                f"the prompt has no {self.medium}, but the checkpoint's adapter, which is merged into the weights, is "
                f"for prompts with {self.medium}; give {self.medium}=..., or open a model of text"
            )
        if self.start and not prompt:
            return self._add(self.start, self.read_media(given))
        if not isinstance(prompt, str):
            return self._prepare_tokens(tuple(prompt), given)
        self._check_unread([text for text, _ in self.unread if text in prompt])
        self._check_count(prompt.count(self.placeholder), len(given))
        read = self.read_media(given)
        between = [*(item.text for item in read), ""]
        text = "".join(map("".join, zip(prompt.split(self.placeholder), between, strict=True)))
        for mark, written in (note for item in read for note in item.notes.items()):
            text = text.replace(mark, written, 1)
        begin = self.tokenizer.bos_token  # a processor adds it to a rendered conversation too, if missing
        special = not (isinstance(prompt, Rendered) and begin is not None and prompt.startswith(begin))
        return self._place(tokenize(self.tokenizer, text, special=special), read)

    def _prepare_tokens(self, token_ids: tuple[int, ...], given: Sequence[Any]) -> Prepared:
        self._check_unread([text for text, token in self.unread if token in token_ids])
        self._check_count(token_ids.count(self.placeholder_id), len(given))
        read = self.read_media(given)
        standing = iter([self._standing(item) for item in read])
        expanded = [next(standing) if token == self.placeholder_id else (token,) for token in token_ids]
        return self._place(tuple(token for part in expanded for token in part), read)

    def _standing(self, item: ReadItem) -> tuple[int, ...]:
        """The tokens that stand for ``item``."""
        if item.text == self.placeholder * item.embeddings:  # placeholders alone need no tokenizer
            return (self.placeholder_id,) * item.embeddings
        return tokenize(self.tokenizer, item.text, special=False)

    def _check_unread(self, found: list[str]) -> None:
        if found:
            raise InvalidRequest(
                f"the prompt has {', '.join(found)}, but the model reads only {self.medium}; leave it out"
            )

    def _check_count(self, placeholders: int, items: int) -> None:
        if placeholders != items:
            kind = "of audio" if self.medium == "audio" else "image" if items == 1 else "images"
            counted = f"{items} {kind} {'was' if items == 1 else 'were'}"
            raise InvalidRequest(
                f"the prompt has {placeholders} of {self.placeholder!r} (token {self.placeholder_id}), but "
                f"{counted} given; write it once for each, where it belongs"
            )

    def read_media(self, given: Sequence[Any]) -> list[ReadItem]:
        """Reads ``given`` as the family does. Items that are read already stay as they are.

        Raises:
            InvalidRequest: an item cannot be read.
        """
        read = []
        for number, item in enumerate(given, 1):
            try:
                with OwnDefaults():
                    read.append(item if isinstance(item, ReadItem) else self._read(item))
            except InvalidRequest as error:
                raise InvalidRequest(f"{self.medium} {number} of {len(given)}: {error}") from error
        return read if len(read) == 1 else [item.beside or item for item in read]

    def _place(self, token_ids: tuple[int, ...], read: list[ReadItem]) -> Prepared:
        if self.start:
            return self._add(token_ids, read)
        places = [index for index, token in enumerate(token_ids) if token == self.embedded_id]
        wanted = sum(item.embeddings for item in read)
        assert len(places) == wanted, f"{len(places)} placeholders for {wanted} embeddings: they were counted wrong"
        items, first = [], 0
        for item in read:
            items.append(self._item(item, places[first : first + item.embeddings]))
            first += item.embeddings
        return Prepared(token_ids=token_ids, items=tuple(items))

    def _add(self, token_ids: tuple[int, ...], read: list[ReadItem]) -> Prepared:
        """Places the one item from the first position on. It goes on where the answer will be."""
        if len(read) != 1 or len(token_ids) >= read[0].embeddings:
            count = sum(item.embeddings for item in read)
            raise InvalidRequest(
                f"{len(read)} pieces of {self.medium} with {count} positions are given for a prompt of "
                f"{len(token_ids)} tokens; allowed: one piece that has more positions than the prompt has tokens"
            )
        return Prepared(token_ids=token_ids, items=(self._item(read[0], list(range(read[0].embeddings))),))

    def _item(self, read: ReadItem, places: list[int]) -> EncoderItem:
        return EncoderItem(
            key=read.key or payload_key(self.identity, read.payload),
            payload=read.payload,
            embeddings=read.embeddings,
            size=read.embeddings * self.embedding_bytes,
            spans=_spans(places),
            grid=read.grid,
        )


def settled(tokenizer: Any) -> Any:
    """Returns ``tokenizer`` ready for several threads. The first call of a tokenizer turns truncation and padding off,
    so it is made here. Later calls change nothing. The tokenizer of a GGUF file makes it itself.
    """
    if not isinstance(tokenizer, GgufTokenizer):
        tokenizer("")
    return tokenizer


def tokenize(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    """Returns the token ids of ``text``; ``special``: including the tokens that the tokenizer puts around every text.

    Raises:
        InvalidRequest: the text has lone surrogates, which are no characters.
    """
    check_characters(text)
    return tuple(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def payload_key(identity: str, payload: Mapping[str, Tensor]) -> str:
    """A hash of ``identity`` and of each tensor's name, kind, shape and content."""
    digest = hashlib.blake2b(identity.encode(), digest_size=32)
    for name, tensor in sorted(payload.items()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _refuse(name: str, given: Sequence[Any], reads: str) -> None:
    if given:
        raise InvalidRequest(f"the request has {len(given)} {name}, but the model {reads}; leave them out")


def _spans(places: list[int]) -> tuple[tuple[int, int], ...]:
    """Turns ascending positions into ranges: 3, 4, 5, 9 become (3, 6), (9, 10)."""
    spans: list[tuple[int, int]] = []
    for place in places:
        if spans and spans[-1][1] == place:
            spans[-1] = (spans[-1][0], place + 1)
        else:
            spans.append((place, place + 1))
    return tuple(spans)
