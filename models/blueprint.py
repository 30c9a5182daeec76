"""`Blueprint`: what is found out once about a model and its device, and what is built from it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from attrs import evolve, frozen
from torch import nn

from ..core.config import EngineConfig
from ..core.errors import InvalidRequest
from ..core.model import Kind, ModelDescription
from .architecture import TextCheckpoint, read_text_checkpoint
from .budget import Budget, KVSizes, Room, check_sizes
from .causal import CausalDecode, CausalNetwork
from .checkpoint import Checkpoint, WeightFiles, is_mapped, is_whisper, read_checkpoint, resolve
from .compiled import CompiledLayers
from .encoder import EncoderNetwork
from .features import LogMel
from .graphs import GraphManager, find_recorder
from .inputs import MediaPreparer, TextPreparer
from .kv import CrossKV, PagedKV
from .loading import load_module
from .network import Network, WhisperNetwork
from .pipeline import Buffers, Pipeline, Places, Stage, StagedKV, cut
from .resources import AnyHolder
from .transformer import ModuleFiles, TransformerModel
from .trial import try_out, try_out_encoder
from .whisper import WhisperModel

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

AnyModel = WhisperModel | TransformerModel
_AnyDrawn = TypeVar("_AnyDrawn", "Blueprint", "TextBlueprint")


class Own(Protocol):
    """`ResourceStack.own`."""

    def __call__(self, owner: str, holder: AnyHolder, /) -> AnyHolder:
        """Takes over ``holder``, and returns it."""


@frozen(kw_only=True, eq=False)
class Parts:
    """What an open executor's model is made of, each owned; what a kind of model has not is ``None``."""

    network: Network
    model: AnyModel
    log_mel: LogMel | None
    paged: PagedKV | StagedKV | None
    cross: CrossKV | None


