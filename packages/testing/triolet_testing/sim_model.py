"""The simulated model: its sizes, its tokens, and the output that a request must get."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import evolve, field, frozen

from triolet.core.errors import InvalidRequest
from triolet.core.model import Kind, ModelDescription, Prepared, WhisperTokens, WithoutConversations
from triolet.core.plan import AlignedTokens
from triolet.core.request import Alignment, EncoderItem, Placeholder, Pooling
from triolet.models.speech.whisper_speech import with_whisper

EOS, START = 0, 1


IMAGE = 61  # in a prompt, the place of an image


MOST_IMAGE = 4  # the most embeddings of an image


class SimTokenizer:
    """A tokenizer in which token n is the character with code point 97 + n."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns a token for each character."""
        del add_special_tokens
        return [ord(character) - 97 for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns a character for each token."""
        del skip_special_tokens
        return "".join(chr(97 + token_id) for token_id in token_ids)


@frozen(kw_only=True)
class SimPreparer(WithoutConversations):
    """A preparer of prompts with images. An image is a number here (of a real image, the red value of its first pixel).
    Image n has ``1 + n % 4`` embeddings, each as large as an embedding of the model. `IMAGE` stands for each image in
    the prompt.
    """

    model: SimModel
    media: frozenset[str] = frozenset({"image"})
    needs_prompt: bool = True
    instead: ClassVar[str] = "; allowed: prompts, since this simulated model has no chat template"

    def with_items(self, prompt: str, count: int) -> str:
        """Implements `triolet.core.model.Preparer`."""
        return prompt if chr(97 + IMAGE) in prompt else chr(97 + IMAGE) * count + prompt

    def read_media(self, given: Sequence[Any]) -> Sequence[Any]:
        """Implements `triolet.core.model.Preparer`."""
        return given

    def prepare(
        self, prompt: str | Sequence[int], *, images: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Prepared:
        """Implements `triolet.core.model.Preparer`.

        Raises:
            InvalidRequest: there is audio, or the images and the placeholders in the prompt do not match.
        """
        if audio:
            raise InvalidRequest(
                f"{len(audio)} pieces of audio are given; allowed: images, since this simulated model reads no audio"
            )
        written = SimTokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
        if written.count(IMAGE) != len(images):
            places = written.count(IMAGE)
            raise InvalidRequest(
                f"{len(images)} images are given; allowed: {places}, one for each token {IMAGE} of the prompt"
            )
        token_ids: list[int] = []
        items: list[EncoderItem] = []
        for token_id in written:
            if token_id == IMAGE:
                items.append(self._item(images[len(items)], len(token_ids)))
                token_ids += [IMAGE] * items[-1].embeddings
            else:
                token_ids.append(token_id)
        return Prepared(token_ids=tuple(token_ids), items=tuple(items))

    def prepare_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int | None]:
        """Implements `triolet.core.model.Preparer`."""
        tokenizer = SimTokenizer()
        return (*tokenizer.encode(first), *tokenizer.encode(second)), len(first)

    def _item(self, image: Any, start: int) -> EncoderItem:
        number = image if isinstance(image, int) else image.getpixel((0, 0))[0]
        count = 1 + number % MOST_IMAGE
        return EncoderItem(
            key=f"image {number}",
            payload=number,
            embeddings=count,
            size=count * self.model.encoder_bytes // self.model.encoder_embeddings,
            spans=((start, start + count),),
        )


@frozen(kw_only=True)
class SimModel:
    """The sizes of a simulated model. A model that is not an encoder-decoder reads images. A model that pools is fed
    whole prompts. A model with ``states`` has recurrent layers.
    """

    vocabulary_size: int = 64
    max_positions: int = 64
    page_size: int = 4
    pages: int = 64
    cross_slots: int = 4
    encoder_embeddings: int = 10
    encoder_bytes: int = 100
    kind: Kind = field(default=Kind.ENCODER_DECODER, repr=str)  # its repr must be Python
    whole_prompts: bool = False
    states: int = 0

    def describe(self) -> ModelDescription:
        """Returns the model's description for the engine."""
        windows = self.kind is Kind.ENCODER_DECODER
        description = ModelDescription(
            name="sim",
            architecture="SimForConditionalGeneration",
            device="sim",
            dtype="float32",
            vocabulary_size=self.vocabulary_size,
            max_positions=self.max_positions,
            eos_token_ids=(EOS,),
            suppress_token_ids=(),
            begin_suppress_token_ids=(),
            page_size=self.page_size,
            pages=self.pages,
            cross_slots=self.cross_slots if windows else 0,
            encoder_embeddings=self.encoder_embeddings if windows else 0,
            encoder_bytes=self.encoder_bytes if windows else 0,
            sampling_rate=16_000,
            window_samples=480_000 if windows else 0,
            processor_identity="sim",
            tokenizer=SimTokenizer(),
            kind=self.kind,
            preparer=None if windows else SimPreparer(model=self),
            whole_prompts=self.whole_prompts,
            states=self.states,
            alignment_fault=None if windows else "the simulated model reads no audio",
            default_pooling=Pooling(kind="last") if self.kind is Kind.POOLING else None,
        )
        return evolve(description, **with_whisper(description, self._whisper())) if windows else description

    def _whisper(self) -> WhisperTokens:
        return WhisperTokens(
            start_id=START,
            no_timestamps_id=self.vocabulary_size - 1,
            timestamp_begin_id=self.vocabulary_size,
            previous_id=None,
            no_speech_id=None,
            language_ids={},
            task_ids={},
            max_initial_timestamp=None,
        )


def _chain(before: int, token_id: int, seen: str | None) -> int:
    """Returns the fingerprint of a position, made of the previous position's fingerprint, the token, and the item that
    the position sees."""
    return zlib.crc32(f"{before}/{token_id}/{seen}".encode())


def _begin(adapter: str) -> int:
    """Returns the fingerprint of what comes before a prompt that is computed with an adapter; empty: with none."""
    return zlib.crc32(adapter.encode())


def _placed(placeholders: Sequence[Placeholder]) -> dict[int, tuple[str, int]]:
    """Returns the item's key and the embedding's row for each position that has an embedding."""
    found = {}
    for placeholder in placeholders:
        positions = [position for start, stop in placeholder.spans for position in range(start, stop)]
        found.update({position: (placeholder.key, row) for row, position in enumerate(positions)})
    return found


def _seen(placed: Mapping[int, tuple[str, int]], position: int, cross_key: str | None) -> str | None:
    here = placed.get(position)
    return cross_key if here is None else f"{here[0]}[{here[1]}]"


def expected_tokens(
    prompt_token_ids: Sequence[int],
    key: str | None,
    max_tokens: int,
    model: SimModel | None = None,
    placeholders: Sequence[Placeholder] = (),
    adapter: str = "",
) -> tuple[int, ...]:
    """Returns the tokens that a request must get, end-of-text included, whatever the engine does beside it."""
    model = model or SimModel()
    fingerprint, placed = _read(prompt_token_ids, key, placeholders, adapter), _placed(placeholders)
    sampled: list[int] = []
    while len(sampled) < max_tokens:
        sampled.append(fingerprint % model.vocabulary_size)
        if sampled[-1] == EOS:
            break
        position = len(prompt_token_ids) + len(sampled) - 1
        fingerprint = _chain(fingerprint, sampled[-1], _seen(placed, position, key))
    return tuple(sampled)


def expected_logprob(token_id: int) -> float:
    """Returns the log-probability that a probe reports for a token."""
    return -float(token_id + 1)


def expected_vector(
    prompt_token_ids: Sequence[int], key: str | None = None, placeholders: Sequence[Placeholder] = ()
) -> tuple[float, ...]:
    """Returns the vector that a request with a `Pooling` must get."""
    return (float(_read(prompt_token_ids, key, placeholders)),)


def expected_alignment(prompt_token_ids: Sequence[int], key: str, alignment: Alignment) -> AlignedTokens:
    """Returns the answer that a request with an `Alignment` must get."""
    fingerprints, before = [], 0
    for token_id in prompt_token_ids:
        before = _chain(before, token_id, key)
        fingerprints.append(before)
    return aligned_tokens(fingerprints[alignment.start - 1 :], alignment)


def aligned_tokens(fingerprints: Sequence[int], alignment: Alignment) -> AlignedTokens:
    """Makes times and log-probabilities from ``fingerprints``: those of the aligned tokens, and of the token before
    them.
    """
    return AlignedTokens(
        frames=tuple(sorted(one % alignment.frames for one in fingerprints)),
        logprobs=tuple(-(one % 1000) / 100 for one in fingerprints[:-1]),
    )


def _read(
    prompt_token_ids: Sequence[int], key: str | None, placeholders: Sequence[Placeholder], adapter: str = ""
) -> int:
    """Returns the fingerprint of a prompt's last position."""
    placed = _placed(placeholders)
    fingerprint = _begin(adapter)
    for position, token_id in enumerate(prompt_token_ids):
        fingerprint = _chain(fingerprint, token_id, _seen(placed, position, key))
    return fingerprint


READ_WHOLE = ("mean", "cls")  # poolings that need every position of the prompt
