"""`WordAligner`: finds the times of the words that another model has written. The functions put these words into
segments."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from attrs import evolve

from ...core.aligning import TextAligner, Timed, between, cut_words, spoken_words
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ..inputs.audio import Samples
from ..outputs.results import Segment, Word


class WordAligner(Protocol):
    """Finds the times of words for ``engine.transcribe(..., timestamps="word", aligner=...)``. An `Engine` whose model
    aligns texts is one, and so is an object of the caller's with this method."""

    def align(
        self, audio: tuple[Samples, int], text: str, language: str | None = None
    ) -> Awaitable[Sequence[Word]] | Sequence[Word]:
        """Returns the words of ``text`` with their times. For an `Engine` this is an async method, which is awaited in
        the caller's event loop. For a `SyncEngine` it is a plain method, which is called in a thread.

        Args:
            audio: samples, float32 of shape (n,) with full scale at 1.0, and their rate in Hz.
            text: the text that is spoken in the audio.
            language: the code of the language; ``None``: it is not known.

        Returns:
            The words in order. Their joined texts are ``text``, blanks included. Times are in seconds from the
            beginning of ``audio``.

        Raises:
            InvalidRequest: the text cannot be aligned. Its words then share the time of their segment evenly, with
                probability 0, and `Transcript.warnings` gives the reason.
        """
        ...


def check_aligns(model: ModelDescription) -> TextAligner:
    """Returns the model's way to align texts. Raises `InvalidRequest` if it has none."""
    if model.aligner is None:
        raise InvalidRequest(
            f"{model.architecture} does not align texts; allowed: Qwen3-ForcedAligner and CTC models, such as Parakeet"
        )
    return model.aligner


async def segment_with_words(
    segment: Segment, samples: Samples, rate: int, language: str | None, aligner: WordAligner
) -> Segment:
    """Returns ``segment``, whose sound is ``samples``, with the words that ``aligner`` finds, and with their times.

    Raises:
        InvalidRequest: the aligner refused the text, or answered with something other than its words.
    """
    answer: Any = aligner.align((samples, rate), segment.text, language)
    words = await answer
    if not isinstance(words, list | tuple) or not all(isinstance(word, Word) for word in words):
        raise InvalidRequest(f"the aligner answered {words!r:.200}; allowed: a list of Word")
    if "".join(word.text for word in words) != segment.text:
        raise InvalidRequest(
            f"the aligner answered the words {[word.text for word in words]!r:.200}; allowed: words whose joined texts "
            f"are {segment.text!r:.200}"
        )
    known = [Timed(segment.start + word.start, segment.start + word.end, word.probability) for word in words]
    return _placed(segment, [word.text for word in words], known)


def segment_with_even_words(segment: Segment) -> Segment:
    """Returns ``segment`` with words that share its time evenly, with probability 0."""
    texts = cut_words(segment.text, spoken_words(segment.text))
    return _placed(segment, texts, [None] * len(texts))


def words_between(texts: Sequence[str], times: Sequence[Timed | None], start: float, end: float) -> tuple[Word, ...]:
    """Returns words of ``texts`` with their times, in milliseconds, as `between` places them."""
    return tuple(
        Word(
            text=text,
            start=min(round(time.start, 3), end),
            end=min(round(time.end, 3), end),
            probability=time.probability,
        )
        for text, time in zip(texts, between(times, start, end), strict=True)
    )


def _placed(segment: Segment, texts: Sequence[str], times: Sequence[Timed | None]) -> Segment:
    words = words_between(texts, times, segment.start, segment.end)
    return evolve(segment, start=words[0].start, end=words[-1].end, words=words)
