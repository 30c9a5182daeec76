"""Whisper as a `Network`: its items are windows of samples, which the decoder reads through cross-attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from ...core.errors import InvalidRequest
from ...core.request import EncoderItem
from ..attention.paged import PagedStep
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.slots import CrossStep
from ..native.runner import Runner
from .features import LogMel
from .network import CrossedNetwork, Feed
from .whisper import WhisperModel


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

    model: WhisperModel
    log_mel: LogMel
    encoder: Runner | None = None
    queries: tuple[int, ...] = ()

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        return encode_windows(self.model, self.log_mel, jobs, self.encoder)

    def write_cross(self, slot: int, output: Tensor) -> None:
        found = self.model.cross_keys_values(output) if self.encoder is None else self.encoder.head(output)
        self.cross.write_all(slot, found)

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs) -> Tensor:
        if self.native is not None:
            return self.native.step(*self.fed(feeds, wanted, outputs))
        reading = self.read(feeds, ())
        if not wanted:
            return reading.hidden.new_empty(0, self.model.shape.vocabulary, dtype=torch.float32)
        rows_of = [reading.starts[index] + offset for index, offset in wanted]
        return self.head(reading.hidden[torch.tensor(rows_of, device=self.device)])

    def read(self, feeds: Sequence[Feed], layers: Sequence[int]) -> ReadChunks:
        """Feeds chunks. Returns their hidden states, and the queries of cross-attention in ``layers``."""
        if self.native is not None:
            return self._read_natively(self.native, feeds, layers)
        self.paged.enter([feed.part for feed in feeds])
        fed, rows = self.fed(feeds, ())
        tokens, positions = torch.tensor([fed, rows.positions]).to(self.device)
        kept: dict[int, Tensor] = {}
        step, crossing = PagedStep(self.paged, rows), CrossStep.of(self.cross, rows)
        hidden = self.model.decode(tokens, positions, step, crossing, kept)
        starts = dict(zip(rows.order, rows.starts, strict=True))
        return ReadChunks(starts=starts, hidden=hidden, queries=[kept[layer] for layer in layers])

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits [rows, vocabulary], float32, of hidden states from `read`."""
        return self.model.logits(hidden) if self.native is None else self.native.head(hidden)

    def _read_natively(self, native: Runner, feeds: Sequence[Feed], layers: Sequence[int]) -> ReadChunks:
        fed, rows = self.fed(feeds, ())
        shape = len(fed), self.model.shape.width
        kept = {self.queries[layer]: torch.empty(shape, dtype=torch.float32) for layer in layers}
        in_order = evolve(rows, wanted=range(len(fed)))
        hidden = native.step(fed, in_order, hidden=True, kept=kept)
        starts = dict(zip(rows.order, rows.starts, strict=True))
        return ReadChunks(starts=starts, hidden=hidden, queries=list(kept.values()))


def encode_windows(
    model: WhisperModel, log_mel: LogMel, jobs: Sequence[EncoderItem], runner: Runner | None = None
) -> list[Tensor]:
    """Encodes windows, as `Network.encode` does. Windows of the same length share a launch. With a ``runner`` (see
    `WhisperModel.encode`), each window is computed alone: one window has enough rows, and its bits do not depend on
    other windows then.
    """
    if runner is not None:
        return [_encode(model, log_mel, [job], job.embeddings, runner)[0] for job in jobs]
    outputs: dict[str, Tensor] = {}
    for embeddings in {job.embeddings for job in jobs}:
        alike = [job for job in jobs if job.embeddings == embeddings]
        for job, output in zip(alike, _encode(model, log_mel, alike, embeddings, None), strict=True):
            outputs[job.key] = output.clone()
    return [outputs[job.key] for job in jobs]


def _encode(
    model: WhisperModel, log_mel: LogMel, jobs: Sequence[EncoderItem], embeddings: int, runner: Runner | None
) -> Tensor:
    """Returns encoder outputs [jobs, embeddings, width]. If ``embeddings`` is less than the model's number, the windows
    are shorter in proportion."""
    most = model.shape.embeddings
    assert 1 <= embeddings <= most, f"{embeddings} embeddings of a window; allowed: 1..{most}"
    limit = log_mel.settings.window_samples * embeddings // most
    samples = log_mel.pad([_samples(job, limit) for job in jobs])
    return model.encode(log_mel(samples, log_mel.settings.frames * embeddings // most), runner)


def _samples(job: EncoderItem, limit: int) -> Tensor:
    """Returns a job's payload as a float32 vector on the CPU."""
    samples = torch.as_tensor(job.payload, dtype=torch.float32)
    if samples.ndim != 1 or not 1 <= len(samples) <= limit:
        raise InvalidRequest(
            f"encoder item {job.key!r} has samples of shape {tuple(samples.shape)}; allowed: (1..{limit},)"
        )
    return samples
