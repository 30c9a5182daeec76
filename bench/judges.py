"""The judges of cards: a class for each kind of model, which measures a row beside what transformers computes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import numpy as np
import transformers
import trio
from attrs import define, field, frozen

from ..api.engine import Engine
from ..api.inputs.audio import load_audio
from ..core.config import EngineConfig
from ..core.errors import InvalidRequest
from ..core.model import Kind, ModelDescription
from ..core.request import SamplingParams
from ..models.checkpoints.ctranslate2_file import MODEL as CTRANSLATE2
from ..models.checkpoints.files import find_weights
from ..models.checkpoints.gguf_folder import NOTE
from . import quality, reference
from .inputs import RATE, Clips, prompts_of, queries_of, texts_of, word_error_rate

REFERENCE = "transformers, float32"
"""The row of transformers' own classes."""

_GREEDY = {"temperature": 0.0, "beam_size": 1, "timestamps": "none", "voice_activity": "off"}  # as transformers reads
_LONGEST = 25.0  # seconds of a clip
_TURNS, _TOGETHER, _TEXTS = 3, 8, 64
_WRITTEN, _READ = 64, 512  # tokens
_WORDS = 60  # the most words of a text that becomes a vector

Figures = dict[str, Any]


@frozen(kw_only=True)
class Given:
    """The inputs and limits of a card. ``inputs`` is a folder of recordings or a file of prose, ``most`` the most clips
    or texts whose accuracy is measured."""

    inputs: Path
    scratch: Path
    language: str | None
    most: int
    threads: int

    def config(self, settings: Mapping[str, Any]) -> EngineConfig:
        """Returns the engine's settings."""
        return EngineConfig(**{"device": "cpu", "threads": self.threads, **settings})

    @property
    def prose(self) -> str:
        """The text of the file ``inputs``."""
        try:
            return self.inputs.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InvalidRequest(f"{self.inputs} cannot be read: {error.strerror}; give a file of prose") from error


@define
class _Judge:
    """Measures the rows of one card. ``kept`` has the figures so far."""

    given: Given
    folder: Path
    model: ModelDescription = field(repr=False)
    kept: Figures = field(repr=False)
    settings: ClassVar[Mapping[str, Any]] = {}  # of an engine whose speed is measured


class Speech(_Judge):
    """Measures transcriptions."""

    kind = "speech"

    @cached_property
    def clips(self) -> Clips:
        """The clips of the recordings."""
        return Clips.of(self.given.inputs, self.given.scratch, _LONGEST)

    @property
    def _paths(self) -> list[str]:
        return self.clips.some(min(self.clips.count, self.given.most), 0)

    @property
    def inputs(self) -> str:
        """The inputs in words."""
        words = sum(len((self.clips.texts[path] or "").split()) for path in self._paths)
        return f"{self.given.inputs.name}: {words:,} words, {_seconds(self._paths):.0f} s, clips: {len(self._paths)}"

    async def accuracy(self, folder: Path, settings: Mapping[str, Any]) -> Figures:
        """Returns error rates, and how far texts are from those of transformers."""
        if "heard" not in self.kept:
            read = reference.reader(self.folder, self.given.language, self.model.speech)
            self.kept["heard"] = [read(load_audio(path, sampling_rate=RATE)) for path in self._paths]
        theirs = dict(zip(self._paths, self.kept["heard"], strict=True))
        self.kept["rows"][REFERENCE] = {"greedy_errors": word_error_rate(self.clips.texts, theirs)}
        async with Engine(folder, config=self.given.config(settings)) as engine:
            plain, greedy = await self._heard(engine, self._paths), await self._heard(engine, self._paths, _GREEDY)
        texts = {path: one.text for path, one in greedy.items()}
        return {
            "errors": word_error_rate(self.clips.texts, {path: one.text for path, one in plain.items()}),
            "greedy_errors": word_error_rate(self.clips.texts, texts),
            "unlike": word_error_rate(dict(theirs), texts),
        }

    async def _heard(self, engine: Engine, paths: Sequence[str], options: Mapping[str, Any] = {}) -> dict[str, Any]:
        """The transcripts of clips that are asked for at once."""
        found: dict[str, Any] = {}
        asked: dict[str, Any] = {**options, **({"language": self.given.language} if self.given.language else {})}

        async def hear(path: str) -> None:
            found[path] = await engine.transcribe(path, **asked)

        async with trio.open_nursery() as nursery:
            for path in paths:
                nursery.start_soon(hear, path)
        return found

    async def speed(self, engine: Engine) -> Figures:
        """Returns seconds for each second of speech, and those until the first token."""
        await self._heard(engine, self.clips.some(1, 1), _GREEDY)  # warms the engine up
        found: Figures = {}
        for name, number, options in (("factor", 2, {}), ("greedy_factor", 3, _GREEDY)):
            seconds, first = 0.0, []
            for path in self.clips.some(_TURNS, number):
                begun = time.perf_counter()
                timings = (await self._heard(engine, [path], options))[path].timings
                seconds += time.perf_counter() - begun
                first += [timings.first_token] if timings and timings.first_token is not None else []
            found[name] = seconds / _seconds(self.clips.some(_TURNS, number))
            found["first_token"] = median(first) if first else None
        paths = self.clips.some(_TOGETHER, 4)
        return {**found, "together_factor": await _timed(self._heard(engine, paths, _GREEDY)) / _seconds(paths)}


