"""The blueprint of CTC models and transducers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from ..architectures.ctc_texts import CtcTexts
from ..architectures.frames_checkpoint import FrameCheckpoint
from ..checkpoints.loading import load_module
from ..linear.modules import quantize_modules
from ..memory.budget import KVSizes
from ..memory.encoder_states import MOST_STATES, EncoderStates
from ..memory.frame_states import MOST_TEXTS, FrameSlots, FrameStates
from ..native.transducers import pack_transducer, transducer_program, unknown_transducer
from ..networks.frame_network import AHEAD, FrameNetwork
from ..networks.item_encoder import ItemEncoder
from ..networks.network import Network
from .blueprint import Blueprint, ModuleBlueprint, Own, Parts


@frozen(kw_only=True, eq=False)
class FrameBlueprint(ModuleBlueprint):
    """The blueprint of CTC models and transducers. A page is the state of one sequence, and a slot one encoder
    output."""

    checkpoint: FrameCheckpoint

    @property
    def sizes(self) -> KVSizes:
        shape = self.checkpoint.shape
        width = self.dtype.itemsize
        return KVSizes(
            page=(2 * shape.layers + 1) * shape.head_dim * width,
            slot=shape.embeddings * shape.hidden * width,
            positions=self.positions,
            page_size=self.positions,
        )

    @property
    def state_bytes(self) -> int:
        held = torch.float32 if Blueprint.not_native(self) is None else self.dtype  # the library's are in float32
        return MOST_STATES * self.checkpoint.family.state_bytes(self.checkpoint.config, held)

    @property
    def texts(self) -> int:
        """The most texts that may go on with another piece of audio."""
        return MOST_TEXTS if self.checkpoint.family.causal else 0

    def read(self) -> nn.Module:
        family, lazily = self.checkpoint.family, Blueprint.not_native(self) is None
        module = load_module(family.loader, self.checkpoint.folder, self.dtype, lazily=lazily)
        for part in module.modules():
            if isinstance(part, nn.LSTM):
                part._flat_weights = []  # a second list of the weights, which nothing here reads
        if self.checkpoint.family.causal:  # the processor says what the encoder sees ahead
            encoder: Any = module.encoder
            encoder.config.default_num_lookahead_tokens = self.checkpoint.family.ahead(self.checkpoint.folder)
        return module

    def not_native(self) -> str | None:
        return "it reads frames"

    def pack(self, module: nn.Module, decoder: Any) -> None:  # noqa: ARG002
        int8, encoder = self.config.quantization is not None, self.native_speech(module)
        if not isinstance(encoder, str):
            encoder.pack(self.checkpoint.shape.embeddings, int8=int8)
        elif int8:
            quantize_modules(module, self.checkpoint.family.encoder(module))
        if self.unknown_transducer(module) is None:
            pack_transducer(module, int8=int8)

    def unknown_transducer(self, module: Any) -> str | None:
        """The reason why the native library does not compute the prediction network; ``None``: it does."""
        return self.not_native_part("its prediction network") or unknown_transducer(module)

    def take(self, own: Own, model: Any) -> Parts:
        family, shape = self.checkpoint.family, self.checkpoint.shape
        encoder = ItemEncoder(
            model=model,
            family=family,
            alike=True,
            states=own("encoder_states", EncoderStates()) if family.causal else None,
        )
        states = FrameStates.allocate(
            layers=shape.layers,
            pages=self.chosen.pages,
            page_size=self.positions,
            width=shape.head_dim,
            dtype=self.dtype,
            device=self.device,
            texts=self.texts,
        )
        slots = FrameSlots.allocate(
            slots=self.chosen.slots,
            frames=shape.embeddings,
            width=shape.hidden,
            dtype=self.dtype,
            device=self.device,
        )
        network = FrameNetwork(
            model=model,
            family=family,
            emissions=self.checkpoint.emissions,
            states=own("self_kv", states),
            slots=own("cross_kv", slots),
            encoder=encoder,
            positions=self.positions,
            vocabulary=shape.vocabulary,
            device=self.device,
        )
        return Parts(network=network, model=model, paged=states, cross=slots)

    def hasten(self, network: Network, own: Own) -> Network:
        assert isinstance(network, FrameNetwork), "the network of `take`"
        module, encoder = network.model.module, self.hasten_items(network.encoder, own)
        why_not = self.unknown_transducer(module)
        self.log_way(why_not)
        if why_not is not None:
            return evolve(network, encoder=encoder)
        runner = self.open_runner(transducer_program(module), rows=AHEAD * self.chosen.pages)
        return evolve(network, encoder=encoder, reader=own("native", runner))

    def prove(self, network: Network) -> None:
        assert isinstance(network, FrameNetwork), "the network of `take`"
        self.compare_clips(network.encoder)

    def facts(self) -> Mapping[str, Any]:
        checkpoint, settings = self.checkpoint, self.items_after(self.checkpoint.emissions.blank)
        preparer = checkpoint.family.preparer(checkpoint.folder, checkpoint.tokenizer, checkpoint.config, settings)
        texts = CtcTexts(preparer=preparer, blank=checkpoint.emissions.blank)
        return {
            "page_size": self.positions,
            "sampling_rate": preparer.sampling_rate,
            "window_samples": preparer.most_samples,
            "preparer": preparer,
            "frame_seconds": preparer.frame_seconds,
            "aligner": None if checkpoint.family.predicts else texts,
        }
