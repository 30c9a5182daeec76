"""A driver that plays the planner's part for any model, and transformers' answers beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen

from triolet.core.config import EngineConfig
from triolet.core.model import ModelDescription
from triolet.core.plan import Chunk, CrossWrite, SampledToken, SequenceStart, StepPlan
from triolet.core.request import EncoderItem, LogitRules, Placeholder, Pooling, Probe, SamplingParams
from triolet.models.executor import TorchExecutor
from triolet.models.sampling.logits import choose
from triolet.models.sampling.rules import ConstantBans, SamplerInput, draw_of, token_of

WHOLE = 1 << 30
SMALL = EngineConfig(dtype="float32", device="cpu", self_kv_bytes=1 << 20, cross_kv_bytes=1 << 22)


@frozen(kw_only=True)
class Job:
    """One sequence to play."""

    prompt: tuple[int, ...]
    key: str = ""  # of the encoder output that an encoder-decoder reads
    max_tokens: int = 16
    sampling: SamplingParams = field(factory=SamplingParams)
    rules: LogitRules = field(factory=LogitRules)
    probe: Probe | None = None
    pooling: Pooling | None = None
    placeholders: tuple[Placeholder, ...] = ()
    committed: tuple[int, ...] = ()  # replayed
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
class Outcome:
    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    probes: list[tuple[float, ...]] = field(factory=list)
    vector: tuple[float, ...] | None = None


@define
class _Running:
    job: Job
    outcome: Outcome
    sequence: int = 0
    pages: list[int] = field(factory=list)
    slot: int | None = None
    fed: int = 0
    started: bool = False
    preempted: bool = False
    done: bool = False

    @property
    def known(self) -> int:
        return len(self.job.prompt) + len(self.outcome.tokens)


def encode_job(description: ModelDescription, key: str, payload: Any) -> EncoderItem:
    """The job of a whole window."""
    embeddings, size = description.encoder_embeddings, description.encoder_bytes
    return EncoderItem(key=key, payload=payload, embeddings=embeddings, size=size)


@define
class Driver:
    """Plays the planner: hands out pages (in a shuffled order) and slots, joins, preempts and retires sequences. Pages
    return when a sequence ends, unless job 0's are shared."""

    executor: TorchExecutor
    description: ModelDescription
    random: random.Random = field(factory=lambda: random.Random(0))
    share_slots: bool = False
    _sequences: int = 0
    _steps: int = 0

    def encode(self, **payloads: np.ndarray[Any, Any]) -> None:
        self.executor.encode(tuple(encode_job(self.description, key, data) for key, data in payloads.items()))

    def run(self, *jobs: Job) -> list[Outcome]:
        pages, slots = list(range(self.description.pages)), list(range(self.description.cross_slots))
        self.random.shuffle(pages)
        every = [_Running(job, Outcome(list(job.committed))) for job in jobs]
        ended: list[int] = []
        for step in range(10_000):
            active = [one for one in every if not one.done and one.job.joins <= step]
            if not active and all(one.done for one in every):
                break
            self.random.shuffle(active)
            writes: list[CrossWrite] = []
            started = [self._start(one, every, slots, writes) for one in active if not one.started]
            chunks = tuple(self._slice(one, pages) for one in active)
            plan = StepPlan(
                step_id=self._steps,
                epoch=0,
                started=tuple(started),
                ended=tuple(ended),
                cross_writes=tuple(writes),
                chunks=chunks,
            )
            self._steps += 1
            ended.clear()
            result = self.executor.step(plan)
            assert result.step_id == plan.step_id
            for one, part, sampled in zip(active, chunks, result.sampled, strict=True):
                self._commit(one, part, sampled)
            for one in active:
                if one.done or not one.started:
                    ended.append(one.sequence)
                    pages += () if any(job.shared for job in jobs) else one.pages
                    if one.slot is not None and not any(one.slot == other.slot for other in every if other is not one):
                        slots.append(one.slot)
                    one.slot = None
        self.executor.step(StepPlan(step_id=-1, epoch=0, started=(), ended=tuple(ended), cross_writes=(), chunks=()))
        assert not self.executor._records
        return [one.outcome for one in every]

    def _start(self, one: _Running, every: list[_Running], slots: list[int], writes: list[CrossWrite]) -> SequenceStart:
        self._sequences += 1
        one.sequence, one.started, one.fed, one.pages = self._sequences, True, 0, []
        job = one.job
        if job.shared:
            one.pages, one.fed = every[0].pages[: job.shared], job.shared * self.description.page_size
            assert every[0].fed >= one.fed, "the pages to share are not written yet"
        if self.description.cross_slots:
            read = {other.job.key: other.slot for other in every if other.slot is not None}
            one.slot = read.get(job.key) if self.share_slots else None
            if one.slot is None:
                one.slot = slots.pop(0)
                writes.append(CrossWrite(key=job.key, slot=one.slot))
        return start_of(
            one.sequence,
            (*job.prompt, *one.outcome.tokens),
            prompt_length=len(job.prompt),
            sampling=job.sampling,
            rules=job.rules,
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
            cross_slot=one.slot,
            samples=one.fed + length == one.known,
            states=(one.sequence % self.description.states,) if self.description.states else (),
        )

    def _commit(self, one: _Running, part: Chunk, sampled: SampledToken) -> None:
        one.fed += part.length
        outcome, job = one.outcome, one.job
        if sampled.probe is not None:
            outcome.probes.append(sampled.probe)
        if job.pooling is not None:
            assert sampled.token_id is None
            assert (sampled.vector is not None) is part.samples
            outcome.vector, one.done = sampled.vector, part.samples
            return
        assert (sampled.token_id is not None) is part.samples
        if sampled.token_id is not None:
            outcome.tokens.append(sampled.token_id)
            outcome.logprobs.append(sampled.logprob)
            one.done = len(outcome.tokens) >= job.max_tokens or sampled.token_id in self.description.eos_token_ids
        if job.preempted_at and len(outcome.tokens) >= job.preempted_at and not (one.done or one.preempted):
            one.started, one.preempted = False, True


def generate(model: Any, prompt: Sequence[int], max_tokens: int, **inputs: Any) -> list[int]:
    """What transformers draws after ``prompt``, greedily, alone."""
    tokens = torch.tensor([list(prompt)])
    inputs = {"attention_mask": torch.ones_like(tokens), **inputs}
    output = model.generate(tokens, max_new_tokens=max_tokens, do_sample=False, **inputs)
    sampled: list[int] = output[0, len(prompt) :].tolist()
    return sampled


def sample_tokens(
    logits: torch.Tensor, inputs: Sequence[SamplerInput], eos_token_ids: tuple[int, ...]
) -> list[SampledToken]:
    """What the sampler takes of each row of ``logits``, by torch."""
    bans = ConstantBans(logits.shape[-1])
    chosen = choose(logits, [draw_of(one, bans, eos_token_ids) for one in inputs])
    return [token_of(one, found, eos_token_ids) for one, found in zip(inputs, chosen, strict=True)]


def noise(length: int, seed: int, vocabulary: int = 256) -> tuple[int, ...]:
    """A prompt of plain tokens."""
    source = random.Random(seed)
    return tuple(source.randrange(vocabulary) for _ in range(length))
