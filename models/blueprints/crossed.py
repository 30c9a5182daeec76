"""The blueprint of encoder-decoders besides Whisper."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from ...core.config import EngineConfig
from ...core.model import ModelDescription
from ..architectures.crossed_checkpoint import CrossedCheckpoint
from ..architectures.items import AudioItems, ItemSettings
from ..checkpoints.files import is_mapped
from ..checkpoints.lengths import lengths_of
from ..checkpoints.loading import load_module
from ..machine.devices import find_kv_dtype
from ..memory.budget import Budget, KVSizes
from ..memory.kv import PagedKV
from ..memory.module import ModuleFiles, TransformerModel
from ..memory.slots import CrossKV
from ..native.crossed import CrossedDecoder
from ..native.library import Library
from ..native.runner import Runner
from ..networks.encoder_alone import EncoderAlone
from ..networks.encoder_decoder import EncoderDecoderNetwork, encode_alike
from ..networks.network import Network
from .blueprint import (
    NATIVE_ROWS,
    Own,
    Parts,
    check_kv_dtype,
    chosen,
    kept_by,
    most_positions,
    not_native,
    tell_way,
)
from .passed import PassedTrials, trial_key
from .trial_crossed import LONGEST, try_out_crossed


@frozen(kw_only=True, eq=False)
class CrossedBlueprint:
    """Of encoder-decoders besides Whisper."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    checkpoint: CrossedCheckpoint
    budget: Budget | None = None  # when the weights are loaded
    fingerprint: str = ""  # of the weights, when they have been read

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return ()

    def files(self) -> ModuleFiles:
        return ModuleFiles(self.checkpoint.folder)

    def load(self, files: ModuleFiles) -> TransformerModel:
        return files.read(self._read, partial(self.place, copied=is_mapped(self.checkpoint.folder)), self._change)

    def place(self, model: Any, *, copied: bool = False) -> TransformerModel:
        whole: TransformerModel = model
        return whole.to(self.device, copied=copied)

    def _read(self) -> nn.Module:
        loader, folder = self.checkpoint.family.loader, self.checkpoint.folder
        if not self.config.decodes:
            return load_module(loader, folder, self.dtype, without=_decoder_of)
        module = load_module(loader, folder, self.dtype)
        _set_apart(module)
        return module

    def _change(self, module: nn.Module) -> None:
        """Puts the decoder's weights in the order of the native library where that computes it."""
        decoder = self._native_decoder(module)
        check_kv_dtype(self.config, self.dtype, decoder if isinstance(decoder, str) else None)
        if isinstance(decoder, CrossedDecoder):
            decoder.pack()

    def not_native(self) -> str | None:
        """Why torch computes the model, as far as it is known before the weights; ``None``: the library may."""
        return not_native(self.device, self.dtype) if self.config.decodes else "it has no decoder"

    def _native_decoder(self, module: nn.Module) -> CrossedDecoder | str:
        """The decoder that the native library computes, or why it does not."""
        if why_not := self.not_native():
            return why_not
        decoder = CrossedDecoder(module)
        return decoder.unknown() or decoder

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are held in."""
        return find_kv_dtype(self.config.kv_dtype, self.dtype)

    @property
    def sizes(self) -> KVSizes:
        shape, config = self.checkpoint.shape, self.config
        position = shape.layers * 2 * shape.kv_heads * shape.head_dim * self.kv_dtype.itemsize
        sizes = KVSizes(
            page=position * config.page_size,
            slot=position * shape.embeddings,
            positions=most_positions(config, shape.positions),
            page_size=config.page_size,
        )
        return kept_by(config, sizes)

    def take(self, own: Own, model: Any) -> Parts:
        shape = self.checkpoint.shape
        if not self.config.decodes:
            encode = partial(encode_alike, self.checkpoint.family, model)
            alone = EncoderAlone(positions=shape.positions, encode=encode)
            return Parts(network=alone, model=model, log_mel=None, paged=None, cross=None)
        paged = own("self_kv", self._allocate_pages())
        cross = own("cross_kv", self._allocate_slots())
        network = EncoderDecoderNetwork(
            model=model,
            family=self.checkpoint.family,
            paged=paged,
            cross=cross,
            positions=shape.positions,
            hidden=shape.hidden,
            device=self.device,
        )
        network.attach()
        return Parts(network=network, model=model, log_mel=None, paged=paged, cross=cross)

    def hasten(self, network: Network, own: Own) -> Network:
        if not isinstance(network, EncoderDecoderNetwork):
            return network
        decoder = self._native_decoder(network.model.module)
        why_not = decoder if isinstance(decoder, str) else None
        tell_way(self.checkpoint.architecture, why_not, torch.get_num_threads())
        if isinstance(decoder, str):
            return network
        return evolve(network, native=own("native", self._open_native(decoder, network.paged, network.cross)))

    def _open_native(self, decoder: CrossedDecoder, paged: PagedKV, cross: CrossKV) -> Runner:
        library = Library.load()
        assert library is not None, "a decoder was packed without the library"
        (pages,), (slots,) = paged.tensors(), cross.tensors()
        positions = max(LONGEST, most_positions(self.config, self.checkpoint.shape.positions))  # a trial is as long
        distances = self.checkpoint.family.distances(decoder.module, positions)
        return Runner.open(
            library,
            decoder.program(positions, distances),
            pages,
            slots,
            rows=NATIVE_ROWS,
            positions=positions,
            threads=torch.get_num_threads(),
        )

    def prove(self, network: Network) -> None:
        if isinstance(network, EncoderAlone):
            return  # an encoder has attention of its own
        assert isinstance(network, EncoderDecoderNetwork), "the blueprint made it"
        decoder = self._native_decoder(network.model.module)
        native = None if isinstance(decoder, str) else partial(self._open_native, decoder)
        computed = (self.kv_dtype, native is not None)
        key = trial_key(self.checkpoint.stamps, self.fingerprint, [self.device], self.dtype, *computed)
        PassedTrials.of_user().once(key, partial(try_out_crossed, network, self.checkpoint, self.dtype, native))

    def _allocate_pages(self) -> PagedKV:
        shape = self.checkpoint.shape
        return PagedKV.allocate(
            layers=shape.layers,
            pages=chosen(self.budget).pages,
            page_size=self.config.page_size,
            heads=shape.kv_heads,
            width=shape.kv_heads * shape.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def _allocate_slots(self) -> CrossKV:
        shape = self.checkpoint.shape
        return CrossKV.allocate(
            layers=shape.layers,
            slots=chosen(self.budget).slots,
            heads=shape.kv_heads,
            embeddings=shape.embeddings,
            head_dim=shape.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def describe(self, name: str) -> ModelDescription:
        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        dtype_name = str(self.dtype).removeprefix("torch.")
        identity = checkpoint.identity(self.fingerprint, dtype_name)
        settings = ItemSettings(
            start_id=checkpoint.start_id,
            identity=identity,
            embedding_bytes=shape.hidden * self.dtype.itemsize,
            most_embeddings=shape.embeddings,
        )
        preparer = checkpoint.family.preparer(checkpoint.folder, checkpoint.tokenizer, checkpoint.config, settings)
        hears = preparer if isinstance(preparer, AudioItems) else None
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
            encoder_bytes=shape.embeddings * settings.embedding_bytes,
            sampling_rate=0 if hears is None else hears.sampling_rate,
            window_samples=0 if hears is None else hears.most_samples,
            processor_identity=identity,
            whisper=None,
            tokenizer=checkpoint.tokenizer,
            lengths=lengths_of(checkpoint.tokenizer),
            preparer=preparer,
            generation=checkpoint.rules,
        )


def _decoder_of(module: Any) -> list[nn.Module]:
    """The parts beside the encoder, which has token embeddings of its own where it reads any."""
    return [module.get_decoder(), module.get_output_embeddings(), module.get_input_embeddings()]


def _set_apart(module: Any) -> None:
    """Gives the decoder a configuration of its own. In some models it shares the encoder's, whose attention would
    become ours too."""
    decoder = module.get_decoder()
    shared, own = decoder.config, copy.deepcopy(decoder.config)
    for part in decoder.modules():
        if getattr(part, "config", None) is shared:
            part.config = own
