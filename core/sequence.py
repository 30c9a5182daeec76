"""A request's progress through the planner."""

from __future__ import annotations

import enum
import math

from attrs import define, field

from .prefix import PageKeys
from .request import EncoderItem, Placement, Request


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"  # no further chunks; resources go back when no step mentions it


@define(eq=False)
class Ask:
    """An encoder output that the sequence has asked for. ``holder`` is its name at the encoder cache: new for every
    ask, so that a late answer to a withdrawn one is recognised."""

    holder: str
    item: EncoderItem
    held: bool = False


@define(eq=False)
class Sequence:
    """A request's progress. ``tokens`` is the prompt and the committed tokens."""

    request: Request
    arrival: int
    tokens: list[int]
    keys: PageKeys
    placements: tuple[Placement, ...]
    phase: Phase = Phase.WAITING
    asks: dict[str, Ask] = field(factory=dict)  # by content key
    asked: int = 0  # how often: numbers the holders
    shuns_cache: bool = False  # it starts without cached pages: those it relied on were gone
    id: int | None = None  # the executor's name for it; a new one for each time it starts
    dispatched: int = 0  # positions that dispatched steps have fed or will feed
    fed: int = 0  # positions that answered steps have fed
    listed: int = 0  # pages that others may find
    draws: int = 0  # tokens sampled by steps in flight
    in_flight: int = 0  # steps in flight that mention it
    pages: list[int] = field(factory=list)
    slot: int | None = None
    ended: bool = False  # its one end has been told
    suspicion: int = 0  # failed steps it was part of, since the last one that went well
    crashes_alone: int = 0

    @classmethod
    def of(cls, request: Request, arrival: int, *, page_size: int, identity: str) -> Sequence:
        """A request that nothing has been done for yet."""
        cross = next((item.key for item in request.items if not item.spans), None)
        placements = tuple(item.placement for item in request.items if item.placement is not None)
        assert cross is None or len(request.items) == 1, "a request has one item for cross-attention, or placed ones"
        keys = PageKeys.of(request, page_size=page_size, identity=identity)
        return cls(request, arrival, list(request.prompt_token_ids), keys, placements)

    @property
    def cross_item(self) -> EncoderItem | None:
        """What it reads through cross-attention."""
        items = self.request.items
        return items[0] if items and not items[0].spans else None

    @property
    def generated(self) -> int:
        """Committed tokens that are not of the prompt."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def known(self) -> int:
        """Tokens it will have when the steps in flight are done."""
        return len(self.tokens) + self.draws

    @property
    def left(self) -> int:
        """Tokens it may still draw."""
        return self.request.max_tokens - self.generated - self.draws

    @property
    def waits_for_item(self) -> bool:
        """Whether something that it has asked for has not come."""
        return not all(ask.held for ask in self.asks.values())

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: the smaller priority, then the earlier arrival."""
        return (self.request.priority, self.arrival)

    def needed(self, start: int) -> list[EncoderItem]:
        """The placed items with embeddings at ``start`` or behind, each key once, in the order of their positions."""
        found: dict[str, EncoderItem] = {}
        for item, placement in zip(self.request.items, self.placements, strict=False):
            if placement.stop > start:
                found.setdefault(item.key, item)
        return list(found.values())

    def reach(self, start: int) -> float:
        """The first position from ``start`` on whose embedding is not held."""
        for placement in self.placements:
            ask = self.asks.get(placement.key)
            if placement.stop > start and not (ask is not None and ask.held):
                return next(max(first, start) for first, stop in placement.spans if stop > start)
        return math.inf

    def most_cached(self) -> int:
        """Pages of its tokens that need not be fed where their content is cached: its last token has to be, for the
        logits, and so have those that it is asked about."""
        most = len(self.tokens) - 1
        if self.request.probe is not None:
            most = min(most, self.request.probe.position)
        if self.request.pooling is not None and self.request.pooling.kind in ("mean", "cls"):
            most = 0
        return most // self.keys.page_size
