"""The player of an adapter. It drives an `Executor` as the engine does, and keeps every sequence's sampled tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import define, field, frozen

from triolet.core.executor import Executor
from triolet.core.model import ModelDescription
from triolet.core.plan import Chunk, CrossWrite, SampledToken, SequenceStart, StepPlan
from triolet.core.request import EncoderItem, LogitRules, Probe, SamplingParams


@frozen
class Item:
    """A sequence to play: the key and payload of its encoder item, its prompt, and its probe if it has one."""

    key: str
    payload: Any = field(repr=False)
    prompt: tuple[int, ...]
    probe: Probe | None = None


@define
class PlayedSequence:
    item: Item
    id: int
    slot: int
    pages: tuple[int, ...]
    sampled: list[SampledToken] = field(factory=list)
    fed: int = 0
    probed: list[tuple[Chunk, tuple[float, ...]]] = field(factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the sampled tokens."""
        return (*self.item.prompt, *(one.token_id for one in self.sampled if one.token_id is not None))

    @property
    def known(self) -> int:
        return len(self.item.prompt) + len(self.sampled)


@define(eq=False)
class Player:
    """A player of the planner's part for one open adapter."""

    adapter: Executor
    description: ModelDescription
    max_tokens: int
    _ids: Iterator[int] = field(factory=itertools.count)

    def encode(self, items: Sequence[Item]) -> None:
        """Encodes ``items`` in one batch."""
        size, embeddings = self.description.encoder_bytes, self.description.encoder_embeddings
        self.adapter.encode(
            tuple(EncoderItem(key=item.key, payload=item.payload, embeddings=embeddings, size=size) for item in items)
        )

    def free(self, items: Sequence[Item]) -> None:
        self.adapter.free(tuple(item.key for item in items))

    def owned(self) -> dict[str, int]:
        """Returns the bytes by owner, without owners that hold none."""
        return {owner: count for owner, count in self.adapter.memory().by_owner.items() if count}

    def held(self) -> int:
        """Returns the bytes of all owners together."""
        return self.adapter.memory().total

    def decode(self, items: Sequence[Item], *, chunk: int | None = None) -> list[tuple[SampledToken, ...]]:
        """Returns the sampled tokens of each item. All items share the steps; each feeds at most ``chunk`` tokens in a
        step."""
        return [tuple(sequence.sampled) for sequence in self.run(items, chunk=chunk)]

    def run(self, items: Sequence[Item], *, chunk: int | None = None) -> list[PlayedSequence]:
        """Starts a sequence for each item, and runs all sequences to their end."""
        running = self.begin(items)
        self.step(running, chunk, started=running, written=running)
        self.finish(running, chunk)
        return running

    def finish(self, running: list[PlayedSequence], chunk: int | None = None) -> None:
        """Runs steps until all sequences have sampled their tokens, then ends them."""
        while any(len(sequence.sampled) < self.max_tokens for sequence in running):
            self.step(running, chunk)
        self.end(running)

    def end(self, running: list[PlayedSequence]) -> None:
        self.adapter.step(self._plan(ended=tuple(sequence.id for sequence in running)))

    def begin(self, items: Sequence[Item]) -> list[PlayedSequence]:
        """Makes a sequence for each item. Pages are dealt one by one from the last page down, so that no sequence has
        ascending neighbours."""
        each = max(-(-(len(item.prompt) + self.max_tokens) // self.description.page_size) for item in items)
        pages = range(self.description.pages - 1, -1, -1)
        count = len(items)
        return [
            PlayedSequence(
                item, next(self._ids), slot=count - 1 - number, pages=tuple(pages[number : each * count : count])
            )
            for number, item in enumerate(items)
        ]

    def step(
        self,
        running: list[PlayedSequence],
        chunk: int | None = None,
        *,
        started: Sequence[PlayedSequence] = (),
        written: Sequence[PlayedSequence] = (),
    ) -> None:
        """Runs one step of all sequences that still need tokens. It writes the cross slots of the sequences in
        ``written``."""
        active = [sequence for sequence in running if len(sequence.sampled) < self.max_tokens]
        chunks = tuple(self._slice(sequence, chunk) for sequence in active)
        plan = self._plan(
            started=tuple(self._start(sequence) for sequence in started),
            cross_writes=tuple(CrossWrite(key=one.item.key, slot=one.slot) for one in written),
            chunks=chunks,
        )
        for sequence, part, sampled in zip(active, chunks, self.adapter.step(plan).sampled, strict=True):
            sequence.fed += part.length
            if part.samples:
                sequence.sampled.append(sampled)
            if sampled.probe is not None:
                sequence.probed.append((part, sampled.probe))

    def _slice(self, sequence: PlayedSequence, chunk: int | None) -> Chunk:
        left = sequence.known - sequence.fed
        length = left if chunk is None else min(chunk, left)
        end = sequence.fed + length
        return Chunk(
            sequence_id=sequence.id,
            start=sequence.fed,
            length=length,
            page_table=sequence.pages[: -(-end // self.description.page_size)],
            cross_slot=sequence.slot,
            samples=end == sequence.known,
        )

    @staticmethod
    def _start(sequence: PlayedSequence) -> SequenceStart:
        return SequenceStart(
            sequence_id=sequence.id,
            token_ids=sequence.tokens,
            prompt_length=len(sequence.item.prompt),
            sampling=SamplingParams(),
            rules=LogitRules(),
            probe=sequence.item.probe,
        )

    def _plan(
        self,
        *,
        started: tuple[SequenceStart, ...] = (),
        ended: tuple[int, ...] = (),
        cross_writes: tuple[CrossWrite, ...] = (),
        chunks: tuple[Chunk, ...] = (),
    ) -> StepPlan:
        number = next(self._ids)  # one counter for sequences and steps, so that no number comes twice
        return StepPlan(step_id=number, epoch=0, started=started, ended=ended, cross_writes=cross_writes, chunks=chunks)


MakeAdapter = Callable[[], Executor]
