"""`Network`: what `TorchExecutor` works with, whatever the architecture: tokens in, logits or vectors out.

A network owns no tensor. It refers to what the executor's resource stack owns: the weights, the KV, the features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...core.errors import InvalidRequest
from ...core.plan import AlignedTokens, Chunk, EncodeJob, SequenceStart
from ..attention.paged import PagedStep
from ..memory.kv import PagedKV
from ..memory.rows import Rows
from ..memory.slots import CrossKV, CrossStep
from ..native.runner import Runner
from ..sampling.beams import Search
from ..sampling.lookup import Lookup
from ..sampling.structure import Guide
from .features import LogMel
from .whisper import WhisperModel


@define(eq=False)
class Record:
    """A sequence as the executor knows it: all its tokens, sampled ones included.

    ``notes`` is the network's own: what it has found out of the sequence, kept on the host (no tensor may hide here).
    """

    start: SequenceStart
    tokens: list[int]
    guide: Guide | None = None  # the way through its structure
    lookup: Lookup | None = field(default=None, repr=False)  # of a proposer; see `triolet.models.speculation`
    twin: Record | None = field(default=None, repr=False)  # the same sequence, as a draft model knows it
    notes: Any = field(default=None, repr=False)
    search: Search | None = field(default=None, repr=False)  # whose beams it has; their tokens are not among its own
    prompt: tuple[int, ...] = field(init=False)  # its tokens, each once; only where a penalty needs them

    @prompt.default
    def _distinct(self) -> tuple[int, ...]:
        penalty = self.start.sampling.repetition_penalty
        return tuple(set(self.start.token_ids[: self.start.prompt_length])) if penalty != 1.0 else ()

    @property
    def generated(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[self.start.prompt_length :]


@frozen(kw_only=True, eq=False)
class Feed:
    """One chunk of a step, and the sequence it is of. The last tokens of the chunk may be draft tokens,
    ``proposed``."""

    part: Chunk
    record: Record
    proposed: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """What is fed."""
        known = self.record.tokens[self.part.start : self.part.start + self.part.length]
        return [*known, *self.proposed]

    def with_proposed(self, proposed: tuple[int, ...]) -> Feed:
        """The chunk with ``proposed`` behind it."""
        if not proposed:
            return self
        longer = evolve(self.part, length=self.part.length + len(proposed))
        return Feed(part=longer, record=self.record, proposed=proposed)


class Outputs(Protocol):
    """Where encoder outputs are read."""

    def get(self, key: str) -> Tensor:
        """The output of ``key``, [embeddings, width], which must be resident."""


class Weights(Protocol):
    """A model's tensors: a holder (see `resources.Holder`) that can be taken to another device."""

    def to(self, device: torch.device) -> Self:
        """The same model with its tensors on ``device``; those that are there already are shared, not copied."""

    def tensors(self) -> Iterable[Tensor]:
        """The weights."""

    def release(self) -> None:
        """Forgets every tensor."""


class Network(Protocol):
    """A model at work. Every method is for `torch.inference_mode`; chunks have been checked against pages and slots."""

    @property
    def positions(self) -> int:
        """Decoder positions: prompt and generated tokens together."""

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[Tensor]:
        """Encoder outputs, each [embeddings, width] in storage of its own.

        Raises:
            InvalidRequest: a payload is not what the model reads.
        """

    def write_cross(self, slot: int, output: Tensor) -> None:
        """Writes the cross-attention KV of one encoder output."""

    def start(self, record: Record) -> None:
        """Hears of a sequence before its first chunk."""

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs) -> Tensor:
        """Feeds at least one chunk.

        Args:
            wanted: (index of the chunk, offset in it) of each row whose logits are wanted.
            outputs: encoder outputs that are placed among the tokens.

        Returns:
            Logits, float32 [wanted, vocabulary], to be written to by the caller.
        """

    def vectors(self, feeds: Sequence[Feed], outputs: Outputs) -> list[tuple[float, ...] | None]:
        """Feeds chunks of sequences with a `Pooling`; the vector of each whose chunk ends its prompt."""


@runtime_checkable
class Chooser(Protocol):
    """A network whose tokens the native library may choose. What `Network` says of chunks holds here too."""

    @property
    def native(self) -> Runner | None:
        """The library at work; ``None``: torch computes."""

    def fed(
        self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs
    ) -> tuple[Tensor | Sequence[int], Rows]:
        """Embeddings [rows, hidden] or tokens [rows] of a step, and its rows, for `Runner.choose`."""


class Aligner(Protocol):
    """A network that tells when the tokens of a prompt are spoken. What `Network` says of chunks holds here too."""

    def align(self, feeds: Sequence[Feed]) -> list[AlignedTokens | None]:
        """Feeds chunks of sequences with an `Alignment`; the answer to each whose chunk ends its prompt."""


@frozen(kw_only=True, eq=False)
class Reading:
    """What a decoder makes of the rows of some chunks."""

    starts: Mapping[int, int]  # the first row of each chunk
    hidden: Tensor  # [rows, width], for `WhisperNetwork.head`
    queries: list[Tensor]  # scaled, [rows, width] of each layer that was asked for


