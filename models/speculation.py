"""Proposers of draft tokens: the text itself, or a smaller model that reads along.

A proposer sees every chunk of every step, even those that sample nothing. So a draft model's KV is always as long as
the model's own. It lies in a pool of its own, in pages with the same numbers. So the planner's facts about a page hold
for both pools.

Both proposers have two methods. ``start`` is called for a sequence before its first chunk. ``propose`` returns, for
each chunk of a step, up to ``draft_tokens`` tokens that may follow it.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from ..core.plan import Chunk
from .networks.network import Feed, Record
from .sampler import Sampler, is_token
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
        record.lookup = Lookup(self.match)

    def propose(self, feeds: Sequence[Feed]) -> list[tuple[int, ...]]:
        share = max(self.pace // max(len(feeds), 1), self.least)
        for feed in feeds:
            if feed.record.lookup is not None:
                feed.record.lookup.learn(feed.record.tokens, share)
        proposed = list[tuple[int, ...]]()
        for feed in feeds:
            count, lookup, tokens = feed.part.draft_tokens, feed.record.lookup, feed.record.tokens
            proposed.append(clipped(feed.record, lookup.propose(tokens, count)) if count and lookup is not None else ())
        return proposed


@frozen(kw_only=True, eq=False)
class DraftModelProposer:
    """Proposes what a smaller model with the same vocabulary samples, by the sequence's own rules and random numbers.
    The more alike the two models are, the more draft tokens are accepted, also at temperatures above 0."""

    sampler: Sampler

    def start(self, record: Record) -> None:
        start = evolve(record.start, placeholders=(), probe=None)  # these belong to the main model
        record.twin = Record(start, record.tokens, record.guide)
        self.sampler.network.start(record.twin)

    def propose(self, feeds: Sequence[Feed]) -> list[tuple[int, ...]]:
        proposed: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(feeds)), ())
        now = {}
        for index, feed in enumerate(feeds):
            part, twin = feed.part, feed.record.twin
            if twin is not None and part.start + part.length + part.draft_tokens <= self.sampler.network.positions:
                now[index] = Feed(part=evolve(part, samples=part.draft_tokens > 0), record=twin)
        while now:
            sampled = self.sampler.try_sample(list(now.values()))
            for index, one in zip(now, sampled, strict=True):
                if one.token_id is not None and is_token(one):  # if its logits are not finite, it proposes nothing
                    proposed[index] = clipped(feeds[index].record, (*proposed[index], one.token_id))
            unread = [index for index, last in now.items() if _read(feeds[index], last) < len(proposed[index])]
            now = {index: _next(feeds[index], proposed[index]) for index in unread}
        return list(proposed.values())


def _read(feed: Feed, last: Feed) -> int:
    """The number of draft tokens that the smaller model has read after ``last``. In the end it reads all of them, the
    last one included.
    """
    return last.part.start + last.part.length - feed.part.start - feed.part.length


def _next(feed: Feed, proposed: tuple[int, ...]) -> Feed:
    """Returns the last proposed token as a chunk of its own. The chunk samples only if more draft tokens are
    wanted."""
    assert feed.record.twin is not None, "a sequence that has been started has a twin"
    start = feed.part.start + feed.part.length + len(proposed) - 1
    part: Chunk = evolve(
        feed.part, start=start, length=1, samples=len(proposed) < feed.part.draft_tokens, draft_tokens=0
    )
    tokens = [*feed.record.tokens, *proposed]
    return Feed(part=part, record=evolve(feed.record.twin, tokens=tokens))


def clipped(record: Record, proposed: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the leading tokens of ``proposed`` that the sequence's structured output allows."""
    return proposed if record.guide is None else proposed[: record.guide.valid(record.generated, proposed)]