class AnyBlueprint(Protocol):
    """What `TorchExecutor.open` finds out once, and builds from; so does `TorchExecutor.wake`. No tensors."""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of its stages; none where ``device`` is all."""

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""

    @property
    def fingerprint(self) -> str:
        """Of the weights, when they have been read."""

    @property
    def checkpoint(self) -> Checkpoint | TextCheckpoint:
        """What its files say."""

    def files(self) -> WeightFiles | ModuleFiles:
        """Its weights, to be loaded. Raises `CheckpointError` when they cannot be read."""

    def load(self, files: Any) -> AnyModel:
        """The model, with weights of `files`."""

    def place(self, model: Any, *, copied: bool = False) -> AnyModel:
        """``model`` on the device, or the devices: tensors that are there already are shared, unless they are to be
        ``copied``."""

    @property
    def sizes(self) -> KVSizes:
        """The units of its keys and values."""

    def take(self, own: Own, model: Any) -> Parts:
        """Takes all that the loaded ``model`` needs beside its weights, each thing in the name of its owner."""

    def hasten(self, network: Network, own: Own) -> Network:
        """``network`` with what makes it faster and refers to all the rest, so is taken after it and released
        before."""

    def prove(self, network: Network) -> None:
        """Raises `UnsupportedModel` where the loaded model is not what was thought."""

    def describe(self, name: str) -> ModelDescription:
        """What the engine must know."""


def draw(model: str | Path, config: EngineConfig) -> Blueprint | TextBlueprint:
    """The blueprint of the checkpoint ``model``, a folder or hub id.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
        UnsupportedModel: of an architecture that the engine cannot run.
        InvalidRequest: a device that is not there, or sizes too small for one sequence.
    """
    devices = find_devices(config.devices)
    device = devices[0] if devices else find_device(config.device)
    dtype = find_dtype(config.dtype, device)
    folder = resolve(model)
    if is_whisper(folder):
        _refuse(config, "Whisper")
        checkpoint = read_checkpoint(folder)
        return _checked(Blueprint(config=config, device=device, dtype=dtype, checkpoint=checkpoint))
    text = read_text_checkpoint(folder)
    if not text.causal:
        _refuse(config, text.architecture)
    stages = cut(text.shape.layers, devices) if devices else ()
    return _checked(TextBlueprint(config=config, device=device, dtype=dtype, checkpoint=text, stages=stages))


def _checked(blueprint: _AnyDrawn) -> _AnyDrawn:
    """Raises `InvalidRequest` for sizes too small for one sequence, before anything is loaded."""
    check_sizes(blueprint.config, blueprint.sizes)
    return blueprint


def _refuse(config: EngineConfig, kind: str) -> None:
    if config.compile:
        raise InvalidRequest(f"compile=True of {kind}; allowed: decoder-only models. Use compile=False")
    if config.devices:
        raise InvalidRequest(
            f"devices={config.devices!r} of {kind}; allowed: decoder-only models. Use device={config.devices[0]!r}"
        )


@frozen(kw_only=True, eq=False)
class Blueprints:
    """Of the model, and of a smaller one that guesses for it if the configuration has one."""

    main: Blueprint | TextBlueprint
    draft: Blueprint | TextBlueprint | None

    @classmethod
    def draw(cls, model: str | Path, config: EngineConfig) -> Blueprints:
        """As `draw`.

        Raises:
            InvalidRequest: a draft model of another kind or vocabulary, too.
        """
        main = draw(model, config)
        name = None if config.speculation is None else config.speculation.draft
        if name is None:
            return cls(main=main, draft=None)
        device = config.devices[-1] if config.devices else config.device  # where the model's logits are
        draft = draw(name, evolve(config, device=device, devices=(), self_kv_bytes=0, cross_kv_bytes=0))
        _check_draft(main, draft)
        return cls(main=main, draft=draft)

    @property
    def all(self) -> tuple[Blueprint | TextBlueprint, ...]:
        """One or two."""
        return (self.main,) if self.draft is None else (self.main, self.draft)

    def sized(self, weights: int) -> Blueprints:
        """With as many pages and slots as there is room for beside the ``weights`` (bytes), which are loaded; the draft
        model has as many as the model: page for page, they hold the same tokens. What was chosen once stays.

        Raises:
            DeviceOutOfMemory: not even one sequence has room.
        """
        if self.main.budget is not None:
            return self
        main, draft = self.main, self.draft
        together = main.sizes if draft is None else main.sizes.beside(draft.sizes)
        budget = Budget.choose(main.config, main.sizes, together, Room.of(main.devices or (main.device,), weights))
        placed = None if draft is None else evolve(draft, budget=budget)
        return Blueprints(main=evolve(main, budget=budget), draft=placed)

    def with_fingerprints(self, fingerprints: Sequence[str]) -> Blueprints:
        """With those of the weights."""
        main, *rest = [evolve(one, fingerprint=new) for one, new in zip(self.all, fingerprints, strict=True)]
        return Blueprints(main=main, draft=rest[0] if rest else None)

    def describe(self, name: str) -> ModelDescription:
        """What the engine must know: an encoder output takes the bytes of both encoders."""
        sizes = [blueprint.describe(name).encoder_bytes for blueprint in self.all]
        return evolve(self.main.describe(name), encoder_bytes=sum(sizes))


def _check_draft(main: Blueprint | TextBlueprint, draft: Blueprint | TextBlueprint) -> None:
    """Raises `InvalidRequest` where the draft cannot guess for this model."""
    ours, its = main.checkpoint.shape.vocabulary, draft.checkpoint.shape.vocabulary
    if ours != its:
        raise InvalidRequest(f"the draft model has a vocabulary of {its} tokens; allowed: the model's own, of {ours}")
    if isinstance(main, Blueprint) and isinstance(draft, Blueprint):
        if main.checkpoint.features.window_samples != draft.checkpoint.features.window_samples:
            raise InvalidRequest("the draft model reads windows of another length; allowed: one of the model's own")
        return
    if isinstance(main, TextBlueprint) and isinstance(draft, TextBlueprint):
        if draft.checkpoint.kind is Kind.POOLING or draft.checkpoint.family is not None:
            raise InvalidRequest(
                f"the draft model is {draft.checkpoint.architecture}; allowed: a decoder that reads text and writes it"
            )
        return
    raise InvalidRequest(
        f"the draft model is {draft.checkpoint.architecture}, the model {main.checkpoint.architecture}; allowed: a "
        "smaller Whisper for Whisper, a decoder of text for a decoder"
    )


@frozen(kw_only=True, eq=False)
class Blueprint:
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
        )

    @property
    def sizes(self) -> KVSizes:
        shape, config = self.checkpoint.shape, self.config
        position = shape.decoder_layers * 2 * shape.width * self.dtype.itemsize
        return KVSizes(
            page=position * config.page_size,
            slot=position * shape.embeddings,
            positions=_most_positions(config, shape.positions),
            page_size=config.page_size,
        )

    def take(self, own: Own, model: Any) -> Parts:
        log_mel = own("features", LogMel.build(self.checkpoint.features, self.device))
        paged = own("self_kv", self._allocate_pages())
        cross = own("cross_kv", self._allocate_slots())
        network = WhisperNetwork(
            model=model,
            log_mel=log_mel,
            paged=paged,
            cross=cross,
            window_samples=self.checkpoint.features.window_samples,
            dtype=self.dtype,
            device=self.device,
        )
        return Parts(network=network, model=model, log_mel=log_mel, paged=paged, cross=cross)

    def hasten(self, network: Network, own: Own) -> Network:  # noqa: ARG002
        return network

    def prove(self, network: Network) -> None:
        """Whisper is computed by code of our own."""

    def _allocate_pages(self) -> PagedKV:
        shape = self.checkpoint.shape
        return PagedKV.allocate(
            layers=shape.decoder_layers,
            pages=_chosen(self.budget).pages,
            page_size=self.config.page_size,
            heads=shape.decoder_heads,
            width=shape.width,
            dtype=self.dtype,
            device=self.device,
        )

    def _allocate_slots(self) -> CrossKV:
        shape = self.checkpoint.shape
        return CrossKV.allocate(
            layers=shape.decoder_layers,
            slots=_chosen(self.budget).slots,
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
            max_positions=_most_positions(self.config, shape.positions),
            eos_token_ids=checkpoint.eos_token_ids,
            suppress_token_ids=checkpoint.suppress_token_ids,
            begin_suppress_token_ids=checkpoint.begin_suppress_token_ids,
            page_size=self.config.page_size,
            pages=_chosen(self.budget).pages,
            cross_slots=_chosen(self.budget).slots,
            encoder_embeddings=shape.embeddings,
            encoder_bytes=shape.embeddings * shape.width * self.dtype.itemsize,
            sampling_rate=checkpoint.features.sampling_rate,
            window_samples=checkpoint.features.window_samples,
            processor_identity=checkpoint.identity(self.fingerprint, dtype_name),
            whisper=checkpoint.tokens,
            tokenizer=checkpoint.tokenizer,
        )


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
        return files.read(self._read, partial(self.place, copied=is_mapped(self.checkpoint.folder)))

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
            return checkpoint.family.load(checkpoint.folder, self.dtype)
        return load_module(checkpoint.loader, checkpoint.folder, self.dtype, spare="pooler")

    @property
    def sizes(self) -> KVSizes:
        shape, config = self.checkpoint.shape, self.config
        position = shape.layers * 2 * shape.kv_heads * shape.head_dim * self.dtype.itemsize
        return KVSizes(
            page=position * config.page_size if self.checkpoint.causal else 0,
            slot=0,
            positions=_most_positions(config, shape.positions),
            page_size=config.page_size,
        )

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

    def prove(self, network: Network) -> None:
        if isinstance(network, EncoderNetwork):
            try_out_encoder(network, self.checkpoint, self.dtype)
        if isinstance(network, CausalNetwork):
            if network.family is not None:  # transformers imports this for the first image, while everybody waits
                importlib.import_module("torch._dynamo")
            try_out(network, self.checkpoint)
            if network.graphs is not None:
                network.graphs.prove()

    def _allocate_buffers(self) -> Buffers:
        rows, hidden = self.config.max_step_tokens, self.checkpoint.shape.hidden
        return Buffers.allocate(self.stages, rows=rows, hidden=hidden, dtype=self.dtype)

    def _allocate_pages(self) -> PagedKV | StagedKV:
        shape = self.checkpoint.shape
        if self.stages:
            return StagedKV.allocate(
                self.stages,
                pages=_chosen(self.budget).pages,
                page_size=self.config.page_size,
                heads=shape.kv_heads,
                width=shape.kv_heads * shape.head_dim,
                dtype=self.dtype,
            )
        return PagedKV.allocate(
            layers=shape.layers,
            pages=_chosen(self.budget).pages,
            page_size=self.config.page_size,
            heads=shape.kv_heads,
            width=shape.kv_heads * shape.head_dim,
            dtype=self.dtype,
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
            max_positions=_most_positions(self.config, shape.positions),
            eos_token_ids=checkpoint.eos_token_ids,
            suppress_token_ids=checkpoint.suppress_token_ids,
            begin_suppress_token_ids=checkpoint.begin_suppress_token_ids,
            page_size=self.config.page_size,
            pages=_chosen(self.budget).pages,
            cross_slots=0,
            encoder_embeddings=0,
            encoder_bytes=0,
            sampling_rate=preparer.sampling_rate if isinstance(preparer, MediaPreparer) else 0,
            window_samples=0,
            processor_identity=identity,
            whisper=None,
            tokenizer=checkpoint.tokenizer,
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


def _chosen(budget: Budget | None) -> Budget:
    assert budget is not None, "pages and slots are counted when the weights are loaded"
    return budget


def _most_positions(config: EngineConfig, own: int) -> int:
    """What a sequence may have, of a model with ``own`` positions."""
    return min(own, config.max_positions or own)


def name_devices(blueprint: AnyBlueprint) -> str:
    """As in `ModelDescription.device`: ``"cuda:0"``, or ``"cuda:0, cuda:1"``."""
    return ", ".join(map(str, blueprint.devices or (blueprint.device,)))


def find_devices(names: tuple[str, ...]) -> tuple[torch.device, ...]:
    """Of ``EngineConfig.devices``. Raises `InvalidRequest` where one is not there, or they are of different kinds."""
    devices = tuple(map(find_device, names))
    if len({device.type for device in devices}) > 1:
        raise InvalidRequest(f"devices={names!r}; allowed: devices of one kind, as ('cuda:0', 'cuda:1')")
    return devices


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidRequest(f"device={name!r}; allowed: 'auto', 'cpu', 'cuda', 'cuda:1' and so on") from None
    if device.type == "cpu":
        return torch.device("cpu")  # "cpu:0" is the same, but compares as another
    if device.type != "cuda":
        raise InvalidRequest(f"device={name!r}; allowed: 'auto', 'cpu', 'cuda', 'cuda:1' and so on")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise InvalidRequest(f"device={name!r}, but torch sees {count} CUDA devices; use device='auto' or 'cpu'")
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]
