"""A step while it is being planned: what it would take and whom it would move. Nothing happens before its commit."""

from __future__ import annotations

from attrs import define, field

from .sequence import Sequence


@define(eq=False)
class Part:
    """One sequence's share of the step: ``length`` of the ``wanted`` tokens from position ``start`` on."""

    sequence: Sequence
    start: int
    length: int
    wanted: int
    pages: int = 0  # new ones
    draft_tokens: int = 0

    @property
    def stop(self) -> int:
        """One past its last position, draft tokens not counted."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether it ends at the sequence's last token."""
        return self.start + self.length == len(self.sequence.tokens) + self.sequence.sampling


@define(eq=False)
class StepDraft:
    """``tokens``, ``pages``, ``slots`` and ``places`` are what is left for those who come next."""

    tokens: int
    pages: int
    slots: int
    places: int
    parts: list[Part] = field(factory=list)
    starts: dict[Sequence, tuple[int, ...]] = field(factory=dict)  # and the cached pages that they begin with
    preempted: dict[Sequence, None] = field(factory=dict)  # the last ones of those that run
    lost: dict[Sequence, None] = field(factory=dict)  # what they relied on is gone: they must acquire anew
    blocked: Sequence | None = None  # the first one that could start, if there were room
    awaits: bool = False  # room is on its way back
    work: int = 0  # pages looked at to admit somebody
    joined: set[int] = field(factory=set)  # unused pages that those who start would join
    slot_keys: set[str] = field(factory=set)  # whose cross KV those who start would join or write
    growth: dict[int, int] = field(factory=dict)  # pages that those beside a newcomer take for so many tokens more

    def add(self, part: Part) -> None:
        """``part`` is in the step."""
        self.parts.append(part)
        self.tokens -= part.length
        self.pages -= part.pages

    def waits_before(self, sequence: Sequence) -> bool:
        """True if one that comes before ``sequence`` waits for room."""
        return self.blocked is not None and self.blocked.key < sequence.key

    def preempt(self, victim: Sequence, pages: int) -> None:
        """``victim`` gives way; ``pages`` come back, at once where no step in flight mentions it."""
        self.preempted[victim] = None
        if victim.in_flight:
            self.awaits = True
        else:
            self.pages += pages

    def share(self, wanted: int, least: int, *, others: bool) -> int:
        """How many of ``wanted`` tokens a prompt is fed: what is left, and where ``others`` want some, half of that."""
        most = max(self.tokens // 2, least) if others else self.tokens
        return min(wanted, most, self.tokens)
