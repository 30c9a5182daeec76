"""A request's progress through the planner."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import define, field

from ..beam_pages import pages_of_beams
from ..order import order_of
from ..plan import Hypothesis, SampledToken, SequenceStart
from ..request import EncoderItem, FinishReason, Request
from .limits import PlannerLimits
from .placeholders import PlaceholderItems
from .prefix import PageKeys

_MOST_DOUBTS = 4

STAND_IN = -1
"""The value in `Sequence.tokens` for a token that a beam search has not decided yet."""


class Phase(enum.Enum):
    """The phase of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"  # gets no further chunks; gives its pages and slot back when no step in flight mentions it


@define(eq=False)
class EncoderHold:
    """An encoder output that a sequence has acquired, and holds if it is ``ready``. ``holder`` is the hold's name at
    the encoder cache. The name is new for every acquire, so that a late answer to a withdrawn acquire is recognised.
    A hold does not name its sequence: the two would keep each other alive."""

    holder: str
    item: EncoderItem
    ready: bool = False


@define(eq=False)
class Sequence:
    """The progress of a request. ``tokens`` has the prompt and the committed tokens. A beam search commits nothing
    before its end. While it runs, ``tokens`` has a `STAND_IN` for each of its steps, so that positions count as usual.

    Answered steps have fed the positions before ``fed``. Together with the steps in flight they feed the positions
    before ``dispatched``. Steps in flight sample ``sampling`` tokens.
    """

    request: Request
    key: tuple[int, int]  # the place of the sequence in every queue: order, arrival
    tokens: list[int]
    page_keys: PageKeys
    placeholders: PlaceholderItems
    cross_item: EncoderItem | None  # the item that is read through cross-attention
    limit: int  # most tokens of the sequence, prompt included
    stops: frozenset[int]  # tokens that end the sequence
    phase: Phase = Phase.WAITING
    holds: dict[str, EncoderHold] = field(factory=dict)  # by content key
    shuns_cache: bool = False  # starts without cached pages, since those that it counted on were evicted
    id: int | None = None  # the executor's name for the sequence; new for each start
    pages: tuple[int, ...] = ()
    slot: int | None = None
    adapter: int | None = None  # the slot of its adapter
    states: tuple[int, ...] = ()  # its own, see `Chunk.states`
    source: int | None = None  # the kept state that it goes on from, until the step that copies it is answered
    ends: frozenset[int] = frozenset()  # numbers of pages at whose end its state is worth keeping
    trail: bytes | None = None  # the key of the last state that it has kept
    begun: int = 0  # the number of its tokens when it started
    dispatched: int = 0
    fed: int = 0
    listed: int = 0  # how many of the first pages are listed for other sequences to find
    sampling: int = 0
    drafting: int = 0  # steps in flight with draft tokens; the number of tokens that they sample is not known
    doubts: int = 0  # grows when draft tokens prove wrong, and sets how long none are proposed: see `judge_drafts`
    drafts_from: int = 0  # from this length on draft tokens are proposed again
    in_flight: int = 0  # steps in flight that mention the sequence
    last_step: int = -1  # the latest step that mentions the sequence
    gave_way: tuple[Sequence, int] | None = None  # the one that it was preempted for, and that one's latest step then
    ended: bool = False  # a Finish, Fail or Abort was issued
    beams: int = 1  # most rows that a chunk feeds after the prompt; more than 1 in a beam search
    reached: int = 0  # most tokens that a search has had; a search that starts anew loses its tokens

    @classmethod
    def of(cls, request: Request, arrival: int, limits: PlannerLimits) -> Sequence:
        """Returns the sequence of a new request, which is the ``arrival``-th request."""
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
        """The number of tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    def rows(self, start: int) -> int:
        """Returns the number of rows of a chunk of one token at position ``start``."""
        return self.beams if self.beams > 1 and start >= self.prompt_length else 1

    def pages_for(self, positions: int, page_size: int) -> int:
        """Returns the number of pages that the first ``positions`` positions need."""
        if self.beams == 1:
            return -(-positions // page_size)
        shared = self.prompt_length // page_size
        return pages_of_beams(positions, page_size=page_size, shared=shared, size=self.beams)

    @property
    def held(self) -> set[str]:
        """The keys of the encoder outputs that the sequence holds."""
        return {key for key, hold in self.holds.items() if hold.ready}

    @property
    def holds_all(self) -> bool:
        """True if the sequence has acquired at least one encoder output, and holds all that it has acquired."""
        return bool(self.holds) and all(hold.ready for hold in self.holds.values())

    @property
    def known(self) -> int:
        """The number of tokens that the sequence will have when the steps in flight are done."""
        return len(self.tokens) + self.sampling

    @property
    def left(self) -> int:
        """The number of tokens that the sequence may still sample."""
        return self.limit - self.known

    @property
    def may_draft(self) -> bool:
        """True if draft tokens may be proposed: the sequence samples one token after another, and its pause since wrong
        draft tokens is over.
        """
        return self.beams == 1 and self.request.reads is None and self.known >= self.drafts_from

    def judge_drafts(self, accepted: int, proposed: int) -> None:
        """Decides how long the sequence goes without draft tokens, by the number of ``accepted`` tokens of the last
        ``proposed`` ones. A step with draft tokens takes longer, and the next step cannot be planned before its answer.
        Each draft without a right token doubles the pause, from 1 token up to 15. One right token halves the pause;
        two right tokens, or all, end it."""
        if accepted > 1 or accepted == proposed:
            self.doubts = 0
        else:
            self.doubts = max(self.doubts - 1, 0) if accepted else min(self.doubts + 1, _MOST_DOUBTS)
        self.drafts_from = len(self.tokens) + (1 << self.doubts) - 1

    @property
    def lets_pass(self) -> bool:
        """True if the sequence was preempted for another one that has neither run since nor ended."""
        if self.gave_way is None:
            return False
        other, last_step = self.gave_way
        return not other.ended and other.last_step == last_step

    @property
    def replays(self) -> bool:
        """True if the sequence has sampled its next token before. This is so for a beam search that started anew."""
        return len(self.tokens) < self.reached

    def steps(self, budget: int) -> int:
        """Returns the number of steps, of up to ``budget`` tokens each, that the sequence needs from its start to its
        next token."""
        if self.beams == 1:
            return -(-len(self.tokens) // budget)
        return -(-self.prompt_length // budget) + self.reached - self.prompt_length

    def search_on(self, found: tuple[Hypothesis, ...]) -> FinishReason | None:
        """Notes that a step of the beam search is done. ``found`` has the hypotheses if the search is over, and is
        empty otherwise. Returns the reason why the sequence ends; ``None``: the sequence goes on."""
        if found:
            return FinishReason.STOP if found[0].token_ids[-1] in self.stops else FinishReason.LENGTH
        self.tokens.append(STAND_IN)
        self.reached = max(self.reached, len(self.tokens))
        return None

    def extend(self, sampled: Iterable[SampledToken]) -> FinishReason | None:
        """Appends the sampled tokens, up to one that ends the sequence. Returns the reason why the sequence ends;
        ``None``: the sequence goes on."""
        for one in sampled:
            assert one.token_id is not None, "a chunk that samples must answer with a token"
            self.tokens.append(one.token_id)
            if one.token_id in self.stops:
                return FinishReason.STOP
            if len(self.tokens) >= self.limit:
                return FinishReason.LENGTH
        return None

    @property
    def is_scored(self) -> bool:
        """True if the log-probabilities of its prompt are asked for."""
        return self.request.sampling.prompt_logprobs is not None

    def most_cached(self) -> int:
        """Returns the largest number of pages that the sequence may take from the cache instead of feeding them. The
        last token must be fed, for the logits, and so must the tokens whose logits or hidden states the request asks
        for."""
        most = len(self.tokens) - 1
        if self.is_scored:
            return 0
        if self.request.probe is not None:
            most = min(most, self.request.probe.position)
        if self.request.pooling is not None and self.request.pooling.kind in ("mean", "cls"):
            most = 0
        if self.request.alignment is not None:
            most = min(most, self.request.alignment.start - 1)
        return most // self.page_keys.page_size

    def find_ends(self, known: int) -> None:
        """Finds where its state is worth keeping: behind the last page of its prompt and the one before, since the same
        prompt or its conversation may come again, the latter with a few tokens less; and behind its ``known`` pages,
        where its prefix leaves one that is listed."""
        last = (self.prompt_length - 1) // self.page_keys.page_size
        self.ends = frozenset({known, last, last - 1} - {0, -1})

    def keeps(self, start: int, stop: int) -> list[int]:
        """Returns the positions in ``start+1 .. stop``, in order, at which its state is kept: the last end of a page,
        and each end that is worth it."""
        size = self.page_keys.page_size
        ends = range(start // size + 1, stop // size + 1)
        return [end * size for end in ends if end == ends[-1] or end in self.ends]

    def as_start(self) -> SequenceStart:
        """Returns the record of the sequence that the executor keeps."""
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
            reasoning=request.reasoning,
            state=self.source,
            adapter=self.adapter,
        )

    def rewind(self) -> None:
        """Resets the sequence, which will start anew from its prompt and committed tokens."""
        if self.beams > 1:
            del self.tokens[self.prompt_length :]
        self.id = self.slot = self.adapter = None
        self.pages = self.states = ()
        self.dispatched = self.fed = self.listed = self.sampling = self.drafting = 0
