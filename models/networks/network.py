"""`Network`: what `TorchExecutor` works with, whatever the architecture: tokens in, logits or vectors out.

A network owns no tensor. It refers to what the executor's resource stack owns: the weights, the KV, the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...core.plan import Chunk, SequenceStart
from ...core.request import EncoderItem
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.kv import PagedKV
from ..memory.rows import Rows
from ..memory.slots import CrossKV
from ..native.runner import Runner
from ..sampling.beams import Search
from ..sampling.lookup import Lookup
from ..sampling.structure import Guide


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
        """The tokens after the prompt."""
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
        """The tokens that are fed."""
        known = self.record.tokens[self.part.start : self.part.start + self.part.length]
        return [*known, *self.proposed]

    def with_proposed(self, proposed: tuple[int, ...]) -> Feed:
        """The chunk with ``proposed`` after it."""
        if not proposed:
            return self
        longer = evolve(self.part, length=self.part.length + len(proposed))
        return Feed(part=longer, record=self.record, proposed=proposed)


class Network:
    """A model at work. Every method is for `torch.inference_mode`; chunks have been checked against pages and slots.

    A network has the methods of what its model can do. The planner asks for nothing else, so the others assert.
    """

    positions: int
    """Decoder positions: prompt and generated tokens together."""
    native: Runner | None = None
    """The native library at work, which then chooses tokens, too; ``None``: torch computes."""

    @property
    def is_native(self) -> bool:
        """True if the native library computes all layers."""
        return self.native is not None

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        """Encoder outputs, each [embeddings, width] in storage of its own.

        Raises:
            InvalidRequest: a payload is not what the model reads.
        """
        raise AssertionError(f"{type(self).__name__} encodes nothing, but is given {len(jobs)} items")

    def write_cross(self, slot: int, output: Tensor) -> None:
        """Writes the cross-attention KV of one encoder output."""
        raise AssertionError(f"{type(self).__name__} has no slot {slot} for {tuple(output.shape)}")

    def start(self, record: Record) -> None:
        """Takes a sequence before its first chunk."""
        raise AssertionError(f"{type(self).__name__} starts no sequence, but is given {record.start.sequence_id}")

    def fed(
        self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs
    ) -> tuple[Tensor | Sequence[int], Rows]:
        """Embeddings [rows, hidden] or tokens [rows] of a step, and its rows, for a `Runner`."""
        raise AssertionError(f"{type(self).__name__} feeds nothing of {len(feeds)} chunks, {wanted} and {outputs}")

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs) -> Tensor:
        """Feeds at least one chunk.

        Args:
            wanted: (index of the chunk, offset in it) of each row whose logits are wanted.
            outputs: encoder outputs that are placed among the tokens.

        Returns:
            Logits, float32 [wanted, vocabulary], to be written to by the caller.
        """
        raise AssertionError(f"{type(self).__name__} has no logits {wanted} of {len(feeds)} chunks and {outputs}")

    def vectors(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[tuple[float, ...] | None]:
        """Feeds chunks of sequences with a `Pooling`; the vector of each whose chunk ends its prompt."""
        raise AssertionError(f"{type(self).__name__} pools nothing of {len(feeds)} chunks and {outputs}")


@frozen(kw_only=True, eq=False)
class CrossedNetwork(Network):
    """A decoder that reads items through cross-attention."""

    positions: int
    paged: PagedKV
    cross: CrossKV
    device: torch.device
    native: Runner | None = None

    def start(self, record: Record) -> None:
        start = record.start
        assert not start.placeholders, f"sequence {start.sequence_id}: an encoder-decoder places no items in a prompt"
        assert start.pooling is None, f"sequence {start.sequence_id}: an encoder-decoder pools nothing"

    def fed(
        self,
        feeds: Sequence[Feed],
        wanted: Sequence[tuple[int, int]],
        outputs: EncoderOutputs | None = None,  # noqa: ARG002
    ) -> tuple[Sequence[int], Rows]:
        rows = Rows.of([feed.part for feed in feeds], wanted, self.paged.page_size, self.cross.length)
        return [token for index in rows.order for token in feeds[index].tokens], rows
