"""`Sampler`: which logits a step needs, the tokens sampled from them, and the draft tokens that were right.

A chunk that samples yields the token after its last one. If draft tokens were proposed after the chunk, the row of each
draft token yields one more. A draft token is accepted if it equals the token that was sampled from the row before it.
Therefore speculation changes no token, greedy or not: sampling is keyed by position (`triolet.models.sampling.rules`),
and a sampled token depends on no draft token that was rejected. Speculative sampling (Leviathan et al. 2023, section
2.3) keeps the distribution by an acceptance test. Here proposer and model share random numbers instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve, frozen

from ..core.beam_pages import Copy
from ..core.errors import EngineError
from ..core.plan import SampledToken
from .memory.encoder_outputs import EncoderOutputs
from .memory.frame_states import FrameStates
from .memory.kv import PagedKV
from .networks.network import Feed, Network
from .sampling.answers import Answers, Asked, answers_of, draws_of
from .sampling.beams import Search
from .sampling.logits import choose
from .sampling.rules import ConstantBans, SamplerInput


@frozen(kw_only=True)
class _Wanted:
    """The rows whose logits a step needs, as (index of the chunk, offset in it). ``samples`` has, for each chunk by
    index, the range of its rows, one for each token that may be sampled. These come first. Then comes one row for each
    beam, whose chunk ``searches`` names. ``probes`` has the row of a chunk's probe.
    """

    rows: list[tuple[int, int]]
    samples: dict[int, range]
    searches: list[int]
    probes: dict[int, int]


@frozen(kw_only=True, eq=False)
class Sampler:
    """Samples tokens from a network's logits."""

    network: Network
    paged: PagedKV | FrameStates | None  # the pages of the network
    outputs: EncoderOutputs
    constant: ConstantBans
    eos_token_ids: tuple[int, ...]

    def sample(self, feeds: Sequence[Feed], copies: Sequence[Copy] = ()) -> list[SampledToken]:
        """Feeds the chunks; a search has one chunk for each beam, side by side. Returns one result for each chunk; the
        beams of one search share a result. No record changes, but searches advance.

        Args:
            copies: pages that are copied before the chunks are fed.

        Raises:
            EngineError: a sequence has no token to sample.
        """
        wanted = _wanted_rows(feeds)
        beams = [feeds[index] for index in wanted.searches]
        owners = list(dict.fromkeys(feed.record.search for feed in beams if feed.record.search is not None))
        asked = Asked(
            tokens=[
                self._of(feeds[index], behind) for index, own in wanted.samples.items() for behind in range(len(own))
            ],
            beams=[self._of(feed, 0) for feed in beams],
            searches=owners,
            probes=[
                (row, probe.token_ids)
                for index, row in wanted.probes.items()
                if (probe := feeds[index].record.start.probe)
            ],
        )
        answers = self._answer(feeds, wanted.rows, asked, copies)
        sampled = {
            index: _accept(feeds[index], answers.tokens[own.start : own.stop]) for index, own in wanted.samples.items()
        }
        found = dict(zip(owners, map(Search.advance, owners, answers.candidates), strict=True))
        sampled |= {index: found[owner] for index in wanted.searches if (owner := feeds[index].record.search)}
        for index, one in sampled.items():
            if any(math.isnan(token.logprob) for token in (one, *one.accepted)):
                raise EngineError(
                    f"sequence {feeds[index].part.sequence_id} has no token to sample: its logits are not finite, or "
                    "its rules do not allow any token"
                )
        probes = dict(zip(wanted.probes, answers.probes, strict=True))
        nothing = SampledToken(token_id=None)
        return [
            evolve(
                sampled.get(index, nothing),
                probe=probes.get(index),
                frames=feed.record.frames if index in wanted.samples else None,
            )
            for index, feed in enumerate(feeds)
        ]

    def _answer(
        self, feeds: Sequence[Feed], rows: Sequence[tuple[int, int]], asked: Asked, copies: Sequence[Copy]
    ) -> Answers:
        """Copies the pages, feeds the chunks and answers ``asked``. The native library does all this in one call."""
        draws = draws_of(asked, self.constant, self.eos_token_ids)
        if self.network.native is not None:
            fed, told_rows = self.network.fed(feeds, rows, self.outputs)
            return answers_of(self.network.native.choose(fed, told_rows, draws, copies), asked, self.eos_token_ids)
        if copies:
            assert isinstance(self.paged, PagedKV), "a search reads pages"
            self.paged.copy(copies)
        logits = self.network.logits(feeds, rows, self.outputs)
        return answers_of(choose(logits, draws), asked, self.eos_token_ids)

    def _of(self, feed: Feed, behind: int) -> SamplerInput:
        """Returns the sampler's input for the token after the first ``behind`` draft tokens of ``feed``."""
        record, start = feed.record, feed.record.start
        in_order = start.rules.no_repeat_ngram > 0 and start.rules.counts_prompt
        return SamplerInput(
            generated=[*record.generated, *feed.proposed[:behind]] if behind else record.generated,
            sampling=start.sampling,
            rules=start.rules,
            prompt=record.prompt,
            guide=record.guide,
            before=start.token_ids[: start.prompt_length] if in_order else (),
        )


def _accept(feed: Feed, sampled: list[SampledToken]) -> SampledToken:
    """Returns the first sampled token, with the tokens that were sampled after accepted draft tokens. A draft token is
    accepted if it equals the token that was sampled from the row before it."""
    kept = [sampled[0]]
    for draft, behind in zip(feed.proposed, sampled[1:], strict=True):
        if kept[-1].token_id != draft or kept[-1].error:
            break
        kept.append(behind)
    return evolve(kept[0], accepted=tuple(kept[1:]))


def _wanted_rows(feeds: Sequence[Feed]) -> _Wanted:
    """Returns the rows to compute. A probe may share a row with a sampled token."""
    wanted = _Wanted(rows=[], samples={}, searches=[], probes={})
    for index, feed in enumerate(feeds):
        if feed.part.samples and feed.record.search is None:
            first, row = feed.part.length - len(feed.proposed) - 1, len(wanted.rows)
            wanted.rows.extend((index, offset) for offset in range(first, feed.part.length))
            wanted.samples[index] = range(row, len(wanted.rows))
    for index, feed in enumerate(feeds):
        if feed.part.samples and feed.record.search is not None:
            wanted.searches.append(index)
            wanted.rows.append((index, feed.part.length - 1))
    for index, feed in enumerate(feeds):
        part, probe = feed.part, feed.record.start.probe
        if probe is None or not part.start <= probe.position < part.start + part.length - len(feed.proposed):
            continue
        place = (index, probe.position - part.start)
        shared = index in wanted.samples and wanted.rows[wanted.samples[index][0]] == place
        wanted.probes[index] = wanted.samples[index][0] if shared else len(wanted.rows)
        if not shared:
            wanted.rows.append(place)
    return wanted
