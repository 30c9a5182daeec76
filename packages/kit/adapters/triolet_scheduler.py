"""Triolet's planner and ledger as the subject of `examine_scheduler`. The adapter plays the actors' part."""

from __future__ import annotations

from collections.abc import Mapping

from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_values import Decisions
from triolet.core.plan import Chunk as Part
from triolet.core.plan import SampledToken, StepPlan, StepResult
from triolet.core.planning.actions import Acquire, Finish, Release
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import EncoderItem, Request
from triolet_kit import Chunk, Limits, NewRequest, Step
from triolet_kit.paged_device import EOS


class TrioletScheduler:
    """An adapter of `Planner` and `EncoderLedger`. When a step has run, it reports the step's frees and encodings to
    them.
    """

    def __init__(self, limits: Limits) -> None:
        self.planner, self.ledger = Planner(_limits(limits)), EncoderLedger(limits.room)
        self.frees = list[str]()

    def add_request(self, request: NewRequest) -> None:
        self.planner.submit(_request(request))

    def schedule(self) -> Step | None:
        self.act()
        encodes, plan = self.ledger.take_encode_batch(), self.planner.next_step()
        if not (plan or encodes or self.frees):
            return None
        frees, self.frees = self.frees, []
        return Step(chunks=self.chunks(plan), encodes=[job.key for job in encodes], frees=frees, own=plan)

    def update(self, step: Step, tokens: Mapping[str, int]) -> list[str]:
        self.obey(self.ledger.freed(step.frees))
        self.obey(self.ledger.encoded(step.encodes, now=0.0))
        if step.own is not None:
            sampled = [SampledToken(token_id=tokens.get(chunk.request)) for chunk in step.chunks]
            self.planner.step_done(StepResult(step_id=step.own.step_id, sampled=tuple(sampled)))
        return self.act()

    def finish(self, request_id: str) -> None:
        self.planner.abort(request_id)

    # the work of the actors between the planner and the ledger

    def act(self) -> list[str]:
        ended = []
        while actions := self.planner.take_actions():
            for action in actions:
                match action:
                    case Acquire(holder, item):
                        self.obey(self.ledger.acquire(holder, item))
                    case Release(holder, key):
                        self.obey(self.ledger.release(holder, key, now=0.0))
                    case Finish(request_id):
                        ended.append(request_id)
        return ended

    def obey(self, decisions: Decisions) -> None:
        self.frees += decisions.free
        for hold in decisions.ready:
            self.planner.encoder_ready(hold.holder)

    # translations of the kit's values

    def chunks(self, plan: StepPlan | None) -> list[Chunk]:
        if plan is None:
            return []
        sources = {start.sequence_id: start.state for start in plan.started}
        parts = zip(self.planner.in_flight(plan.step_id).request_ids, plan.chunks, strict=True)
        return [_chunk(name, part, sources.get(part.sequence_id)) for name, part in parts]


def _chunk(name: str, part: Part, source: int | None) -> Chunk:
    keeps = [(keep.position, keep.state) for keep in part.keeps]
    state = part.states[0] if part.states else None
    return Chunk(name, part.start, part.length, part.page_table, part.samples, state, source, keeps)


def _limits(limits: Limits) -> PlannerLimits:
    return PlannerLimits(
        pages=limits.pages,
        page_size=limits.page_size,
        max_step_tokens=limits.max_step_tokens,
        max_running=limits.max_running,
        steps_in_flight=limits.steps_in_flight,
        encoder_cache_bytes=limits.room,
        cross_slots=0,
        states=limits.states,
        eos_token_ids=frozenset({EOS}),
        prefix_caching=True,
    )


def _request(new: NewRequest) -> Request:
    items = tuple(
        EncoderItem(key=i.key, payload=i, embeddings=i.length, size=i.size, spans=((i.start, i.start + i.length),))
        for i in new.items
    )
    return Request(
        id=new.id, prompt_token_ids=new.tokens, items=items, max_tokens=new.max_tokens, priority=new.priority
    )
