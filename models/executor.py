"""`TorchExecutor`: the executor that runs models on torch. Its owner calls it from one thread; nothing here is shared.

One step, in order::

    StepPlan -> forget `ended`, record `started` -> write cross KV -> feed the slices (network.py, causal.py)
             -> rules and draws (sampling.py) -> records grow -> StepResult

What is known of the architecture lies behind `Network`, and what is taken for it behind a blueprint (blueprint.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ..core.config import EngineConfig
from ..core.errors import (
    CheckpointError,
    DeviceLost,
    DeviceOutOfMemory,
    EncodeFailed,
    EngineError,
)
from ..core.frames import clear_frames
from ..core.model import ModelDescription
from ..core.plan import DeviceMemory, Drawn, EncodeJob, Slice, StepPlan, StepResult
from .blueprint import AnyBlueprint, AnyModel, Blueprint, TextBlueprint, draw, name_devices
from .checkpoint import WeightFiles
from .features import LogMel
from .kv import CrossKV, PagedKV
from .network import Feed, Network, Record
from .pipeline import StagedKV
from .resources import ReleaseReport, ResourceStack
from .sampling import Draw, RuleMasks, draw_tokens
from .structure import Grammars
from .transformer import ModuleFiles, TransformerModel
from .whisper import WhisperModel

_HOST = torch.device("cpu")
_Executor = TypeVar("_Executor")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _device_call(
    method: Callable[Concatenate[_Executor, _Arguments], _Result],
) -> Callable[Concatenate[_Executor, _Arguments], _Result]:
    """A call that works with tensors: in inference mode; and what it raises keeps none of them alive, however long
    somebody keeps the error."""

    @wraps(method)
    def call(self: _Executor, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        outer = sys.exception()
        try:
            with torch.inference_mode():
                return method(self, *args, **kwargs)
        except BaseException as error:
            clear_frames(error, outer=outer)
            del self, args, kwargs, outer  # this frame is in the traceback too, and still runs: nobody else clears it
            raise

    return call


@contextmanager
def _device_errors(what: str) -> Iterator[None]:
    """torch's errors of the device, as ours."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(f"{what} does not fit the device's memory: {error}") from error
    except torch.AcceleratorError as error:
        raise DeviceLost(
            f"the device broke down in {what}: {error}. Its context is lost for this process; start a new one"
        ) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # torch has no class of its own for it
            raise
        raise DeviceOutOfMemory(f"{what} does not fit the host's memory: {error}") from error


@contextmanager
def _still_the_same(folder: Path) -> Iterator[None]:
    """The checkpoint is read again: what was described must still be true."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} has changed since the executor was opened: {error}; put it back as it was, or "
            f"open another executor"
        ) from error


@define(eq=False)
class EncoderOutputs:
    """Encoder outputs by key, each [embeddings, width] in storage of its own: freeing one frees its bytes, whatever
    became of the others of its batch."""

    _outputs: dict[str, Tensor] = field(init=False, factory=dict, repr=False)

    def __contains__(self, key: object) -> bool:
        return key in self._outputs

    def add(self, outputs: dict[str, Tensor]) -> None:
        """Keeps ``outputs``."""
        self._outputs.update(outputs)

    def get(self, key: str) -> Tensor:
        """The output of ``key``, which must be resident."""
        assert key in self._outputs, f"encoder output {key!r} is read but not resident"
        return self._outputs[key]

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops ``keys``, all of which must be resident: all or none."""
        missing = [key for key in keys if key not in self._outputs]
        assert not missing, f"encoder outputs {missing} are freed but not resident"
        for key in keys:
            del self._outputs[key]

    def tensors(self) -> tuple[Tensor, ...]:
        """All outputs."""
        return tuple(self._outputs.values())

    def release(self) -> None:
        """Drops everything."""
        self._outputs.clear()


@frozen(kw_only=True, eq=False)
class _Open:
    """What an open executor works with. The executor and the resource stack hold it, nothing else.

    Whatever holds tensors here has an owner in the stack: `TorchExecutor._take` looks for what was forgotten.
    """

    device: torch.device
    eos_token_ids: tuple[int, ...]
    network: Network
    log_mel: LogMel | None
    model: WhisperModel | TransformerModel
    paged: PagedKV | StagedKV | None
    cross: CrossKV | None
    outputs: EncoderOutputs
    masks: RuleMasks
    grammars: Grammars


