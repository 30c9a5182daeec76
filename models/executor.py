"""`TorchExecutor`: the executor that runs Whisper on torch. Its owner calls it from one thread; nothing here is shared.

One step, in order::

    StepPlan -> forget `ended`, record `started` -> write cross KV -> lay out rows (kv.py) -> decode (whisper.py)
             -> rules and draws (sampling.py) -> records grow -> StepResult
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import define, field, frozen
from torch import Tensor

from ..core.config import EngineConfig
from ..core.errors import DeviceLost, DeviceOutOfMemory, EncodeFailed, EngineError, InvalidRequest
from ..core.model import ModelDescription
from ..core.plan import DeviceMemory, Drawn, EncodeJob, SequenceStart, Slice, StepPlan, StepResult
from .checkpoint import Checkpoint, WeightFiles, read_checkpoint, resolve
from .features import LogMel
from .kv import CrossKV, PagedKV, StepLayout, lay_out
from .resources import ResourceStack, tensor_bytes
from .sampling import Draw, RuleMasks, apply_rules, choose
from .whisper import WhisperModel, WhisperShape

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CROSS_KV_LIMIT = 2 << 30  # bytes, where the configuration leaves the size to us


@contextmanager
def _device_errors(what: str, count: int, of: str) -> Iterator[None]:
    """torch's errors of the device, as ours."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(f"{what} {count} {of} does not fit the device's memory: {error}") from error
    except torch.AcceleratorError as error:
        raise DeviceLost(
            f"the device broke down in {what} {count} {of}: {error}. Its context is lost for this process; start "
            f"a new one"
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

    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return tensor_bytes(self._outputs.values())

    def release(self) -> None:
        """Drops everything."""
        self._outputs.clear()


@define(eq=False)
class _Record:
    """A sequence as the executor knows it: all its tokens, drawn ones included."""

    start: SequenceStart
    tokens: list[int]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.start.prompt_length :]

    def feed(self, part: Slice) -> list[int]:
        return self.tokens[part.start : part.start + part.length]


