"""Proposers of draft tokens: `LookupProposer`, by the text itself, and `HeadProposer`, by the model's draft head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from ..core.plan import Chunk, SampledToken
from .blueprints.blueprint import DraftParts
from .memory.rows import Rows
from .native.draws import Draw
from .networks.network import Drafted, Feed, Record
from .sampling.lookup import Lookup


@frozen(kw_only=True)
class LookupProposer:
    """Proposes the tokens that followed an earlier occurrence of the last tokens.

    It learns a long prompt over several steps, including steps that read the prompt and sample nothing. No step learns
    more than ``pace`` tokens in all, or ``least`` tokens of each sequence if that is more. Until a prompt is learned,
    draft tokens come from its beginning.
    """

    match: int
    pace: int = 2_048
    least: int = 64  # enough to learn all that one step adds

    def start(self, record: Record) -> None:
        """Prepares for a sequence, before its first chunk."""
        record.lookup = Lookup(self.match)

    def learn(self, feeds: Sequence[Feed], sampled: Sequence[SampledToken], hidden: Sequence[Tensor]) -> None:
        """Does nothing: what a step has sampled is learned when the next one is proposed for."""

    def propose(self, feeds: Sequence[Feed]) -> list[tuple[int, ...]]:
        """Returns, for each chunk of a step, up to ``draft_tokens`` tokens that may follow it."""
        share = max(self.pace // max(len(feeds), 1), self.least)
        for feed in feeds:
            if feed.record.lookup is not None:
                feed.record.lookup.learn(feed.record.tokens, share)
        proposed = list[tuple[int, ...]]()
        for feed in feeds:
            count, lookup, tokens = feed.part.draft_tokens, feed.record.lookup, feed.record.tokens
            proposed.append(clipped(feed.record, lookup.propose(tokens, count)) if count and lookup is not None else ())
        return proposed


@frozen(kw_only=True)
class HeadProposer:
    """Proposes the tokens that a draft head finds likeliest, one after another.

    A head with keys and values of its own reads, after each step, the positions whose next token is known, and finds
    the token behind that one. Before the next step it goes on from its own tokens. Its keys and values lie in pages
    with the numbers of the sequence's pages. A head that reads the model's keys and values begins with the last token
    before the next step, and stays at its position. Beside more sequences than ``most`` nothing is read: what is found
    later is worse, and so is refused.

    Args:
        most: the most sequences of a step that the head reads.
    """

    head: DraftParts
    most: int

    @property
    def _stays(self) -> bool:
        """True if the head has no keys and values of its own."""
        return self.head.found is not None

    def start(self, record: Record) -> None:
        """Prepares for a sequence, before its first chunk."""

    def learn(self, feeds: Sequence[Feed], sampled: Sequence[SampledToken], hidden: Sequence[Tensor]) -> None:
        """Reads a step that is done.

        Args:
            hidden: the hidden states of each chunk's rows behind the last layer.
        """
        if len(feeds) > self.most:
            return
        parts, ends = list[_Part](), list[_Part]()
        for feed, one, states in zip(feeds, sampled, hidden, strict=True):
            start, length = feed.part.start, feed.part.length
            tokens = feed.record.tokens[start + 1 : start + 1 + length - len(feed.proposed) + len(one.accepted)]
            own = states[: len(tokens)]
            if feed.record.search is not None or not tokens:
                continue
            known = feed.part.samples and start + len(tokens) + 1 == len(feed.record.tokens)
            if len(tokens) > known and not self._stays:
                stop = len(tokens) - known
                parts.append(_Part(feed, start, tokens[:stop], self.head.norm(own[:stop])))
            if known:
                ends.append(_Part(feed, start + len(tokens) - 1, tokens[-1:], self.head.norm(own[-1:])))
        if parts:
            self._read(parts, wanted=False)
        found = [(part.tokens[0], part.states[0].float().numpy()) for part in ends] if self._stays else self._read(ends)
        for part, (token, left) in zip(ends, found, strict=True):
            part.feed.record.drafted = Drafted(len(part.feed.record.tokens), token, left)

    def propose(self, feeds: Sequence[Feed]) -> list[tuple[int, ...]]:
        """Returns, for each chunk of a step, up to ``draft_tokens`` tokens that may follow it."""
        proposed: list[list[int]] = [[] for _ in feeds]
        chains = list[_Part]()
        for feed, own in zip(feeds, proposed, strict=True):
            drafted, known = feed.record.drafted, len(feed.record.tokens)
            if not feed.part.draft_tokens or drafted is None or drafted.known != known:
                continue
            if not self._stays:
                own.append(drafted.token)
            start = known - 2 if self._stays else known - 1
            chains.append(_Part(feed, start, [drafted.token], torch.from_numpy(drafted.hidden)[None], own))
        while chains := [part for part in chains if len(part.proposed) < part.feed.part.draft_tokens]:
            longer = list[_Part]()
            for part, (token, left) in zip(chains, self._read(chains), strict=True):
                part.proposed.append(token)
                start = part.start if self._stays else part.start + 1
                longer.append(evolve(part, start=start, tokens=[token], states=torch.from_numpy(left)[None]))
            chains = longer
        return [clipped(feed.record, tuple(own)) for feed, own in zip(feeds, proposed, strict=True)]

    def _read(self, parts: Sequence[_Part], *, wanted: bool = True) -> list[tuple[int, Any]]:
        """Feeds the head. Returns for each part, whose one row is ``wanted``, the likeliest token behind its token, and
        the head's hidden state."""
        if not wanted:
            return self._read_together(parts, wanted=False)
        most = self.head.runner.rows  # the runner has the last hidden states of one call alone
        cut = [parts[start : start + most] for start in range(0, len(parts), most)]
        return [one for some in cut for one in self._read_together(some, wanted=True)]

    def _read_together(self, parts: Sequence[_Part], *, wanted: bool) -> list[tuple[int, Any]]:
        chunks = [part.chunk for part in parts]
        rows = Rows.of(chunks, [(index, 0) for index in range(len(parts))] if wanted else (), self.head.paged.page_size)
        rows = evolve(rows, tokens=[token for part in parts for token in part.tokens])
        states = torch.cat([part.states for part in parts]).float()
        chosen = self.head.runner.choose(states, rows, [Draw()] * len(parts) if wanted else ())
        left = self.head.runner.last_hidden(len(chosen)).numpy()
        found = self.head.found or (lambda choice, own: (choice, own))
        return [found(one.token, left[index]) for index, one in enumerate(chosen)]


@frozen
class _Part:
    """Positions of one sequence from ``start`` on that a draft head reads: the token behind each, and the hidden states
    [positions, hidden]. ``proposed`` has the tokens of a chain."""

    feed: Feed
    start: int
    tokens: list[int]
    states: Tensor
    proposed: list[int] = field(factory=list)

    @property
    def chunk(self) -> Chunk:
        """The positions, as a chunk of a step."""
        part, length = self.feed.part, len(self.tokens)
        return Chunk(part.sequence_id, self.start, length, part.page_table, part.cross_slot, samples=False)


Proposer = LookupProposer | HeadProposer


def clipped(record: Record, proposed: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the leading tokens of ``proposed`` that the sequence's structured output allows. It allows all before the
    answer."""
    if record.guide is None:
        return proposed
    begin = 0 if record.track is None else record.track.at(record.generated).answer
    return proposed if begin is None else proposed[: record.guide.valid(record.generated[begin:], proposed)]
