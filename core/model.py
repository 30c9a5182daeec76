"""The description of a loaded model: plain values, which the executor returns when it opens."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import evolve, field, frozen

from .request import EncoderItem, LogitRules, Pooling, Structure
from .tools import Tool


@frozen(kw_only=True)
class WhisperTokens:
    """The special tokens of a Whisper checkpoint, as its generation_config names them."""

    start_id: int  # <|startoftranscript|>
    no_timestamps_id: int
    timestamp_begin_id: int  # <|0.00|>
    previous_id: int | None  # <|startofprev|>
    no_speech_id: int | None  # <|nospeech|>, <|nocaptions|> in older vocabularies
    language_ids: Mapping[str, int]  # "en" -> id of <|en|>; empty for English-only checkpoints
    task_ids: Mapping[str, int]  # "transcribe", "translate"; empty for English-only checkpoints
    max_initial_timestamp: int | None  # in 20 ms steps
    seconds_per_timestamp: float = 0.02


@frozen(kw_only=True)
class GenerationRules:
    """The rules that the generation_config of an encoder-decoder sets for every text, as transformers' `generate` obeys
    it."""

    forced_first: int | None = None  # forced_bos_token_id: the token after the start token
    forced_last: int | None = None  # forced_eos_token_id: the last token, where the text ends by its length
    no_repeat_ngram: int = 0  # no_repeat_ngram_size
    min_length: int = 0  # positions before which no text ends, the prompt's included
    min_new_tokens: int = 0

    def of(self, rules: LogitRules, *, prompt_length: int, max_tokens: int) -> LogitRules:
        """``rules`` of a request, and these."""
        forced = []
        if self.forced_last is not None:
            forced.append((max_tokens - 1, self.forced_last))
        if self.forced_first is not None and prompt_length == 1:
            forced.append((0, self.forced_first))
        return evolve(
            rules,
            forced=tuple(forced),
            no_repeat_ngram=self.no_repeat_ngram,
            min_tokens=max(self.min_new_tokens, self.min_length - prompt_length),
        )


@frozen
class Lengths:
    """The least number of tokens that a text can have.

    Args:
        longest: the most characters that one token stands for.
        unread: characters that become no token.
    """

    longest: int
    unread: str = ""

    def least_tokens(self, text: str) -> int:
        """``text`` has so many tokens or more, whatever it is. It is not tokenized for that."""
        read = len(text) - sum(map(text.count, self.unread))
        return -(-read // self.longest)


class Kind(enum.Enum):
    """The kind of answer that a model gives to a prompt."""

    ENCODER_DECODER = "encoder-decoder"  # items are read through cross-attention
    DECODER = "decoder"  # tokens, with images or audio placed among them
    POOLING = "pooling"  # one vector of the whole prompt


@frozen(kw_only=True)
class Prepared:
    """A prompt as the model reads it: its tokens, and the encoder items placed among them."""

    token_ids: tuple[int, ...]
    items: tuple[EncoderItem, ...] = ()


class Preparer(Protocol):
    """Turns what users write into what the model reads. Called in threads: a preparer never changes."""

    @property
    def media(self) -> frozenset[str]:
        """The kinds of items that a prompt may have: ``"image"``, ``"audio"``, or none."""

    @property
    def needs_prompt(self) -> bool:
        """False if items alone make a request: the prompt is how the answer begins."""

    @property
    def converses(self) -> bool:
        """True if there is a chat template for `render`."""

    def with_items(self, prompt: str, count: int) -> str:
        """``prompt`` with ``count`` placeholders in front of it, unless the prompt has placeholders already."""

    def read_media(self, given: Sequence[Any]) -> Sequence[Any]:
        """``given`` for `prepare`, which takes less time for them then: texts are tokenized in turns, and what else
        takes long is done before.

        Raises:
            InvalidRequest: one cannot be read.
        """

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Tokens and items of ``prompt``: text with the checkpoint's own placeholders, or tokens with one placeholder
        for each image or audio. An image is a PIL image. An audio is an array of finite float32 samples at
        ``ModelDescription.sampling_rate``.

        Raises:
            InvalidRequest: placeholders and items do not match, or an item cannot be read.
        """

    def prepare_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int | None]:
        """Tokens of two texts read together, and the position of the second text, for models that tell them apart.

        Raises:
            InvalidRequest: the tokenizer joins no texts.
        """

    @property
    def tool_template(self) -> str:
        """The text of the chat template that renders conversations with tools; empty where there is none."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, by the checkpoint's own chat template.

        Args:
            options: further variables of the template.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or does not read what is given.
        """


class Structures(Protocol):
    """Compiles structures for a model. Called in several threads at once."""

    def compile(self, structure: Structure) -> Structure:
        """A structure equal to ``structure``, with its compiled form: no step has to compile it.

        Raises:
            InvalidRequest: the structure cannot be followed.
        """


@frozen(kw_only=True)
class ModelDescription:
    """A loaded model's limits and vocabulary.

    Bytes are of the executor's dtype. ``pages`` pages of ``page_size`` positions each hold the self-attention KV;
    ``cross_slots`` slots hold the cross-attention KV of one encoder item each. ``encoder_embeddings``,
    ``encoder_bytes`` and ``window_samples`` are 0 unless the decoder reads items through cross-attention
    (encoder-decoder). Whisper's whole windows all have this size; elsewhere it is that of the largest.
    """

    name: str
    architecture: str
    device: str
    dtype: str
    vocabulary_size: int
    max_positions: int  # decoder positions: prompt and generated tokens together
    eos_token_ids: tuple[int, ...]
    suppress_token_ids: tuple[int, ...]
    begin_suppress_token_ids: tuple[int, ...]
    page_size: int
    pages: int
    cross_slots: int
    encoder_embeddings: int  # rows of one encoder output, or the most
    encoder_bytes: int  # bytes of one encoder output, or the most
    sampling_rate: int  # Hz
    window_samples: int  # most samples of one encoder item
    processor_identity: str  # part of the content keys
    whisper: WhisperTokens | None
    tokenizer: Any = field(repr=False, eq=False)  # transformers', or one with its methods
    lengths: Lengths | None = None  # None: a token may stand for any number of characters
    kind: Kind = Kind.ENCODER_DECODER
    preparer: Preparer | None = field(default=None, repr=False, eq=False)  # None: prompts are tokenized as they are
    structures: Structures | None = field(default=None, repr=False, eq=False)  # None: the executor compiles in a step
    whole_prompts: bool = False  # every position attends to all others: a prompt is one chunk, and holds no pages
    default_pooling: Pooling | None = None  # of pooling models
    alignment_fault: str | None = "its decoder reads no audio through cross-attention"
    """Returns why an `Alignment` is not possible; ``None``: it is."""
    labels: tuple[str, ...] = ()  # of a classification head, in the order of its scores
    generation: GenerationRules | None = None  # of encoder-decoders but Whisper
    native: bool = False  # the native library computes all of its layers, and Python's lock is free meanwhile
