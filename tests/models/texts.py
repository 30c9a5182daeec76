"""A driver that plays the planner's part for models without cross-attention, and transformers' answers beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from triolet.core.model import ModelDescription
from triolet.core.plan import Chunk, SampledToken, SequenceStart, StepPlan
from triolet.core.request import LogitRules, Placeholder, Pooling, Probe, SamplingParams
from triolet.models.executor import TorchExecutor

WHOLE = 1 << 30


@frozen(kw_only=True)
class TextJob:
    """One sequence to play."""

    prompt: tuple[int, ...]
    max_tokens: int = 16
    sampling: SamplingParams = field(factory=SamplingParams)
    probe: Probe | None = None
    pooling: Pooling | None = None
    placeholders: tuple[Placeholder, ...] = ()
    joins: int = 0  # the step it starts with
    chunk: int = WHOLE  # most tokens of one chunk
    preempted_at: int = 0  # once it has so many tokens it is forgotten and starts again
    shared: int = 0  # pages of job 0 (its first ones) that hold its beginning already


def start_of(sequence: int, tokens: Sequence[int], **changes: Any) -> SequenceStart:
    """A sequence that begins with ``tokens``, its prompt unless told otherwise."""
    plain: dict[str, Any] = {"sampling": SamplingParams(), "rules": LogitRules(), "probe": None}
    given = {"prompt_length": len(tokens), **plain, **changes}
    return SequenceStart(sequence_id=sequence, token_ids=tuple(tokens), **given)


def first_step(prompts: Sequence[Sequence[int]], *, pages: int = 20, draft_tokens: int = 0) -> StepPlan:
    """A step that reads ``prompts`` whole, each in so many pages of its own, and samples."""
    chunks = [
        Chunk(
            sequence_id=index,
            start=0,
            length=len(prompt),
            page_table=tuple(range(pages * index, pages * (index + 1))),
            cross_slot=None,
            samples=True,
            draft_tokens=draft_tokens,
        )
        for index, prompt in enumerate(prompts)
    ]
    started = tuple(start_of(index, prompt) for index, prompt in enumerate(prompts))
    return StepPlan(step_id=0, epoch=0, started=started, ended=(), cross_writes=(), chunks=tuple(chunks))


@define
class Result:
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    probes: list[tuple[float, ...]] = field(factory=list)
    vector: tuple[float, ...] | None = None


@define
class _Running:
    job: TextJob
    result: Result
    sequence: int = 0
    pages: list[int] = field(factory=list)
    owned: list[int] = field(factory=list)
    fed: int = 0
    started: bool = False
    preempted: bool = False
    done: bool = False

    @property
    def known(self) -> int:
        return len(self.job.prompt) + len(self.result.tokens)


@define
class TextDriver:
    """Hands out pages in a shuffled order, joins, preempts and retires sequences. No page returns before all jobs have
    ended, so job 0's pages can be shared."""

    executor: TorchExecutor
    description: ModelDescription
    random: random.Random = field(factory=lambda: random.Random(0))
    _sequences: int = 0
    _steps: int = 0

    def run(self, *jobs: TextJob) -> list[Result]:
        pages = list(range(self.description.pages))
        self.random.shuffle(pages)
        every = [_Running(job, Result()) for job in jobs]
        ended: list[int] = []
        for step in range(10_000):
            active = [one for one in every if not one.done and one.job.joins <= step]
            if not active and all(one.done for one in every):
                break
            self.random.shuffle(active)
            started = [self._start(one, every[0]) for one in active if not one.started]
            chunks = tuple(self._slice(one, pages) for one in active)
            plan = StepPlan(
                step_id=self._steps,
                epoch=0,
                started=tuple(started),
                ended=tuple(ended),
                cross_writes=(),
                chunks=chunks,
            )
            self._steps += 1
            ended.clear()
            for one, part, sampled in zip(active, chunks, self.executor.step(plan).sampled, strict=True):
                self._commit(one, part, sampled, ended)
        self.executor.step(StepPlan(step_id=-1, epoch=0, started=(), ended=tuple(ended), cross_writes=(), chunks=()))
        assert not self.executor._records
        return [one.result for one in every]

    def _start(self, one: _Running, first: _Running) -> SequenceStart:
        self._sequences += 1
        one.sequence, one.started, one.fed, one.owned = self._sequences, True, 0, []
        one.pages = []
        if one.job.shared:
            one.pages = first.pages[: one.job.shared]
            one.fed = one.job.shared * self.description.page_size
            assert first.fed >= one.fed, "the pages to share are not written yet"
        job = one.job
        return start_of(
            one.sequence,
            (*job.prompt, *one.result.tokens),
            prompt_length=len(job.prompt),
            sampling=job.sampling,
            probe=job.probe,
            placeholders=job.placeholders,
            pooling=job.pooling,
        )

    def _slice(self, one: _Running, pages: list[int]) -> Chunk:
        length = min(one.job.chunk, one.known - one.fed)
        if not self.description.whole_prompts:
            while len(one.pages) * self.description.page_size < one.fed + length:
                one.pages.append(pages.pop())
        return Chunk(
            sequence_id=one.sequence,
            start=one.fed,
            length=length,
            page_table=tuple(one.pages),
            cross_slot=None,
            samples=one.fed + length == one.known,
        )

    def _commit(self, one: _Running, part: Chunk, sampled: SampledToken, ended: list[int]) -> None:
        one.fed += part.length
        result, job = one.result, one.job
        if sampled.probe is not None:
            result.probes.append(sampled.probe)
        if job.pooling is not None:
            assert sampled.token_id is None
            assert (sampled.vector is not None) is part.samples
            result.vector, one.done = sampled.vector, part.samples
        else:
            assert (sampled.token_id is not None) is part.samples
            if sampled.token_id is not None:
                result.tokens.append(sampled.token_id)
                result.logprobs.append(sampled.logprob)
                one.done = len(result.tokens) == job.max_tokens or sampled.token_id in self.description.eos_token_ids
        if one.done:
            ended.append(one.sequence)
        elif job.preempted_at and len(result.tokens) >= job.preempted_at and not one.preempted:
            ended.append(one.sequence)
            one.started, one.preempted = False, True


def generate(model: Any, prompt: Sequence[int], max_tokens: int, **inputs: Any) -> list[int]:
    """What transformers draws after ``prompt``, greedily, alone."""
    tokens = torch.tensor([list(prompt)])
    inputs = {"attention_mask": torch.ones_like(tokens), **inputs}
    output = model.generate(tokens, max_new_tokens=max_tokens, do_sample=False, **inputs)
    sampled: list[int] = output[0, len(prompt) :].tolist()
    return sampled


def noise(length: int, seed: int, vocabulary: int = 256) -> tuple[int, ...]:
    """A prompt of plain tokens."""
    source = random.Random(seed)
    return tuple(source.randrange(vocabulary) for _ in range(length))
