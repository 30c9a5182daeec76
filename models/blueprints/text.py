"""The blueprint of decoder-only and pooling models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from ...core.config import EngineConfig
from ...core.errors import UnsupportedModel
from ...core.model import Kind, ModelDescription
from ..architectures.prompts import MediaPreparer, TextPreparer
from ..architectures.text import TextCheckpoint
from ..checkpoints.files import is_mapped
from ..checkpoints.lengths import lengths_of
from ..checkpoints.loading import load_module
from ..checkpoints.parts import Find
from ..launch.compiled import CompiledLayers
from ..launch.graphs import GraphManager, find_recorder
from ..launch.pipeline import Buffers, Pipeline, Places, Stage, StagedKV
from ..linear.modules import quantize_modules
from ..linear.stored import adopt_quantized
from ..machine.devices import find_kv_dtype
from ..memory.budget import Budget, KVSizes
from ..memory.kv import PagedKV
from ..memory.module import ModuleFiles, TransformerModel
from ..native.decoders import Decoder
from ..native.library import Library
from ..native.runner import Runner
from ..networks.causal import CausalDecode, CausalNetwork, encode_together
from ..networks.encoder import EncoderNetwork
from ..networks.encoder_alone import EncoderAlone
from ..networks.network import Network
from .blueprint import (
    NATIVE_ROWS,
    Own,
    Parts,
    check_kv_dtype,
    chosen,
    kept_by,
    most_positions,
    name_devices,
    not_native,
    tell_way,
)
from .passed import PassedTrials, trial_key
from .trial import LONGEST, try_out, try_out_encoder


@frozen(kw_only=True, eq=False)
class TextBlueprint:
    """Of decoder-only and pooling models."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    checkpoint: TextCheckpoint
    budget: Budget | None = None  # when the weights are loaded
    stages: tuple[Stage, ...] = ()  # where the layers are, if on several devices
    fingerprint: str = ""  # of the weights, when they have been read

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(stage.device for stage in self.stages)

    def files(self) -> ModuleFiles:
        return ModuleFiles(self.checkpoint.folder)

    def load(self, files: ModuleFiles) -> TransformerModel:
        return files.read(self._read, partial(self.place, copied=is_mapped(self.checkpoint.folder)), self._change)

    def place(self, model: Any, *, copied: bool = False) -> TransformerModel:
        whole: TransformerModel = model
        if not self.stages:
            return whole.to(self.device, copied=copied)
        return whole.placed(self._places(whole).device, copied=copied)

    def _places(self, model: TransformerModel) -> Places:
        family = self.checkpoint.family
        language = model.module if family is None else family.text(model.module)
        return Places.find(model.module, language, self.stages)

    def _read(self) -> nn.Module:
        checkpoint = self.checkpoint
        if checkpoint.family is not None:
            return checkpoint.family.load(checkpoint.folder, self.dtype, without=self._left_out())
        module = load_module(
            checkpoint.loader, checkpoint.folder, self.dtype, spare="pooler", quantized=checkpoint.quantized
        )
        others = adopt_quantized(module, self.dtype) if checkpoint.quantized else []
        if others:
            raise UnsupportedModel(
                f"{checkpoint.folder} has layers that are quantized in another way ({', '.join(others[:3])}); allowed: "
                "int8, symmetric, with one scale for each output"
            )
        return module

    def _change(self, module: nn.Module) -> None:
        """Quantizes the decoder's weights if it is to be, and puts them in the order of the native library where that
        computes the model."""
        int8 = self.config.quantization is not None and self.config.decodes
        decoder = self._native_decoder(module)
        check_kv_dtype(self.config, self.dtype, decoder if isinstance(decoder, str) else None)
        if isinstance(decoder, Decoder):
            decoder.pack(int8=int8)
        elif int8:
            quantize_modules(module, self._language(module))

    def not_native(self) -> str | None:
        """Why torch computes the model, as far as it is known before the weights; ``None``: the library may."""
        config = self.config
        if not (self.checkpoint.causal and config.decodes):
            return "it is an encoder"
        if self.stages:
            return f"it runs on {name_devices(self)}"
        if find_recorder(config.graphs, self.device) is not None:
            return f"graphs={config.graphs!r}"
        return not_native(self.device, self.dtype)

    def _native_decoder(self, module: nn.Module) -> Decoder | str:
        """The decoder that the native library computes, or why it does not."""
        if why_not := self.not_native():
            return why_not
        decoder = Decoder(module, self._language(module), self.checkpoint.shape.windows)
        return decoder.unknown() or decoder

    def _left_out(self) -> Find | None:
        return None if self.config.decodes else self._decoder_of

    def _decoder_of(self, module: Any) -> list[nn.Module]:
        return [self._language(module), module.get_output_embeddings()]

    def _language(self, module: nn.Module) -> nn.Module:
        """The part of a module that is a decoder of text; the others of it, which encode, are small."""
        family = self.checkpoint.family
        return module if family is None else family.text(module)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are held in."""
        return find_kv_dtype(self.config.kv_dtype, self.dtype)

    @property
    def sizes(self) -> KVSizes:
        shape, config = self.checkpoint.shape, self.config
        position = shape.layers * 2 * shape.kv_heads * shape.head_dim * self.kv_dtype.itemsize
        sizes = KVSizes(
            page=position * config.page_size if self.checkpoint.causal else 0,
            slot=0,
            positions=most_positions(config, shape.positions),
            page_size=config.page_size,
        )
        return kept_by(config, sizes)

    def take(self, own: Own, model: Any) -> Parts:
        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        if not checkpoint.causal:
            pads = (checkpoint.config.pad_token_id, checkpoint.tokenizer.pad_token_id, 0)
            encoder = EncoderNetwork(
                model=model,
                positions=shape.positions,
                pad=next(pad for pad in pads if pad is not None),
                classifies=bool(checkpoint.labels),
                device=self.device,
            )
            return Parts(network=encoder, model=model, log_mel=None, paged=None, cross=None)
        if not self.config.decodes:
            assert checkpoint.family is not None, "a model without an encoder was refused"
            alone = EncoderAlone(positions=shape.positions, encode=partial(encode_together, checkpoint.family, model))
            return Parts(network=alone, model=model, log_mel=None, paged=None, cross=None)
        paged = own("self_kv", self._allocate_pages())
        pipeline = None
        if self.stages:
            buffers = own("pipeline_buffers", self._allocate_buffers())
            pipeline = Pipeline.of(model, self._places(model), buffers)
        network = CausalNetwork(
            model=model,
            paged=paged,
            positions=shape.positions,
            device=self.device,
            generates=checkpoint.kind is not Kind.POOLING,
            classifies=bool(checkpoint.labels),
            family=checkpoint.family,
            pipeline=pipeline,
        )
        network.attach()
        return Parts(network=network, model=model, log_mel=None, paged=paged, cross=None)

    def hasten(self, network: Network, own: Own) -> Network:
        if not isinstance(network, CausalNetwork):
            return network
        decoder = self._native_decoder(network.model.module)
        why_not = decoder if isinstance(decoder, str) else None
        tell_way(self.checkpoint.architecture, why_not, torch.get_num_threads())
        if isinstance(decoder, Decoder):
            assert isinstance(network.paged, PagedKV), "the library reads pages of one device"
            return evolve(network, native=own("native", self._open_native(decoder, network.paged)))
        if self.config.compile:
            compiled = own("compiled", CompiledLayers.of(network.language, self.checkpoint.shape.layers))
            network = evolve(network, compiled=compiled)
            network.attach()
        recorder = find_recorder(self.config.graphs, self.device)
        if recorder is None or not network.generates or not isinstance(network.paged, PagedKV):
            return network  # a graph is of one device
        shape = self.checkpoint.shape
        graphs = GraphManager.allocate(
            decode=CausalDecode.of(network),
            recorder=recorder,
            paged=network.paged,
            max_running=self.config.max_running,
            positions=shape.positions,
            vocabulary=shape.vocabulary,
            device=self.device,
        )
        return evolve(network, graphs=own("graphs", graphs))

    def _open_native(self, decoder: Decoder, paged: PagedKV) -> Runner:
        library = Library.load()
        assert library is not None, "a decoder was packed without the library"
        positions = max(LONGEST, most_positions(self.config, self.checkpoint.shape.positions))  # a trial is as long
        (pages,) = paged.tensors()
        threads = torch.get_num_threads()
        program = decoder.program(positions)
        return Runner.open(library, program, pages, rows=NATIVE_ROWS, positions=positions, threads=threads)

    def prove(self, network: Network) -> None:
        if isinstance(network, EncoderNetwork):
            self._once(partial(try_out_encoder, network, self.checkpoint, self.dtype))
        if self.checkpoint.family is not None:  # transformers imports this for the first image, while everybody waits
            importlib.import_module("torch._dynamo")
        if isinstance(network, CausalNetwork):
            decoder = self._native_decoder(network.model.module)
            native = partial(self._open_native, decoder) if isinstance(decoder, Decoder) else None
            prove = partial(try_out, network, self.checkpoint, self.dtype, native)
            if network.compiled is not None:
                prove()  # which compiles, too
            else:
                self._once(prove, network.native is not None)
            if network.graphs is not None:
                network.graphs.prove()

    def _once(self, prove: Callable[[], None], *computed: object) -> None:
        """Calls ``prove`` unless this model has passed it before; ``computed``: see `trial_key`."""
        devices = self.devices or (self.device,)
        settings = (self.config.quantization, self.kv_dtype, *computed)
        key = trial_key(self.checkpoint.stamps, self.fingerprint, devices, self.dtype, *settings)
        PassedTrials.of_user().once(key, prove)

    def _allocate_buffers(self) -> Buffers:
        rows, hidden = self.config.max_step_tokens, self.checkpoint.shape.hidden
        return Buffers.allocate(self.stages, rows=rows, hidden=hidden, dtype=self.dtype)

    def _allocate_pages(self) -> PagedKV | StagedKV:
        shape = self.checkpoint.shape
        if self.stages:
            return StagedKV.allocate(
                self.stages,
                pages=chosen(self.budget).pages,
                page_size=self.config.page_size,
                heads=shape.kv_heads,
                width=shape.kv_heads * shape.head_dim,
                dtype=self.dtype,
            )
        return PagedKV.allocate(
            layers=shape.layers,
            pages=chosen(self.budget).pages,
            page_size=self.config.page_size,
            heads=shape.kv_heads,
            width=shape.kv_heads * shape.head_dim,
            dtype=self.kv_dtype,
            device=self.device,
        )

    def describe(self, name: str) -> ModelDescription:
        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        dtype_name = str(self.dtype).removeprefix("torch.")
        identity = checkpoint.identity(self.fingerprint, dtype_name)
        preparer = self._preparer(identity)
        return ModelDescription(
            name=name,
            architecture=checkpoint.architecture,
            device=name_devices(self),
            dtype=dtype_name,
            vocabulary_size=shape.vocabulary,
            max_positions=most_positions(self.config, shape.positions),
            eos_token_ids=checkpoint.eos_token_ids,
            suppress_token_ids=checkpoint.suppress_token_ids,
            begin_suppress_token_ids=checkpoint.begin_suppress_token_ids,
            page_size=self.config.page_size,
            pages=chosen(self.budget).pages,
            cross_slots=0,
            encoder_embeddings=0,
            encoder_bytes=0,
            sampling_rate=preparer.sampling_rate if isinstance(preparer, MediaPreparer) else 0,
            window_samples=0,
            processor_identity=identity,
            whisper=None,
            tokenizer=checkpoint.tokenizer,
            lengths=lengths_of(checkpoint.tokenizer),
            kind=checkpoint.kind,
            preparer=preparer,
            whole_prompts=not checkpoint.causal,
            default_pooling=checkpoint.default_pooling,
            labels=checkpoint.labels,
        )

    def _preparer(self, identity: str) -> TextPreparer | MediaPreparer:
        checkpoint = self.checkpoint
        if checkpoint.family is None:
            return TextPreparer.of(checkpoint.tokenizer)
        preparer = checkpoint.family.preparer(
            checkpoint.folder,
            checkpoint.tokenizer,
            checkpoint.config,
            identity=identity,
            hidden=checkpoint.shape.hidden,
            dtype=self.dtype,
        )
        assert isinstance(preparer, MediaPreparer), "families read media"
        return preparer