@define(eq=False)
class TorchExecutor:
    """Runs one checkpoint; implements `core.model.Executor`.

    Args:
        model: a checkpoint's folder or a hub id.
        config: the engine's settings; device, dtype, threads and the KV sizes matter here.

    When a step raises, the sequences of its slices and of its ``started`` are forgotten, and what it wrote to their
    pages and slots counts for nothing: the planner starts them again under new ids and writes the slots again. All
    other sequences go on undisturbed. For the same reason an id in ``ended`` may be unknown: there is nothing left to
    forget.

    It is closed (as made), open or asleep. ``_blueprint`` is there while it is not closed, ``_open`` while it is open;
    ``_parked`` holds what sleep keeps: ``_parked_model``, or nothing.
    """

    model: str | Path
    config: EngineConfig
    released: ReleaseReport = field(init=False, factory=ReleaseReport, repr=False)
    """What the last `sleep` or `close`, or failed `open` or `wake`, gave back, also where it raised: bytes by owner,
    before and after."""
    _stack: ResourceStack = field(init=False, factory=ResourceStack, repr=False)
    _parked: ResourceStack = field(init=False, factory=ResourceStack, repr=False)
    _parked_model: AnyModel | None = field(init=False, default=None, repr=False)
    _blueprint: Blueprint | TextBlueprint | None = field(init=False, default=None, repr=False)
    _open: _Open | None = field(init=False, default=None, repr=False)
    _records: dict[int, Record] = field(init=False, factory=dict, repr=False)
    _device: str = field(init=False, default="", repr=False)

    @_device_call
    def open(self) -> ModelDescription:
        """Loads the weights and takes all memory; gives everything back when it fails.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged.
            UnsupportedModel: of an architecture without an adapter.
            InvalidRequest: a device that is not there, or sizes too small for one sequence.
            DeviceOutOfMemory: the memory is not there.
        """
        assert self._blueprint is None, "the executor is open already"
        blueprint = draw(self.model, self.config)
        self._device = name_devices(blueprint)
        with self._all_or_nothing():
            fingerprint = self._take_and_load(blueprint)
            assert self._open is not None, "what was taken is open"
            blueprint.prove(self._open.network)
            blueprint = evolve(blueprint, fingerprint=fingerprint)
            description = blueprint.describe(str(self.model))
        self._blueprint = blueprint
        return description

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What is raised within finds everything given back that was taken within."""
        outer = sys.exception()
        try:
            with _device_errors("the model"):
                yield
        except BaseException as error:
            clear_frames(error, outer=outer)  # first: they hold what was on its way to an owner
            del outer
            try:
                self._release()
            except ExceptionGroup as failed:
                error.add_note(f"when it was given back: {failed!r}")
            raise

    def _take_and_load(self, blueprint: AnyBlueprint) -> str:
        """Takes everything, with weights from the checkpoint's files; returns their fingerprint."""
        weights: WeightFiles | ModuleFiles = blueprint.files()
        self._take(blueprint, partial(blueprint.load, weights))
        return weights.fingerprint

    def _take(self, blueprint: AnyBlueprint, load: Callable[[], AnyModel]) -> None:
        """Takes all that an open executor holds, each thing in the name of its owner."""
        checkpoint = blueprint.checkpoint
        own, vocabulary, device = self._stack.own, checkpoint.shape.vocabulary, blueprint.device
        self._stack.callback("records", self._records.clear)
        self._set_threads()
        grammars = Grammars(checkpoint.tokenizer, vocabulary, checkpoint.eos_token_ids)
        self._stack.callback("grammars", grammars.release)
        if device.type == "cuda":
            self._stack.callback("workspace", torch.cuda.empty_cache)
        parts = blueprint.take(own, load)
        answers_on = blueprint.devices[-1] if blueprint.devices else device
        outputs, masks = own("encoder_outputs", EncoderOutputs()), own("rule_masks", RuleMasks(vocabulary, answers_on))
        self._open = _Open(
            device=device,
            eos_token_ids=checkpoint.eos_token_ids,
            network=blueprint.hasten(parts.network, own),
            log_mel=parts.log_mel,
            model=parts.model,
            paged=parts.paged,
            cross=parts.cross,
            outputs=outputs,
            masks=masks,
            grammars=grammars,
        )
        forgotten = [tuple(tensor.shape) for tensor in self._stack.unowned(self._open)]
        assert not forgotten, f"tensors of shapes {forgotten} have no owner: whoever holds them is to be own()ed"

    def _set_threads(self) -> None:
        """The thread count is the process's: it is only touched when asked for, and restored."""
        if self.config.threads:
            self._stack.callback("threads", partial(torch.set_num_threads, torch.get_num_threads()))
            torch.set_num_threads(self.config.threads)

    def _release(self) -> None:
        """Gives back what `_take` took, whatever is raised on the way. What is parked stays: on the CPU the weights are
        the very same tensors."""
        self._open = None
        handed_on = self._parked_model.tensors() if self._parked_model is not None else ()
        try:
            self._stack.close(handed_on=handed_on)
        finally:
            self.released = self._stack.report

    @_device_call
    def sleep(self, *, keep_weights: bool) -> None:
        """Gives the device back, as `close` does; the weights are parked in host memory, or dropped.

        On the CPU parked weights stay where they are, in the name of another owner.

        Raises:
            DeviceOutOfMemory: the host has no room for the weights; the executor is awake and undisturbed.
            ExceptionGroup: what the releases raised; the executor sleeps, and the others were released.
        """
        model = self._opened().model
        if keep_weights:
            with _device_errors("a copy of the weights"):
                self._parked_model = self._parked.own("parked_weights", model.to(_HOST))
        del model
        self._release()

    @_device_call
    def wake(self) -> None:
        """Takes the device again; gives it back and stays asleep when it fails.

        Raises:
            CheckpointError: the weights were dropped, and the checkpoint is not what it was.
            DeviceOutOfMemory: the memory is not there now.
        """
        blueprint = self._blueprint
        assert blueprint is not None, "the executor is not open"
        assert self._open is None, "the executor is awake"
        with self._all_or_nothing():
            if self._parked_model is not None:
                self._take(blueprint, partial(blueprint.place, self._parked_model))
            else:
                self._load_again(blueprint)
        self._parked_model = None
        self._parked.close(handed_on=self._opened().model.tensors())

    def _load_again(self, blueprint: AnyBlueprint) -> None:
        checkpoint = blueprint.checkpoint
        with _still_the_same(checkpoint.folder):
            if changed := checkpoint.changed_files():
                raise CheckpointError(f"{', '.join(changed)} differ or are gone")
            if self._take_and_load(blueprint) != blueprint.fingerprint:
                raise CheckpointError("the weights are others")

    @_device_call
    def encode(self, jobs: tuple[EncodeJob, ...]) -> None:
        """Computes the encoder outputs of ``jobs`` in one batch: all are kept, or none.

        Raises:
            InvalidRequest: a payload is not one window of float samples.
            EncodeFailed: an output is not finite, as from samples that are not.
        """
        now = self._opened()
        keys = [job.key for job in jobs]
        assert len(set(keys)) == len(keys), f"an encode batch names a key twice: {keys}"
        resident = [key for key in keys if key in now.outputs]
        assert not resident, f"encoder outputs {resident} are encoded although resident"
        if not jobs:
            return
        with _device_errors(f"an encode batch of {len(jobs)} items"):
            encoded = now.network.encode(jobs)
            finite = [bool(output.isfinite().all()) for output in encoded]
            broken = [key for key, good in zip(keys, finite, strict=True) if not good]
            if broken:
                raise EncodeFailed(
                    f"the encoder's output for {broken} is not finite; check the samples for NaN and infinity"
                )
            now.outputs.add(dict(zip(keys, encoded, strict=True)))

    @_device_call
    def step(self, plan: StepPlan) -> StepResult:
        """Runs one decoder step; see the class for what holds when it raises."""
        now = self._opened()
        for sequence in plan.ended:
            self._records.pop(sequence, None)
        fed, started = {part.sequence_id for part in plan.slices}, {start.sequence_id for start in plan.started}
        touched = (fed | started) - (started & self._records.keys())  # one that is started twice is an older step's
        try:
            with _device_errors(f"a step of {plan.tokens} tokens"):
                return self._run(now, plan)
        except BaseException:
            for sequence in touched:
                self._records.pop(sequence, None)
            raise

    def _run(self, now: _Open, plan: StepPlan) -> StepResult:
        for start in plan.started:
            assert start.sequence_id not in self._records, f"sequence {start.sequence_id} is started twice"
            guide = now.grammars.guide(start.sampling.structure, start.token_ids[start.prompt_length :])
            record = self._records[start.sequence_id] = Record(start, list(start.token_ids), guide)
            now.network.start(record)
        for write in plan.cross_writes:
            slots = 0 if now.cross is None else now.cross.slots
            assert 0 <= write.slot < slots, f"{write} of {slots} slots"
            now.network.write_cross(write.slot, now.outputs.get(write.key))
        feeds = [Feed(part=part, record=self._record(now, part)) for part in plan.slices]
        drawn: list[Drawn] = [Drawn(token_id=None)] * len(feeds)
        pooled = [index for index, feed in enumerate(feeds) if feed.record.start.pooling is not None]
        others = [index for index, feed in enumerate(feeds) if feed.record.start.pooling is None]
        for indices, answer in ((pooled, self._pool), (others, self._draw)):
            if indices:
                for index, one in zip(indices, answer(now, [feeds[index] for index in indices]), strict=True):
                    drawn[index] = one
        return StepResult(step_id=plan.step_id, drawn=tuple(drawn))

    def _record(self, now: _Open, part: Slice) -> Record:
        """The record of a possible slice. A bad index must go no further: on CUDA it ends the process's context."""
        record = self._records.get(part.sequence_id)
        assert record is not None, (
            f"sequence {part.sequence_id} is not known: it was never started, or an earlier step of it failed"
        )
        end, known = part.start + part.length, len(record.tokens)
        assert 0 <= part.start < end <= known, (
            f"sequence {part.sequence_id}: slice {part.start}..{end} of {known} tokens"
        )
        assert end <= now.network.positions, f"sequence {part.sequence_id}: position {end - 1} is past the last"
        if now.paged is None:
            assert part.start == 0, f"sequence {part.sequence_id}: a prompt is read whole, but starts at {part.start}"
            assert end == record.start.prompt_length, (
                f"sequence {part.sequence_id}: a prompt is read whole, not to {end}"
            )
        else:
            _check_pages(now.paged, part)
        slots = 0 if now.cross is None else now.cross.slots
        assert part.cross_slot is None or 0 <= part.cross_slot < slots, f"sequence {part.sequence_id}: unknown slot"
        assert not part.draw or end == known, f"sequence {part.sequence_id}: a draw at {end} with {known} tokens known"
        return record

    def _pool(self, now: _Open, feeds: list[Feed]) -> list[Drawn]:
        """The vectors of those whose prompt ends."""
        return [Drawn(token_id=None, vector=vector) for vector in now.network.vectors(feeds, now.outputs)]

    def _draw(self, now: _Open, feeds: list[Feed]) -> list[Drawn]:
        """Logits where they are needed, probes, then tokens; the records grow when all has gone well."""
        wanted = _wanted_rows(feeds)
        logits = now.network.logits(feeds, wanted.rows, now.outputs)
        probed = [feeds[index].record for index in wanted.probes]
        answers = map(_probe, map(logits.__getitem__, wanted.probes.values()), probed)
        probes = dict(zip(wanted.probes, answers, strict=True))
        records = [feed.record for feed in feeds]
        chosen = self._choose(now, logits, wanted.draws, records)
        for index, drawn in chosen.items():
            assert drawn.token_id is not None, "a draw without a token"
            records[index].tokens.append(drawn.token_id)
        nothing = Drawn(token_id=None)
        return [evolve(chosen.get(index, nothing), probe=probes.get(index)) for index in range(len(feeds))]

    @staticmethod
    def _choose(now: _Open, logits: Tensor, rows: dict[int, int], records: list[Record]) -> dict[int, Drawn]:
        """What is drawn, by slice. ``rows`` are the first of ``logits``, which are written to."""
        if not rows:
            return {}
        draws = []
        for index in rows:
            start = records[index].start
            never = now.masks.mask(start.rules)
            draws.append(
                Draw(
                    generated=records[index].generated,
                    sampling=start.sampling,
                    rules=start.rules,
                    never=never,
                    prompt=records[index].prompt,
                    guide=records[index].guide,
                )
            )
        drawn = dict(zip(rows, draw_tokens(logits[: len(rows)], draws, now.eos_token_ids), strict=True))
        for index, one in drawn.items():
            if math.isnan(one.logprob):  # the model's numbers broke down, or the rules leave no token
                raise EngineError(
                    f"sequence {records[index].start.sequence_id} has no token to draw: its logits are not finite, "
                    "or its rules allow none"
                )
        return drawn

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops encoder outputs; every key must be resident."""
        self._opened().outputs.free(keys)

    def reset(self) -> None:
        """Forgets sequences and encoder outputs. Pages and slots stay allocated: what is in them counts for nothing."""
        assert self._blueprint is not None, "the executor is not open"
        self._records.clear()
        if self._open is not None:
            self._open.outputs.release()

    def memory(self) -> DeviceMemory:
        """Bytes held now, by owner; asleep, what is parked in host memory. None before `open` and after `close`, unless
        somebody else keeps what was released: that is told, too."""
        by_owner = {**self._stack.bytes_by_owner(), **self._parked.bytes_by_owner()}
        asleep = self._blueprint is not None and self._open is None
        return DeviceMemory(device=str(_HOST) if asleep else self._device, by_owner=by_owner)

    def close(self) -> None:
        """Gives everything back, in reverse order of taking; idempotent; works on an executor that is half open or
        asleep.

        Raises:
            ExceptionGroup: what the releases raised; all the others were released.
        """
        self._blueprint = self._parked_model = None
        try:
            self._release()
        finally:
            self._parked.close()
            self.released = self.released.with_(self._parked.report)

    def _opened(self) -> _Open:
        assert self._blueprint is not None, "the executor is not open"
        assert self._open is not None, "the executor is asleep"
        return self._open


def _check_pages(paged: PagedKV | StagedKV, part: Slice) -> None:
    end = part.start + part.length
    assert len(part.block_table) * paged.page_size >= end, f"sequence {part.sequence_id}: pages are missing"
    assert min(part.block_table) >= 0 and max(part.block_table) < paged.pages, (
        f"sequence {part.sequence_id}: pages of {paged.pages} are unknown"
    )


@frozen(kw_only=True)
class _Wanted:
    """The rows whose logits a step needs, as (index of the slice, offset in it), and for each slice (by index) where in
    them its draw and probe lie."""

    rows: list[tuple[int, int]]
    draws: dict[int, int]
    probes: dict[int, int]


def _wanted_rows(feeds: list[Feed]) -> _Wanted:
    """Draws first, so that they are one view of the logits; a probe at a drawn row shares it."""
    wanted = _Wanted(rows=[], draws={}, probes={})
    for index, feed in enumerate(feeds):
        if feed.part.draw:
            wanted.draws[index] = len(wanted.rows)
            wanted.rows.append((index, feed.part.length - 1))
    for index, feed in enumerate(feeds):
        part, probe = feed.part, feed.record.start.probe
        if probe is not None and part.start <= probe.position < part.start + part.length:
            offset = probe.position - part.start
            shared = part.draw and offset == part.length - 1
            wanted.probes[index] = wanted.draws[index] if shared else len(wanted.rows)
            if not shared:
                wanted.rows.append((index, offset))
    return wanted


def _probe(logits: Tensor, record: Record) -> tuple[float, ...]:
    probe = record.start.probe
    assert probe is not None, "only a sequence with a probe is probed"
    return tuple(logits.log_softmax(-1)[list(probe.token_ids)].tolist())
