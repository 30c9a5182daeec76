"""Prompts as the model reads them: text becomes tokens, a conversation becomes text.

What is placed among the tokens, images and audio, is in `vision` and `hearing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from ..core.errors import InvalidRequest
from ..core.model import Prepared


class Rendered(str):
    """A prompt that a chat template wrote. It has its special tokens already: tokenizing it adds none.

    Changing it gives a plain `str`, to which the tokenizer's own special tokens are added.
    """

    __slots__ = ()


@frozen(kw_only=True)
class TextPreparer:
    """Prompts of models that read text alone."""

    tokenizer: Any
    media: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any) -> TextPreparer:
        """For a transformers tokenizer, which settles on its first call how it truncates and pads; later ones only read.
        So they can come from several threads."""
        tokenizer("")
        return cls(tokenizer=tokenizer)

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Tokens of ``prompt``, as ``tokenizer(prompt)`` gives them; those of a rendered conversation as
        ``tokenizer.apply_chat_template`` does.

        Raises:
            InvalidRequest: there are images or audio, which this model does not read.
        """
        for name, given in (("image", images), ("audio", audio)):
            if given:
                raise InvalidRequest(f"{len(given)} of {name}, but the model reads text only; leave them out")
        if not isinstance(prompt, str):
            return Prepared(token_ids=tuple(prompt))
        return Prepared(token_ids=tokenize(self.tokenizer, prompt, special=not isinstance(prompt, Rendered)))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, by the tokenizer's chat template, up to where the assistant's turn begins."""
        return render(self.tokenizer, messages)


def tokenize(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    """The ids of ``text``; ``special``: with the tokens that the tokenizer puts around every text."""
    return tuple(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def render(templates: Any, messages: Sequence[Mapping[str, Any]]) -> Rendered:
    """What the chat template of ``templates``, a tokenizer or processor, makes of ``messages``.

    Raises:
        InvalidRequest: there is no template, or it refuses the messages.
    """
    if not templates.chat_template:
        raise InvalidRequest("the checkpoint has no chat template; write the prompt as text")
    if not messages:
        raise InvalidRequest("no messages; a conversation has one or more")
    try:
        text = templates.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of others, and raise what they like
        raise InvalidRequest(
            f"the checkpoint's chat template refuses the messages: {type(error).__name__}: {error}"
        ) from error
    return Rendered(text)
