"""Prompts of encoder-decoders: the text or audio becomes the one item that the encoder reads, and the decoder begins
with its start token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from ...core.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from ...core.model import Prepared, WithoutConversations
from ...core.request import EncoderItem
from ..machine.defaults import OwnDefaults
from .prompts import TextPreparer, payload_key, tokenize


@frozen(kw_only=True)
class ItemSettings:
    """The settings that the items of one checkpoint have in common."""

    start_id: int  # decoder_start_token_id: the decoder's first token
    identity: str  # hash of all that an encoder output depends on, except the item
    embedding_bytes: int
    most_embeddings: int

    def item(self, payload: Mapping[str, Tensor], embeddings: int) -> EncoderItem:
        """Returns the item of ``payload``, keyed by its content."""
        return EncoderItem(
            key=payload_key(self.identity, payload),
            payload=payload,
            embeddings=embeddings,
            size=embeddings * self.embedding_bytes,
        )


@frozen(kw_only=True)
class TextItems(TextPreparer):
    """Prompts of models that read a text: the encoder reads the prompt, and the decoder begins with the start token."""

    settings: ItemSettings

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Returns ``prompt`` as an item; its tokens are those of ``tokenizer(prompt)``.

        Raises:
            InvalidRequest: the prompt has no token, or images or audio are given.
            ContextLengthExceeded: there are more tokens than the encoder reads.
        """
        tokens = super().prepare(prompt, images=images, audio=audio).token_ids
        if not tokens:
            raise InvalidRequest("the encoder was given a text without tokens; allowed: 1 token or more")
        most = self.settings.most_embeddings
        if len(tokens) > most:
            raise ContextLengthExceeded(
                f"a text of {len(tokens)} tokens is too long for the encoder; allowed: up to {most}"
            )
        item = self.settings.item({"input_ids": torch.tensor(tokens)}, len(tokens))
        return Prepared(token_ids=(self.settings.start_id,), items=(item,))


@frozen(kw_only=True)
class AudioItems(WithoutConversations, TextPreparer):
    """Prompts of models that read samples: the encoder reads one piece of audio, and the decoder's text begins with the
    prompt, if there is one. The audio is a single piece and cannot be part of a conversation."""

    media: frozenset[str] = frozenset({"audio"})
    needs_prompt: bool = False
    settings: ItemSettings
    sampling_rate: int  # Hz
    most_samples: int
    _read: Callable[[np.ndarray[Any, Any]], Mapping[str, Tensor]] = field(repr=False)  # makes a payload of samples
    extends: bool = False  # the output of a longer audio begins as that of its beginning, see `EncoderItem.follows`
    _count: Callable[[int], int]  # the embeddings of a number of samples; less than 1: too few samples
    instead: ClassVar[str] = (
        ", but the model reads only one piece of audio; give audio=..., and prompt=... for the beginning of its text"
    )

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Returns the single piece of ``audio`` as an item. The decoder begins with the start token and ``prompt``.

        Raises:
            InvalidRequest: there is not exactly one piece of audio, or it is too short.
            RequestTooLarge: the audio is longer than the model reads at once.
        """
        if images or len(audio) != 1:
            raise InvalidRequest(
                f"{len(images)} images and {len(audio)} pieces of audio are given; allowed: one piece of audio. "
                "Give audio=..."
            )
        return Prepared(token_ids=self.begin(prompt), items=(self.item(audio[0]),))

    def item(self, samples: np.ndarray[Any, Any]) -> EncoderItem:
        """Returns the item of one piece of audio. Raises the errors of `prepare` for its length."""
        with OwnDefaults():
            return self.settings.item(self._read(self._checked(samples)), self._count(len(samples)))

    def begin(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of ``prompt`` after the start token."""
        start = self.settings.start_id
        if isinstance(prompt, str):
            return (start, *tokenize(self.tokenizer, prompt, special=False))
        given = tuple(prompt)
        return given if given[:1] == (start,) else (start, *given)  # as in transformers' `generate`

    def _checked(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if len(samples) > self.most_samples:
            raise RequestTooLarge(
                f"audio of {len(samples) / self.sampling_rate:.2f} s is too long; allowed: up to "
                f"{self.most_samples / self.sampling_rate:g} s. Cut it into pieces"
            )
        if self._count(len(samples)) < 1:
            least = next(samples for samples in range(self.most_samples) if self._count(samples) >= 1)
            raise InvalidRequest(
                f"audio of {len(samples)} samples is too short for one embedding; allowed: {least} samples or more"
            )
        return samples
