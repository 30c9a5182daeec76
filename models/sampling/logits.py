"""The way from logits to tokens: logit rules, greedy choice, keyed sampling and log-probabilities.

The order is that of transformers: bias and penalties, suppressions, timestamp rules and the bans of a structure, then
temperature, top-k, top-p and min-p. Log-probabilities are computed after the rules and before the temperature.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from ...core.plan import SampledToken
from ...core.request import LogitRules, SamplingParams, TimestampRules
from .structure import Guide

_T = TypeVar("_T")

_NEVER = -torch.inf
_STEEP = 1_024  # tokens that usually hold all of top-p


@frozen(kw_only=True, eq=False)
class SamplerInput:
    """The inputs of sampling one token: the sequence's tokens so far, its sampling and its rules."""

    generated: Sequence[int]  # tokens sampled so far, the prompt excluded
    sampling: SamplingParams
    rules: LogitRules
    never: Tensor | None = None  # from `RuleMasks`; only torch needs it
    prompt: Sequence[int] = ()  # the prompt's tokens, each at least once; only a repetition penalty needs them
    guide: Guide | None = None  # the way through the structure
    before: Sequence[int] = ()  # the prompt's tokens in order; only needed if n-grams may not repeat


@define(eq=False)
class RuleMasks:
    """A cache of the tokens that are always banned by the constant part of `LogitRules` (``suppress``, ``allowed``).

    Only the latest ``capacity`` rules are kept."""

    vocabulary: int
    device: torch.device
    capacity: int = 16
    _masks: dict[tuple[object, object], Tensor] = field(init=False, factory=dict, repr=False)
    _bans: dict[tuple[object, object], array[int]] = field(init=False, factory=dict, repr=False)

    def mask(self, rules: LogitRules) -> Tensor | None:
        """Returns the banned tokens: a mask, bool [vocabulary], if the rules list the allowed tokens; otherwise ids,
        int64 [banned]. ``None``: all tokens are allowed.
        """
        if not rules.suppress and rules.allowed is None:
            return None
        return self._latest(self._masks, rules, self._build)

    def bans(self, rules: LogitRules) -> Sequence[int]:
        """Returns the banned tokens as flat ranges: first token, token after the last, first token of the next range,
        and so on."""
        if not rules.suppress and rules.allowed is None:
            return ()
        return self._latest(self._bans, rules, self._find_ranges)

    def _latest(self, kept: dict[tuple[object, object], _T], rules: LogitRules, make: Callable[[LogitRules], _T]) -> _T:
        key = (rules.suppress, rules.allowed)
        kept[key] = found = kept.pop(key) if key in kept else make(rules)  # the least recently used comes first
        if len(kept) > self.capacity:
            del kept[next(iter(kept))]
        return found

    def _build(self, rules: LogitRules) -> Tensor:
        mask = torch.zeros(self.vocabulary, dtype=torch.bool)
        if rules.allowed is not None:
            mask.fill_(True)
            mask[list(rules.allowed)] = False
        mask[list(rules.suppress)] = True
        return (mask if rules.allowed is not None else mask.nonzero()[:, 0]).to(self.device)

    def _find_ranges(self, rules: LogitRules) -> array[int]:
        mask = np.zeros(self.vocabulary + 2, np.int8)
        if rules.allowed is not None:
            mask[1:-1] = 1
            mask[[token + 1 for token in rules.allowed]] = 0
        mask[[token + 1 for token in rules.suppress]] = 1
        return array("i", np.diff(mask).nonzero()[0].tolist())  # ranges begin and end where the mask changes

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the masks that are kept."""
        return tuple(self._masks.values())

    def release(self) -> None:
        """Forgets all masks and ranges."""
        self._masks.clear()
        self._bans.clear()


def sample_tokens(logits: Tensor, inputs: Sequence[SamplerInput], eos_token_ids: tuple[int, ...]) -> list[SampledToken]:
    """Samples one token per row, with the log-probabilities that its caller wants. ``logits`` (float32
    [rows, vocabulary]) is overwritten.

    If no token could be sampled, the log-probability is NaN. If the structure is the reason, the ``error`` of the
    sampled token says so.
    """
    apply_rules(logits, inputs, eos_token_ids)
    tokens, logprobs = choose(logits, inputs)
    tops = likeliest(logits, inputs)
    found = []
    for row, (one, token, logprob, top) in enumerate(zip(inputs, tokens, logprobs, tops, strict=True)):
        left = not math.isnan(logprob) or bool(logits[row].isnan().any())
        found.append(told(one, SampledToken(token_id=token, logprob=logprob, top=top), eos_token_ids, left=left))
    return found


def told(one: SamplerInput, sampled: SampledToken, eos_token_ids: tuple[int, ...], *, left: bool) -> SampledToken:
    """Returns ``sampled``; if the structure has an error, with that error and an end-of-text token in place of the
    sampled one. A model without an end-of-text token keeps the sampled one.

    Args:
        left: true if structure and rules allow at least one token, as far as the logits show.
    """
    guide = one.guide
    if guide is None:
        return sampled
    nothing = "the structure leaves no token that the model may sample; ask for another one"
    error = guide.error or ("" if left else nothing)  # the guide does not keep it: perhaps a draft token led here
    return SampledToken(token_id=(*eos_token_ids, sampled.token_id)[0], error=error) if error else sampled


def apply_rules(logits: Tensor, inputs: Sequence[SamplerInput], eos_token_ids: tuple[int, ...]) -> None:
    """Applies bias and penalties, then sets the logits of banned tokens to -inf, in place. ``logits`` (float32
    [rows, vocabulary]) has one row for each of ``inputs``."""
    _apply_bias(logits, inputs)
    _penalise_repetition(logits, inputs)
    _penalise_counts(logits, inputs)
    _apply_constant(logits, inputs)
    banned = [(row, token) for row, one in enumerate(inputs) for token in banned_now(one, eos_token_ids)]
    if banned:
        rows, tokens = torch.tensor(banned, device=logits.device).T
        logits[rows, tokens] = _NEVER
    _apply_timestamps(logits, inputs, eos_token_ids)
    _apply_guides(logits, inputs)
    _force(logits, inputs)


def _apply_bias(logits: Tensor, inputs: Sequence[SamplerInput]) -> None:
    entries = [(row, token, bias) for row, one in enumerate(inputs) for token, bias in one.sampling.logit_bias]
    if entries:
        rows, tokens, biases = zip(*entries, strict=True)
        logits[_indices(logits, rows, tokens)] += torch.tensor(biases, device=logits.device, dtype=logits.dtype)


def _penalise_repetition(logits: Tensor, inputs: Sequence[SamplerInput]) -> None:
    """Penalises repetition as transformers' `RepetitionPenaltyLogitsProcessor` does. A token may occur twice in the
    indices: the same number is written both times."""
    rows: list[int] = []
    tokens: list[int] = []
    penalties: list[float] = []
    for row, one in enumerate(inputs):
        if one.sampling.repetition_penalty != 1.0:
            seen = (*one.prompt, *one.generated)
            tokens += seen
            rows += [row] * len(seen)
            penalties += [one.sampling.repetition_penalty] * len(seen)
    if rows:
        where = _indices(logits, rows, tokens)
        penalty = torch.tensor(penalties, device=logits.device, dtype=logits.dtype)
        scores = logits[where]
        logits[where] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _penalise_counts(logits: Tensor, inputs: Sequence[SamplerInput]) -> None:
    """Applies presence and frequency penalties to the generated tokens alone, as OpenAI's reference defines them."""
    entries = [
        (row, token, one.sampling.presence_penalty + one.sampling.frequency_penalty * count)
        for row, one in enumerate(inputs)
        if one.sampling.presence_penalty or one.sampling.frequency_penalty
        for token, count in Counter(one.generated).items()
    ]
    if entries:
        rows, tokens, penalties = zip(*entries, strict=True)
        logits[_indices(logits, rows, tokens)] -= torch.tensor(penalties, device=logits.device, dtype=logits.dtype)


