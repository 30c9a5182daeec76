"""The blueprint of diarizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen
from torch import nn

from ...core.model import Kind
from ..architectures.diarization import DiarizerCheckpoint, diarize_chunk
from ..checkpoints.loading import load_module
from ..linear.modules import quantize_modules
from ..networks.encoder_alone import EncoderAlone
from .blueprint import ModuleBlueprint, Own, Parts


@frozen(kw_only=True, eq=False)
class DiarizerBlueprint(ModuleBlueprint):
    """The blueprint of diarizers. transformers' module computes everything; there are no pages and no slots."""

    checkpoint: DiarizerCheckpoint

    @property
    def kind(self) -> Kind:
        return Kind.DIARIZER

    def read(self) -> nn.Module:
        return load_module(self.checkpoint.architecture, self.checkpoint.folder, self.dtype)

    def not_native(self) -> str | None:
        return "it is an encoder"

    def pack(self, module: nn.Module, decoder: Any) -> None:  # noqa: ARG002
        if self.config.quantization is not None:
            quantize_modules(module, module)

    def take(self, own: Own, model: Any) -> Parts:  # noqa: ARG002
        # one chunk after the other, so that an answer does not depend on other requests
        network = EncoderAlone(
            positions=self.positions, encode=lambda jobs: [diarize_chunk(model.module, job.payload) for job in jobs]
        )
        return Parts(network=network, model=model)

    def facts(self) -> Mapping[str, Any]:
        return {
            "sampling_rate": self.checkpoint.extractor.sampling_rate,
            "whole_prompts": True,
            "diarizer": evolve(self.checkpoint, loaded=self.identity),
        }
