"""`TorchExecutor`: the executor that runs models on torch. Its owner calls it from one thread; nothing here is shared.

One step, in order::

    StepPlan -> forget `ended`, record `started` -> write cross KV -> feed the chunks (networks/)
             -> logit rules, sampling (sampler.py) -> records grow -> StepResult

`Network` hides the architecture, and a blueprint (blueprints/) hides how memory is allocated for it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ..core.beam_pages import Copy
from ..core.config import EngineConfig
from ..core.detokenizer import TokenBytes
from ..core.errors import CheckpointError, EncodeFailed, InvalidRequest
from ..core.model import ModelDescription
from ..core.plan import Chunk, DeviceMemory, SampledToken, StepPlan, StepResult
from ..core.reasoning import Track
from ..core.request import EncoderItem
from ..core.tracebacks import clear_frames
from .blueprints.blueprint import Blueprint, Parts
from .blueprints.read import read_blueprint
from .checkpoints.adapter_store import AdapterStore
from .checkpoints.lora import Adapter
from .checkpoints.turns import TURNS
from .checkpoints.whisper_tokenizer import whole_tokenizer
from .chunks import check_chunk, spread_all, with_state
from .device_calls import device_call, device_errors
from .machine.defaults import OwnDefaults
from .machine.threads import set_threads
from .memory.allocator import trim
from .memory.encoder_outputs import EncoderOutputs
from .memory.module import TransformerModel
from .memory.resources import ReleaseReport, ResourceStack
from .native.adapters import no_adapters
from .networks.network import Feed, Record
from .sampler import Sampler
from .sampling.beams import Search
from .sampling.rules import ConstantBans
from .sampling.structure import Grammars
from .speculation import HeadProposer, LookupProposer, Proposer

_HOST = torch.device("cpu")


@contextmanager
def _still_the_same(place: Path) -> Iterator[None]:
    """Turns errors within the block into a `CheckpointError` which says that the checkpoint at ``place`` has
    changed."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"the checkpoint {place} has changed since the executor was opened: {error}; restore it, or open "
            "another executor"
        ) from error


@frozen(kw_only=True, eq=False)
class _Open:
    """The parts that an open executor works with. Only the executor and the resource stack refer to this object.

    Every holder of tensors here has an owner in the stack: `TorchExecutor._take` looks for tensors without one.
    """

    parts: Parts
    outputs: EncoderOutputs
    grammars: Grammars
    sampler: Sampler
    proposer: Proposer | None
    token_bytes: Callable[[], TokenBytes]


