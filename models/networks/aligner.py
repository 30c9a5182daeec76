"""`WhisperAligner`: answers an `Alignment` by reading a prompt and looking at the decoder's cross-attention.

Fused attention returns no weights. So while the prompt is read, chunk by chunk, the queries of the layers with
alignment heads are kept on the host. At the last chunk, the window's cross-attention slot still holds all keys. The
weights of the alignment heads alone are then computed from queries and keys. A step that aligns nothing has no extra
cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from ...core.plan import AlignedTokens
from ...core.request import Alignment
from ..attention.alignment import cross_weights, first_frames, mean_weights
from ..checkpoints.alignment import AlignmentSettings
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.rows import slot_of
from .network import Feed
from .whisper_network import WhisperNetwork

_ROWS = 32  # rows of logits computed at once: a whole prompt's logits would take 90 MB


@define(eq=False)
class _Read:
    """The queries and log-probabilities of the chunks read so far, on the host, since a record must hold no tensor."""

    queries: list[Any] = field(factory=list)  # numpy float32 [layers, rows, width], one for each chunk
    logprobs: list[float] = field(factory=list)


@frozen(kw_only=True, eq=False)
class WhisperAligner:
    """Finds the times at which the tokens of a Whisper prompt are spoken."""

    network: WhisperNetwork
    settings: AlignmentSettings

    def align(self, feeds: Sequence[Feed], _: EncoderOutputs) -> list[AlignedTokens | None]:
        """Implements `Network.align`."""
        assert self.settings.fault is None, f"words are aligned although {self.settings.fault}"
        reading = self.network.read(feeds, self.settings.layers)
        kept = torch.stack(reading.queries)
        answers: list[AlignedTokens | None] = []
        for index, feed in enumerate(feeds):
            rows = slice(reading.starts[index], reading.starts[index] + feed.part.length)
            answers.append(self._read(feed, reading.hidden[rows], kept[:, rows]))
        return answers

    def _read(self, feed: Feed, hidden: Tensor, queries: Tensor) -> AlignedTokens | None:
        """Keeps the queries and log-probabilities of a chunk. Returns the answer if the chunk ends its prompt."""
        part, record = feed.part, feed.record
        alignment, length = record.start.alignment, record.start.prompt_length
        assert alignment is not None, "only a sequence with an alignment is aligned"
        assert alignment.start < length, f"sequence {part.sequence_id}: no token from {alignment.start} on of {length}"
        if record.notes is None:
            record.notes = _Read()
            assert part.start < alignment.start, (
                f"sequence {part.sequence_id}: positions before {part.start} are needed, and were not fed"
            )
        # a row predicts the token after it, so the first row is that of the token before ``start``
        first = max(alignment.start - 1 - part.start, 0)
        record.notes.queries.append(queries[:, first:].float().cpu().numpy().copy())
        known = record.tokens[part.start + first + 1 : min(part.start + part.length + 1, length)]
        record.notes.logprobs += self._logprobs(hidden[first : first + len(known)], known, alignment.among)
        return self._answer(feed, record.notes, alignment) if part.samples else None

    def _logprobs(self, hidden: Tensor, tokens: list[int], among: int | None) -> list[float]:
        found: list[float] = []
        for start in range(0, len(tokens), _ROWS):
            asked = torch.tensor(tokens[start : start + _ROWS], device=hidden.device)
            logits = self.network.head(hidden[start : start + _ROWS])[:, :among]
            there = asked < logits.shape[1]
            chosen = logits.gather(1, asked.where(there, 0)[:, None])[:, 0] - logits.logsumexp(-1)
            found += chosen.masked_fill(~there, -torch.inf).tolist()
        return found

    def _answer(self, feed: Feed, read: _Read, alignment: Alignment) -> AlignedTokens:
        slot = slot_of(feed.part)
        queries = torch.from_numpy(np.concatenate(read.queries, 1)).to(self.network.device)
        mean = mean_weights(self._weights(queries, slot, alignment.frames), self.settings.filter_width)
        return AlignedTokens(frames=tuple(first_frames(mean.double().cpu().numpy())), logprobs=tuple(read.logprobs))

    def _weights(self, queries: Tensor, slot: int, frames: int) -> Iterator[Tensor]:
        """Yields, for each layer, the weights of its alignment heads, [heads, tokens, frames]."""
        for layer, found in zip(self.settings.layers, queries, strict=True):
            keys = self.network.cross.keys(layer, slot)  # [heads, embeddings, head_dim]
            heads = self.settings.heads_of(layer)
            split = found.view(len(found), len(keys), -1).transpose(0, 1)
            yield cross_weights(split[heads], keys[heads], frames)
