"""The blueprint of encoder-decoders besides Whisper."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen
from torch import nn

from ..architectures.crossed_checkpoint import CrossedCheckpoint
from ..architectures.items import AudioItems
from ..checkpoints.loading import load_module
from ..linear.modules import quantize_modules
from ..linear.rounded import round_matrices
from ..native.crossed_decoder import CrossedDecoder
from ..native.runner import Runner
from ..networks.encoder_decoder import EncoderDecoderNetwork
from ..networks.item_encoder import ItemEncoder
from ..networks.network import Network
from .blueprint import ModuleBlueprint, Own, Parts
from .comparison import LONGEST


@frozen(kw_only=True, eq=False)
class CrossedBlueprint(ModuleBlueprint):
    """The blueprint of encoder-decoders besides Whisper."""

    checkpoint: CrossedCheckpoint

    def read(self) -> nn.Module:
        family, lazily = self.checkpoint.family, self.not_native() is None
        module = load_module(family.loader, self.checkpoint.folder, self.dtype, lazily=lazily)
        _set_apart(module)
        return module

    def find_decoder(self, module: nn.Module) -> CrossedDecoder:
        return CrossedDecoder(module)

    def pack(self, module: nn.Module, decoder: CrossedDecoder | None) -> None:
        int8 = self.config.quantization is not None
        if self.config.quantization == "int4":
            encoder = self.native_speech(module)
            self.check_formats(encoder if isinstance(encoder, str) else None)
            round_matrices(module)
        if decoder is not None:
            decoder.pack(int8=int8)
        if not isinstance(known := self.native_speech(module), str):
            known.pack(self.checkpoint.shape.embeddings, int8=int8)
        if int8:
            part = module if decoder is None else self.checkpoint.family.encoder(module)
            quantize_modules(module, part)  # what is not packed

    def take(self, own: Own, model: Any) -> Parts:
        shape = self.checkpoint.shape
        paged = own("self_kv", self.allocate_pages())
        cross = own("cross_kv", self.allocate_slots())
        network = EncoderDecoderNetwork(
            model=model,
            family=self.checkpoint.family,
            items=ItemEncoder(model=model, family=self.checkpoint.family, alike=True),
            paged=paged,
            cross=cross,
            positions=shape.positions,
            hidden=shape.hidden,
            device=self.device,
        )
        network.attach()
        return Parts(network=network, model=model, paged=paged, cross=cross)

    def open_native(self, decoder: CrossedDecoder, network: EncoderDecoderNetwork) -> Runner:
        positions = max(LONGEST, self.positions)  # a comparison needs LONGEST
        distances = self.checkpoint.family.distances(decoder.module, positions)
        return self.open_runner(decoder.program(positions, distances), network.paged, network.cross)

    def hasten(self, network: Network, own: Own) -> Network:
        network = super().hasten(network, own)
        assert isinstance(network, EncoderDecoderNetwork), "the network of `take`"
        if network.native is not None:
            program, most = CrossedDecoder(network.model.module).crossing(), self.checkpoint.shape.embeddings
            network = evolve(network, crossing=own("native", self.open_runner(program, positions=most)))
        return evolve(network, items=self.hasten_items(network.items, own))

    def prove(self, network: Network) -> None:
        assert isinstance(network, EncoderDecoderNetwork), "the network of `take`"
        self.compare(network)
        self.compare_clips(network.items)

    def facts(self) -> Mapping[str, Any]:
        checkpoint, settings = self.checkpoint, self.items_after(self.checkpoint.start_id)
        preparer = checkpoint.family.preparer(checkpoint.folder, checkpoint.tokenizer, checkpoint.config, settings)
        hears = preparer if isinstance(preparer, AudioItems) else None
        heard = {} if hears is None else {"sampling_rate": hears.sampling_rate, "window_samples": hears.most_samples}
        return {**heard, "preparer": preparer, "generation": checkpoint.rules}


def _set_apart(module: Any) -> None:
    """Gives the decoder its own copy of the configuration. In some models encoder and decoder share one, so our
    attention would be set for the encoder too."""
    decoder = module.get_decoder()
    shared, own = decoder.config, copy.deepcopy(decoder.config)
    for name in own.sub_configs:  # the encoder's, in which transformers would set our attention, with a warning
        setattr(own, name, None)
    for part in decoder.modules():
        if getattr(part, "config", None) is shared:
            part.config = own
