"""`Blueprint`: what is found out once about a model and its device, and what is built from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import evolve, frozen
from torch import nn

from ..core.config import EngineConfig
from ..core.errors import InvalidRequest
from ..core.model import Kind, ModelDescription
from .architecture import TextCheckpoint, read_text_checkpoint
from .causal import CausalNetwork
from .checkpoint import Checkpoint, WeightFiles, is_whisper, read_checkpoint, resolve
from .encoder import EncoderNetwork
from .features import LogMel
from .inputs import MediaPreparer, TextPreparer
from .kv import CrossKV, PagedKV
from .loading import load_module
from .network import Network, WhisperNetwork
from .resources import AnyHolder
from .transformer import ModuleFiles, TransformerModel
from .trial import try_out
from .whisper import WhisperModel, WhisperShape

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SELF_KV_LIMIT = 4 << 30  # bytes of a text model's pages, where the configuration leaves the size to us
_CROSS_KV_LIMIT = 2 << 30  # bytes, where the configuration leaves the size to us


AnyModel = WhisperModel | TransformerModel


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
    paged: PagedKV | None
    cross: CrossKV | None


class AnyBlueprint(Protocol):
    """What `TorchExecutor.open` finds out once, and builds from; so does `TorchExecutor.wake`. No tensors."""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""

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

    def take(self, own: Own, load: Callable[[], AnyModel]) -> Parts:
        """Takes all that the model needs on the device, each thing in the name of its owner."""

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
    device = find_device(config.device)
    dtype = find_dtype(config.dtype, device)
    folder = resolve(model)
    if is_whisper(folder):
        checkpoint = read_checkpoint(folder)
        budget = Budget.of(config, checkpoint.shape, dtype)
        return Blueprint(config=config, device=device, dtype=dtype, checkpoint=checkpoint, budget=budget)
    text = read_text_checkpoint(folder)
    pages = _text_pages(config, text, dtype)
    return TextBlueprint(config=config, device=device, dtype=dtype, checkpoint=text, pages=pages)


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
        draft = draw(name, evolve(config, self_kv_bytes=0, cross_kv_bytes=0))
        return cls(main=main, draft=_with_room_of(main, draft))

    @property
    def all(self) -> tuple[Blueprint | TextBlueprint, ...]:
        """One or two."""
        return (self.main,) if self.draft is None else (self.main, self.draft)

    def with_fingerprints(self, fingerprints: Sequence[str]) -> Blueprints:
        """With those of the weights."""
        main, *rest = [evolve(one, fingerprint=new) for one, new in zip(self.all, fingerprints, strict=True)]
        return Blueprints(main=main, draft=rest[0] if rest else None)

    def describe(self, name: str) -> ModelDescription:
        """What the engine must know: an encoder output takes the bytes of both encoders."""
        sizes = [blueprint.describe(name).encoder_bytes for blueprint in self.all]
        return evolve(self.main.describe(name), encoder_bytes=sum(sizes))


def _with_room_of(main: Blueprint | TextBlueprint, draft: Blueprint | TextBlueprint) -> Blueprint | TextBlueprint:
    """The draft with as many pages and slots as the model: page for page, they hold the same tokens.

    Raises:
        InvalidRequest: it cannot guess for this model.
    """
    ours, its = main.checkpoint.shape.vocabulary, draft.checkpoint.shape.vocabulary
    if ours != its:
        raise InvalidRequest(f"the draft model has a vocabulary of {its} tokens; allowed: the model's own, of {ours}")
    if isinstance(main, Blueprint) and isinstance(draft, Blueprint):
        if main.checkpoint.features.window_samples != draft.checkpoint.features.window_samples:
            raise InvalidRequest("the draft model reads windows of another length; allowed: one of the model's own")
        return evolve(draft, budget=main.budget)
    if isinstance(main, TextBlueprint) and isinstance(draft, TextBlueprint):
        if draft.checkpoint.kind is Kind.POOLING or draft.checkpoint.family is not None:
            raise InvalidRequest(
                f"the draft model is {draft.checkpoint.architecture}; allowed: a decoder that reads text and writes it"
            )
        return evolve(draft, pages=main.pages)
    raise InvalidRequest(
        f"the draft model is {draft.checkpoint.architecture}, the model {main.checkpoint.architecture}; allowed: a "
        "smaller Whisper for Whisper, a decoder of text for a decoder"
    )


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
    """Of Whisper."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    checkpoint: Checkpoint
    budget: Budget
    fingerprint: str = ""  # of the weights, when they have been read

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

    def take(self, own: Own, load: Callable[[], Any]) -> Parts:
        log_mel = own("features", LogMel.build(self.checkpoint.features, self.device))
        model: WhisperModel = own("weights", load())
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

    def prove(self, network: Network) -> None:
        """Whisper is computed by code of our own."""

    def _allocate_pages(self) -> PagedKV:
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

    def _allocate_slots(self) -> CrossKV:
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


