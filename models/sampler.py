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
from itertools import groupby

import torch
from attrs import evolve, frozen
from torch import Tensor

from ..core.beam_pages import Copy
from ..core.errors import EngineError
from ..core.plan import SampledToken
from .memory.encoder_outputs import EncoderOutputs
from .memory.frame_states import FrameStates
from .memory.kv import PagedKV
from .native.draws import NOTHING, Chosen, Draw
from .native.library import Choice
from .networks.network import Feed, Network
from .sampling.beams import Search, merge
from .sampling.logits import choose
from .sampling.rules import ConstantBans, SamplerInput, draw_of, token_of


@frozen(kw_only=True)
class _Wanted:
    """The rows whose logits a step needs, as (index of the chunk, offset in it). ``samples`` has, for each chunk by
    index, the range of its rows, one for each token that may be sampled. These come first. Then come those of the
    ``searches``, one for each beam. ``probes`` has the row of a chunk's probe, ``prompts`` those of the prompt's tokens
    whose log-probabilities are asked for.
    """

    rows: list[tuple[int, int]]
    samples: dict[int, range]
    searches: dict[Search, range]
    probes: dict[int, int]
    prompts: dict[int, range]


@frozen(kw_only=True, eq=False)
class Sampler:
    """Samples tokens from a network's logits. Each row of logits has a `Draw`, which the native library answers within
    the call that computes the step, or torch (`choose`)."""

    network: Network
    paged: PagedKV | FrameStates | None  # the pages of the network
    outputs: EncoderOutputs
    constant: ConstantBans
    eos_token_ids: tuple[int, ...]

    def sample(
        self, feeds: Sequence[Feed], copies: Sequence[Copy] = (), hidden: list[Tensor] | None = None
    ) -> list[SampledToken]:
        """Feeds the chunks; a search has one chunk for each beam, side by side. Returns one result for each chunk; the
        beams of one search share a result. No record changes, but searches advance.

        Args:
            copies: pages that are copied before the chunks are fed.
            hidden: gets the hidden states behind the last layer of each chunk's rows, [rows, hidden]; the native
                library must compute the model.

        Raises:
            EngineError: a sequence has no token to sample.
        """
        if not copies and all(map(_is_plain, feeds)):
            return self._sample_each(feeds, hidden)
        wanted = _wanted_rows(feeds)
        inputs = [
            feeds[index].record.sampler_input.after(feeds[index].proposed[: row - own.start])
            for index, own in wanted.samples.items()
            for row in own
        ]
        chosen = self._choose(feeds, wanted.rows, self._draws(feeds, wanted, inputs), copies, hidden)
        tokens = [token_of(one, found, self.eos_token_ids) for one, found in zip(inputs, chosen, strict=False)]
        sampled = {index: _accept(feeds[index], tokens[own.start : own.stop]) for index, own in wanted.samples.items()}
        for search, own in wanted.searches.items():
            found = merge([chosen[row].found for row in own], search.state.settings.candidates)
            sampled |= dict.fromkeys((wanted.rows[row][0] for row in own), search.advance(found))
        for index, one in sampled.items():
            _check(feeds[index], (one, *one.accepted))
        for index, own in wanted.prompts.items():
            feeds[index].record.prompt_logprobs += [
                (chosen[row].asked[0], tuple((token, score) for token, score, _ in chosen[row].found)) for row in own
            ]
        nothing = SampledToken(token_id=None)
        for index, row in wanted.probes.items():
            sampled[index] = evolve(sampled.get(index, nothing), probe=chosen[row].asked)
        for index in wanted.samples:
            record = feeds[index].record
            prompt = tuple(record.prompt_logprobs) if feeds[index].ends_prompt else ()
            if prompt or record.frames is not None:
                sampled[index] = evolve(sampled[index], frames=record.frames, prompt=prompt)
        return [sampled.get(index, nothing) for index in range(len(feeds))]

    def _sample_each(self, feeds: Sequence[Feed], hidden: list[Tensor] | None) -> list[SampledToken]:
        """Samples one token for each chunk. Most steps are of this kind, so they get no more than they need."""
        rows = [(index, feed.part.length - 1) for index, feed in enumerate(feeds)]
        draws = [draw_of(feed.record.sampler_input, self.constant, self.eos_token_ids) for feed in feeds]
        sampled = list[SampledToken]()
        for feed, found in zip(feeds, self._choose(feeds, rows, draws, (), hidden), strict=True):
            one = token_of(feed.record.sampler_input, found, self.eos_token_ids)
            _check(feed, (one,))
            sampled.append(one if feed.record.frames is None else evolve(one, frames=feed.record.frames))
        return sampled

    def _draws(self, feeds: Sequence[Feed], wanted: _Wanted, inputs: Sequence[SamplerInput]) -> list[Draw]:
        """Returns the draw of each wanted row. ``inputs`` are those of the rows of samples."""
        draws = [draw_of(one, self.constant, self.eos_token_ids) for one in inputs]
        for search, own in wanted.searches.items():
            for row, beam in zip(own, search.state.beams, strict=True):
                draw = draw_of(feeds[wanted.rows[row][0]].record.sampler_input, self.constant, self.eos_token_ids)
                draws.append(evolve(draw, choice=Choice.BEAM, told=search.state.settings.candidates, total=beam.total))
        draws += [NOTHING] * (len(wanted.rows) - len(draws))
        for index, row in wanted.probes.items():
            probe = feeds[index].record.start.probe
            assert probe is not None, "a row is wanted for a probe"
            draws[row] = evolve(draws[row], asked=probe.token_ids)
        for index, own in wanted.prompts.items():
            told = feeds[index].record.start.sampling.prompt_logprobs or 0
            for row in own:
                following = feeds[index].record.tokens[feeds[index].part.start + wanted.rows[row][1] + 1]
                draws[row] = Draw(choice=Choice.BEAM if told else Choice.NOTHING, told=told, asked=(following,))
        return draws

    def _choose(
        self,
        feeds: Sequence[Feed],
        rows: Sequence[tuple[int, int]],
        draws: Sequence[Draw],
        copies: Sequence[Copy],
        hidden: list[Tensor] | None,
    ) -> list[Chosen]:
        """Copies the pages, feeds the chunks and answers the draws. The native library does all this in one call."""
        if self.network.native is not None:
            fed, laid = self.network.fed(feeds, rows, self.outputs)
            pieces: list[Tensor] | None = None if hidden is None else []
            chosen = self.network.native.choose(fed, laid, draws, copies, hidden=pieces)
            if hidden is not None and pieces:  # beyond a chunk that ends within an image, more of that is computed
                every = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                starts = zip(laid.starts, feeds, strict=True)
                hidden += [every[start : start + feed.part.length] for start, feed in starts]
            return chosen
        if copies:
            assert isinstance(self.paged, PagedKV), "a search reads pages"
            self.paged.copy(copies)
        return choose(self.network.logits(feeds, rows, self.outputs), draws)


