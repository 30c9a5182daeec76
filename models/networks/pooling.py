"""Computes one vector for a whole prompt, or a class for some of its tokens, from the last hidden states, chunk by
chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import define
from torch import Tensor

from ...core.plan import SequenceStart
from ...core.request import Pooling
from ..memory.module import TransformerModel


@define(eq=False)
class Sums:
    """The sums over the chunks read so far, on the host, since a record must hold no tensor."""

    count: int = 0
    first: Any = None  # numpy float32 [hidden]
    last: Any = None
    total: Any = None  # numpy float64 [hidden]

    def add(self, hidden: Tensor, pooling: Pooling) -> None:
        """Adds the hidden states [rows, hidden] of the next positions."""
        if pooling.kind == "cls" and self.first is None:
            self.first = _host(hidden[0])
        if pooling.kind in {"last", "classify"}:
            self.last = _host(hidden[-1])
        if pooling.kind == "mean":
            total = _host(hidden.sum(0, dtype=torch.float32)).astype(np.float64)
            self.total = total if self.total is None else self.total + total
        self.count += len(hidden)

    def vector(self, pooling: Pooling) -> Any:
        """Returns the pooled vector, numpy float32 [hidden], before a head and before normalization."""
        if pooling.kind == "cls":
            return self.first
        return self.last if self.total is None else (self.total / self.count).astype(np.float32)


def _host(tensor: Tensor) -> Any:
    return tensor.float().cpu().numpy().copy()


def pooled(model: TransformerModel, sums: Sums, pooling: Pooling) -> tuple[float, ...]:
    """Returns the answer of a decoder that has read the prompt. If the request asks for classes, the classification
    head computes it."""
    vector = sums.vector(pooling)
    if pooling.kind == "classify":
        score = model.module.score
        vector = _host(score(torch.from_numpy(vector).to(getattr(score, "scales", score.weight))))
    return finish(vector, pooling)


def marked(model: TransformerModel, hidden: Tensor) -> list[tuple[int, float]]:
    """Returns the likeliest class of each of ``hidden`` [rows, hidden] and its natural log-probability, by the
    classification head."""
    score = model.module.score
    logprobs = score(hidden.to(getattr(score, "scales", score.weight))).float().log_softmax(-1)
    best = logprobs.max(-1)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def check_pooling(start: SequenceStart, *, classifies: bool) -> None:
    """Asserts that the model can do what the request asks for: classes need a classification head."""
    kind = None if start.pooling is None else start.pooling.kind
    assert classifies or kind != "classify", f"sequence {start.sequence_id}: the model has no classification head"


def finish(vector: Any, pooling: Pooling) -> tuple[float, ...]:
    """Returns the answer to ``pooling``: ``vector``, normalized if the request asks for it."""
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return tuple(vector.tolist())
