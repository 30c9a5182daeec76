"""The rules of a sequence as a `Draw`: what is changed, banned and chosen of one row of logits.

The order is that of transformers: bias and penalties, suppressions, timestamp rules and the bans of a structure, then
temperature, top-k, top-p and min-p. Log-probabilities are computed after the rules and before the temperature.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from ...core.plan import SampledToken
from ...core.reasoning import Split, Track
from ...core.request import LogitRules, SamplingParams, TimestampRules
from ..native.draws import NONE, Chosen, Draw
from ..native.library import Change
from .structure import Guide


@define(kw_only=True, eq=False)
class SamplerInput:
    """The inputs of sampling the tokens of a sequence: its tokens so far, its sampling and its rules. Only
    ``generated`` may change: it may grow. From ``settled`` tokens on all draws are ``usual``, the draw of a token that
    no rule singles out."""

    generated: Sequence[int]  # tokens sampled so far, the prompt excluded
    sampling: SamplingParams
    rules: LogitRules
    prompt: Sequence[int] = ()  # the prompt's tokens, each at least once; only a repetition penalty needs them
    guide: Guide | None = None  # the way through the structure
    track: Track | None = None  # the way through the marks of the reasoning
    before: Sequence[int] = ()  # the prompt's tokens in order; only needed if n-grams may not repeat
    drafted: int = 0  # the last of ``generated`` that are drafts
    usual: Draw | None = field(init=False, default=None, repr=False)  # made for the first token
    settled: float = field(init=False, repr=False)

    @settled.default
    def _settles(self) -> float:
        sampling, rules = self.sampling, self.rules
        penalties = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        looks_back = rules.timestamps is not None or rules.no_repeat_ngram > 0
        follows = self.guide is not None or self.track is not None
        if penalties or looks_back or follows or sampling.temperature > 0.0:
            return math.inf
        return max(2, sampling.min_tokens, rules.min_tokens, *(index + 1 for index, _ in rules.forced))

    def after(self, drafts: Sequence[int]) -> SamplerInput:
        """Returns the input for the token that comes after the draft tokens ``drafts``."""
        same = not drafts or len(self.generated) >= self.settled
        return self if same else evolve(self, generated=[*self.generated, *drafts], drafted=len(drafts))


@define(eq=False)
class ConstantBans:
    """A cache of the tokens that are always banned by the constant part of `LogitRules` (``suppress``, ``allowed``).

    Only the latest ``capacity`` rules are kept."""

    vocabulary: int
    capacity: int = 16
    _kept: dict[tuple[object, object], array[int]] = field(init=False, factory=dict, repr=False)

    def of(self, rules: LogitRules) -> Sequence[int]:
        """Returns the banned tokens as flat ranges: first token, token after the last, first token of the next range,
        and so on."""
        if not rules.suppress and rules.allowed is None:
            return ()
        key = (rules.suppress, rules.allowed)
        found = self._kept.pop(key) if key in self._kept else self._find(rules)
        self._kept[key] = found  # the least recently used comes first
        if len(self._kept) > self.capacity:
            del self._kept[next(iter(self._kept))]
        return found

    def _find(self, rules: LogitRules) -> array[int]:
        mask = np.zeros(self.vocabulary + 2, np.int8)
        if rules.allowed is not None:
            mask[1:-1] = 1
            mask[[token + 1 for token in rules.allowed]] = 0
        mask[[token + 1 for token in rules.suppress]] = 1
        return array("i", np.diff(mask).nonzero()[0].tolist())  # ranges begin and end where the mask changes


def draw_of(one: SamplerInput, constant: ConstantBans, eos_token_ids: tuple[int, ...]) -> Draw:
    """Returns the draw of the next token of a sequence."""
    sampling, rules, count = one.sampling, one.rules, len(one.generated)
    usual = one.usual = one.usual or _usual(sampling, rules, constant)
    if count >= one.settled:
        return usual
    point = uniform(sampling.seed or 0, count) if usual.temperature else 0.0
    forced = [token for index, token in rules.forced if index == count]
    place = None if one.track is None else one.track.at(one.generated, one.drafted)
    if place is not None and place.forced is not None:
        forced.append(place.forced)
    if forced:  # as in transformers' `ForcedBOSTokenLogitsProcessor`
        last, others = forced[-1], [(0, forced[-1]), (forced[-1] + 1, constant.vocabulary)]
        return evolve(usual, point=point, edits=[(last, Change.REPLACED, 0.0)], bans=others, timestamps=0)
    bans: list[Sequence[int]] = [*usual.bans, *((token, token + 1) for token in banned_now(one, eos_token_ids))]
    if rules.timestamps is not None:
        bans += timestamp_bans(one.generated, rules.timestamps, eos_token_ids[0], constant.vocabulary)
    if one.guide is not None and one.track is not None and place is not None and place.thinks:
        # a text without an answer has no structure, nor has an answer that begins within the closing mark's token
        straddling = [token for token in one.track.straddling(place) if token < constant.vocabulary]
        bans += [(token, token + 1) for token in (*eos_token_ids, *straddling)]
    bits = _allowed(one, place)
    allowed = None if bits is None else bits.tobytes()
    return evolve(usual, point=point, edits=[*usual.edits, *_penalties(one)], bans=bans, allowed=allowed)


def _usual(sampling: SamplingParams, rules: LogitRules, constant: ConstantBans) -> Draw:
    """Returns what all draws of a sequence have in common."""
    warm, banned = sampling.temperature > 0.0, constant.of(rules)
    assert not warm or sampling.seed is not None, (
        "a fresh seed is chosen when a request is built, so that a replay samples the same tokens"
    )
    return Draw(
        # CUDA divides by multiplying with the reciprocal, which is finite only for normal numbers
        temperature=max(sampling.temperature, sys.float_info.min) if warm else 0.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        edits=[(token, Change.ADDED, bias) for token, bias in sampling.logit_bias],
        bans=[banned] if banned else [],
        timestamps=0 if rules.timestamps is None else rules.timestamps.begin_id,
        told=sampling.logprobs or 0,
    )


def _allowed(one: SamplerInput, place: Split | None) -> NDArray[np.uint8] | None:
    """Returns the tokens that the structure allows, as `Guide.allowed` does. The structure is that of the answer. As
    long as nothing is decided, the opening mark may come, too."""
    if one.guide is None or (place is not None and place.thinks):
        return None
    bits = one.guide.allowed(one.generated[place.before :] if place is not None else one.generated)
    opens = place.reasoning.opens(one.generated) if place is not None and place.answer is None else None
    if opens is None or one.guide.error:
        return bits
    headed = place is not None and bool(place.reasoning.pauses)  # an answer has a header, which comes behind reasoning
    bits = one.guide.nothing() if bits is None or headed else bits.copy()  # None: the mark so far begins no answer
    bits[opens // 8] |= 1 << opens % 8
    return bits


def _penalties(one: SamplerInput) -> Iterator[tuple[int, Change, float]]:
    """Yields the changes of the repetition penalty, as in transformers' `RepetitionPenaltyLogitsProcessor`; then
    presence and frequency penalties of the generated tokens alone, as OpenAI's reference defines them."""
    sampling = one.sampling
    if sampling.repetition_penalty != 1.0:
        for token in {*one.prompt, *one.generated}:
            yield token, Change.SCALED, sampling.repetition_penalty
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(one.generated).items():
            yield token, Change.ADDED, -(sampling.presence_penalty + sampling.frequency_penalty * count)


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


def token_of(one: SamplerInput, chosen: Chosen, eos_token_ids: tuple[int, ...]) -> SampledToken:
    """Returns what is sampled by the answer to the draw of ``one``. If the structure has an error, returns that error
    with an end-of-text token in place of the chosen one; a model without an end-of-text token keeps the chosen one."""
    error = ""
    if one.guide is not None:  # it does not keep this error: perhaps a draft token led here
        nothing = "the structure leaves no token that the model may sample; ask for another one"
        error = one.guide.error or (nothing if chosen.token == NONE else "")
    if error:
        return SampledToken(token_id=(*eos_token_ids, chosen.token)[0], error=error)
    top = tuple((token, logprob) for token, _, logprob in chosen.found)
    return SampledToken(token_id=chosen.token, logprob=chosen.logprob, top=top)


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1), a pure function of its arguments: 52 bits of BLAKE2b. A double holds one bit more, so
    a sum multiplied by this number stays below the sum."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 12) * 2.0**-52
