"""A request's progress through the planner."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import define

from ..beam_pages import pages_of_beams
from ..order import order_of
from ..plan import Hypothesis, SampledToken, SequenceStart
from ..request import EncoderItem, FinishReason, Request
from .limits import PlannerLimits
from .placeholders import PlaceholderItems
from .prefix import PageKeys

_MOST_DOUBTS = 4

STAND_IN = -1
"""Stands in `Sequence.tokens` for a token that a beam search has not decided."""


class Phase(enum.Enum):
    """The phase of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"  # no further chunks; its pages and slot go back when no step in flight mentions it


@define(eq=False)
class Sequence:
    """A request's progress. ``tokens`` is the prompt and the committed tokens. While a beam search runs, which commits
    nothing before its end, ``tokens`` has a `STAND_IN` for each step of it, so that positions count as usual.

    Answered steps have fed the positions before ``fed``; with the steps in flight, those before ``dispatched``. Steps
    in flight sample ``sampling`` tokens.
    """

    request: Request
    key: tuple[int, int]  # its place in every queue: order, arrival
    tokens: list[int]
    page_keys: PageKeys
    placeholders: PlaceholderItems
    cross_item: EncoderItem | None  # the item that it reads through cross-attention
    limit: int  # most tokens that it will have, prompt included
    stops: frozenset[int]  # tokens that end it
    phase: Phase = Phase.WAITING
    shuns_cache: bool = False  # it starts without cached pages: the pages it counted on were evicted
    id: int | None = None  # the executor's name for it; a new one for each start
    pages: tuple[int, ...] = ()
    slot: int | None = None
    dispatched: int = 0
    fed: int = 0
    listed: int = 0  # how many of its first pages are listed, for others to find
    sampling: int = 0
    drafting: int = 0  # steps in flight with draft tokens of it: how many tokens they sample is not known
    doubts: int = 0  # what its draft tokens were worth so far, and how long it goes without: see `judge_drafts`
    drafts_from: int = 0  # the length from which on it gets draft tokens again
    in_flight: int = 0  # steps in flight that mention it
    last_step: int = -1  # the latest step that mentions it
    ended: bool = False  # its Finish, Fail or Abort was issued
    beams: int = 1  # most rows that it feeds after its prompt: more than 1 in a beam search
    reached: int = 0  # most tokens that it has had, if it is a search: one that starts anew loses them

    @classmethod
    def of(cls, request: Request, arrival: int, limits: PlannerLimits) -> Sequence:
        """The sequence of a new request, the ``arrival``-th one."""
        cross = next((item for item in request.items if not item.spans), None)
        assert cross is None or len(request.items) == 1, "a request has one item for cross-attention, or placed ones"
        sampling = request.sampling
        return cls(
            request=request,
            key=(order_of(request.priority, arrival), arrival),
            tokens=[*request.prompt_token_ids, *request.committed],
            page_keys=PageKeys.of(request, page_size=limits.page_size, identity=limits.identity),
            placeholders=PlaceholderItems.of(request),
            cross_item=cross,
            limit=len(request.prompt_token_ids) + request.max_tokens,
            stops=(frozenset() if sampling.ignore_eos else limits.eos_token_ids).union(sampling.stop_token_ids),
            beams=sampling.beam_size if request.reads is None else 1,
            reached=len(request.prompt_token_ids),
        )

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    def rows(self, start: int) -> int:
        """Rows of a chunk of one token at position ``start``."""
        return self.beams if start >= self.prompt_length else 1

    def pages_for(self, positions: int, page_size: int) -> int:
        """The number of pages that the first ``positions`` take."""
        if self.beams == 1:
            return -(-positions // page_size)
        shared = self.prompt_length // page_size
        return pages_of_beams(positions, page_size=page_size, shared=shared, size=self.beams)

    @property
    def known(self) -> int:
        """Tokens that the sequence will have when the steps in flight are done."""
        return len(self.tokens) + self.sampling

    @property
    def left(self) -> int:
        """Tokens that the sequence may still sample."""
        return self.limit - self.known

    @property
    def may_draft(self) -> bool:
        """True if draft tokens may be proposed for it: it samples one token after the other, and its last ones were
        of use or are long ago."""
        return self.beams == 1 and self.request.reads is None and self.known >= self.drafts_from

    def judge_drafts(self, accepted: int) -> None:
        """Decides how long the sequence goes without draft tokens, by how many of the last ones were right: a step that
        has some takes longer, and the next one cannot be planned before its answer. Each step without a right one
        doubles the pause, from 1 token up to 15; one right token halves it, two end it."""
        if accepted > 1:
            self.doubts = 0
        else:
            self.doubts = max(self.doubts - 1, 0) if accepted else min(self.doubts + 1, _MOST_DOUBTS)
        self.drafts_from = len(self.tokens) + (1 << self.doubts) - 1

    @property
    def replays(self) -> bool:
        """True if the next token is one that it has sampled before: it is a search that started anew."""
        return len(self.tokens) < self.reached

    def steps(self, budget: int) -> int:
        """The number of steps of up to ``budget`` tokens that it takes from its start to its next token."""
        if self.beams == 1:
            return -(-len(self.tokens) // budget)
        return -(-self.prompt_length // budget) + self.reached - self.prompt_length

    def search_on(self, found: tuple[Hypothesis, ...]) -> FinishReason | None:
        """A step of its beam search is done, which has ``found`` what it was after, or nothing yet. Returns why the
        sequence ends; ``None``: it goes on."""
        if found:
            return FinishReason.STOP if found[0].token_ids[-1] in self.stops else FinishReason.LENGTH
        self.tokens.append(STAND_IN)
        self.reached = max(self.reached, len(self.tokens))
        return None

    def extend(self, sampled: Iterable[SampledToken]) -> FinishReason | None:
        """Appends the tokens, up to one that ends the sequence. Returns why it ends; ``None``: it goes on."""
        for one in sampled:
            assert one.token_id is not None, "a chunk that samples must answer with a token"
            self.tokens.append(one.token_id)
            if one.token_id in self.stops:
                return FinishReason.STOP
            if len(self.tokens) >= self.limit:
                return FinishReason.LENGTH
        return None

    def most_cached(self) -> int:
        """The most pages that cached content can spare the sequence from feeding. The last token must be fed, for the
        logits, and so must the tokens whose logits or hidden states the request asks for."""
        most = len(self.tokens) - 1
        if self.request.probe is not None:
            most = min(most, self.request.probe.position)
        if self.request.pooling is not None and self.request.pooling.kind in ("mean", "cls"):
            most = 0
        if self.request.alignment is not None:
            most = min(most, self.request.alignment.start - 1)
        return most // self.page_keys.page_size

    def as_start(self) -> SequenceStart:
        """The record that the executor keeps of it."""
        assert self.id is not None, "a sequence that starts has an id"
        request = self.request
        return SequenceStart(
            sequence_id=self.id,
            token_ids=tuple(self.tokens),
            prompt_length=self.prompt_length,
            sampling=request.sampling,
            rules=request.rules,
            probe=request.probe,
            placeholders=self.placeholders.all,
            pooling=request.pooling,
            alignment=request.alignment,
            max_tokens=request.max_tokens,
            stops=self.stops,
        )

    def rewind(self) -> None:
        """Sets the sequence back: it will start anew, from its prompt and committed tokens."""
        if self.beams > 1:
            del self.tokens[self.prompt_length :]
        self.id = self.slot = None
        self.pages = ()
        self.dispatched = self.fed = self.listed = self.sampling = self.drafting = 0