@frozen(kw_only=True, eq=False)
class WhisperNetwork:
    """Whisper behind `Network`: items are windows of samples, read through cross-attention.

    ``native`` computes steps, and ``encoder`` what a window becomes; ``None``: torch computes both. ``queries`` are the
    buffers of ``native`` that have the queries of each layer's cross-attention.
    """

    model: WhisperModel
    log_mel: LogMel
    paged: PagedKV
    cross: CrossKV
    device: torch.device
    native: Runner | None = None
    encoder: Runner | None = None
    queries: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        return self.model.shape.positions

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[Tensor]:
        return encode_windows(self.model, self.log_mel, jobs, self.encoder)

    def write_cross(self, slot: int, output: Tensor) -> None:
        found = self.model.cross_keys_values(output) if self.encoder is None else self.encoder.head(output)
        self.cross.write_all(slot, found)

    def start(self, record: Record) -> None:
        assert not record.start.placeholders, (
            f"sequence {record.start.sequence_id}: Whisper places no items in a prompt"
        )
        assert record.start.pooling is None, f"sequence {record.start.sequence_id}: Whisper pools nothing"

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs) -> Tensor:
        if self.native is not None:
            return self.native.step(*self.fed(feeds, wanted, outputs))
        reading = self.read(feeds, ())
        if not wanted:
            return reading.hidden.new_empty(0, self.model.shape.vocabulary, dtype=torch.float32)
        rows_of = [reading.starts[index] + offset for index, offset in wanted]
        return self.head(reading.hidden[torch.tensor(rows_of, device=self.device)])

    def read(self, feeds: Sequence[Feed], layers: Sequence[int]) -> Reading:
        """Feeds chunks, and keeps the queries of the cross-attention of ``layers``."""
        if self.native is not None:
            return self._read_natively(self.native, feeds, layers)
        self.paged.enter([feed.part for feed in feeds])
        fed, rows = self.fed(feeds, ())
        tokens, positions = torch.tensor([fed, rows.positions]).to(self.device)
        kept: dict[int, Tensor] = {}
        step, crossing = PagedStep(self.paged, rows), CrossStep.of(self.cross, rows)
        hidden = self.model.decode(tokens, positions, step, crossing, kept)
        starts = dict(zip(rows.order, rows.starts, strict=True))
        return Reading(starts=starts, hidden=hidden, queries=[kept[layer] for layer in layers])

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary], float32, of what `read` gives."""
        return self.model.logits(hidden) if self.native is None else self.native.head(hidden)

    def _read_natively(self, native: Runner, feeds: Sequence[Feed], layers: Sequence[int]) -> Reading:
        fed, rows = self.fed(feeds, ())
        kept = {self.queries[layer]: torch.empty(len(fed), self.model.shape.width) for layer in layers}
        in_order = evolve(rows, wanted=range(len(fed)))
        hidden = native.step(fed, in_order, hidden=True, kept=kept)
        starts = dict(zip(rows.order, rows.starts, strict=True))
        return Reading(starts=starts, hidden=hidden, queries=list(kept.values()))

    def fed(
        self,
        feeds: Sequence[Feed],
        wanted: Sequence[tuple[int, int]],
        outputs: Outputs | None = None,  # noqa: ARG002
    ) -> tuple[Sequence[int], Rows]:
        """See `Chooser`."""
        rows = Rows.of([feed.part for feed in feeds], wanted, self.paged.page_size, self.cross.length)
        return [token for index in rows.order for token in feeds[index].tokens], rows

    def vectors(self, feeds: Sequence[Feed], outputs: Outputs) -> list[tuple[float, ...] | None]:
        raise AssertionError(f"{len(feeds)} chunks are to be pooled with {outputs}, but Whisper pools nothing")


def encode_windows(
    model: WhisperModel, log_mel: LogMel, jobs: Sequence[EncodeJob], runner: Runner | None = None
) -> list[Tensor]:
    """See `Network.encode`. Windows of one length share a launch, but not by a ``runner`` (see `WhisperModel.encode`):
    one window has rows enough, and so its bits do not depend on the others."""
    if runner is not None:
        return [_encode(model, log_mel, [job], job.embeddings, runner)[0] for job in jobs]
    outputs: dict[str, Tensor] = {}
    for embeddings in {job.embeddings for job in jobs}:
        alike = [job for job in jobs if job.embeddings == embeddings]
        for job, output in zip(alike, _encode(model, log_mel, alike, embeddings, None), strict=True):
            outputs[job.key] = output.clone()
    return [outputs[job.key] for job in jobs]


def _encode(
    model: WhisperModel, log_mel: LogMel, jobs: Sequence[EncodeJob], embeddings: int, runner: Runner | None
) -> Tensor:
    """Outputs [jobs, embeddings, width]. Fewer embeddings than the model's are of a window that is as much shorter."""
    most = model.shape.embeddings
    assert 1 <= embeddings <= most, f"{embeddings} embeddings of a window; allowed: 1..{most}"
    limit = log_mel.settings.window_samples * embeddings // most
    samples = log_mel.pad([_samples(job, limit) for job in jobs])
    return model.encode(log_mel(samples, log_mel.settings.frames * embeddings // most), runner)


def _samples(job: EncodeJob, limit: int) -> Tensor:
    """A job's payload as a float32 vector on the CPU."""
    samples = torch.as_tensor(job.payload, dtype=torch.float32)
    if samples.ndim != 1 or not 1 <= len(samples) <= limit:
        raise InvalidRequest(
            f"encoder item {job.key!r} has samples of shape {tuple(samples.shape)}; allowed: (1..{limit},)"
        )
    return samples
