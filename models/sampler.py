"""`Sampler`: which logits a step needs, the tokens sampled from them, and the draft tokens that were right.

A chunk that samples gives the token behind its last one. Where draft tokens were proposed behind it, the row of each
draft token gives one more: a draft token is accepted if it is the very token that is sampled before it. So speculation
changes no token, greedy or not: sampling is keyed by position (`triolet.models.sampling.logits`), and a sampled token
depends on no draft token that was rejected. The distribution is that of speculative sampling (Leviathan et al. 2023,
section 2.3), whose acceptance test is replaced by random numbers that proposer and model share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import repeat

from attrs import evolve, frozen
from torch import Tensor

from ..core.errors import EngineError
from ..core.plan import SampledToken
from .native.runner import Draw
from .networks.network import Chooser, Feed, Network, Outputs, Record
from .sampling.beams import Search, find_candidates
from .sampling.logits import RuleMasks, SamplerInput, apply_rules, chosen_plainly, sample_tokens, uniform


@frozen(kw_only=True)
class _Wanted:
    """The rows whose logits a step needs, as (index of the chunk, offset in it). ``samples`` of them come first: for
    each chunk (by index) where its rows lie, one for each token that may be sampled. Then come ``searches``: the row of
    each beam. ``probes``: where a chunk's probe lies."""

    rows: list[tuple[int, int]]
    samples: dict[int, range]
    searches: dict[int, int]
    probes: dict[int, int]


@frozen(kw_only=True, eq=False)
class Sampler:
    """Samples tokens from a network's logits."""

    network: Network
    outputs: Outputs
    masks: RuleMasks
    eos_token_ids: tuple[int, ...]

    def sample(self, feeds: Sequence[Feed]) -> list[SampledToken]:
        """Feeds the chunks; those of a search are one for each beam, side by side. Returns the result of each; the
        beams of a search have one together. No record changes, but searches go on.

        Raises:
            EngineError: a sequence has no token to sample.
        """
        sampled = self.try_sample(feeds)
        for feed, one in zip(feeds, sampled, strict=True):
            if not all(map(is_token, (one, *one.accepted))):
                raise EngineError(
                    f"sequence {feed.part.sequence_id} has no token to sample: its logits are not finite, or its rules "
                    "allow none"
                )
        return sampled

    def try_sample(self, feeds: Sequence[Feed]) -> list[SampledToken]:
        """As `sample`, but where a sequence has no token to sample, its result is no token: see `is_token`."""
        wanted = _wanted_rows(feeds)
        inputs = [self._of(feeds[index], behind) for index, own in wanted.samples.items() for behind in range(len(own))]
        chosen, logits = self._chosen(feeds, wanted.rows, inputs)
        asked = [feeds[index].record for index in wanted.probes]
        answers = map(_probe, map(logits.__getitem__, wanted.probes.values()), asked)
        probes = dict(zip(wanted.probes, answers, strict=True))
        tokens = self._choose_others(chosen, logits, inputs)
        sampled = {index: _accept(feeds[index], tokens[own.start : own.stop]) for index, own in wanted.samples.items()}
        sampled |= self._searched(logits, wanted.searches, feeds)
        nothing = SampledToken(token_id=None)
        return [evolve(sampled.get(index, nothing), probe=probes.get(index)) for index in range(len(feeds))]

    def _chosen(
        self, feeds: Sequence[Feed], rows: Sequence[tuple[int, int]], inputs: Sequence[SamplerInput]
    ) -> tuple[list[SampledToken | None], Tensor]:
        """Feeds the chunks. The tokens of the ``inputs``, the first of ``rows``, as far as the network chooses them,
        and the logits of all rows. Whether it does is a matter of the row alone: so are the bits of its
        log-probability."""
        network = self.network
        if not (inputs and isinstance(network, Chooser) and network.native is not None):
            return [None] * len(inputs), self.network.logits(feeds, rows, self.outputs)
        draws = [draw_of(one) if chosen_plainly(one, self.eos_token_ids) else None for one in inputs]
        fed, told_rows = network.fed(feeds, rows, self.outputs)
        told, logits = network.native.choose(fed, told_rows, [*draws, *[None] * (len(rows) - len(draws))])
        tokens = [None if one is None else SampledToken(token_id=one[0], logprob=one[1]) for one in told]
        return tokens[: len(inputs)], logits

    def _choose_others(
        self, chosen: Sequence[SampledToken | None], logits: Tensor, inputs: Sequence[SamplerInput]
    ) -> list[SampledToken]:
        """``chosen`` without gaps. Their rows of ``logits`` are overwritten."""
        left = [index for index, one in enumerate(chosen) if one is None]
        if not left:
            return [one for one in chosen if one is not None]
        own = logits[: len(inputs)] if len(left) == len(inputs) else logits[left]
        found = iter(sample_tokens(own, [inputs[index] for index in left], self.eos_token_ids))
        return [next(found) if one is None else one for one in chosen]

    def _searched(self, logits: Tensor, rows: dict[int, int], feeds: Sequence[Feed]) -> dict[int, SampledToken]:
        """The results of searches, by chunk. ``rows`` of ``logits`` lie side by side, and are overwritten. As in
        transformers the rules come after the softmax, and what they rule out is not shared out among the others."""
        if not rows:
            return {}
        first = min(rows.values())
        own = logits[first : first + len(rows)]
        own.copy_(own.log_softmax(-1))
        apply_rules(own, list(map(self._of, map(feeds.__getitem__, rows), repeat(0))), self.eos_token_ids)
        beams = {index: feeds[index].record.search for index in rows}
        searches = list(dict.fromkeys(search for search in beams.values() if search is not None))
        found = dict(zip(searches, map(Search.advance, searches, find_candidates(own, searches)), strict=True))
        return {index: found[search] for index, search in beams.items() if search is not None}

    def _of(self, feed: Feed, behind: int) -> SamplerInput:
        """The input for the token that follows the first ``behind`` draft tokens of ``feed``."""
        record = feed.record
        return SamplerInput(
            generated=[*record.generated, *feed.proposed[:behind]] if behind else record.generated,
            sampling=record.start.sampling,
            rules=record.start.rules,
            never=self.masks.mask(record.start.rules),
            prompt=record.prompt,
            guide=record.guide,
            before=record.start.token_ids[: record.start.prompt_length] if record.start.rules.no_repeat_ngram else (),
        )