@frozen(kw_only=True, eq=False)
class TextBlueprint:
    """Of decoder-only and pooling models."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    checkpoint: TextCheckpoint
    pages: int
    fingerprint: str = ""  # of the weights, when they have been read

    def files(self) -> ModuleFiles:
        return ModuleFiles(self.checkpoint.folder)

    def load(self, files: ModuleFiles) -> TransformerModel:
        return files.read(self._read, self.device)

    def _read(self) -> nn.Module:
        checkpoint = self.checkpoint
        if checkpoint.family is not None:
            return checkpoint.family.load(checkpoint.folder, self.dtype)
        return load_module(checkpoint.loader, checkpoint.folder, self.dtype, spare="pooler")

    def take(self, own: Own, load: Callable[[], Any]) -> Parts:
        checkpoint, shape = self.checkpoint, self.checkpoint.shape
        model: TransformerModel = own("weights", load())
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
        network = CausalNetwork(
            model=model,
            paged=paged,
            positions=shape.positions,
            device=self.device,
            generates=checkpoint.kind is not Kind.POOLING,
            classifies=bool(checkpoint.labels),
            family=checkpoint.family,
        )
        network.attach()
        return Parts(network=network, model=model, log_mel=None, paged=paged, cross=None)

    def prove(self, network: Network) -> None:
        if isinstance(network, CausalNetwork):
            try_out(network, self.checkpoint)

    def _allocate_pages(self) -> PagedKV:
        shape = self.checkpoint.shape
        return PagedKV.allocate(
            layers=shape.layers,
            pages=self.pages,
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
            device=str(self.device),
            dtype=dtype_name,
            vocabulary_size=shape.vocabulary,
            max_positions=shape.positions,
            eos_token_ids=checkpoint.eos_token_ids,
            suppress_token_ids=checkpoint.suppress_token_ids,
            begin_suppress_token_ids=checkpoint.begin_suppress_token_ids,
            page_size=self.config.page_size,
            pages=self.pages,
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


def _text_pages(config: EngineConfig, checkpoint: TextCheckpoint, dtype: torch.dtype) -> int:
    """How many pages the configured bytes are; by default enough for ``max_running`` sequences of full length, but no
    more than `_SELF_KV_LIMIT` beyond what one sequence needs.

    Raises `InvalidRequest` where one sequence of full length would not fit.
    """
    shape = checkpoint.shape
    if not checkpoint.causal:
        return 0
    page = shape.layers * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize * config.page_size
    full = -(-shape.positions // config.page_size)
    if not config.self_kv_bytes:
        return max(full, min(config.max_running * full, _SELF_KV_LIMIT // page))
    pages = config.self_kv_bytes // page - 1
    if pages < full:
        raise InvalidRequest(
            f"self_kv_bytes={config.self_kv_bytes}; allowed: {(full + 1) * page} or more, the pages of a sequence of "
            f"{shape.positions} positions and one of zeros, or 0 for {config.max_running} sequences"
        )
    return pages


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
