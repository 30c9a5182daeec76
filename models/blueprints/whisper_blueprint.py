"""The blueprint of Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from ...core.model import ModelDescription
from ..checkpoints.whisper_checkpoint import Checkpoint, WeightFiles
from ..memory.module import TransformerModel
from ..native.crossed_decoder import CrossedDecoder
from ..networks.features import LogMel
from ..networks.whisper_model import load_whisper
from ..networks.whisper_network import WhisperAligner, WhisperNetwork
from ..networks.whisper_program import unknown
from ..speech.whisper_speech import with_whisper
from .blueprint import Blueprint, Own, Parts


@frozen(kw_only=True, eq=False)
class WhisperBlueprint(Blueprint):
    """The blueprint of Whisper. Our own code computes this model, so no comparison is needed."""

    checkpoint: Checkpoint

    @property
    def kv_dtype(self) -> torch.dtype:
        # each token reads all keys and values of its slot, as many bytes in float32 as weights in int8
        int8 = self.config.quantization is not None or self.checkpoint.quantized
        if self.config.kv_dtype == "auto" and int8 and self.not_native() is None:
            return torch.float16
        return super().kv_dtype

    def files(self) -> WeightFiles:
        return WeightFiles.open(self.checkpoint.folder)

    def load(self, files: WeightFiles) -> TransformerModel:
        native = self.not_native() is None
        module = load_whisper(
            files,
            self.checkpoint,
            device=self.device,
            dtype=self.dtype,
            quantization=self.config.quantization,
            native=native,
        )
        model = TransformerModel(module)
        if native:
            model.gather()
        return model

    def not_native(self) -> str | None:
        return super().not_native() or unknown(self.checkpoint.shape, self.checkpoint.activation)

    def take(self, own: Own, model: Any) -> Parts:
        why_not, rows = self.not_native(), self.checkpoint.shape.embeddings
        log_mel = own("features", LogMel.build(self.checkpoint.features, self.device))
        self.log_way(why_not)
        paged = own("self_kv", self.allocate_pages())
        cross = own("cross_kv", self.allocate_slots())
        network = WhisperNetwork(
            model=model,
            log_mel=log_mel,
            positions=self.checkpoint.shape.positions,
            paged=paged,
            cross=cross,
            device=self.device,
        )
        if why_not is None:
            encoder = own("native", self.open_runner(model.module.encoder_program(), rows=rows))
            written = CrossedDecoder(model.module).program(network.positions, apart=True)
            native = own("native", self.open_runner(written, paged, cross))
            network = evolve(network, native=native, encoder=encoder, queries=written.crossing)
        aligner = WhisperAligner(network=network, settings=self.checkpoint.alignment)
        return Parts(network=network, model=model, paged=paged, cross=cross, aligner=aligner)

    @property
    def identity(self) -> str:
        return self.checkpoint.identity(self.fingerprint, f"{self.dtype_name}, {self.config.quantization}")

    def facts(self) -> Mapping[str, Any]:
        checkpoint = self.checkpoint
        return {
            "sampling_rate": checkpoint.features.sampling_rate,
            "window_samples": checkpoint.features.window_samples,
            "alignment_fault": checkpoint.alignment.fault,
        }

    def with_speech(self, description: ModelDescription) -> ModelDescription:
        return evolve(description, **with_whisper(description, self.checkpoint.tokens))