def _indices(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)


def _apply_constant(logits: Tensor, inputs: Sequence[SamplerInput]) -> None:
    first = inputs[0].never
    if all(one.never is first for one in inputs):
        if first is not None:
            _ban(logits, first)
        return
    for row, one in zip(logits, inputs, strict=True):
        if one.never is not None:
            _ban(row, one.never)


def _ban(logits: Tensor, never: Tensor) -> None:
    """Bans tokens in one row or in all rows. Writing a few ids is much faster than reading a mask."""
    if never.dtype == torch.bool:
        logits.masked_fill_(never, _NEVER)
    else:
        logits.index_fill_(-1, never, _NEVER)


def banned_now(one: SamplerInput, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens that are banned for the next token alone: tokens that may not begin a text, end tokens before
    ``min_tokens``, and tokens that would repeat an n-gram.
    """
    count, sampling = len(one.generated), one.sampling
    first = int(any(index == 0 for index, _ in one.rules.forced))  # the text begins after a forced first token
    begin = one.rules.begin_suppress if count == first else ()
    ends = (*eos_token_ids, *sampling.stop_token_ids) if count < sampling.min_tokens else ()
    early = eos_token_ids if count < one.rules.min_tokens else ()
    ngram = one.rules.no_repeat_ngram
    again = repeats([*one.before, *one.generated], ngram) if ngram else ()  # copies all tokens only if needed
    return (*begin, *ends, *early, *again)


def repeats(tokens: Sequence[int], size: int) -> set[int]:
    """Returns the tokens that would complete an n-gram of ``size`` tokens that occurred before, as transformers'
    `NoRepeatNGramLogitsProcessor` bans them. ``size`` is 1 or more."""
    last = tuple(tokens[len(tokens) - size + 1 :])
    starts = range(len(tokens) - size + 1)
    return {tokens[start + size - 1] for start in starts if tuple(tokens[start : start + size - 1]) == last}


def _force(logits: Tensor, inputs: Sequence[SamplerInput]) -> None:
    """Leaves only the forced token in each row that has one, as transformers' `ForcedBOSTokenLogitsProcessor` does."""
    for row, one in enumerate(inputs):
        for index, token in one.rules.forced:
            if index == len(one.generated):
                logits[row] = _NEVER
                logits[row, token] = 0.0


def timestamp_bans(
    generated: Sequence[int], rules: TimestampRules, eos_token_id: int, vocabulary: int
) -> list[tuple[int, int]]:
    """Returns ranges ``[start, stop)`` of tokens that may not come next, as transformers'
    `WhisperTimeStampLogitsProcessor` bans them."""
    begin = rules.begin_id
    generated = [*rules.begun, *generated] if rules.begun else generated
    bans = [(rules.no_timestamps_id, rules.no_timestamps_id + 1)]
    if not generated:  # a timestamp comes first, and not too late
        latest = vocabulary if rules.max_initial is None else min(begin + rules.max_initial + 1, vocabulary)
        return [*bans, (0, begin), (latest, vocabulary)]
    ends_in_timestamp = generated[-1] >= begin
    opens = ends_in_timestamp and (
        len(generated) < 2 or generated[-2] >= begin
    )  # the last token is the second of a pair, or the very first token
    closes = ends_in_timestamp and not opens
    if opens:
        bans.append((begin, vocabulary))  # text must follow
    if closes:
        bans.append((0, eos_token_id))  # the second timestamp of the pair, or the end, must follow
    last = next((token for token in reversed(generated) if token >= begin), None)
    if last is not None:  # time does not run backwards, and only a pair repeats a timestamp
        bans.append((begin, last if closes else last + 1))
    return bans


def _apply_guides(logits: Tensor, inputs: Sequence[SamplerInput]) -> None:
    """Bans the tokens that a structure does not allow next. Packed bits are moved to the device and unpacked there,
    since they are an eighth of the bytes."""
    allowed = [
        (row, bits)
        for row, one in enumerate(inputs)
        if one.guide is not None and (bits := one.guide.allowed(one.generated)) is not None
    ]
    if not allowed:
        return
    rows = torch.tensor([row for row, _ in allowed], device=logits.device)
    packed = torch.from_numpy(np.stack([bits for _, bits in allowed])).to(logits.device)
    spread = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    banned = spread.flatten(1)[:, : logits.shape[-1]] == 0
    logits[rows] = logits[rows].masked_fill(banned, _NEVER)


def _apply_timestamps(logits: Tensor, inputs: Sequence[SamplerInput], eos_token_ids: tuple[int, ...]) -> None:
    rows_by_begin: dict[int, list[int]] = {}
    for row, one in enumerate(inputs):
        rules = one.rules.timestamps
        if rules is None:
            continue
        for start, stop in timestamp_bans(one.generated, rules, eos_token_ids[0], logits.shape[-1]):
            logits[row, start:stop] = _NEVER
        rows_by_begin.setdefault(rules.begin_id, []).append(row)
    for begin, rows in rows_by_begin.items():
        _force_likely_timestamps(logits, begin, rows)


def _force_likely_timestamps(logits: Tensor, begin: int, rows: list[int]) -> None:
    """Bans text tokens in each row in which all timestamps together are likelier than any text token."""
    part = logits if len(rows) == len(logits) else logits[rows]
    forced = part[:, begin:].logsumexp(-1) > part[:, :begin].amax(-1)
    part[:, :begin].masked_fill_(forced[:, None], _NEVER)
    if part is not logits:
        logits[rows] = part


def choose(logits: Tensor, inputs: Sequence[SamplerInput]) -> tuple[list[int], list[float]]:
    """Samples one token per row of ``logits`` (float32 [rows, vocabulary], after `apply_rules`).

    Returns:
        The tokens and their log-probabilities. A log-probability is NaN if no token could be sampled.
    """
    tokens = largest(logits)
    for row, one in enumerate(inputs):
        if one.sampling.temperature > 0.0:
            tokens[row] = sample(logits[row], one.sampling, len(one.generated))
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs.tolist()


def largest(logits: Tensor) -> Tensor:
    """Returns the index of the largest logit of each row of ``logits`` (float32 [rows, vocabulary])."""
    # on the CPU numpy finds the first of the largest ten times as fast as torch
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def likeliest(logits: Tensor, inputs: Sequence[SamplerInput]) -> list[tuple[tuple[int, float], ...]]:
    """Returns for each row of ``logits`` (as for `choose`) the likeliest tokens with their log-probabilities, likeliest
    first. Their number is ``logprobs``, or less if fewer tokens can be sampled."""
    found: list[tuple[tuple[int, float], ...]] = [() for _ in inputs]
    for row, one in enumerate(inputs):
        if one.sampling.logprobs:
            best = logits[row].log_softmax(-1).topk(min(one.sampling.logprobs, logits.shape[-1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found[row] = tuple((token, logprob) for token, logprob in pairs if logprob > _NEVER)
    return found


def sample(logits: Tensor, sampling: SamplingParams, position: int) -> Tensor:
    """Samples one token from ``logits`` [vocabulary] by inverse CDF at ``uniform(seed, position)``, and returns it as a
    scalar tensor.

    The token depends on the row, the seed and the position only: batching, chunking and replay do not change it.
    """
    # The maximum is subtracted so that nothing overflows: the maximum becomes 0 and a suppressed token stays -inf,
    # however small the temperature is. CUDA divides by multiplying with the reciprocal, which is finite only for
    # normal numbers.
    wide = logits.double()
    scaled = (wide - wide.max()) / max(sampling.temperature, sys.float_info.min)
    if 0 < sampling.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], _NEVER)
    probabilities, tokens = scaled.softmax(-1), None
    if sampling.top_p < 1.0:
        probabilities, tokens = _nucleus(probabilities, sampling.top_p)
    if sampling.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < sampling.min_p * probabilities.max(), 0.0)
    assert sampling.seed is not None, (
        "a fresh seed is chosen when a request is built, so that a replay samples the same tokens"
    )
    cumulative = probabilities.cumsum(-1)
    # Strictly above: an index of probability 0 adds nothing to the sum, so it is never the first one above the point.
    point = cumulative[-1:] * uniform(sampling.seed, position)
    index = torch.searchsorted(cumulative, point, right=True)[0].clamp(max=len(probabilities) - 1)
    return index if tokens is None else tokens[index]


def _nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Returns the probabilities and ids of the likeliest tokens, likeliest first, up to the token with which their sum
    reaches ``top_p``. Equally likely tokens are in the order of their ids; the probability of all others is 0.

    Most distributions are steep: if the first thousand tokens reach ``top_p``, the others need no sorting (1.6 instead
    of 5.5 ms for 50,000 tokens on one core).
    """
    ids = probabilities.topk(min(_STEEP, len(probabilities))).indices.sort().values
    if probabilities[ids].sum() < top_p:
        ids = torch.arange(len(probabilities), device=probabilities.device)
    likely, order = probabilities[ids].sort(descending=True, stable=True)
    before = likely.cumsum(-1).roll(1)
    before[0] = 0.0
    return likely.masked_fill(before >= top_p, 0.0), ids[order]


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1), a pure function of its arguments: 52 bits of BLAKE2b. A double holds one bit more, so
    a sum multiplied by this number stays below the sum."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 12) * 2.0**-52
