"""The kit for schedulers, applied to Triolet's own engine. `JudgedWorker` reports to a `StepJudge` when a step is
dispatched, and when a step, an encoding or a free has run. The judge keeps the kit's device of fingerprints beside the
simulated device. It notices more than the simulated one: pages that are given to another sequence while a step in
flight uses them, and the sequence that has spoiled a page.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

from attrs import define, field

from triolet.actors.worker import Call, Job
from triolet.core.config import EngineConfig
from triolet.core.errors import InvariantViolation
from triolet.core.plan import Chunk, SampledToken, SequenceStart, StepPlan, StepResult
from triolet.core.request import EncoderItem
from triolet_kit import schedulers as kit
from triolet_kit.findings import Promise
from triolet_kit.paged_device import BALANCE, PagedDevice
from triolet_kit.scheduler_play import FREE_FOLLOWS, TERMINAL
from triolet_kit.scheduler_values import describe_step

from .sim import SimWorker
from .sim_model import SimModel

_LOSES_ALL = {Job.RESET, Job.SLEEP, Job.CLOSE}


class _Device(PagedDevice):
    """The kit's device, which reports a broken promise by Triolet's own exception."""

    told: list[str]

    def fail(self, promise: Promise, what: str, kind: str = "") -> NoReturn:  # noqa: ARG002
        raise InvariantViolation(promise.name, what, tuple(self.told[-8:]))


@define(eq=False)
class StepJudge:
    """A judge of the engine's steps. ``violation`` is the first broken promise, or an error of the judge itself;
    nothing is judged after it."""

    model: SimModel
    config: EngineConfig
    violation: Exception | None = field(default=None, init=False)
    steps: int = field(default=0, init=False)  # the steps that were judged
    _device: _Device = field(init=False)
    _flights: dict[int, dict[int, int]] = field(factory=dict, init=False)  # for each step, who uses each page
    _starts: dict[int, SequenceStart] = field(factory=dict, init=False)
    _salts: dict[str, int] = field(factory=dict, init=False)  # added to each sequence's tokens, by its cross slot
    _slots: dict[int, str] = field(factory=dict, init=False)
    _told: list[str] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Forgets everything, since the device has lost all that it held."""
        self._device = _Device(self.model.page_size, self.config.encoder_cache_bytes)
        self._device.told = self._told
        self._slots.clear()
        self._starts.clear()
        self._salts.clear()

    # -- what the worker tells ---------------------------------------------------------------------------------------

    def dispatched(self, plan: StepPlan) -> None:
        """Judges a step that was sent to the runner."""
        if self.violation is None:
            self._keep(self._judge_plan, plan)
        self._flights[plan.step_id] = {page: part.sequence_id for part in plan.chunks for page in part.page_table}

    def ended(self, job: Job, argument: Any, result: object) -> None:
        """Judges a call that the device has done. ``result`` is the error if the call has failed."""
        if isinstance(argument, StepPlan):
            del self._flights[argument.step_id]
        if self.violation is None:
            self._keep(self._judge_call, job, argument, result)

    def _keep(self, judge: Any, *arguments: Any) -> None:
        try:
            judge(*arguments)
        except Exception as violation:  # noqa: BLE001  (raised by `simulate`: on the worker it would be the device's fault)
            self.violation = violation

    def _judge_call(self, job: Job, argument: Any, result: object) -> None:
        failed = isinstance(result, BaseException)
        if job in _LOSES_ALL:
            self._forget()
        elif isinstance(argument, StepPlan):
            self._step_ended(argument, result)
        elif job is Job.ENCODE and not failed:
            self._encoded(argument)
        elif job is Job.FREE and not failed:
            for key in argument:
                self._device.free(key)

    def _encoded(self, jobs: Sequence[EncoderItem]) -> None:
        for job in jobs:
            self._device.encode(job.key, job.size)

    # -- a plan ------------------------------------------------------------------------------------------------------

    def _judge_plan(self, plan: StepPlan) -> None:
        chunks = [_told(part) for part in plan.chunks]
        self._told.append(f"step {plan.step_id} is planned: {describe_step(kit.Step(chunks=chunks), {})}")
        places, most = self.config.max_running, self.config.max_step_tokens
        if len(plan.chunks) > places:
            self._device.fail(BALANCE, f"step {plan.step_id} runs {len(plan.chunks)} sequences; places: {places}")
        if plan.tokens > most and len(plan.chunks) > 1:  # a chunk that cannot be divided runs alone
            self._device.fail(BALANCE, f"step {plan.step_id} feeds {plan.tokens} tokens; allowed: {most}")
        using = {page: sequence for flight in self._flights.values() for page, sequence in flight.items()}
        prompts = {start.sequence_id: start.prompt_length for start in (*self._starts.values(), *plan.started)}
        for part in plan.chunks:
            first = prompts.get(part.sequence_id, 0) if part.beams > 1 else part.start
            for page in part.page_table[first // self.model.page_size :]:
                if using.get(page, part.sequence_id) != part.sequence_id:
                    what = f"gives page {page} to sequence {part.sequence_id}, but a step in flight"
                    self._device.fail(FREE_FOLLOWS, f"step {plan.step_id} {what} uses it for {using[page]}")

    # -- a step that has run -----------------------------------------------------------------------------------------

    def _step_ended(self, plan: StepPlan, result: object) -> None:
        """Judges a step after the device has run it. A step that was not run is not judged, nor one that failed for
        another reason than a misuse: their sequences start anew under other ids.
        """
        if not isinstance(result, StepResult | AssertionError):
            return
        for sequence_id in plan.ended:
            self._starts.pop(sequence_id, None)
            self._device.records.pop(str(sequence_id), None)
            self._salts.pop(str(sequence_id), None)
        self._starts.update({start.sequence_id: start for start in plan.started})
        self._ran(plan)
        if isinstance(result, StepResult):
            for part, sampled in zip(plan.chunks, result.sampled, strict=True):
                self._sampled(part, sampled)

    def _ran(self, plan: StepPlan) -> None:
        self.steps += 1
        self._told.append(f"step {plan.step_id} runs")
        self._slots.update({write.slot: write.key for write in plan.cross_writes})
        self._device.steps += 1
        parts = [part for part in plan.chunks if not self._is_search(part)]
        if self.model.whole_prompts:  # such a model has no pages
            return
        for part in parts:
            self._record(part)
            self._device.write(_told(part))
        for part in plan.chunks:
            self._smear(part)
        for part in parts:
            self._device.read_items(_told(part))
            self._device.read_pages(_told(part))

    def _is_search(self, part: Chunk) -> bool:
        """Returns whether the chunk feeds the beams of a search. Beams share pages in another way."""
        start = self._start(part)
        return start.sampling.beam_size > 1 and not start.reads_only and part.start >= start.prompt_length

    def _start(self, part: Chunk) -> SequenceStart:
        if part.sequence_id not in self._starts:
            self._device.fail(TERMINAL, f"sequence {part.sequence_id} is fed, and was not started, or has ended")
        return self._starts[part.sequence_id]

    def _record(self, part: Chunk) -> None:
        name = str(part.sequence_id)
        if name in self._device.records:
            return
        start = self._start(part)
        salt = 0 if part.cross_slot is None else 64 * zlib.crc32(self._slots[part.cross_slot].encode())
        items = [
            kit.Item(placeholder.key, 0, first, stop - first)
            for placeholder in start.placeholders
            for first, stop in placeholder.spans
        ]
        tokens = tuple(salt + token for token in start.token_ids)
        self._device.add(kit.NewRequest(id=name, tokens=tokens, max_tokens=1, items=tuple(items)))
        self._salts[name] = salt

    def _smear(self, part: Chunk) -> None:
        """Marks the positions that draft tokens and beams write as unknown, since they belong to no sequence's
        prefix.
        """
        size, stop = self.model.page_size, part.start + part.length
        if self._is_search(part):
            for page in part.page_table[self._start(part).prompt_length // size :]:
                self._device.pages[page] = [None] * size
        for position in range(stop, stop + part.draft_tokens):
            self._device.pages.setdefault(part.page_table[position // size], [None] * size)[position % size] = None

    def _sampled(self, part: Chunk, sampled: SampledToken) -> None:
        if self._is_search(part) or sampled.token_id is None:
            return
        record, stop = self._device.records[str(part.sequence_id)], part.start + part.length
        salt = self._salts[str(part.sequence_id)]
        record.tokens += [salt + token.token_id for token in (sampled, *sampled.accepted) if token.token_id is not None]
        if sampled.accepted:
            fed = kit.Chunk(str(part.sequence_id), stop, len(sampled.accepted), part.page_table, samples=False)
            self._device.write(fed)
            self._device.read_pages(fed)


def _told(part: Chunk) -> kit.Chunk:
    return kit.Chunk(str(part.sequence_id), part.start, part.length, part.page_table, part.samples)


@define(eq=False)
class JudgedWorker(SimWorker):
    """A worker that reports each call to ``judge``."""

    judge: StepJudge = field(kw_only=True)

    def submit(self, job: Job, call: Call, *args: Any) -> None:
        """Implements `Worker.submit`."""
        if job is Job.STEP:
            self.judge.dispatched(args[0])
        super().submit(job, self._told(job, call), *args)

    def _told(self, job: Job, call: Call) -> Call:
        def called(*args: Any) -> object:
            try:
                result = call(*args)
            except BaseException as error:
                self.judge.ended(job, args[0] if args else None, error)
                raise
            self.judge.ended(job, args[0] if args else None, result)
            return result

        return called