def draw_of(one: SamplerInput) -> Draw:
    """The same choice as `sample` makes, for where the logits are."""
    sampling = one.sampling
    warm = sampling.temperature > 0.0
    assert not warm or sampling.seed is not None, "a fresh seed is chosen when a request is built"
    return Draw(
        temperature=max(sampling.temperature, sys.float_info.min) if warm else 0.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        point=uniform(sampling.seed or 0, len(one.generated)) if warm else 0.0,
    )


def is_token(sampled: SampledToken) -> bool:
    """True unless the model's numbers broke down, or the rules left no token."""
    return not math.isnan(sampled.logprob)


def _accept(feed: Feed, sampled: list[SampledToken]) -> SampledToken:
    """The first sampled token, and those behind the draft tokens that were right: a row counts if the draft token that
    it fed was sampled in the row before."""
    kept = [sampled[0]]
    for draft, behind in zip(feed.proposed, sampled[1:], strict=True):
        if kept[-1].token_id != draft or kept[-1].error:
            break
        kept.append(behind)
    return evolve(kept[0], accepted=tuple(kept[1:]))


def _wanted_rows(feeds: Sequence[Feed]) -> _Wanted:
    """The rows to compute. Sampled rows come first: one view of the logits. A probe may share a sampled row."""
    wanted = _Wanted(rows=[], samples={}, searches={}, probes={})
    for index, feed in enumerate(feeds):
        if feed.part.samples and feed.record.search is None:
            first, row = feed.part.length - len(feed.proposed) - 1, len(wanted.rows)
            wanted.rows.extend((index, offset) for offset in range(first, feed.part.length))
            wanted.samples[index] = range(row, len(wanted.rows))
    for index, feed in enumerate(feeds):
        if feed.part.samples and feed.record.search is not None:
            wanted.searches[index] = len(wanted.rows)
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


def _probe(logits: Tensor, record: Record) -> tuple[float, ...]:
    probe = record.start.probe
    assert probe is not None, "only a sequence with a probe is probed"
    return tuple(logits.log_softmax(-1)[list(probe.token_ids)].tolist())