def _is_plain(feed: Feed) -> bool:
    """True if the chunk yields one token and nothing else."""
    start = feed.record.start
    told_more = feed.record.search or start.probe or start.sampling.prompt_logprobs is not None
    return feed.part.samples and not (feed.proposed or told_more)


def _check(feed: Feed, sampled: Sequence[SampledToken]) -> None:
    for one in sampled:
        if math.isnan(one.logprob):
            raise EngineError(
                f"sequence {feed.part.sequence_id} has no token to sample: its logits are not finite, or its rules do "
                "not allow any token"
            )


def _accept(feed: Feed, sampled: list[SampledToken]) -> SampledToken:
    """Returns the first sampled token, with the tokens that were sampled after accepted draft tokens. A draft token is
    accepted if it equals the token that was sampled from the row before it."""
    kept = [sampled[0]]
    for draft, behind in zip(feed.proposed, sampled[1:], strict=True):
        if kept[-1].token_id != draft or kept[-1].error:
            break
        kept.append(behind)
    return evolve(kept[0], accepted=tuple(kept[1:])) if len(kept) > 1 else kept[0]


def _wanted_rows(feeds: Sequence[Feed]) -> _Wanted:
    """Returns the rows to compute. A probe may share a row with a sampled token."""
    wanted = _Wanted(rows=[], samples={}, searches={}, probes={}, prompts={})
    sampling = [(index, feed) for index, feed in enumerate(feeds) if feed.part.samples]
    for index, feed in sampling:
        if feed.record.search is None:
            first, row = feed.part.length - len(feed.proposed) - 1, len(wanted.rows)
            wanted.rows.extend((index, offset) for offset in range(first, feed.part.length))
            wanted.samples[index] = range(row, len(wanted.rows))
    for search, beams in groupby(sampling, key=lambda one: one[1].record.search):
        if search is not None:
            row = len(wanted.rows)
            wanted.rows.extend((index, feed.part.length - 1) for index, feed in beams)
            wanted.searches[search] = range(row, len(wanted.rows))
    for index, feed in enumerate(feeds):
        if feed.record.start.sampling.prompt_logprobs is not None:
            last, row = min(feed.part.length, feed.record.start.prompt_length - 1 - feed.part.start), len(wanted.rows)
            wanted.rows.extend((index, offset) for offset in range(last))
            wanted.prompts[index] = range(row, len(wanted.rows))
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
