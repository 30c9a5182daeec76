"""The inputs of the contenders: clips that are cut from a folder's recordings, prompts, and texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import soundfile
from attrs import define, field, frozen

from ..core.errors import InvalidRequest

RATE = 16_000
_PAUSE = 0.2  # seconds
_SOUNDS = (".wav", ".flac", ".mp3", ".ogg")
_GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are all different

PROMPTS = tuple(
    f"{question} {thing}?"
    for question in ("What is the history of", "Why do people care about", "How does one begin with", "Who invented")
    for thing in ("the bicycle", "bread", "the violin", "chess", "paper", "the sea", "glass", "cheese")
)

_WORDS = sorted({word for prompt in PROMPTS for word in prompt.lower().strip("?").split()})
_QUERY = 12  # words
_LENGTHS = (6, 160, 12, 90, 24, 60, 40, 120)  # words


def prompts_of(count: int, number: int) -> list[str]:
    """Returns the prompts of a round. No two rounds share a prompt."""
    return [f"({number}.{index // len(PROMPTS)}) {PROMPTS[index % len(PROMPTS)]}" for index in range(count)]


def queries_of(count: int, number: int) -> list[str]:
    """Returns the queries of a round, short texts of the same length."""
    return [_words(_QUERY, f"query {number} {index}") for index in range(count)]


def texts_of(count: int, number: int) -> list[str]:
    """Returns the texts of a round. Their lengths are mixed, and the same in each round."""
    return [_words(_LENGTHS[index % len(_LENGTHS)], f"text {number} {index}") for index in range(count)]


def _words(count: int, seed: str) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=count))


@frozen(eq=False)
class Piece:
    """A stretch of speech without a cut: a short recording, or what is said between two pauses of a long one."""

    samples: Any = field(repr=False)  # numpy float32
    text: str | None  # None: the text is not known


def pieces_of(recording: Path, longest: float) -> list[Piece]:
    """Returns the pieces of a recording. A short recording has its text in ``NAME.txt``. A long one has the times of
    its words in ``NAME.json``, as benchmarks/recordings.py writes them; a long one without this file is cut anywhere. A
    phrase that is longer than ``longest`` is left out."""
    from ..api.inputs.audio import load_audio

    whole = load_audio(recording, sampling_rate=RATE)
    times, text = recording.with_suffix(".json"), recording.with_suffix(".txt")
    most = round(longest * RATE)
    if times.exists():
        words = json.loads(times.read_text(encoding="utf-8"))["words"]
        return [one for one in _phrases(whole, words) if len(one.samples) <= most]
    if len(whole) <= most:
        return [Piece(whole, text.read_text(encoding="utf-8") if text.exists() else None)]
    return [Piece(whole[start : start + most], None) for start in range(0, len(whole) - most + 1, most)]


def _phrases(whole: Any, words: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Yields the phrases of a recording: words between which nobody pauses."""
    found: list[list[Mapping[str, Any]]] = []
    for word in words:
        if not found or word["start"] - found[-1][-1]["end"] >= _PAUSE:
            found.append([])
        found[-1].append(word)
    for group in found:
        start, end = group[0]["start"] - _PAUSE / 2, group[-1]["end"] + _PAUSE / 2
        text = " ".join(word["word"] for word in group)
        yield Piece(whole[max(round(start * RATE), 0) : round(end * RATE)], text)


def packed(pieces: Sequence[Piece], longest: float) -> list[Piece]:
    """Joins pieces, in their order, into clips no longer than ``longest`` seconds."""
    found: list[list[Piece]] = []
    room = 0
    silence = np.zeros(round(_PAUSE * RATE), np.float32)
    for piece in pieces:
        if not found or len(piece.samples) + len(silence) > room:
            found.append([])
            room = round(longest * RATE)
        found[-1].append(piece)
        room -= len(piece.samples) + len(silence)
    joined = []
    for group in found:
        texts = [piece.text for piece in group]
        samples = np.concatenate([part for piece in group for part in (piece.samples, silence)])
        joined.append(Piece(samples[: -len(silence)], None if None in texts else " ".join(map(str, texts))))
    return joined


@define(eq=False)
class Clips:
    """Clips of up to ``seconds`` from recordings, written as WAV files into ``folder`` when they are asked for."""

    folder: Path
    seconds: float  # at most
    _pieces: list[Piece] = field(repr=False)
    texts: dict[str, str | None] = field(factory=dict, init=False)
    """The text of each clip, by its path; ``None``: the text is not known."""

    @classmethod
    def of(cls, recordings: Path, folder: Path, seconds: float) -> Self:
        """Makes clips of all recordings in a folder, the longest ones first.

        Raises:
            InvalidRequest: the folder has no recordings.
        """
        paths = sorted(path for path in recordings.glob("*") if path.suffix in _SOUNDS)
        pieces = [piece for path in paths for piece in pieces_of(path, seconds)]
        if not pieces:
            raise InvalidRequest(
                f"{recordings} has no recordings; allowed: a folder with files of {', '.join(_SOUNDS)}"
            )
        return cls(folder, seconds, sorted(packed(pieces, seconds), key=lambda one: -len(one.samples)))

    @property
    def shortest(self) -> float:
        """The seconds of the shortest clip."""
        return min(len(piece.samples) for piece in self._pieces) / RATE

    @property
    def count(self) -> int:
        """The number of clips that are all different."""
        return len(self._pieces)

    def some(self, count: int, number: int) -> list[str]:
        """Returns the paths of ``count`` clips of a round. No two rounds share a clip, since each clip has a gain of
        its own."""
        return [self._write(index, number) for index in range(count)]

    def _write(self, index: int, number: int) -> str:
        piece = self._pieces[index % len(self._pieces)]
        path = self.folder / f"{self.seconds:g}s-{number}-{index}.wav"
        if not path.exists():
            gain = 0.7 + 0.3 * ((number * 1009 + index) * _GOLDEN % 1.0)
            soundfile.write(path, (piece.samples * gain).astype(np.float32), RATE, subtype="FLOAT")
            self.texts[str(path)] = piece.text
        return str(path)


def word_error_rate(texts: Mapping[str, str | None], heard: Mapping[str, str]) -> float | None:
    """Returns the percentage of wrong words in all texts that are known; ``None``: no text is known. Both sides are put
    through transformers' English normalizer."""
    told = {path: text for path in heard if (text := texts.get(path))}
    if not told:
        return None
    import jiwer
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer as Untyped

    make: Any = Untyped
    normal = make({})
    return 100.0 * jiwer.wer([normal(text) for text in told.values()], [normal(heard[path]) for path in told])
