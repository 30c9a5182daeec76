"""`Network`: the interface through which `TorchExecutor` uses a model of any architecture: tokens in, logits or vectors
out.

A network owns no tensor. It refers to tensors that the executor's resource stack owns: the weights, the KV and the
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...core.plan import AlignedTokens, Chunk, SampledToken, SequenceStart
from ...core.reasoning import Track
from ...core.recurrent import OwnState
from ...core.request import EncoderItem
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.kv import PagedKV
from ..memory.rows import Rows
from ..memory.slots import CrossKV
from ..native.runner import Runner
from ..sampling.beams import Search
from ..sampling.lookup import Lookup
from ..sampling.rules import SamplerInput
from ..sampling.structure import Guide


@frozen
class Drafted:
    """The proposal of a draft head after ``known`` tokens of a sequence: the token at that position, and the head's
    hidden state, numpy float32 [hidden]."""

    known: int
    token: int
    hidden: Any = field(repr=False)


@define(eq=False)
class Record:
    """A sequence as the executor knows it: all its tokens, sampled ones included.

    ``notes`` belongs to the network, which keeps here what it knows about the sequence, on the host. No tensor may hide
    here.
    """

    start: SequenceStart
    tokens: list[int]
    guide: Guide | None = None  # its position in its structured output
    track: Track | None = None  # its position among the marks of its reasoning
    lookup: Lookup | None = field(default=None, repr=False)  # for `LookupProposer`, see `triolet.models.speculation`
    drafted: Drafted | None = field(default=None, repr=False)  # for `HeadProposer`
    notes: Any = field(default=None, repr=False)
    frames: tuple[int, int] | None = None  # of the last token, as `SampledToken.frames`
    prompt_logprobs: list[Any] = field(factory=list, repr=False)  # of what is read, as in `SampledToken.prompt`
    search: Search | None = field(default=None, repr=False)  # the beam search; ``tokens`` has no tokens of beams
    own: OwnState = field(factory=OwnState, repr=False)  # of the model's recurrent layers, if it has any
    generated: list[int] = field(init=False, repr=False)  # the tokens after the prompt; grows as ``tokens`` does
    sampler_input: SamplerInput = field(init=False, repr=False)  # reads ``generated``
    page_table: tuple[int, ...] = field(init=False, default=(), repr=False)  # the last one that `check_chunk` has seen

    @generated.default
    def _after_prompt(self) -> list[int]:
        return self.tokens[self.start.prompt_length :]

    @sampler_input.default
    def _its_rules(self) -> SamplerInput:
        sampling, rules = self.start.sampling, self.start.rules
        told = self.start.token_ids[: self.start.prompt_length] if rules.counts_prompt else ()
        prompt = tuple(set(told)) if sampling.repetition_penalty != 1.0 else ()
        return SamplerInput(
            generated=self.generated,
            sampling=sampling,
            rules=rules,
            prompt=prompt,
            guide=self.guide,
            track=self.track,
            before=told if rules.no_repeat_ngram > 0 else (),
        )

    def grow(self, sampled: SampledToken) -> None:
        """Appends what was sampled."""
        for one in (sampled, *sampled.accepted):
            if one.token_id is not None:
                self.tokens.append(one.token_id)
                self.generated.append(one.token_id)


@frozen(kw_only=True, eq=False)
class Feed:
    """One chunk of a step, with the record of its sequence. The last tokens of the chunk may be draft tokens,
    ``proposed``."""

    part: Chunk
    record: Record
    proposed: tuple[int, ...] = ()

    @property
    def ends_prompt(self) -> bool:
        """True if the chunk feeds the last token of the prompt."""
        return self.part.start < self.record.start.prompt_length <= self.part.start + self.part.length

    @property
    def tokens(self) -> list[int]:
        """The tokens that the chunk feeds."""
        known = self.record.tokens[self.part.start : self.part.start + self.part.length]
        return [*known, *self.proposed]

    def up_to(self, stop: int) -> Feed:
        """Returns the chunk with the known tokens behind it, up to the position ``stop``."""
        return evolve(self, part=evolve(self.part, length=stop - self.part.start))

    def with_proposed(self, proposed: tuple[int, ...]) -> Feed:
        """Returns the chunk with the draft tokens ``proposed`` after it."""
        if not proposed:
            return self
        longer = evolve(self.part, length=self.part.length + len(proposed))
        return Feed(part=longer, record=self.record, proposed=proposed)


class Network:
    """A model at work. Every method must run in `torch.inference_mode`, with chunks that were checked against pages and
    slots.

    A network implements the methods for what its model can do. The planner never asks for more, so all other methods
    fail with an assertion.
    """

    positions: int
    """Decoder positions: prompt and generated tokens together."""
    native: Runner | None = None
    """The native library, which computes steps and chooses tokens; ``None``: torch computes."""

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        """Returns the encoder outputs of ``jobs``, each [embeddings, width], in storage of its own.

        Raises:
            InvalidRequest: the model cannot read a payload.
        """
        raise self._cannot("encode", jobs)

    def write_cross(self, slot: int, output: Tensor) -> None:
        """Writes the cross-attention KV of one encoder output."""
        raise self._cannot("write a slot", slot, output.shape)

    def start(self, record: Record) -> None:
        """Prepares for a sequence, before its first chunk."""
        raise self._cannot("start a sequence", record)

    def fed(
        self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs
    ) -> tuple[Tensor | Sequence[int], Rows]:
        """Returns the embeddings [rows, hidden] or the tokens [rows] of a step, and its rows, for a `Runner`."""
        raise self._cannot("be fed", feeds, wanted, outputs)

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: EncoderOutputs) -> Tensor:
        """Feeds one or more chunks, and returns the wanted logits.

        Args:
            wanted: (index of the chunk, offset in it) of each row whose logits are wanted.
            outputs: encoder outputs that are placed among the tokens.

        Returns:
            Logits, float32 [wanted, vocabulary], which the caller may overwrite.
        """
        raise self._cannot("give logits", feeds, wanted, outputs)

    def vectors(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[tuple[float, ...] | None]:
        """Feeds chunks of sequences with a `Pooling`. Returns a vector for each chunk that ends its prompt, otherwise
        ``None``."""
        raise self._cannot("give vectors", feeds, outputs)

    def align(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[AlignedTokens | None]:
        """Feeds chunks of sequences with an `Alignment`. Returns an answer for each chunk that ends its prompt,
        otherwise ``None``."""
        raise self._cannot("align", feeds, outputs)

    def _cannot(self, what: str, *given: object) -> AssertionError:
        return AssertionError(f"{type(self).__name__} cannot {what}, but was given {given!r:.300}")


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
