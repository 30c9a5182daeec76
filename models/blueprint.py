"""`Blueprint`: what is found out once about a model and its device, and what is built from it."""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen

from ..core.config import EngineConfig
from ..core.errors import InvalidRequest
from ..core.model import ModelDescription
from .checkpoint import Checkpoint, WeightFiles, read_checkpoint, resolve
from .kv import CrossKV, PagedKV
from .whisper import WhisperModel, WhisperShape

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CROSS_KV_LIMIT = 2 << 30  # bytes, where the configuration leaves the size to us


@frozen(kw_only=True)
class Budget:
    """How many pages and slots the configured bytes are."""

    pages: int  # of sequences; one more of zeros is allocated
    slots: int

    @classmethod
    def of(cls, config: EngineConfig, shape: WhisperShape, dtype: torch.dtype) -> Budget:
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
class Blueprint:
    """What `TorchExecutor.open` finds out once, and builds from; so does `TorchExecutor.wake`. No tensors."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    checkpoint: Checkpoint
    budget: Budget
    fingerprint: str = ""  # of the weights, when they have been read

    @classmethod
    def draw(cls, model: str | Path, config: EngineConfig) -> Blueprint:
        device = find_device(config.device)
        dtype = find_dtype(config.dtype, device)
        checkpoint = read_checkpoint(resolve(model))
        budget = Budget.of(config, checkpoint.shape, dtype)
        return cls(config=config, device=device, dtype=dtype, checkpoint=checkpoint, budget=budget)

    def load(self, weights: WeightFiles) -> WhisperModel:
        checkpoint = self.checkpoint
        return WhisperModel.load(
            weights,
            checkpoint.shape,
            encoder_inner=checkpoint.encoder_inner,
            decoder_inner=checkpoint.decoder_inner,
            activation=checkpoint.activation,
            tied=checkpoint.tied,
            device=self.device,
            dtype=self.dtype,
        )

    def allocate_pages(self) -> PagedKV:
        shape = self.checkpoint.shape
        return PagedKV.allocate(
            layers=shape.decoder_layers,
            pages=self.budget.pages,
            page_size=self.config.page_size,
            heads=shape.decoder_heads,
            width=shape.width,
            dtype=self.dtype,
            device=self.device,
        )

    def allocate_slots(self) -> CrossKV:
        shape = self.checkpoint.shape
        return CrossKV.allocate(
            layers=shape.decoder_layers,
            slots=self.budget.slots,
            heads=shape.decoder_heads,
            embeddings=shape.embeddings,
            width=shape.width,
            dtype=self.dtype,
            device=self.device,
        )

    def describe(self, name: str) -> ModelDescription:
        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        dtype_name = str(self.dtype).removeprefix("torch.")
        return ModelDescription(
            name=name,
            architecture=checkpoint.architecture,
            device=str(self.device),
            dtype=dtype_name,
            vocabulary_size=shape.vocabulary,
            max_positions=shape.positions,
            eos_token_ids=checkpoint.eos_token_ids,
            suppress_token_ids=checkpoint.suppress_token_ids,
            begin_suppress_token_ids=checkpoint.begin_suppress_token_ids,
            page_size=self.config.page_size,
            pages=self.budget.pages,
            cross_slots=self.budget.slots,
            encoder_embeddings=shape.embeddings,
            encoder_bytes=shape.embeddings * shape.width * self.dtype.itemsize,
            sampling_rate=checkpoint.features.sampling_rate,
            window_samples=checkpoint.features.window_samples,
            processor_identity=checkpoint.identity(self.fingerprint, dtype_name),
            whisper=checkpoint.tokens,
            tokenizer=checkpoint.tokenizer,
        )


def find_device(name: str) -> torch.device:
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


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]
