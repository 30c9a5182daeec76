"""A planner over a real executor, without actors, and transformers' own beam search beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from transformers import GenerationConfig
from transformers.generation import GenerationMixin, LogitsProcessorList

from triolet.core.config import EngineConfig
from triolet.core.plan import Hypothesis, StepPlan
from triolet.core.planning.actions import Acquire, Commit, Fail, Finish
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import EncoderItem, FinishReason, Request
from triolet.models.executor import TorchExecutor


@define
class Answer:
    """What a request got."""

    tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(factory=list)
    hypotheses: tuple[Hypothesis, ...] = ()
    reason: FinishReason | None = None
    error: Exception | None = None


@define
class Pump:
    """Plays the actors: up to ``steps_in_flight`` steps are planned before the first of them runs."""

    executor: TorchExecutor
    planner: Planner
    encodes: int = 0  # launches of the encoder
    answers: dict[str, Answer] = field(factory=dict)
    _flights: deque[StepPlan] = field(factory=deque)

    @classmethod
    def of(cls, executor: TorchExecutor, *, pages: int = 0, headroom: int = 4, **limits: Any) -> Pump:
        """Opens ``executor``. The planner may use the first ``pages`` of its pages alone."""
        settings = {"max_running": 8, "max_step_tokens": 64, "steps_in_flight": 2, **limits}
        found = evolve(PlannerLimits.of(executor.open(), EngineConfig(prefix_caching=False)), **settings)
        return cls(executor, Planner(evolve(found, pages=pages or found.pages, headroom=headroom)))

    def run(self, *requests: Request) -> list[Answer]:
        """Runs all of them to their ends."""
        for request in requests:
            self.answers[request.id] = Answer()
            self.planner.submit(request)
        self._obey()
        while not self.planner.idle:
            while (plan := self.planner.next_step()) is not None:
                self._flights.append(plan)
                self._obey()
            self.planner.step_done(self.executor.step(self._flights.popleft()))
            self._obey()
        return [self.answers[request.id] for request in requests]

    def _obey(self) -> None:
        while actions := self.planner.take_actions():
            for action in actions:
                match action:
                    case Acquire(holder, item):
                        self._encode(item)
                        self.planner.encoder_ready(holder)
                    case Commit(request_id, sampled):
                        for one in sampled:
                            self._note(self.answers[request_id], one)
                    case Finish(request_id, reason):
                        self.answers[request_id].reason = reason
                    case Fail(request_id, error):
                        self.answers[request_id].error = error

    def _encode(self, job: EncoderItem) -> None:
        if job.key not in self.executor._opened().outputs:
            self.encodes += 1
            self.executor.encode((job,))

    def _note(self, answer: Answer, one: Any) -> None:
        answer.hypotheses += one.hypotheses
        if one.token_id is not None:
            answer.tokens.append(one.token_id)
            answer.logprobs.append(one.logprob)
            answer.tops.append(one.top)


@frozen
class Expected:
    """What transformers finds: hypotheses without padding, the best first, and their scores."""

    token_ids: list[tuple[int, ...]]
    scores: list[float]


def search(
    model: Any, prompt: Sequence[int], request: Request, *, eos: int, processors: Sequence[Any] = (), **inputs: Any
) -> Expected:
    """transformers' own beam search for what ``request`` asks."""
    sampling, rules = request.sampling, request.rules
    patience = {None: False, 1.0: True}[sampling.patience]
    ends = [eos, *sampling.stop_token_ids]
    config = GenerationConfig(
        num_beams=sampling.beam_size,
        num_return_sequences=sampling.n,
        length_penalty=sampling.length_penalty,
        early_stopping=patience,
        eos_token_id=ends,
        pad_token_id=eos,
        max_length=len(prompt) + request.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        suppress_tokens=list(rules.suppress) or None,
        begin_suppress_tokens=list(rules.begin_suppress) or None,
        repetition_penalty=sampling.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in sampling.logit_bias] or None,
        return_dict_in_generate=True,
        output_scores=True,
        do_sample=False,
        decoder_start_token_id=prompt[0],
    )
    with torch.no_grad():
        found = GenerationMixin.generate(
            model, generation_config=config, logits_processor=LogitsProcessorList(processors), **inputs
        )
    token_ids = []
    for row, beams in zip(found.sequences.tolist(), found.beam_indices.tolist(), strict=True):
        length = sum(beam >= 0 for beam in beams)
        token_ids.append(tuple(row[len(prompt) : len(prompt) + length]))
    return Expected(token_ids, found.sequences_scores.tolist())
