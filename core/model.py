"""The description of a loaded model: plain values, which the executor returns when it opens."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from attrs import evolve, field, frozen

from .aligning import TextAligner
from .diarizing import FrameDiarizer
from .errors import InvalidRequest
from .reasoning import Reasoning
from .request import EncoderItem, LogitRules, Pooling, Structure
from .speech import SpeechModel
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
class LayerKV:
    """The keys and values of a layer at one position."""

    heads: int
    size: int  # numbers of a key of one head
    value_size: int  # numbers of a value
    source: int | None = None  # the earlier layer whose keys and values the layer reads; None: it writes its own

    @property
    def numbers(self) -> int:
        """The numbers that a position takes."""
        return 0 if self.source is not None else self.heads * (self.size + self.value_size)


@frozen(kw_only=True)
class GenerationRules:
    """The rules that the generation_config of an encoder-decoder sets for every text. transformers' `generate` follows
    the same rules."""

    forced_first: int | None = None  # forced_bos_token_id: the token after the start token
    forced_last: int | None = None  # forced_eos_token_id: the last token, if the text ends by its length
    no_repeat_ngram: int = 0  # no_repeat_ngram_size
    min_length: int = 0  # no text ends before this position; the prompt counts
    min_new_tokens: int = 0

    def of(self, rules: LogitRules, *, prompt_length: int, max_tokens: int) -> LogitRules:
        """Returns the ``rules`` of a request, with these rules added."""
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
    """The figures from which the least number of tokens of a text follows.

    Args:
        longest: the largest number of characters that one token stands for.
        unread: characters that become no token.
    """

    longest: int
    unread: str = ""

    def least_tokens(self, text: str) -> int:
        """Returns a number of tokens that ``text`` has at least. Does not tokenize the text."""
        read = len(text) - sum(map(text.count, self.unread))
        return -(-read // self.longest)


class Kind(enum.Enum):
    """The kind of answer that a model gives to a prompt."""

    ENCODER_DECODER = "encoder-decoder"  # items are read through cross-attention
    DECODER = "decoder"  # tokens, with images or audio placed among them
    POOLING = "pooling"  # one vector of the whole prompt
    ALIGNER = "aligner"  # the times at which the words of the prompt are spoken
    DIARIZER = "diarizer"  # which speakers speak in each frame of a recording


@frozen(kw_only=True)
class Prepared:
    """A prompt as the model reads it: its tokens, and the encoder items placed among them. ``reasoning``: how the
    answer to a conversation may begin."""

    token_ids: tuple[int, ...]
    items: tuple[EncoderItem, ...] = ()
    reasoning: Reasoning | None = None


class Preparer(Protocol):
    """Turns the prompts and items of users into tokens and encoder items. Methods are called in threads, so a preparer
    never changes."""

    @property
    def media(self) -> frozenset[str]:
        """The kinds of items that a prompt may have: ``"image"``, ``"audio"``, both, or none."""

    @property
    def needs_prompt(self) -> bool:
        """False if a request may have items alone. A prompt is then the beginning of the answer."""

    @property
    def converses(self) -> bool:
        """True if the checkpoint has a chat template for `render`."""

    def with_items(self, prompt: str, count: int) -> str:
        """Returns ``prompt`` with ``count`` placeholders in front of it, or unchanged if it has placeholders
        already."""

    def read_media(self, given: Sequence[Any]) -> Sequence[Any]:
        """Reads the items in ``given``. `prepare` gets the result in their place. Only one text is tokenized at a time,
        so the slow work on items is done here.

        Raises:
            InvalidRequest: an item cannot be read.
        """

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Returns the tokens and items of ``prompt``. The prompt is a text with the checkpoint's own placeholders, or
        tokens with one placeholder for each image or audio. An image is a PIL image. An audio is an array of finite
        float32 samples at ``ModelDescription.sampling_rate``.

        Raises:
            InvalidRequest: placeholders and items do not match, or an item cannot be read.
        """

    def prepare_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int | None]:
        """Returns the tokens of two texts that are read together, and the position of the second text. Some models
        distinguish the two.

        Raises:
            InvalidRequest: the tokenizer cannot join two texts.
        """

    def template(self, *, tools: bool) -> str:
        """Returns the source of the chat template that renders conversations, with ``tools`` or without; an empty text
        if the checkpoint has none."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        placed: bool = False,
    ) -> str:
        """Returns the prompt of a conversation, rendered by the checkpoint's own chat template.

        Args:
            options: further variables of the template.
            placed: placeholders in the texts stand for items. Else they are text.

        Raises:
            InvalidRequest: there is no template, or the template refuses the messages, or does not read ``tools`` or
                ``options``.
        """


class WithoutConversations:
    """The part of a `Preparer` whose model has no conversations."""

    __slots__ = ()
    instead: ClassVar[str]
    """The end of the refusal of a conversation: what is wrong with it, and what to give in its place."""

    @property
    def converses(self) -> bool:
        """False."""
        return False

    def template(self, *, tools: bool) -> str:  # noqa: ARG002  (see `Preparer`)
        """Returns an empty text."""
        return ""

    def render(self, messages: Sequence[Mapping[str, Any]], **_: object) -> str:
        """Raises `InvalidRequest`."""
        raise InvalidRequest(f"{len(messages)} messages are given{self.instead}")


class Structures(Protocol):
    """Compiles structures for a model. `compile` is called in several threads at once, the others in the event loop."""

    capacity: int
    """The most bytes of what is kept. A server lowers it."""

    def compile(self, structure: Structure) -> Structure:
        """Returns a structure equal to ``structure``, together with its compiled form, so that no step has to compile
        it.

        Raises:
            InvalidRequest: the structure cannot be followed.
        """

    def find(self, structure: Structure) -> Structure | None:
        """Returns what `compile` returned for ``structure`` before, if it is kept."""

    def keep(self, found: Any) -> None:
        """Keeps what `compile` returned for later requests, as far as there is room."""


@frozen(kw_only=True)
class ModelDescription:
    """The limits and the vocabulary of a loaded model.

    Bytes are counted in the executor's dtype. ``pages`` pages of ``page_size`` positions each hold the self-attention
    KV; ``cross_slots`` slots hold the cross-attention KV of one encoder item each. ``encoder_embeddings``,
    ``encoder_bytes`` and ``window_samples`` are 0 unless the decoder reads items through cross-attention
    (encoder-decoder). For Whisper these are the figures of a whole window; for other models they are those of the
    largest item.
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
    tokenizer: Any = field(repr=False, eq=False)  # transformers', or one with its methods
    speech: SpeechModel | None = field(default=None, repr=False, eq=False)  # None: it does not transcribe
    start_id: int | None = None  # the token with which prompts begin; None: prompts may begin with any
    text_tokens: int | None = None  # tokens from this one on are special, such as timestamps; None: the tokenizer knows
    lengths: Lengths | None = None  # None: a token may stand for any number of characters
    kind: Kind = Kind.ENCODER_DECODER
    preparer: Preparer | None = field(default=None, repr=False, eq=False)  # None: prompts are only tokenized
    structures: Structures | None = field(default=None, repr=False, eq=False)  # None: the executor compiles in a step
    has_draft_head: bool = False  # draft tokens are proposed from the hidden states of the step before
    whole_prompts: bool = False  # every position attends to all others: a prompt is one chunk, and holds no pages
    default_pooling: Pooling | None = None  # only pooling models have one
    alignment_fault: str | None = "its decoder reads no audio through cross-attention"
    """The reason why an `Alignment` is not possible; ``None``: it is possible."""
    frame_seconds: float = 0.0  # of one frame, for models that read an encoder output frame by frame; 0 for all others
    labels: tuple[str, ...] = ()  # of the classification head, in the order of the scores
    aligner: TextAligner | None = field(default=None, repr=False, eq=False)  # None: the model aligns no texts
    diarizer: FrameDiarizer | None = field(default=None, repr=False, eq=False)  # None: the model finds no speakers
    generation: GenerationRules | None = None  # only encoder-decoders other than Whisper have them
    states: int = 0  # of sequences, and kept ones, in models with recurrent layers; 0: the model has none