def _seconds(paths: Sequence[str]) -> float:
    return sum(len(load_audio(path, sampling_rate=RATE)) for path in paths) / RATE


async def _timed(task: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await task
    return time.perf_counter() - begun


class Text(_Judge):
    """Measures a decoder. Its speed is measured without draft tokens, which depend on the text, and without kept
    prefixes."""

    kind = "text"
    settings: ClassVar[Mapping[str, Any]] = {"speculation": None, "prefix_caching": False}

    @cached_property
    def ids(self) -> list[int]:
        """The first tokens of the prose."""
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.folder)
        ids: list[int] = tokenizer(self.given.prose).input_ids
        return ids[: min(quality.TOKENS, self.model.max_positions)]

    @cached_property
    def _reference(self) -> Any:
        return reference.distributions(self.folder)

    @property
    def inputs(self) -> str:
        """The inputs in words."""
        return f"{self.given.inputs.name}: the first {len(self.ids):,} tokens"

    async def accuracy(self, folder: Path, settings: Mapping[str, Any]) -> Figures:
        """Returns the perplexity, and how far distributions are from those of transformers."""
        exact, prose = self._reference(self.ids), self.given.prose
        own, found = quality.judged("", folder, settings, prose, self.ids, exact, self.given.threads)
        self.kept["rows"][REFERENCE] = {"perplexity": own.perplexity}
        return {"perplexity": found.perplexity, "same": found.same, "divergence": found.divergence}

    async def speed(self, engine: Engine) -> Figures:
        """Returns tokens a second."""
        tokens = min(_WRITTEN, engine.model.max_positions // 4)
        sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens)
        prompt = self.ids[: min(_READ, engine.model.max_positions // 2)]

        async def write(count: int, number: int) -> None:
            async with trio.open_nursery() as nursery:
                for text in prompts_of(count, number):
                    nursery.start_soon(partial(engine.generate, text, sampling=sampling))

        async def read() -> None:
            await engine.generate(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))

        await write(1, -1)  # warms the engine up
        alone = median([await _timed(write(1, turn)) for turn in range(_TURNS)])
        together = median([await _timed(write(_TOGETHER, _TURNS + turn)) for turn in range(_TURNS)])
        reading = median([await _timed(read()) for _ in range(_TURNS)])
        return {"alone": tokens / alone, "together": _TOGETHER * tokens / together, "prompt": len(prompt) / reading}


class Vectors(_Judge):
    """Measures a model of vectors."""

    kind = "vectors"

    @cached_property
    def texts(self) -> list[str]:
        """The beginnings of the paragraphs of the prose."""
        found = [" ".join(one.split()[:_WORDS]) for one in self.given.prose.split("\n\n")]
        texts = list(dict.fromkeys(filter(None, found)))[: self.given.most]
        if len(texts) < 2:
            raise InvalidRequest(
                f"{self.given.inputs} has {len(texts)} different paragraphs; allowed: 2 or more, with a line between"
            )
        return texts

    @property
    def inputs(self) -> str:
        """The inputs in words."""
        return f"{self.given.inputs.name}: the beginnings of {len(self.texts)} paragraphs, up to {_WORDS} words of each"

    @cached_property
    def _reference(self) -> Any:
        return np.array(reference.vectors(self.folder, self.texts, self.model.default_pooling))

    async def accuracy(self, folder: Path, settings: Mapping[str, Any]) -> Figures:
        """Returns how far vectors are from those of transformers."""
        async with Engine(folder, config=self.given.config(settings)) as engine:
            ours = np.array(await engine.embed(self.texts, normalize=True), np.float64)
        cosines = (ours * self._reference).sum(1)
        same = _nearest(ours) == _nearest(self._reference)
        return {"least_cosine": float(cosines.min()), "cosine": fmean(cosines), "nearest": float(same.mean())}

    async def speed(self, engine: Engine) -> Figures:
        """Returns texts a second, and the seconds of a query."""
        await engine.embed(texts_of(_TEXTS, -1))  # warms the engine up
        many = median([await _timed(engine.embed(texts_of(_TEXTS, turn))) for turn in range(_TURNS)])
        return {
            "texts": _TEXTS / many,
            "query": median([await _timed(engine.embed(queries_of(1, turn))) for turn in range(_TURNS)]),
        }


def _nearest(vectors: Any) -> Any:
    """The text that is nearest to each text but itself."""
    return (vectors @ vectors.T - 2 * np.eye(len(vectors))).argmax(1)


def judge_of(given: Given, folder: Path, model: ModelDescription, kept: Figures) -> Speech | Text | Vectors:
    """Returns the judge of a model. Raises `InvalidRequest` if there is none for its kind, or if transformers cannot
    read it."""
    if model.speech is not None:
        if find_weights(folder)[0].name in (NOTE, CTRANSLATE2):
            raise InvalidRequest(
                f"transformers cannot read {folder}; give the checkpoint from which it was converted, and this one to "
                "--also"
            )
        return Speech(given, folder, model, kept)
    if model.kind is Kind.DECODER:
        return Text(given, folder, model, kept)
    if model.default_pooling is not None and model.default_pooling.kind != "classify":
        return Vectors(given, folder, model, kept)
    raise InvalidRequest(f"{folder} has no card; allowed: models of speech, text and vectors")
