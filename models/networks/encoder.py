"""Encoder-only models (BERT and its kin; Devlin et al. 2019) as a `Network`: whole prompts in, vectors out, no pages.

The native library computes the encoders that `TextEncoder` knows. Prompts of any lengths stand side by side in a step,
without padding, and each has the bits that it has alone. A head for classes is computed by transformers' own module,
prompt by prompt.

Other encoders are computed by transformers' modules and attention, so all special features of an architecture are the
same as in transformers. Prompts of similar length share a batch; shorter prompts are padded and masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ...core.request import Pooling
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.module import TransformerModel, forwards
from ..memory.rows import Rows
from ..native.runner import Runner
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
    native: Runner | None = None

    def start(self, record: Record) -> None:
        assert record.start.pooling is not None, (
            f"sequence {record.start.sequence_id} is to be generated, but the model gives vectors only"
        )
        check_pooling(record.start, classifies=self.classifies)

    def vectors(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[tuple[float, ...] | None]:  # noqa: ARG002
        if self.native is not None:
            return self._of_library(self.native, feeds)
        answers: list[tuple[float, ...] | None] = [None] * len(feeds)
        for classify in (False, True):
            chosen = [index for index, feed in enumerate(feeds) if (_pooling(feed).kind == "classify") is classify]
            for batch in _batches(chosen, feeds):
                for index, vector in zip(batch, self._run([feeds[index] for index in batch], classify), strict=True):
                    answers[index] = vector
        return answers

    def _of_library(self, native: Runner, feeds: Sequence[Feed]) -> list[tuple[float, ...] | None]:
        rows = _side_by_side(feeds, native.uncounted)
        hidden = native.step([token for feed in feeds for token in feed.tokens], rows)
        answers: list[tuple[float, ...] | None] = []
        for feed, part in zip(feeds, torch.split(hidden, list(map(_wanted, feeds))), strict=True):
            answers.append(_pooled(self._classified(part) if _pooling(feed).kind == "classify" else part, feed))
        return answers

    def _classified(self, hidden: Tensor) -> Tensor:
        """Returns the scores [1, labels] of one prompt's hidden states."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        module = self.model.module
        pooler = getattr(module.base_model, "pooler", None)

        def given(*_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
            pooled = None if pooler is None else pooler(inputs_embeds)
            return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)

        with forwards([(module.base_model, given)]):
            scores: Tensor = module(inputs_embeds=hidden[None].to(module.dtype)).logits
        return scores

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
        return [_pooled(row[: feed.part.length], feed) for row, feed in zip(rows, feeds, strict=True)]


def _side_by_side(feeds: Sequence[Feed], uncounted: int | None) -> Rows:
    """Returns the rows of prompts that are read whole. The wanted rows of each prompt follow each other. ``uncounted``
    is `Runner.uncounted`."""
    positions, chunks, wanted, types = list[int](), list[tuple[int, int, int, int]](), list[int](), list[int]()
    typed = any(_pooling(feed).second is not None for feed in feeds)
    for feed in feeds:
        first, length, second = len(positions), feed.part.length, _pooling(feed).second
        chunks.append((length, 0, 0, 0))
        taken = _wanted(feed)
        begin = first if _pooling(feed).kind != "last" else first + length - 1
        wanted += range(begin, begin + taken)
        positions += range(length) if uncounted is None else _counted(feed.tokens, uncounted)
        if typed:  # in pairs, the second text has type 1
            types += [int(second is not None and place >= second) for place in range(length)]
    return Rows(positions=positions, chunks=chunks, tables=(), wanted=wanted, types=types)


def _counted(tokens: Sequence[int], uncounted: int) -> Iterator[int]:
    """Yields the position of each token: 0 of those that are not counted, from 1 on of the others."""
    places = count(1)
    for token in tokens:
        yield 0 if token == uncounted else next(places)


def _wanted(feed: Feed) -> int:
    """Returns the number of rows that a prompt's vector is computed from: the first, the last, or all."""
    return 1 if _pooling(feed).kind in {"cls", "last"} else feed.part.length


def _pooled(rows: Tensor, feed: Feed) -> tuple[float, ...]:
    """Returns a prompt's vector. ``rows`` are its hidden states [rows, hidden], or its scores [1, labels]."""
    pooling = _pooling(feed)
    sums = Sums()
    sums.add(rows, pooling)
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