@frozen(kw_only=True)
class _Budget:
    """How many pages and slots the configured bytes are."""

    pages: int  # of sequences; one more of zeros is allocated
    slots: int

    @classmethod
    def of(cls, config: EngineConfig, shape: WhisperShape, dtype: torch.dtype) -> _Budget:
        """Raises `InvalidRequest` where one sequence of full length, or one window, would not fit."""
        position = shape.decoder_layers * 2 * shape.width * dtype.itemsize
        page, slot = position * config.page_size, position * shape.embeddings
        full = -(-shape.positions // config.page_size)
        pages = config.self_kv_bytes // page - 1 if config.self_kv_bytes else config.max_running * full
        if pages < full:
            raise InvalidRequest(
                f"self_kv_bytes={config.self_kv_bytes}; allowed: {(full + 1) * page} or more, the pages of a sequence "
                f"of {shape.positions} positions and one of zeros, or 0 for {config.max_running} sequences"
            )
        slots = config.cross_kv_bytes // slot or max(1, min(config.max_running, _CROSS_KV_LIMIT // slot))
        if 0 < config.cross_kv_bytes < slot:
            raise InvalidRequest(
                f"cross_kv_bytes={config.cross_kv_bytes}; allowed: {slot} or more, the bytes of one window"
            )
        return cls(pages=pages, slots=slots)


@frozen(kw_only=True, eq=False)
class _Open:
    """What an open executor works with. The executor and the resource stack hold it, nothing else."""

    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    window_samples: int
    log_mel: LogMel
    model: WhisperModel
    paged: PagedKV
    cross: CrossKV
    outputs: EncoderOutputs
    masks: RuleMasks


@define(eq=False)
class TorchExecutor:
    """Runs one Whisper checkpoint; implements `core.model.Executor`.

    Args:
        model: a checkpoint's folder or a hub id.
        config: the engine's settings; device, dtype, threads and the KV sizes matter here.

    When a step raises, the sequences of its slices and of its ``started`` are forgotten, and what it wrote to their
    pages and slots counts for nothing: the planner starts them again under new ids and writes the slots again. All
    other sequences go on undisturbed. For the same reason an id in ``ended`` may be unknown: there is nothing left to
    forget.
    """

    model: str | Path
    config: EngineConfig
    _stack: ResourceStack = field(init=False, factory=ResourceStack, repr=False)
    _open: _Open | None = field(init=False, default=None, repr=False)
    _records: dict[int, _Record] = field(init=False, factory=dict, repr=False)
    _device: str = field(init=False, default="", repr=False)

    def open(self) -> ModelDescription:
        """Loads the weights and takes all memory; gives everything back when it fails.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete or damaged.
            UnsupportedModel: of an architecture without an adapter.
            InvalidRequest: a device that is not there, or sizes too small for one sequence.
        """
        assert self._open is None, "the executor is open already"
        try:
            with torch.inference_mode():
                return self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> ModelDescription:
        device = _device(self.config.device)
        dtype = _dtype(self.config.dtype, device)
        self._device = str(device)
        checkpoint = read_checkpoint(resolve(self.model))
        shape, budget = checkpoint.shape, _Budget.of(self.config, checkpoint.shape, dtype)
        self._set_threads()
        if device.type == "cuda":
            self._stack.register("workspace", lambda: 0, torch.cuda.empty_cache)
        log_mel = LogMel.build(checkpoint.features, device)
        self._stack.register("features", log_mel.nbytes, log_mel.release)
        weights = WeightFiles.open(checkpoint.folder)
        model = WhisperModel.load(
            weights,
            shape,
            encoder_inner=checkpoint.encoder_inner,
            decoder_inner=checkpoint.decoder_inner,
            activation=checkpoint.activation,
            tied=checkpoint.tied,
            device=device,
            dtype=dtype,
        )
        self._stack.register("weights", model.nbytes, model.release)
        paged, cross = self._allocate(shape, budget, device, dtype)
        outputs = EncoderOutputs()
        self._stack.register("encoder_outputs", outputs.nbytes, outputs.release)
        masks = RuleMasks(shape.vocabulary, device)
        self._stack.register("rule_masks", masks.nbytes, masks.release)
        self._open = _Open(
            device=device,
            dtype=dtype,
            eos_token_ids=checkpoint.eos_token_ids,
            window_samples=checkpoint.features.window_samples,
            log_mel=log_mel,
            model=model,
            paged=paged,
            cross=cross,
            outputs=outputs,
            masks=masks,
        )
        return self._describe(checkpoint, budget, weights.fingerprint)

    def _set_threads(self) -> None:
        """The thread count is the process's: it is only touched when asked for, and restored."""
        if self.config.threads:
            before = torch.get_num_threads()
            self._stack.register("threads", lambda: 0, lambda: torch.set_num_threads(before))
            torch.set_num_threads(self.config.threads)

    def _allocate(
        self, shape: WhisperShape, budget: _Budget, device: torch.device, dtype: torch.dtype
    ) -> tuple[PagedKV, CrossKV]:
        paged = PagedKV.allocate(
            layers=shape.decoder_layers,
            pages=budget.pages,
            page_size=self.config.page_size,
            heads=shape.decoder_heads,
            width=shape.width,
            dtype=dtype,
            device=device,
        )
        self._stack.register("self_kv", paged.nbytes, paged.release)
        cross = CrossKV.allocate(
            layers=shape.decoder_layers,
            slots=budget.slots,
            heads=shape.decoder_heads,
            embeddings=shape.embeddings,
            width=shape.width,
            dtype=dtype,
            device=device,
        )
        self._stack.register("cross_kv", cross.nbytes, cross.release)
        return paged, cross

    def _describe(self, checkpoint: Checkpoint, budget: _Budget, fingerprint: str) -> ModelDescription:
        assert self._open is not None, "only an open executor is described"
        shape, dtype = checkpoint.shape, self._open.dtype
        dtype_name = str(dtype).removeprefix("torch.")
        return ModelDescription(
            name=str(self.model),
            architecture=checkpoint.architecture,
            device=self._device,
            dtype=dtype_name,
            vocabulary_size=shape.vocabulary,
            max_positions=shape.positions,
            eos_token_ids=checkpoint.eos_token_ids,
            suppress_token_ids=checkpoint.suppress_token_ids,
            begin_suppress_token_ids=checkpoint.begin_suppress_token_ids,
            page_size=self.config.page_size,
            pages=budget.pages,
            cross_slots=budget.slots,
            encoder_embeddings=shape.embeddings,
            encoder_bytes=shape.embeddings * shape.width * dtype.itemsize,
            sampling_rate=checkpoint.features.sampling_rate,
            window_samples=checkpoint.features.window_samples,
            processor_identity=checkpoint.identity(fingerprint, dtype_name),
            whisper=checkpoint.tokens,
            tokenizer=checkpoint.tokenizer,
        )

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
        with torch.inference_mode(), _device_errors("an encode batch of", len(jobs), "items"):
            samples = [_samples(job, now.window_samples) for job in jobs]
            encoded = now.model.encode(now.log_mel(now.log_mel.pad(samples)))
            finite = encoded.isfinite().flatten(1).all(1).tolist()
            broken = [key for key, good in zip(keys, finite, strict=True) if not good]
            if broken:
                raise EncodeFailed(
                    f"the encoder's output for {broken} is not finite; check the samples for NaN and infinity"
                )
            now.outputs.add({key: encoded[index].clone() for index, key in enumerate(keys)})

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one decoder step; see the class for what holds when it raises."""
        now = self._opened()
        for sequence in plan.ended:
            self._records.pop(sequence, None)
        fed, started = {part.sequence_id for part in plan.slices}, {start.sequence_id for start in plan.started}
        touched = (fed | started) - (started & self._records.keys())  # one that is started twice is an older step's
        try:
            with torch.inference_mode(), _device_errors("a step of", plan.tokens, "tokens"):
                return self._run(now, plan)
        except BaseException:
            for sequence in touched:
                self._records.pop(sequence, None)
            raise

    def _run(self, now: _Open, plan: StepPlan) -> StepResult:
        for start in plan.started:
            assert start.sequence_id not in self._records, f"sequence {start.sequence_id} is started twice"
            self._records[start.sequence_id] = _Record(start, list(start.token_ids))
        for write in plan.cross_writes:
            assert 0 <= write.slot < now.cross.slots, f"{write} of {now.cross.slots} slots"
            now.cross.write(write.slot, now.model.cross_keys_values(now.outputs.get(write.key)))
        if not plan.slices:
            return StepResult(step_id=plan.step_id, drawn=())
        records = [self._record(now, part) for part in plan.slices]
        now.paged.enter(plan.slices)
        layout = lay_out(plan.slices, now.paged, dtype=now.dtype, device=now.device)
        fed = [token for index in layout.order for token in records[index].feed(plan.slices[index])]
        hidden = now.model.decode(torch.tensor(fed).to(now.device), layout, now.paged, now.cross)
        return StepResult(step_id=plan.step_id, drawn=self._draw(now, plan.slices, records, layout, hidden))

    def _record(self, now: _Open, part: Slice) -> _Record:
        """The record of a possible slice. A bad index must go no further: on CUDA it ends the process's context."""
        record = self._records.get(part.sequence_id)
        assert record is not None, (
            f"sequence {part.sequence_id} is not known: it was never started, or an earlier step of it failed"
        )
        end, known = part.start + part.length, len(record.tokens)
        assert 0 <= part.start < end <= known, (
            f"sequence {part.sequence_id}: slice {part.start}..{end} of {known} tokens"
        )
        assert end <= now.model.shape.positions, f"sequence {part.sequence_id}: position {end - 1} is past the last"
        assert len(part.block_table) * now.paged.page_size >= end, f"sequence {part.sequence_id}: pages are missing"
        assert all(0 <= page < now.paged.pages for page in part.block_table), (
            f"sequence {part.sequence_id}: pages of {now.paged.pages} are unknown"
        )
        assert part.cross_slot is None or 0 <= part.cross_slot < now.cross.slots, (
            f"sequence {part.sequence_id}: unknown slot"
        )
        assert not part.draw or end == known, f"sequence {part.sequence_id}: a draw at {end} with {known} tokens known"
        return record

    def _draw(
        self, now: _Open, slices: tuple[Slice, ...], records: list[_Record], layout: StepLayout, hidden: Tensor
    ) -> tuple[Drawn, ...]:
        """Logits where they are needed, probes, then tokens; the records grow when all has gone well."""
        wanted = _wanted_rows(slices, records, layout)
        if not wanted.rows:
            return tuple(Drawn(token_id=None) for _ in slices)
        logits = now.model.logits(hidden[torch.tensor(wanted.rows, device=now.device)])
        probes = {index: _probe(logits[row], records[index]) for index, row in wanted.probes.items()}
        tokens, logprobs = self._choose(now, logits, wanted.draws, records)
        drawn = []
        for index, record in enumerate(records):
            if index in tokens:
                record.tokens.append(tokens[index])
            drawn.append(Drawn(token_id=tokens.get(index), logprob=logprobs.get(index, 0.0), probe=probes.get(index)))
        return tuple(drawn)

    @staticmethod
    def _choose(
        now: _Open, logits: Tensor, rows: dict[int, int], records: list[_Record]
    ) -> tuple[dict[int, int], dict[int, float]]:
        """Tokens and log-probabilities by slice. ``rows`` are the first of ``logits``, which are written to."""
        if not rows:
            return {}, {}
        draws = []
        for index in rows:
            start = records[index].start
            never = now.masks.mask(start.rules)
            draws.append(
                Draw(generated=records[index].generated, sampling=start.sampling, rules=start.rules, never=never)
            )
        apply_rules(logits[: len(rows)], draws, now.eos_token_ids)
        tokens, logprobs = choose(logits[: len(rows)], draws)
        for index, logprob in zip(rows, logprobs, strict=True):
            if math.isnan(logprob):  # the model's numbers broke down, or the rules leave no token
                raise EngineError(
                    f"sequence {records[index].start.sequence_id} has no token to draw: its logits are not finite, "
                    "or its rules allow none"
                )
        return dict(zip(rows, tokens, strict=True)), dict(zip(rows, logprobs, strict=True))

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops encoder outputs; every key must be resident."""
        self._opened().outputs.free(keys)

    def reset(self) -> None:
        """Forgets sequences and encoder outputs. Pages and slots stay allocated: what is in them counts for nothing."""
        self._records.clear()
        self._opened().outputs.release()

    def memory(self) -> DeviceMemory:
        """Bytes held now, by owner; none before `open` and after `close`."""
        return DeviceMemory(device=self._device, by_owner=self._stack.bytes_by_owner())

    def close(self) -> None:
        """Gives everything back, in reverse order of taking; idempotent; works on a half-open executor."""
        self._open = None
        self._records.clear()
        self._stack.close()

    def _opened(self) -> _Open:
        assert self._open is not None, "the executor is not open"
        return self._open


@frozen(kw_only=True)
class _Wanted:
    """The rows whose logits a step needs, and for each slice (by index) where in them its draw and probe lie."""

    rows: list[int]
    draws: dict[int, int]
    probes: dict[int, int]


def _wanted_rows(slices: tuple[Slice, ...], records: list[_Record], layout: StepLayout) -> _Wanted:
    """Draws first, so that they are one view of the logits; a probe at a drawn row shares it."""
    first = dict(zip(layout.order, layout.starts, strict=True))
    wanted = _Wanted(rows=[], draws={}, probes={})
    for index, part in enumerate(slices):
        if part.draw:
            wanted.draws[index] = len(wanted.rows)
            wanted.rows.append(first[index] + part.length - 1)
    for index, part in enumerate(slices):
        probe = records[index].start.probe
        if probe is not None and part.start <= probe.position < part.start + part.length:
            row = first[index] + probe.position - part.start
            shared = part.draw and probe.position == part.start + part.length - 1
            wanted.probes[index] = wanted.draws[index] if shared else len(wanted.rows)
            if not shared:
                wanted.rows.append(row)
    return wanted


def _probe(logits: Tensor, record: _Record) -> tuple[float, ...]:
    probe = record.start.probe
    assert probe is not None, "only a sequence with a probe is probed"
    return tuple(logits.log_softmax(-1)[list(probe.token_ids)].tolist())


def _samples(job: EncodeJob, limit: int) -> Tensor:
    """A job's payload as a float32 vector on the CPU."""
    samples = torch.as_tensor(job.payload, dtype=torch.float32)
    if samples.ndim != 1 or not 1 <= len(samples) <= limit:
        raise InvalidRequest(
            f"encoder item {job.key!r} has samples of shape {tuple(samples.shape)}; allowed: (1..{limit},)"
        )
    return samples


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidRequest(f"device={name!r}; allowed: 'auto', 'cpu', 'cuda', 'cuda:1' and so on") from None
    if device.type not in {"cpu", "cuda"}:
        raise InvalidRequest(f"device={name!r}; allowed: 'auto', 'cpu', 'cuda', 'cuda:1' and so on")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InvalidRequest(f"device={name!r}, but torch sees {count} CUDA devices; use device='auto' or 'cpu'")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]