@define(eq=False)
class TorchExecutor:
    """Runs one checkpoint; implements `core.executor.Executor`.

    Args:
        model: a checkpoint's folder or a hub id.
        config: the engine's settings; device, dtype, threads and the KV sizes matter here.

    When a step raises, the sequences of its chunks and of its ``started`` are forgotten, and the contents of their
    pages and slots are no longer valid. The planner starts these sequences again under new ids and writes the slots
    again. All other sequences go on undisturbed. An id in ``ended`` may be unknown, since its sequence may have been
    forgotten in this way.

    The executor is closed (as when it is new), open or asleep. ``_blueprint`` is set unless the executor is closed.
    ``_open`` is set while it is open. During sleep ``_parked`` owns ``_parked_model``, or nothing if the weights were
    dropped.
    """

    model: str | Path
    config: EngineConfig
    released: ReleaseReport = field(init=False, factory=ReleaseReport, repr=False)
    """The report of the last `sleep`, `close`, or failed `open` or `wake`, even if it raised: bytes by owner, before
    and after."""
    _stack: ResourceStack = field(init=False, factory=ResourceStack, repr=False)
    _parked: ResourceStack = field(init=False, factory=ResourceStack, repr=False)
    _loaded: ResourceStack = field(init=False, factory=ResourceStack, repr=False)  # owns what outlives sleep
    _adapters: AdapterStore = field(init=False, factory=AdapterStore, repr=False)
    _adapted: Mapping[str, tuple[int, int]] = field(init=False, factory=dict, repr=False)  # `AdapterSlots.shapes`
    _parked_model: TransformerModel | None = field(init=False, default=None, repr=False)
    _blueprint: Blueprint | None = field(init=False, default=None, repr=False)
    _open: _Open | None = field(init=False, default=None, repr=False)
    _records: dict[int, Record] = field(init=False, factory=dict, repr=False)
    _device: str = field(init=False, default="", repr=False)
    _grammars: Grammars | None = field(init=False, default=None, repr=False)
    _given_up: bool = field(init=False, default=False, repr=False)

    @device_call
    def open(self) -> ModelDescription:
        """Loads the weights and allocates all memory; releases everything if it fails.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged.
            UnsupportedModel: the architecture has no adapter.
            InvalidRequest: the device does not exist, or the sizes are too small for one sequence.
            DeviceOutOfMemory: the device has too little free memory.
        """
        assert self._blueprint is None, "the executor is open already"
        self._grammars = None
        with TURNS.loading(partial(getattr, self, "_given_up")):
            blueprint: Blueprint = read_blueprint(self.model, self.config)
        trim()  # returns the memory that reading the tokenizer left
        self._device = str(blueprint.device)
        with self._all_or_nothing():
            with TURNS.loading(partial(getattr, self, "_given_up")):
                blueprint = self._take_and_load(blueprint)
            network = self._opened_now().parts.network
            with OwnDefaults():
                blueprint.prove(network)
            if blueprint.positions < blueprint.decoder.positions:
                logging.getLogger("triolet").info("%s", blueprint.context())
            description = evolve(blueprint.describe(str(self.model)), structures=self._grammars)
        self._blueprint = blueprint
        if self.config.adapters:
            self._loaded.own("loaded_adapters", self._adapters)
        return description

    def give_up(self) -> None:
        """Ends an `open` or `wake` that waits for other loads of this process. May be called from any thread."""
        self._given_up = True
        TURNS.look_again()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Releases everything that was allocated within the block if the block raises."""
        outer = sys.exception()
        try:
            with device_errors("the model"):
                yield
        except BaseException as error:
            clear_frames(error, outer=outer)  # first: the frames may hold tensors that have no owner yet
            del outer
            try:
                self._release()
            except ExceptionGroup as failed:
                error.add_note(f"when it was given back: {failed!r}")
            raise

    def _take_and_load(self, blueprint: Blueprint) -> Blueprint:
        """Allocates everything, with weights from the checkpoint's files. Returns the blueprint with the fingerprint of
        the weights and the numbers of pages and slots."""
        files = blueprint.files()
        taken = self._take(blueprint, partial(blueprint.load, files))
        return evolve(taken, fingerprint=files.fingerprint)

    def _take(self, blueprint: Blueprint, load: Callable[[], TransformerModel]) -> Blueprint:
        """Allocates all that an open executor holds, each part under the name of its owner."""
        checkpoint, device = blueprint.checkpoint, blueprint.device
        own, vocabulary = self._stack.own, checkpoint.shape.vocabulary
        self._stack.callback("records", self._records.clear)
        self._stack.callback("threads", set_threads(self.config.threads))
        tokenizer = partial(whole_tokenizer, checkpoint.tokenizer)
        grammars = self._grammars or Grammars(tokenizer, vocabulary, checkpoint.eos_token_ids)
        self._grammars = grammars  # kept until the executor is closed: the model's description refers to the grammars
        self._stack.callback("grammars", grammars.release)
        if device.type == "cuda":
            self._stack.callback("workspace", torch.cuda.empty_cache)

        model = own("weights", load())
        trim()  # returns the memory that loading left, before the free memory is measured
        blueprint = blueprint.measured(model).sized(sum(self._stack.bytes_by_owner().values()))
        parts = blueprint.take(own, model)
        if self.config.adapters and parts.adapters is None:
            raise no_adapters(checkpoint.architecture, self.config.adapters, "it is not a decoder-only model")
        self._adapted = {} if parts.adapters is None else parts.adapters.shapes
        outputs = own("encoder_outputs", EncoderOutputs())
        parts = evolve(parts, network=blueprint.hasten(parts.network, own))  # last, so that graphs are released first
        sampler = Sampler(
            network=parts.network,
            paged=parts.paged,
            outputs=outputs,
            constant=ConstantBans(vocabulary),
            eos_token_ids=checkpoint.eos_token_ids,
        )
        self._open = _Open(
            parts=parts,
            outputs=outputs,
            grammars=grammars,
            sampler=sampler,
            proposer=self._proposer(blueprint, parts),
            token_bytes=cache(lambda: TokenBytes(tokenizer())),
        )
        forgotten = [tuple(tensor.shape) for tensor in self._stack.unowned(self._open)]
        assert not forgotten, f"tensors {forgotten} have no owner: whoever holds them is to be own()ed"
        return blueprint

    def _proposer(self, blueprint: Blueprint, parts: Parts) -> Proposer | None:
        """Returns the proposer of draft tokens; ``None``: none are proposed."""
        speculation = self.config.speculation_for(blueprint.kind, self._device)
        if speculation is None:
            return None
        head = blueprint.take_drafts(parts, self._stack.own)
        if head is None:
            return LookupProposer(match=speculation.match)
        return HeadProposer(head=head, most=speculation.most_running)

    def _release(self) -> None:
        """Releases what `_take` allocated, even if some releases raise. Parked weights stay. On the CPU they are the
        same tensors as the model's weights.
        """
        self._open = None
        handed_on = [] if self._parked_model is None else list(self._parked_model.tensors())
        try:
            self._stack.close(handed_on=handed_on)
        finally:
            handed_on.clear()  # an error would keep the tensors alive with this frame
            self.released = self._stack.report
            trim()

    @device_call
    def sleep(self, *, keep_weights: bool) -> None:
        """Releases the device, as `close` does; the weights are parked in host memory, or dropped.

        On the CPU parked weights stay where they are and change only their owner.

        Raises:
            DeviceOutOfMemory: the host has no room for the weights; the executor stays awake and unchanged.
            ExceptionGroup: the errors of some releases; the executor sleeps, and everything else was released.
        """
        self._opened()
        if keep_weights:
            self._park()
        self._release()

    def _park(self) -> None:
        """Copies the weights to host memory: all, or none if it fails."""
        with device_errors("a copy of the weights"):
            parked = self._opened().parts.model.to(_HOST)
        self._parked_model = self._parked.own("parked_weights", parked)

    @device_call
    def wake(self) -> None:
        """Allocates the device memory again; if that fails, releases it and stays asleep.

        Raises:
            CheckpointError: the weights were dropped, and the checkpoint has changed.
            DeviceOutOfMemory: the device has too little free memory now.
        """
        blueprint = self._blueprint
        assert blueprint is not None, "the executor is not open"
        assert self._open is None, "the executor is awake"
        with self._all_or_nothing():
            if self._parked_model is not None:
                self._take(blueprint, partial(self._parked_model.to, blueprint.device))
            else:
                with TURNS.loading(partial(getattr, self, "_given_up")):
                    self._load_again(blueprint)
        self._parked_model = None
        self._parked.close(handed_on=list(self._opened().parts.model.tensors()))

    def _load_again(self, blueprint: Blueprint) -> None:
        with _still_the_same(blueprint.checkpoint.place):
            blueprint.checkpoint.restore()
            if changed := blueprint.checkpoint.changed_files():
                raise CheckpointError(f"these files were changed or deleted: {', '.join(changed)}")
            if self._take_and_load(blueprint).fingerprint != blueprint.fingerprint:
                raise CheckpointError("the weights are different")

    @device_call
    def encode(self, jobs: tuple[EncoderItem, ...]) -> None:
        """Computes the encoder outputs of ``jobs`` in one batch: all are kept, or none.

        Raises:
            InvalidRequest: a payload is not one window of float samples.
            EncodeFailed: an output is not finite, for example because its samples are not finite.
        """
        now = self._opened()
        keys = [job.key for job in jobs]
        assert len(set(keys)) == len(keys), f"an encode batch names a key twice: {keys}"
        resident = [key for key in keys if key in now.outputs]
        assert not resident, f"encoder outputs {resident} are encoded although resident"
        if not jobs:
            return
        with device_errors(f"an encode batch of {len(jobs)} items"), OwnDefaults():
            encoded = now.parts.network.encode(now.outputs.beside(jobs))
            broken = [job.key for job, output in zip(jobs, encoded, strict=True) if not output.isfinite().all()]
            if broken:
                raise EncodeFailed(
                    f"the encoder's output for {broken} is not finite; check the samples for NaN and infinity"
                )
        now.outputs.add(dict(zip(keys, encoded, strict=True)))

    @device_call
    def step(self, plan: StepPlan) -> StepResult:
        """Runs one decoder step. The docstring of the class says what holds if it raises."""
        now = self._opened()
        for sequence in plan.ended:
            self._records.pop(sequence, None)
        older = [start.sequence_id for start in plan.started if start.sequence_id in self._records]
        try:
            return self._run(now, plan)
        except BaseException:
            fed, started = {part.sequence_id for part in plan.chunks}, {start.sequence_id for start in plan.started}
            for sequence in (fed | started).difference(older):
                self._records.pop(sequence, None)
            with device_errors(f"a step of {plan.tokens} tokens"):
                raise

    def _run(self, now: _Open, plan: StepPlan) -> StepResult:
        for start in plan.started:
            assert start.sequence_id not in self._records, f"sequence {start.sequence_id} is started twice"
            reasoning, structure = start.reasoning, start.sampling.structure
            follows = reasoning is not None and (reasoning.budget is not None or structure is not None)
            track = Track.of(reasoning, now.token_bytes()) if reasoning is not None and follows else None
            committed = start.token_ids[start.prompt_length :] if track is None else ()  # else read with the first draw
            guide = now.grammars.guide(structure, committed)
            record = self._records[start.sequence_id] = Record(start, list(start.token_ids), guide, track)
            if start.sampling.beam_size > 1 and not start.reads_only:
                record.search = Search.of(start, self.config.page_size, track)
            now.parts.network.start(record)
            if now.proposer is not None and not start.reads_only:
                now.proposer.start(record)
        for load in plan.adapter_writes:
            assert now.parts.adapters is not None, f"{load}, but there are no slots"
            now.parts.adapters.put(load.slot, self._adapters.get(load.key).changes)
        for write in plan.cross_writes:
            slots = 0 if now.parts.cross is None else now.parts.cross.slots
            assert 0 <= write.slot < slots, f"{write} of {slots} slots"
            now.parts.network.write_cross(write.slot, now.outputs.get(write.key))
        feeds = [Feed(part=part, record=self._record(now, part)) for part in plan.chunks]
        sampled: list[SampledToken] = [SampledToken(token_id=None)] * len(feeds)
        reading = [index for index, feed in enumerate(feeds) if feed.record.start.reads_only]
        others = [index for index, feed in enumerate(feeds) if not feed.record.start.reads_only]
        for indices, answer in ((reading, self._read), (others, self._sample)):
            if indices:
                for index, one in zip(indices, answer(now, [feeds[index] for index in indices]), strict=True):
                    sampled[index] = one
        return StepResult(step_id=plan.step_id, sampled=tuple(sampled))

    def _record(self, now: _Open, part: Chunk) -> Record:
        """Returns the record of the chunk's sequence, after a check of the chunk."""
        record = self._records.get(part.sequence_id)
        assert record is not None, (
            f"sequence {part.sequence_id} is not known: it was never started, or an earlier step of it failed"
        )
        check_chunk(part, record, now.parts)
        return record

    def _read(self, now: _Open, feeds: list[Feed]) -> list[SampledToken]:
        """Returns the vectors and alignments of those chunks that end their prompt."""
        feeds = self._with_states(now, feeds)
        answers = [SampledToken(token_id=None)] * len(feeds)
        pooled = [index for index, feed in enumerate(feeds) if feed.record.start.pooling is not None]
        aligned = [index for index, feed in enumerate(feeds) if feed.record.start.alignment is not None]
        if pooled:
            vectors = now.parts.network.vectors([feeds[index] for index in pooled], now.outputs)
            for index, vector in zip(pooled, vectors, strict=True):
                answers[index] = SampledToken(token_id=None, vector=vector)
        if aligned:
            aligner = now.parts.aligner or now.parts.network
            found = aligner.align([feeds[index] for index in aligned], now.outputs)
            for index, one in zip(aligned, found, strict=True):
                answers[index] = SampledToken(token_id=None, aligned=one)
        for feed in feeds:
            feed.record.own.leave()
        return answers

    def _with_states(self, now: _Open, feeds: list[Feed]) -> list[Feed]:
        """Returns the chunks as they are fed to recurrent layers, if there are any."""
        states = now.parts.states
        return feeds if states is None else [with_state(feed, states) for feed in feeds]

    def _sample(self, now: _Open, feeds: list[Feed]) -> list[SampledToken]:
        """Returns the sampled tokens with the accepted draft tokens after them, and the results of beam searches. The
        records grow only after sampling has succeeded."""
        if not any(feed.record.search for feed in feeds):
            return self._feed(now, feeds, ())
        every, owned, copies = spread_all(feeds, now.parts.states)
        sampled = self._feed(now, every, copies) if every else []
        return [sampled[own.start] if own else SampledToken(token_id=None) for own in owned]

    def _feed(self, now: _Open, feeds: list[Feed], copies: Sequence[Copy]) -> list[SampledToken]:
        if now.proposer is not None:
            feeds = list(map(Feed.with_proposed, feeds, now.proposer.propose(feeds)))
        feeds = self._with_states(now, feeds)
        hidden: list[Tensor] | None = [] if isinstance(now.proposer, HeadProposer) else None
        sampled = now.sampler.sample(feeds, copies, hidden)
        for feed, one in zip(feeds, sampled, strict=True):
            feed.record.grow(one)
            if now.parts.states is not None:
                feed.record.own.leave(right=len(one.accepted) == len(feed.proposed))
        if now.proposer is not None and hidden is not None:
            now.proposer.learn(feeds, sampled, hidden)
        return sampled

    @device_call
    def load_adapter(self, folder: str) -> str:
        """Reads an adapter into host memory, or counts it once more. Returns its key.

        Raises:
            CheckpointError: there is no adapter in ``folder``, or it is of another model.
            InvalidRequest: the engine has no slots for adapters.
            UnsupportedModel: the adapter is of another kind, or its rank is too large.
        """
        assert self._blueprint is not None, "the executor is not open"
        if not self.config.adapters:
            raise InvalidRequest(
                f"the adapter in {folder} is to be loaded, but the engine has adapters=0; allowed: 1 or more. Open the "
                "engine with EngineConfig(adapters=...)"
            )
        return self._adapters.add(Adapter.read(Path(folder)).fitting(self._adapted, self.config.adapter_rank))

    def drop_adapter(self, key: str) -> None:
        """Takes one `load_adapter` back. The last one drops the adapter."""
        self._adapters.drop(key)

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops encoder outputs; every key must be resident."""
        self._opened().outputs.free(keys)

    def reset(self) -> None:
        """Forgets sequences and encoder outputs. Pages and slots stay allocated, but their contents are no longer
        valid."""
        assert self._blueprint is not None, "the executor is not open"
        self._records.clear()
        if self._open is not None:
            self._open.outputs.release()

    def memory(self) -> DeviceMemory:
        """Bytes held now, by owner; during sleep, the bytes parked in host memory. Before `open` and after `close`
        nothing is held, unless released tensors are still alive: their bytes count as well."""
        by_owner = {**self._stack.bytes_by_owner(), **self._parked.bytes_by_owner(), **self._loaded.bytes_by_owner()}
        asleep = self._blueprint is not None and self._open is None
        return DeviceMemory(device=str(_HOST) if asleep else self._device, by_owner=by_owner)

    def close(self) -> None:
        """Releases everything, in the reverse order of allocation. Idempotent; works on an executor that is half open
        or asleep, too.

        Raises:
            ExceptionGroup: the errors of some releases; everything else was released.
        """
        self._blueprint, self._parked_model, self._given_up = None, None, False
        if self._grammars is not None:
            self._grammars.close()
        try:
            self._release()
        finally:
            self._parked.close()
            self._loaded.close()
            self.released = self.released.with_(self._parked.report).with_(self._loaded.report)
            trim()

    def _opened(self) -> _Open:
        assert self._blueprint is not None, "the executor is not open"
        return self._opened_now()

    def _opened_now(self) -> _Open:
        assert self._open is not None, "the executor is asleep"
        return self._open
