"""The draft of a step: what the step feeds, which sequences it starts and preempts. Nothing changes before the draft is
committed. It is an `InFlightStep` from then on, until it is answered."""

from __future__ import annotations

from attrs import define, field

from ..ledger_values import Hold
from ..plan import StepPlan
from .sequence import Sequence


@define(eq=False)
class Part:
    """One sequence's share of the step: ``length`` of the ``wanted`` tokens from position ``start`` on, for each of
    ``beams`` beams."""

    sequence: Sequence
    start: int
    length: int
    wanted: int
    pages: int = 0  # new pages
    states: int = 0  # new states
    draft_tokens: int = 0
    beams: int = 1

    @property
    def stop(self) -> int:
        """One past the part's last position, without draft tokens."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """True if the part ends at the sequence's last token, so that a token is sampled."""
        return self.start + self.length == len(self.sequence.tokens) + self.sequence.sampling


@define(eq=False)
class StepDraft:
    """The draft of a step. ``tokens``, ``pages``, ``slots``, ``states``, ``adapters`` (slots) and ``places`` are what
    is left for further sequences."""

    tokens: int
    pages: int
    slots: int
    states: int
    adapters: int
    places: int
    parts: list[Part] = field(factory=list)
    starts: dict[Sequence, tuple[int, ...]] = field(factory=dict)  # the cached pages that each start joins
    preempted: dict[Sequence, Sequence] = field(factory=dict)  # the last running ones, and whom each gives way to
    lost: dict[Sequence, None] = field(factory=dict)  # no longer ready: these sequences acquire anew
    blocked: Sequence | None = None  # the first ready sequence that lacks room
    awaits: bool = False  # a preempted sequence is in flight: its room comes back later
    work: int = 0  # pages looked up to admit sequences, see `_MOST_WORK` in `acts`
    joined: set[int] = field(factory=set)  # cached pages that the starts join
    state_keys: set[bytes] = field(factory=set)  # keys of the kept states that the starts go on from
    slot_keys: set[str] = field(factory=set)  # content keys whose cross KV the starts join or write
    adapter_keys: set[str] = field(factory=set)  # of the adapters that the starts have
    scored: int = 0  # tokens of sequences whose prompts have log-probabilities
    growth: dict[int, int] = field(factory=dict)  # pages that running and started sequences need, by token count

    def add(self, part: Part) -> None:
        """Puts ``part`` into the step."""
        self.parts.append(part)
        self.tokens -= part.length * part.beams
        self.scored += part.length * part.sequence.is_scored
        self.pages -= part.pages

    def waits_before(self, sequence: Sequence) -> bool:
        """True if a sequence that comes before ``sequence`` waits for room."""
        return self.blocked is not None and self.blocked.key < sequence.key

    def preempt(self, victim: Sequence, pages: int, *, to: Sequence) -> None:
        """Makes ``victim`` give way ``to`` another one. Its ``pages`` come back at once if no step in flight mentions
        ``victim``, and later otherwise."""
        self.preempted[victim] = to
        if victim.in_flight:
            self.awaits = True
        else:
            self.pages += pages

    def share(self, wanted: int, least: int, *, others: bool) -> int:
        """Returns how many of ``wanted`` tokens a prompt is fed: up to all tokens that are left. If ``others`` want
        tokens too, the prompt gets up to half of them, or up to ``least``."""
        most = max(self.tokens // 2, least) if others else self.tokens
        return min(wanted, most, self.tokens)


@define(eq=False)
class InFlightStep:
    """A dispatched step, and the sequences that its answer concerns."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    writes: tuple[Sequence, ...]  # sequences whose cross KV the step writes
    reads: tuple[Hold, ...]  # holds of the encoder outputs that the step reads

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the step's requests."""
        return tuple([sequence.request.id for sequence in self.sequences])

    @property
    def samples(self) -> tuple[str, ...]:
        """The ids of the requests that get a token from the step, or go on with their beam search."""
        pairs = zip(self.sequences, self.plan.chunks, strict=True)
        return tuple([one.request.id for one, chunk in pairs if chunk.samples and one.request.reads is None])
