"""Whisper as a `Network`: its items are windows of samples, which the decoder reads through cross-attention.

`WhisperAligner` answers an `Alignment` by reading a prompt and looking at the decoder's cross-attention. Fused
attention returns no weights. So while the prompt is read, chunk by chunk, the queries of the layers with alignment
heads are kept on the host. At the last chunk, the window's cross-attention slot still holds all keys. The weights of
the alignment heads alone are then computed from queries and keys. A step that aligns nothing has no extra cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...core.errors import InvalidRequest
from ...core.plan import AlignedTokens
from ...core.request import Alignment, EncoderItem
from ..attention.alignment import cross_weights, first_frames, mean_weights
from ..attention.paged import PagedStep
from ..checkpoints.alignment import AlignmentSettings
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.module import TransformerModel
from ..memory.rows import slot_of
from ..memory.slots import CrossStep
from ..native.crossed_decoder import CrossedDecoder
from ..native.runner import Runner
from .features import LogMel
from .network import CrossedNetwork, Feed


@frozen(kw_only=True, eq=False)
class ReadChunks:
    """The hidden states and queries that the decoder computes for some chunks."""

    starts: Mapping[int, int]  # the first row of each chunk, by the index of the chunk
    hidden: Tensor  # [rows, width], for `WhisperNetwork.head`
    queries: list[Tensor]  # for each requested layer the scaled queries [rows, width]


@frozen(kw_only=True, eq=False)
class WhisperNetwork(CrossedNetwork):
    """Whisper as a network.

    ``native`` computes steps, and ``encoder`` computes encoder outputs; ``None``: torch computes them. ``queries``
    names the buffers of ``native`` that hold the queries of each layer's cross-attention.
    """

    model: TransformerModel
    log_mel: LogMel
    encoder: Runner | None = None
    queries: tuple[int, ...] = ()

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        """Implements `Network.encode`. Windows of the same length share a launch. The library computes each window
        alone: one window has enough rows, and its bits do not depend on other windows then."""
        if self.encoder is not None:
            return [self._encoded([job], job.embeddings)[0] for job in jobs]
        outputs: dict[str, Tensor] = {}
        for embeddings in {job.embeddings for job in jobs}:
            alike = [job for job in jobs if job.embeddings == embeddings]
            for job, output in zip(alike, self._encoded(alike, embeddings), strict=True):
                outputs[job.key] = output.clone()
        return [outputs[job.key] for job in jobs]

    def _encoded(self, jobs: Sequence[EncoderItem], embeddings: int) -> Tensor:
        """Returns encoder outputs [jobs, embeddings, width]. If ``embeddings`` is less than the model's number, the
        windows are shorter in proportion."""
        most, settings = len(self.model.module.encoder.embed_positions.weight), self.log_mel.settings
        assert 1 <= embeddings <= most, f"{embeddings} embeddings of a window; allowed: 1..{most}"
        limit = settings.window_samples * embeddings // most
        samples = self.log_mel.pad([_samples(job, limit) for job in jobs])
        log_mel = self.log_mel(samples, settings.frames * embeddings // most)
        found: Tensor = self.model.module.encode(log_mel, self.encoder)
        return found

    def write_cross(self, slot: int, output: Tensor) -> None:
        if self.encoder is not None:
            self.cross.write_all(slot, output, self.encoder.head)
            return
        self.cross.begin(slot, len(output))
        decoder = CrossedDecoder(self.model.module)
        for layer in range(self.cross.layers):
            self.cross.write(slot, layer, *decoder.keys_values(layer, output))

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs) -> Tensor:
        if self.native is not None:
            return self.native.step(*self.fed(feeds, wanted, outputs))
        reading = self.read(feeds, ())
        if not wanted:
            return reading.hidden.new_empty(0, len(self.model.module.proj_out.weight), dtype=torch.float32)
        rows_of = [reading.starts[index] + offset for index, offset in wanted]
        return self.head(reading.hidden[torch.tensor(rows_of, device=self.device)])

    def read(self, feeds: Sequence[Feed], layers: Sequence[int]) -> ReadChunks:
        """Feeds chunks. Returns their hidden states, and the queries of cross-attention in ``layers``."""
        fed, rows = self.fed(feeds, ())
        if self.native is not None:
            shape = len(fed), self.model.module.config.hidden_size
            kept = {self.queries[layer]: torch.empty(shape, dtype=torch.float32) for layer in layers}
            hidden = self.native.step(fed, evolve(rows, wanted=range(len(fed))), hidden=True, kept=kept)
            queries = list(kept.values())
        else:
            self.paged.enter([feed.part for feed in feeds])
            tokens, positions = torch.tensor([fed, rows.positions]).to(self.device)
            step, crossing = PagedStep(self.paged, rows), CrossStep.of(self.cross, rows)
            hidden, asked = self.model.module.decode(tokens, positions, step, crossing)
            queries = [asked[layer] for layer in layers]
        starts = dict(zip(rows.order, rows.starts, strict=True))
        return ReadChunks(starts=starts, hidden=hidden, queries=queries)

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits [rows, vocabulary], float32, of hidden states from `read`."""
        logits: Tensor = self.model.module.logits(hidden) if self.native is None else self.native.head(hidden)
        return logits


def _samples(job: EncoderItem, limit: int) -> Tensor:
    """Returns a job's payload as a float32 vector on the CPU."""
    samples = torch.as_tensor(job.payload, dtype=torch.float32)
    if samples.ndim != 1 or not 1 <= len(samples) <= limit:
        raise InvalidRequest(
            f"encoder item {job.key!r} has samples of shape {tuple(samples.shape)}; allowed: (1..{limit},)"
        )
    return samples


# -- alignment ---------------------------------------------------------------------------------------------------------

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
