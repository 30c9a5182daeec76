"""Answers to requests that ask for a vector of their prompt, or for the times of its tokens, instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.plan import SampledToken
from .blueprints.blueprint import Parts
from .networks.network import Feed, Outputs


def read_prompts(parts: Parts, feeds: Sequence[Feed], outputs: Outputs) -> list[SampledToken]:
    """Feeds the chunks: those with a `Pooling` in one launch, those with an `Alignment` in another. The answer of each
    chunk, which is empty but where the chunk ends its prompt."""
    answers = [SampledToken(token_id=None)] * len(feeds)
    pooled = [index for index, feed in enumerate(feeds) if feed.record.start.pooling is not None]
    aligned = [index for index, feed in enumerate(feeds) if feed.record.start.alignment is not None]
    if pooled:
        vectors = parts.network.vectors([feeds[index] for index in pooled], outputs)
        for index, vector in zip(pooled, vectors, strict=True):
            answers[index] = SampledToken(token_id=None, vector=vector)
    if aligned:
        assert parts.aligner is not None, f"{len(aligned)} chunks are to be aligned, but the model aligns nothing"
        found = parts.aligner.align([feeds[index] for index in aligned])
        for index, one in zip(aligned, found, strict=True):
            answers[index] = SampledToken(token_id=None, aligned=one)
    return answers
