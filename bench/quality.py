"""The price of number types and of quantized weights to a decoder: perplexity, and how far its distributions are from
those of a reference in float32."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor

from ..core.config import EngineConfig
from ..core.errors import InvalidRequest
from ..models.blueprints.read import read_blueprint
from ..models.blueprints.text_blueprint import TextBlueprint
from ..models.memory.rows import Rows
from ..models.native.decoders import CausalDecoder
from ..models.native.library import Library
from ..models.native.runner import Runner

TOKENS = 2_000
"""The most tokens of a text that are read."""

ROWS = 64
"""The number of tokens whose distributions are compared at a time."""


@frozen(kw_only=True)
class Quality:
    """The figures of a decoder that reads a text in one variant, token by token.

    Args:
        perplexity: e to the mean of the negated log-probabilities of the text's tokens, the first one left out.
        same: the share of tokens after which the likeliest token is that of the reference.
        divergence: the mean Kullback-Leibler divergence of the distributions from the reference's, in nats.
    """

    variant: str
    perplexity: float
    same: float
    divergence: float

    def line(self, reference: Quality) -> str:
        """Returns the figures as a line for people."""
        if self is reference:
            return f"{self.variant}: perplexity {self.perplexity:.3f}"
        return (
            f"{self.variant}: perplexity {self.perplexity:.3f}, {self.perplexity / reference.perplexity:.4f} of the "
            f"reference's; the likeliest token is the reference's for {self.same:.2%}; Kullback-Leibler divergence "
            f"{self.divergence:.6f}"
        )


def qualities(
    model: Path, against: Path, text: str, asked: Mapping[str, Mapping[str, Any]], threads: int
) -> Iterator[Quality]:
    """Yields the reference's own quality, then that of each variant that is ``asked`` for, with the settings of the
    engine.

    Raises:
        InvalidRequest: the native library does not compute a model with keys and values alone, the models have
            different tokens, or the text has fewer than two tokens.
    """
    exact = _open(against, {"dtype": "float32"})
    ids = tokens_of(exact, text)
    with TemporaryDirectory() as folder:
        known = _kept(_read(exact, ids, threads), len(ids), Path(folder))
        for index, (variant, settings) in enumerate(asked.items()):
            pair = judged(variant, model, settings, text, ids, iter(torch.split(known, ROWS)), threads)
            yield from pair[index > 0 :]


def judged(
    variant: str,
    model: Path,
    settings: Mapping[str, Any],
    text: str,
    ids: Sequence[int],
    exact: Iterator[Tensor],
    threads: int,
) -> tuple[Quality, Quality]:
    """Returns the quality of a reference, and that of a model with ``settings`` of the engine beside it.

    Args:
        ids: the first tokens of ``text``.
        exact: the log-probabilities of the reference after each of these tokens, `ROWS` at a time.

    Raises:
        InvalidRequest: as in `qualities`.
    """
    blueprint = _open(model, settings)
    if tokens_of(blueprint, text)[: len(ids)] != ids:
        raise InvalidRequest(f"{model} has other tokens than the reference; give a model with the same ones")
    return _compared(variant, ids, exact, _read(blueprint, ids, threads))


def as_json(model: Path, against: Path, text: Path, found: Sequence[Quality]) -> str:
    """Returns the results as JSON."""
    about = {"model": str(model), "against": str(against), "text": str(text)}
    return json.dumps({**about, "qualities": [asdict(one) for one in found]}, indent=1)


def tokens_of(blueprint: TextBlueprint, text: str) -> list[int]:
    """Returns the first tokens of a text, with a token before it where prompts have one. Raises `InvalidRequest` if
    there are fewer than two."""
    positions = min(TOKENS, blueprint.checkpoint.shape.positions)
    ids: list[int] = blueprint.checkpoint.tokenizer(text).input_ids
    if len(ids) < 2:
        raise InvalidRequest(f"the text has {len(ids)} tokens; allowed: 2 or more")
    return ids[:positions]


def _open(model: Path, settings: Mapping[str, Any]) -> TextBlueprint:
    blueprint = read_blueprint(str(model), EngineConfig(**{"device": "cpu", **settings}))
    if not isinstance(blueprint, TextBlueprint) or not blueprint.keeps_kv or blueprint.checkpoint.shape.recurrent:
        raise InvalidRequest(f"{model} cannot be judged; allowed: decoders with keys and values alone")
    return blueprint


def _read(blueprint: TextBlueprint, ids: Sequence[int], threads: int) -> Iterator[Tensor]:
    """Yields the log-probabilities after the tokens, float64 [rows, vocabulary], some rows at a time."""
    module, shape = blueprint.load(blueprint.files()).module, blueprint.checkpoint.shape
    library, decoder = Library.load(), CausalDecoder(module, module, shape.windows)
    if library is None or (why_not := decoder.unknown()) is not None:
        told = "it is not there" if library is None else why_not
        raise InvalidRequest(f"the native library does not compute {blueprint.checkpoint.folder}: {told}")
    pages = [torch.zeros(1, len(ids), layer.numbers, dtype=blueprint.kv_dtype) for layer in shape.kv]
    runner = Runner.open(library, decoder.program(len(ids)), pages, rows=ROWS, positions=len(ids), threads=threads)
    try:
        for start in range(0, len(ids), ROWS):
            some = ids[start : start + ROWS]
            rows = Rows(
                positions=range(start, start + len(some)),
                chunks=[(len(some), 0, 0, 0)],
                tables=[0],
                wanted=range(len(some)),
            )
            yield runner.step(some, rows).double().log_softmax(-1)
    finally:
        runner.release()


def _kept(found: Iterator[Tensor], count: int, folder: Path) -> Tensor:
    """Returns log-probabilities as float32 [count, vocabulary] in a file: those of a text may take more memory than the
    model."""
    kept, start = torch.empty(0), 0
    for rows in found:
        if not start:
            size = count * rows.shape[1]
            kept = torch.from_file(str(folder / "found"), shared=True, size=size, dtype=torch.float32).view(count, -1)
        kept[start : start + len(rows)] = rows
        start += len(rows)
    return kept


def _compared(
    variant: str, ids: Sequence[int], exact: Iterator[Tensor], other: Iterator[Tensor]
) -> tuple[Quality, Quality]:
    own = surprise = apart = same = 0.0
    with torch.inference_mode():
        for start, (expected, found) in zip(range(0, len(ids), ROWS), zip(exact, other, strict=True), strict=True):
            following = torch.tensor(ids[start + 1 : start + 1 + len(found)])[:, None]
            own -= float(expected[: len(following)].gather(1, following).sum())
            surprise -= float(found[: len(following)].gather(1, following).sum())
            apart += float((expected.exp() * (expected - found)).sum())
            same += float((expected.argmax(-1) == found.argmax(-1)).sum())
    reference, perplexity = (math.exp(each / (len(ids) - 1)) for each in (own, surprise))
    return (
        Quality(variant="reference", perplexity=reference, same=1.0, divergence=0.0),
        Quality(variant=variant, perplexity=perplexity, same=same / len(ids), divergence=apart / len(ids)),
    )
