"""Encoder-only models (BERT and its kin; Devlin et al. 2019) as a `Network`: whole prompts in, vectors out, no pages.

transformers' own modules and attention compute everything, so all special features of an architecture (relative
positions, token types) are the same as in transformers. Prompts of similar length share a batch; shorter prompts are
padded and masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from ...core.request import Pooling
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.module import TransformerModel
from .network import Feed, Network, Record
from .pooling import Sums, check_pooling, finish

_FILLED = 0.25  # the largest share of a batch's rows that may be padding


@frozen(kw_only=True, eq=False)
class EncoderNetwork(Network):
    """An encoder of texts as a network. ``pad`` is the token that pads prompts; it may be any token, since padding is
    masked."""

    model: TransformerModel
    positions: int
    pad: int
    classifies: bool
    device: torch.device

    def start(self, record: Record) -> None:
        assert record.start.pooling is not None, (
            f"sequence {record.start.sequence_id} is to be generated, but the model gives vectors only"
        )
        check_pooling(record.start, classifies=self.classifies)

    def vectors(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[tuple[float, ...] | None]:  # noqa: ARG002
        answers: list[tuple[float, ...] | None] = [None] * len(feeds)
        for classify in (False, True):
            chosen = [index for index, feed in enumerate(feeds) if (_pooling(feed).kind == "classify") is classify]
            for batch in _batches(chosen, feeds):
                for index, vector in zip(batch, self._run([feeds[index] for index in batch], classify), strict=True):
                    answers[index] = vector
        return answers

    def _run(self, feeds: list[Feed], classify: bool) -> list[tuple[float, ...]]:
        longest = max(feed.part.length for feed in feeds)
        filled = [[*feed.tokens, *[self.pad] * (longest - feed.part.length)] for feed in feeds]
        lengths = torch.tensor([feed.part.length for feed in feeds])
        module = self.model.module if classify else self.model.module.base_model
        types = {}
        if any(_pooling(feed).second is not None for feed in feeds):  # in pairs, the second text has type 1
            seconds = [longest if (second := _pooling(feed).second) is None else second for feed in feeds]
            types["token_type_ids"] = (torch.arange(longest) >= torch.tensor(seconds)[:, None]).long().to(self.device)
        output = module(
            input_ids=torch.tensor(filled, device=self.device),
            attention_mask=(torch.arange(longest) < lengths[:, None]).long().to(self.device),
            **types,
        )
        rows = output.logits[:, None] if classify else output.last_hidden_state
        return [_answer(row, feed, classify) for row, feed in zip(rows, feeds, strict=True)]


def _answer(rows: Tensor, feed: Feed, classify: bool) -> tuple[float, ...]:
    """Returns a prompt's vector. ``rows`` are its hidden states [longest, hidden], or its scores [1, labels]."""
    pooling = _pooling(feed)
    sums = Sums()
    sums.add(rows if classify else rows[: feed.part.length], pooling)
    return finish(sums.vector(pooling), pooling)


def _pooling(feed: Feed) -> Pooling:
    pooling = feed.record.start.pooling
    assert pooling is not None, "only a sequence with a pooling is pooled"
    return pooling


def _batches(chosen: Sequence[int], feeds: Sequence[Feed]) -> Iterator[list[int]]:
    """Splits ``chosen`` into batches of prompts with similar lengths."""
    batch: list[int] = []
    rows = 0
    for index in sorted(chosen, key=lambda index: feeds[index].part.length):
        length = feeds[index].part.length
        if batch and (length * (len(batch) + 1) - rows - length) > _FILLED * length * (len(batch) + 1):
            yield batch
            batch, rows = [], 0
        batch.append(index)
        rows += length
    if batch:
        yield batch
