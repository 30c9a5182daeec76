"""Is your model adapter sound? The kit plays the planner of an `Executor` and compares what it draws with itself.

::

    def test_my_adapter_keeps_its_promises():
        check_model_adapter(lambda: MyExecutor(...), payloads=[clip, other_clip, third_clip])

What breaks a promise is an `InvariantViolation` with the promise's name:

- **batched as alone**: a sequence gets the same tokens, whatever is encoded and decoded together with it.
- **chunked as whole**: a prompt that is fed in pieces gives the same tokens as one that is fed at once.
- **outputs are copies**: an encoder output does not change when its siblings are freed, nor when others are encoded.
- **free gives back**: each free gives the bytes of its output back, by owner; a freed key can be encoded again and
  gives the same tokens; work that has ended leaves nothing behind.
- **instances apart**: two open adapters do not change each other, and one goes on when the other is closed.
- **closed is empty**: after `Executor.close`, which may come twice, an adapter holds zero bytes.

Tokens are drawn greedily and must be equal; log-probabilities must be close. Sampling is not checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import define, field, frozen

from ..core.errors import InvariantViolation
from ..core.model import Executor, ModelDescription
from ..core.plan import CrossWrite, Drawn, EncodeJob, SequenceStart, Slice, StepPlan
from ..core.request import LogitRules, SamplingParams

BATCHED_AS_ALONE = "batched as alone"
CHUNKED_AS_WHOLE = "chunked as whole"
OUTPUTS_ARE_COPIES = "outputs are copies"
FREE_GIVES_BACK = "free gives back"
INSTANCES_APART = "instances apart"
CLOSED_IS_EMPTY = "closed is empty"

ADAPTER_INVARIANTS = (
    BATCHED_AS_ALONE,
    CHUNKED_AS_WHOLE,
    OUTPUTS_ARE_COPIES,
    FREE_GIVES_BACK,
    INSTANCES_APART,
    CLOSED_IS_EMPTY,
)

LEAST_PAYLOADS = 3
"""One to free, one to keep, and one to encode later."""

MakeAdapter = Callable[[], Executor]


@frozen
class _Item:
    """A sequence: the key and payload it listens to, and its prompt."""

    key: str
    payload: Any = field(repr=False)
    prompt: tuple[int, ...]


@define
class _Sequence:
    item: _Item
    id: int
    slot: int
    pages: tuple[int, ...]
    drawn: list[Drawn] = field(factory=list)
    fed: int = 0

    @property
    def known(self) -> int:
        return len(self.item.prompt) + len(self.drawn)


@define(eq=False)
class _Player:
    """Plays the planner of one open adapter."""

    adapter: Executor
    description: ModelDescription
    max_tokens: int
    _ids: Iterator[int] = field(factory=itertools.count)

    def encode(self, items: Sequence[_Item]) -> None:
        """All in one batch."""
        size, embeddings = self.description.encoder_bytes, self.description.encoder_embeddings
        self.adapter.encode(
            tuple(EncodeJob(key=item.key, payload=item.payload, embeddings=embeddings, size=size) for item in items)
        )

    def free(self, items: Sequence[_Item]) -> None:
        self.adapter.free(tuple(item.key for item in items))

    def owned(self) -> dict[str, int]:
        """Bytes by owner, of those that hold any."""
        return {owner: count for owner, count in self.adapter.memory().by_owner.items() if count}

    def decode(self, items: Sequence[_Item], *, chunk: int | None = None) -> list[tuple[Drawn, ...]]:
        """What each item draws when all go through common steps, ``chunk`` tokens of each in a step at most."""
        running = self._begin(items)
        first = True
        while any(len(sequence.drawn) < self.max_tokens for sequence in running):
            self._step(running, chunk, first=first)
            first = False
        self.adapter.step(self._plan(ended=tuple(sequence.id for sequence in running)))
        return [tuple(sequence.drawn) for sequence in running]

    def _begin(self, items: Sequence[_Item]) -> list[_Sequence]:
        """Pages are dealt out one by one, so that no sequence has two in a row; the last pages come first."""
        each = max(-(-(len(item.prompt) + self.max_tokens) // self.description.page_size) for item in items)
        pages = range(self.description.pages - 1, -1, -1)
        count = len(items)
        return [
            _Sequence(item, next(self._ids), slot=count - 1 - number, pages=tuple(pages[number : each * count : count]))
            for number, item in enumerate(items)
        ]

    def _step(self, running: list[_Sequence], chunk: int | None, *, first: bool) -> None:
        active = [sequence for sequence in running if len(sequence.drawn) < self.max_tokens]
        slices = tuple(self._slice(sequence, chunk) for sequence in active)
        started = tuple(self._start(sequence) for sequence in running) if first else ()
        writes = tuple(CrossWrite(key=one.item.key, slot=one.slot) for one in running) if first else ()
        plan = self._plan(started=started, cross_writes=writes, slices=slices)
        for sequence, part, drawn in zip(active, slices, self.adapter.step(plan).drawn, strict=True):
            sequence.fed += part.length
            if part.draw:
                sequence.drawn.append(drawn)

    def _slice(self, sequence: _Sequence, chunk: int | None) -> Slice:
        left = sequence.known - sequence.fed
        length = left if chunk is None else min(chunk, left)
        end = sequence.fed + length
        return Slice(
            sequence_id=sequence.id,
            start=sequence.fed,
            length=length,
            block_table=sequence.pages[: -(-end // self.description.page_size)],
            cross_slot=sequence.slot,
            draw=end == sequence.known,
        )

    @staticmethod
    def _start(sequence: _Sequence) -> SequenceStart:
        prompt = sequence.item.prompt
        return SequenceStart(
            sequence_id=sequence.id,
            token_ids=prompt,
            prompt_length=len(prompt),
            sampling=SamplingParams(),
            rules=LogitRules(),
            probe=None,
        )

    def _plan(
        self,
        *,
        started: tuple[SequenceStart, ...] = (),
        ended: tuple[int, ...] = (),
        cross_writes: tuple[CrossWrite, ...] = (),
        slices: tuple[Slice, ...] = (),
    ) -> StepPlan:
        number = next(self._ids)  # sequences and steps are counted together: neither is ever the same again
        return StepPlan(step_id=number, epoch=0, started=started, ended=ended, cross_writes=cross_writes, slices=slices)


@contextmanager
def _promise(invariant: str) -> Iterator[None]:
    """Whatever the adapter raises within breaks ``invariant``."""
    try:
        yield
    except InvariantViolation:
        raise
    except Exception as error:
        raise InvariantViolation(invariant, f"the adapter raised {type(error).__name__}: {error}") from error


@define(eq=False)
class _Check:
    make_adapter: MakeAdapter
    items: tuple[_Item, ...]
    max_tokens: int
    tolerance: float
    truth: list[tuple[Drawn, ...]] = field(factory=list)  # what each item draws alone, in an adapter of its own

    def run(self) -> None:
        self.truth = [self.alone(item) for item in self.items]
        with _promise(BATCHED_AS_ALONE), self.open() as player:
            player.encode(self.items)
            self.compare(BATCHED_AS_ALONE, player.decode(self.items), "encoded and decoded in one batch")
        with _promise(CHUNKED_AS_WHOLE), self.open() as player:
            player.encode(self.items)
            for chunk in (1, 2, 3):
                drawn = player.decode(self.items, chunk=chunk)
                self.compare(CHUNKED_AS_WHOLE, drawn, f"fed in pieces of {chunk}")
        self.outputs_are_copies()
        self.free_gives_back()
        self.instances_apart()
        self.closed_is_empty()

    @contextmanager
    def open(self) -> Iterator[_Player]:
        """An adapter, closed afterwards."""
        adapter = self.make_adapter()
        try:
            yield _Player(adapter, adapter.open(), self.max_tokens)
        finally:
            adapter.close()

    def alone(self, item: _Item) -> tuple[Drawn, ...]:
        with self.open() as player:
            player.encode([item])
            return player.decode([item])[0]

    def compare(self, invariant: str, drawn: list[tuple[Drawn, ...]], how: str, *, first: int = 0) -> None:
        """``drawn`` is what the items from the ``first`` on drew."""
        for item, true, got in zip(self.items[first:], self.truth[first:], drawn, strict=False):
            tokens, true_tokens = [one.token_id for one in got], [one.token_id for one in true]
            if tokens != true_tokens:
                raise InvariantViolation(invariant, f"{item.key}, {how}, gets {tokens}; alone it gets {true_tokens}")
            apart = max(abs(one.logprob - other.logprob) for one, other in zip(got, true, strict=True))
            if not apart <= self.tolerance:  # so that NaN is told too
                raise InvariantViolation(
                    invariant,
                    f"{item.key}, {how}, gets log-probabilities that are {apart:g} from those it gets alone; allowed: "
                    f"{self.tolerance:g}",
                )

    def outputs_are_copies(self) -> None:
        first, *kept, last = self.items
        with _promise(OUTPUTS_ARE_COPIES), self.open() as player:
            player.encode([first, *kept])
            player.free([first])
            player.encode([last])
            drawn = player.decode([*kept, last])
            self.compare(OUTPUTS_ARE_COPIES, drawn, "after a sibling was freed and another encoded", first=1)
            player.encode([first])
            self.compare(OUTPUTS_ARE_COPIES, player.decode(self.items), "after an output was encoded anew")

    def free_gives_back(self) -> None:
        with _promise(FREE_GIVES_BACK), self.open() as player:
            self.round(player)  # for what is taken once, at the first use
            before = player.owned()
            self.round(player)
            after = player.owned()
            if after != before:
                raise InvariantViolation(FREE_GIVES_BACK, f"{before} bytes before a round of work, {after} after it")

    def round(self, player: _Player) -> None:
        """Everything is encoded, decoded, and freed one by one, each with the share that its encoding alone took."""
        empty = player.adapter.memory().total
        player.encode(self.items)
        full = player.adapter.memory().total
        self.compare(FREE_GIVES_BACK, player.decode(self.items), "encoded again after it was freed")
        base = player.adapter.memory().total - full  # what the steps have taken, at their first use
        for number, item in enumerate(self.items, 1):
            player.free([item])
            held, share = player.adapter.memory().total - base, (full - empty) // len(self.items)
            if held != full - number * share:
                raise InvariantViolation(
                    FREE_GIVES_BACK,
                    f"{held} bytes are held after {number} of {len(self.items)} outputs were freed; allowed: "
                    f"{full - number * share} ({share} of each output)",
                )

    def instances_apart(self) -> None:
        with _promise(INSTANCES_APART), self.open() as one:
            one.encode(self.items)
            with self.open() as other:
                other.encode(self.items[:1])
                self.compare(INSTANCES_APART, one.decode(self.items), "while another adapter is open")
                self.compare(INSTANCES_APART, other.decode(self.items[:1]), "in the second adapter")
            self.compare(INSTANCES_APART, one.decode(self.items), "after another adapter was closed")

    def closed_is_empty(self) -> None:
        with _promise(CLOSED_IS_EMPTY):
            with self.open() as player:
                player.encode(self.items)
                player.decode(self.items)
            for _ in range(2):
                left = player.owned()
                if left:
                    raise InvariantViolation(CLOSED_IS_EMPTY, f"a closed adapter holds {left} bytes")
                player.adapter.close()


def check_model_adapter(
    make_adapter: MakeAdapter,
    payloads: Sequence[Any],
    *,
    prompts: Sequence[tuple[int, ...]] | None = None,
    max_tokens: int = 6,
    tolerance: float = 1e-3,
) -> None:
    """Checks an adapter's promises on ``payloads``, of which each is encoded under a key of its own.

    Args:
        make_adapter: makes an adapter that is not open yet; called often, so let its model be tiny.
        payloads: what `Executor.encode` takes, three or more, as different as may be.
        prompts: token ids, one prompt for each payload, of several lengths; by default Whisper's start token and after
            it some that are made up.
        max_tokens: tokens drawn for each; end-of-text ends nothing.
        tolerance: how far (in nats) log-probabilities may be apart.

    Raises:
        InvariantViolation: a promise is broken; its cause is what the adapter raised, if it did.
        ValueError: too few payloads, not as many prompts, or a model too small for all of them at once.
        Exception: whatever the adapter raises with one item alone: it does not work at all.
    """
    if len(payloads) < LEAST_PAYLOADS:
        raise ValueError(f"{len(payloads)} payloads; allowed: {LEAST_PAYLOADS} or more")
    adapter = make_adapter()
    try:
        description = adapter.open()
    finally:
        adapter.close()
    chosen = _default_prompts(description, len(payloads)) if prompts is None else [tuple(prompt) for prompt in prompts]
    if len(chosen) != len(payloads):
        raise ValueError(f"{len(chosen)} prompts; allowed: {len(payloads)}, one for each payload")
    _check_room(description, chosen, max_tokens)
    items = tuple(
        _Item(f"item {number}", payload, prompt)
        for number, (payload, prompt) in enumerate(zip(payloads, chosen, strict=True))
    )
    _Check(make_adapter, items, max_tokens, tolerance).run()


def _default_prompts(description: ModelDescription, count: int) -> list[tuple[int, ...]]:
    """The start token, and after it up to a page and more of others, so that some prompts end within a page."""
    if description.whisper is None:
        raise ValueError(f"no prompts; {description.architecture} has no start token to make some with: give prompts=")
    start, vocabulary = description.whisper.start_id, description.vocabulary_size
    lengths = [1 + number * (description.page_size - 1) % (2 * description.page_size) for number in range(count)]
    return [
        (start, *((7 * place + 3 * number + 2) % vocabulary for place in range(1, lengths[number])))
        for number in range(count)
    ]


def _check_room(description: ModelDescription, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
    """All sequences run at once, each in as many pages as the longest needs."""
    count, longest = len(prompts), max(len(prompt) for prompt in prompts) + max_tokens
    if longest > description.max_positions:
        raise ValueError(f"{longest} tokens of prompt and draws; allowed: up to {description.max_positions}")
    pages = count * -(-longest // description.page_size)
    if pages > description.pages or count > description.cross_slots:
        raise ValueError(
            f"{count} sequences at once need {pages} pages and {count} cross slots; the model has {description.pages} "
            f"and {description.cross_slots}: give it more, or give fewer payloads or shorter prompts"
        )
