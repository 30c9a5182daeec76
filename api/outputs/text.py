"""The text of sampled tokens, as callers see it: it grows, ends at a stop string, and becomes deltas and completions.

Pure: nothing here waits. `Deltas` in `triolet.api.outputs.streams` feeds an `Output` from a request's mailbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, evolve, field

from ...core.detokenizer import TextDeltas
from ...core.errors import InvalidRequest
from ...core.plan import Hypothesis, SampledToken
from ...core.reasoning import Reasoning, Split, Stage, overlap
from ...core.request import FinishReason, Request
from ...core.tracebacks import raise_kept
from .results import Completion, Delta, Usage


@define(eq=False)
class StopStrings:
    """Passes on the part of a text that is certain, and ends the text before the first of ``stops``.

    The first stop string is the one that begins first in the whole text. Text that may be the beginning of a stop
    string is held back until more text decides. A complete stop string is held back, too, while a longer one that began
    before it may still be completed. The output depends on the text alone, never on how it was cut.

    Args:
        stops: the stop strings, none of them empty. Without stop strings all text is passed on at once.
        keep: true if the text ends behind the stop string, the shortest one that begins there.
    """

    stops: tuple[str, ...]
    keep: bool = False
    stopped: bool = field(default=False, init=False)
    """True if a stop string was found: no more text is passed on."""
    _held: str = field(default="", init=False)

    def feed(self, text: str) -> str:
        """Adds the next piece, ``text``, and returns the text that is certain now."""
        if self.stopped:
            return ""
        held = self._held + text
        found, begun = self._found(held), self._begun(held)
        self.stopped = found <= begun and found < len(held)
        certain = min(found, begun)
        self._held = "" if self.stopped else held[certain:]
        return held[: self._end(held, certain)]

    def rest(self) -> str:
        """Ends the whole text, and returns the text that was held back, up to a stop string in it."""
        held, self._held = self._held, ""
        found = self._found(held)
        self.stopped = self.stopped or found < len(held)
        return held[: self._end(held, found)]

    def _end(self, text: str, place: int) -> int:
        """The end of what is passed on of ``text``, where a stop string may begin at ``place``."""
        lengths = [len(stop) for stop in self.stops if self.keep and self.stopped and text.startswith(stop, place)]
        return place + min(lengths, default=0)

    def _found(self, text: str) -> int:
        """The place of the first complete stop string, or else the end of ``text``."""
        places = (text.find(stop) for stop in self.stops)
        return min((place for place in places if place >= 0), default=len(text))

    def _begun(self, text: str) -> int:
        """The place from which on text must be held back, since the rest of ``text`` may become a stop string; the end
        of ``text`` if nothing must be.
        """
        return len(text) - max((overlap(text, stop) for stop in self.stops), default=0)


@define(eq=False)
class PartedText:
    """The text of tokens as they come, divided into reasoning and answer. Without ``reasoning`` all is the answer, and
    without ``texts`` there is no text."""

    _texts: TextDeltas | None
    _reasoning: Reasoning | None
    split: Split | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.split = None if self._reasoning is None else Split(self._reasoning, self._reasoning.stage)

    @property
    def stage(self) -> Stage:
        """The place of the text's end among the marks."""
        return Stage.ANSWERS if self.split is None else self.split.stage

    @property
    def before(self) -> int:
        """The number of tokens before the answer."""
        return 0 if self.split is None else self.split.before

    def add(self, token: int) -> tuple[str, str]:
        """Adds a token. Returns the reasoning and the answer that are certain now."""
        split = self.split
        if self._texts is None or split is None or (split.stage is Stage.ANSWERS and not split.reasoning.behind):
            return "", "" if self._texts is None else self._texts.add(token)
        mark = split.spelling(token)
        text = self._texts.add(token) if mark is None else self._texts.rest() + mark
        self.split, thought, answer = split.add(text)
        return thought, answer

    def rest(self) -> tuple[str, str]:
        """Returns the reasoning and the answer that were held back when the request has ended."""
        text = "" if self._texts is None else self._texts.rest()
        if self.split is None:
            return "", text
        split, thought, answer = self.split.add(text)
        held, last = split.rest()
        return thought + held, answer + last

    def whole(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Returns the whole reasoning and answer of ``token_ids``, which are added at once."""
        parts = [*map(self.add, token_ids), self.rest()]
        return "".join([thought for thought, _ in parts]), "".join([answer for _, answer in parts])


# ---- outputs ---------------------------------------------------------------------------------------------------------


@define(eq=False)
class Output:
    """The output of one request as it grows, one `Delta` after another.

    Args:
        prompt_tokens: the number of tokens of the prompt, for the usage.
        stop_ids: the tokens that end the request and are not part of its output.
        texts: turns tokens into text; ``None`` if deltas need no text.
        reasoning: the marks of what comes before the answer, if there are any.
        stops: the request's stop strings, which need ``texts``.
        tops: true if the caller asked for ``top_logprobs``.
        seed: the seed for the usage.
        n: the largest number of hypotheses of a beam search in a completion.
        scores: true if the caller asked for ``prompt_logprobs``.
        withdraw: called once, if a stop string (with true) or a fault ends the output before the request has ended.
    """

    prompt_tokens: int
    stop_ids: frozenset[int]
    texts: TextDeltas | None
    stops: StopStrings
    tops: bool
    withdraw: Callable[[bool], object] | None = None
    seed: int | None = None
    n: int = 1
    scores: bool = False
    reasoning: Reasoning | None = None
    eager: bool = field(init=False)
    """True if tokens must be added when they come rather than when they are read: otherwise the request of a slow
    reader would go on decoding after a stop string."""
    ready: deque[Delta] = field(factory=deque, init=False)
    """The deltas that are not read yet."""
    ended: bool = field(default=False, init=False)
    """True if no more deltas are added."""
    fault: Exception | None = field(default=None, init=False)
    """The error that ended the output before the request has ended; see `raise_fault`."""
    _sampled: int = field(default=0, init=False)
    _prompt: Any = field(default=None, init=False)  # of the first token, until it is told
    _found: Hypothesis | None = field(default=None, init=False)  # the result of a beam search, known at its end
    _parted: PartedText = field(init=False)
    _untold: list[SampledToken] = field(factory=list, init=False)  # tokens that may be a part of a mark
    _before: int = field(default=0, init=False)  # of the told tokens, those before the answer

    def __attrs_post_init__(self) -> None:
        self.eager = bool(self.stops.stops)
        self._parted = PartedText(self.texts, self.reasoning)

    @property
    def over(self) -> bool:
        """True if nothing is left to read."""
        return self.ended and not self.ready and self.fault is None

    def take(self, sampled: SampledToken) -> None:
        """Adds ``sampled``. The token that completes a stop string ends the output; tokens after it are ignored. Never
        raises, since the scheduler's task may call it; see `raise_fault`."""
        if self.ended:
            return
        try:
            delta = self._add(sampled)
        except Exception as error:  # noqa: BLE001  (raised by `raise_fault`)
            error.__traceback__ = None  # through this frame the error would refer to itself
            self.fault, self.ended, delta = error, True, None
        if delta is not None:
            self.ready.append(delta)
        if self.ended and self.withdraw is not None:
            self.withdraw(self.stops.stopped)
            self.withdraw = None

    def raise_fault(self) -> None:
        """Raises the fault that ended the output, once.

        Raises:
            InvalidRequest: the request's structure could not be followed.
        """
        raise_kept(self, "fault")

    def _add(self, sampled: SampledToken) -> Delta | None:
        if sampled.error:
            raise InvalidRequest(sampled.error)
        if sampled.hypotheses:
            self._found = sampled.hypotheses[0]
        if sampled.token_id is None:
            return None
        self._sampled += 1
        if self.scores and self._sampled == 1:
            self._prompt = sampled.prompt
        if sampled.token_id in self.stop_ids:
            return None
        was, (thought, text) = self._parted.stage, self._parted.add(sampled.token_id)
        self._untold.append(sampled)
        if self.eager:
            text = self.stops.feed(text)
            self.ended = self.stops.stopped
        is_behind = was is Stage.CLOSED and self._parted.stage is Stage.CLOSED  # line breaks, or a part of a mark
        if (is_behind or self._parted.stage is Stage.UNDECIDED) and not self.ended:
            return None
        return self._delta(thought, text, FinishReason.STOP if self.ended else None)

    def _delta(self, thought: str, text: str, reason: FinishReason | None) -> Delta:
        """Returns the delta of the tokens that no delta has told."""
        (told, self._untold), (before, self._before) = (self._untold, []), (self._before, self._parted.before)
        return Delta(
            text=text,
            token_ids=tuple([one.token_id for one in told if one.token_id is not None]),
            logprobs=tuple([one.logprob for one in told]),
            top_logprobs=tuple([one.top for one in told]) if self.tops else None,
            frames=tuple([one.frames for one in told if one.frames is not None]),
            finish_reason=reason,
            usage=None if reason is None else self._usage(self._parted),
            prompt_logprobs=self._take_prompt(),
            reasoning=thought,
            reasoning_tokens=self._before - before,
        )

    def _take_prompt(self) -> Any:
        found, self._prompt = self._prompt, None
        return found

    def end(self, reason: FinishReason) -> None:
        """Adds the last delta of a request that ended by itself. The delta has the text that was held back; for a beam
        search it is the only delta and has the whole output."""
        self.ended = True
        token_ids, logprobs = ((), ()) if self._found is None else self._kept(self._found)
        self._untold += [SampledToken(token_id=one, logprob=at) for one, at in zip(token_ids, logprobs, strict=True)]
        self._sampled += 0 if self._found is None else len(self._found.token_ids)
        thought, text = self._parted.whole(token_ids)
        text = self.stops.feed(text) + self.stops.rest()
        self.ready.append(self._delta(thought, text, FinishReason.STOP if self.stops.stopped else reason))

    def completion(
        self, sampled: Iterable[SampledToken], reason: FinishReason, texts: Callable[[], TextDeltas]
    ) -> Completion:
        """The whole output of a request without stop strings. It is read and decoded at once, without a delta for each
        token.

        Raises:
            InvalidRequest: the request's structure could not be followed.
        """
        given = [one for one in sampled if one.token_id is not None or one.error or one.hypotheses]
        for one in given:
            if one.error:
                raise InvalidRequest(one.error)
            if one.hypotheses:
                best, *others = [self._of(found, texts) for found in one.hypotheses[: self.n]]
                return evolve(best, alternatives=tuple(others))
        self._sampled = len(given)
        kept = [one for one in given if one.token_id not in self.stop_ids]
        token_ids = tuple(one.token_id for one in kept if one.token_id is not None)
        return self._completion(
            texts,
            token_ids,
            reason,
            logprobs=tuple(one.logprob for one in kept),
            top_logprobs=tuple(one.top for one in kept) if self.tops else None,
            frames=tuple(one.frames for one in kept if one.frames is not None),
            prompt_logprobs=given[0].prompt if self.scores else None,
        )

    def _completion(
        self, texts: Callable[[], TextDeltas], token_ids: tuple[int, ...], reason: FinishReason, **more: Any
    ) -> Completion:
        parted = PartedText(texts(), self.reasoning)
        thought, text = parted.whole(token_ids)
        told: dict[str, Any] = {"text": text, "reasoning": thought, "usage": self._usage(parted), **more}
        return Completion(token_ids=token_ids, finish_reason=reason, **told)

    def _of(self, hypothesis: Hypothesis, texts: Callable[[], TextDeltas]) -> Completion:
        self._sampled = len(hypothesis.token_ids)
        token_ids, logprobs = self._kept(hypothesis)
        reason = FinishReason.STOP if hypothesis.token_ids[-1] in self.stop_ids else FinishReason.LENGTH
        return self._completion(texts, token_ids, reason, logprobs=logprobs, score=hypothesis.score)

    def _kept(self, hypothesis: Hypothesis) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The tokens and log-probabilities of ``hypothesis`` that belong to the output."""
        count = len(hypothesis.token_ids) - (hypothesis.token_ids[-1] in self.stop_ids)
        return hypothesis.token_ids[:count], hypothesis.logprobs[:count]

    def _usage(self, parted: PartedText) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self._sampled,
            reasoning_tokens=parted.before,
            seed=self.seed,
        )


def output_of(
    request: Request, texts: TextDeltas | None, eos_ids: frozenset[int], withdraw: Callable[[bool], object]
) -> Output:
    """The output of ``request``. It needs ``texts`` if its deltas are read, or if a stop string may end its text
    early."""
    sampling = request.sampling
    stops = frozenset(sampling.stop_token_ids)
    return Output(
        prompt_tokens=len(request.prompt_token_ids),
        stop_ids=stops if sampling.ignore_eos else stops | eos_ids,
        texts=texts,
        stops=StopStrings(sampling.stop, sampling.include_stop_str_in_output),
        tops=sampling.logprobs is not None,
        withdraw=withdraw,
        seed=sampling.seed,
        n=sampling.n,
        scores=sampling.prompt_logprobs is not None,
        reasoning=request.reasoning,
    )


def completion_of(deltas: Sequence[Delta]) -> Completion:
    """The completion of a request that ended well: the sum of all its ``deltas``."""
    last = deltas[-1]
    assert last.finish_reason is not None, "a request ended without a reason"
    assert last.usage is not None, "a request ended without its usage"
    has_tops = last.top_logprobs is not None
    return Completion(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        top_logprobs=tuple(top for delta in deltas for top in delta.top_logprobs or ()) if has_tops else None,
        frames=tuple(frame for delta in deltas for frame in delta.frames),
        usage=last.usage,
        prompt_logprobs=next((one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None), None),
    )


def sampled_of(sampled: Iterable[SampledToken]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The tokens and log-probabilities of a request that ended well; after a beam search, those of the best
    hypothesis."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    for one in sampled:
        if one.hypotheses:
            return one.hypotheses[0].token_ids, one.hypotheses[0].logprobs
        if one.token_id is not None:
            token_ids.append(one.token_id)
            logprobs.append(one.logprob)
    return tuple(token_ids), tuple(logprobs)
