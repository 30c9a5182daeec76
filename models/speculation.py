"""`LookupProposer`: the text itself proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from .networks.network import Feed, Record
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


def clipped(record: Record, proposed: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the leading tokens of ``proposed`` that the sequence's structured output allows. It allows all before the
    answer."""
    if record.guide is None:
        return proposed
    begin = 0 if record.track is None else record.track.at(record.generated).answer
    return proposed if begin is None else proposed[: record.guide.valid(record.generated[begin:], proposed)]
