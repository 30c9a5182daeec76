"""The blueprint of Whisper."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen

from ...core.config import EngineConfig
from ...core.model import ModelDescription
from ..checkpoints.lengths import lengths_of
from ..checkpoints.whisper import Checkpoint, WeightFiles
from ..machine.devices import find_kv_dtype
from ..memory.budget import Budget, KVSizes
from ..memory.kv import PagedKV
from ..memory.slots import CrossKV
from ..native.library import Library
from ..native.runner import Runner
from ..networks.aligner import WhisperAligner
from ..networks.encoder_alone import EncoderAlone
from ..networks.features import LogMel
from ..networks.network import Network, WhisperNetwork, encode_windows
from ..networks.whisper import WhisperModel
from ..networks.whisper_program import unknown
from .blueprint import NATIVE_ROWS, Own, Parts, chosen, kept_by, most_positions, not_native, tell_way


@frozen(kw_only=True, eq=False)
class WhisperBlueprint:
    """Of Whisper."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    checkpoint: Checkpoint
    budget: Budget | None = None  # when the weights are loaded
    fingerprint: str = ""  # of the weights, when they have been read

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return ()

    def place(self, model: Any, *, copied: bool = False) -> WhisperModel:
        assert not copied, "weights are copied when they are read"
        placed: WhisperModel = model.to(self.device)
        return placed

    def files(self) -> WeightFiles:
        return WeightFiles.open(self.checkpoint.folder)

    def load(self, files: WeightFiles) -> WhisperModel:
        checkpoint = self.checkpoint
        return WhisperModel.load(
            files,
            checkpoint.shape,
            encoder_inner=checkpoint.encoder_inner,
            decoder_inner=checkpoint.decoder_inner,
            activation=checkpoint.activation,
            tied=checkpoint.tied,
            device=self.device,
            dtype=self.dtype,
            int8=self.config.quantization is not None,
            decodes=self.config.decodes,
            native=self.not_native() is None,
        )

    def not_native(self) -> str | None:
        """Why torch computes the model; ``None``: the native library does."""
        return not_native(self.device, self.dtype) or unknown(self.checkpoint.shape, self.checkpoint.activation)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are held in."""
        return find_kv_dtype(self.config.kv_dtype, self.dtype)

    @property
    def sizes(self) -> KVSizes:
        shape, config = self.checkpoint.shape, self.config
        position = shape.decoder_layers * 2 * shape.width * self.kv_dtype.itemsize
        sizes = KVSizes(
            page=position * config.page_size,
            slot=position * shape.embeddings,
            positions=most_positions(config, shape.positions),
            page_size=config.page_size,
        )
        return kept_by(config, sizes)

    def take(self, own: Own, model: Any) -> Parts:
        log_mel = own("features", LogMel.build(self.checkpoint.features, self.device))
        why_not = self.not_native()
        tell_way(self.checkpoint.architecture, why_not, torch.get_num_threads())
        if not self.config.decodes:
            runner = own("native", self._open_encoder(model)) if why_not is None else None
            encode = partial(encode_windows, model, log_mel, runner=runner)
            alone = EncoderAlone(positions=self.checkpoint.shape.positions, encode=encode)
            return Parts(network=alone, model=model, log_mel=log_mel, paged=None, cross=None)
        paged = own("self_kv", self._allocate_pages())
        cross = own("cross_kv", self._allocate_slots())
        network = WhisperNetwork(
            model=model,
            log_mel=log_mel,
            paged=paged,
            cross=cross,
            device=self.device,
        )
        if why_not is None:
            network = self._native(own, network)
        aligner = WhisperAligner(network=network, settings=self.checkpoint.alignment)
        return Parts(network=network, model=model, log_mel=log_mel, paged=paged, cross=cross, aligner=aligner)

    def _open_encoder(self, model: WhisperModel) -> Runner:
        library, rows, threads = Library.load(), self.checkpoint.shape.embeddings, torch.get_num_threads()
        assert library is not None, "an encoder was packed without the library"
        return Runner.open(library, model.encoder_program(), None, rows=rows, positions=rows, threads=threads)

    def _native(self, own: Own, network: WhisperNetwork) -> WhisperNetwork:
        encoder = own("native", self._open_encoder(network.model))
        library, written = Library.load(), network.model.decoder_program()
        assert library is not None, "a decoder was packed without the library"
        (pages,), (slots,) = network.paged.tensors(), network.cross.tensors()
        decoder = Runner.open(
            library,
            written.program,
            pages,
            slots,
            rows=NATIVE_ROWS,
            positions=self.checkpoint.shape.positions,
            threads=torch.get_num_threads(),
        )
        return evolve(network, native=own("native", decoder), encoder=encoder, queries=written.queries)

    def hasten(self, network: Network, own: Own) -> Network:  # noqa: ARG002
        return network

    def prove(self, network: Network) -> None:
        """Whisper is computed by code of our own."""

    def _allocate_pages(self) -> PagedKV:
        shape = self.checkpoint.shape
        return PagedKV.allocate(
            layers=shape.decoder_layers,
            pages=chosen(self.budget).pages,
            page_size=self.config.page_size,
            heads=shape.decoder_heads,
            width=shape.width,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def _allocate_slots(self) -> CrossKV:
        shape = self.checkpoint.shape
        return CrossKV.allocate(
            layers=shape.decoder_layers,
            slots=chosen(self.budget).slots,
            heads=shape.decoder_heads,
            embeddings=shape.embeddings,
            head_dim=shape.width // shape.decoder_heads,
            dtype=self.kv_dtype,
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
            max_positions=most_positions(self.config, shape.positions),
            eos_token_ids=checkpoint.eos_token_ids,
            suppress_token_ids=checkpoint.suppress_token_ids,
            begin_suppress_token_ids=checkpoint.begin_suppress_token_ids,
            page_size=self.config.page_size,
            pages=chosen(self.budget).pages,
            cross_slots=chosen(self.budget).slots,
            encoder_embeddings=shape.embeddings,
            encoder_bytes=shape.embeddings * shape.width * self.dtype.itemsize,
            sampling_rate=checkpoint.features.sampling_rate,
            window_samples=checkpoint.features.window_samples,
            processor_identity=checkpoint.identity(self.fingerprint, f"{dtype_name}, {self.config.quantization}"),
            whisper=checkpoint.tokens,
            alignment_fault=checkpoint.alignment.fault,
            tokenizer=checkpoint.tokenizer,
            lengths=lengths_of(checkpoint.tokenizer),
        )
