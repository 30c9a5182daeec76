"""`read_blueprint` chooses the blueprint of a checkpoint; `Blueprints` holds the blueprints of the model and of its
draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from attrs import evolve, frozen

from ...core.config import EngineConfig, Speculation
from ...core.errors import InvalidRequest
from ...core.model import Kind, ModelDescription
from ..architectures.conversations import replace_template
from ..architectures.crossed_checkpoint import is_crossed, read_crossed_checkpoint
from ..architectures.diarization import read_diarizer_checkpoint
from ..architectures.frames_checkpoint import read_frame_checkpoint
from ..architectures.text import read_text_checkpoint
from ..checkpoints.files import resolve
from ..checkpoints.turns import TURNS
from ..checkpoints.whisper import is_whisper, read_checkpoint
from ..machine.devices import find_device, find_dtype
from ..memory.budget import Available, Budget, check_sizes
from ..native.library import Library
from .crossed import CrossedBlueprint
from .diarizer import DiarizerBlueprint
from .frames import FrameBlueprint
from .text import TextBlueprint
from .whisper import WhisperBlueprint

AnyBlueprint = WhisperBlueprint | CrossedBlueprint | FrameBlueprint | DiarizerBlueprint | TextBlueprint
_AnyBlueprint = TypeVar(
    "_AnyBlueprint", "WhisperBlueprint", "CrossedBlueprint", "FrameBlueprint", "DiarizerBlueprint", "TextBlueprint"
)


def read_blueprint(model: str | Path, config: EngineConfig) -> AnyBlueprint:
    """Returns the blueprint of the checkpoint ``model``, a folder or hub id.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
        UnsupportedModel: the engine cannot run the architecture.
        InvalidRequest: the device does not exist, or the sizes are too small for one sequence.
    """
    folder = resolve(model)
    with TURNS.turn():  # transformers reads configurations, tokenizers and processors
        return _read(folder, config)


def _read(folder: Path, config: EngineConfig) -> AnyBlueprint:
    device = find_device(config.device)
    int8 = config.quantization is not None
    if int8 and device.type != "cpu":
        raise InvalidRequest(f"quantization={config.quantization!r} on {device}; allowed: device='cpu'")
    dtype = find_dtype(config.dtype, device, int8=int8 and Library.load() is None)  # the library computes in float32
    if is_whisper(folder):
        _refuse(config, "Whisper", quantizes=True)
        checkpoint = read_checkpoint(folder)
        return _checked(WhisperBlueprint(config=config, device=device, dtype=dtype, checkpoint=checkpoint))
    if is_crossed(folder):
        crossed = read_crossed_checkpoint(folder)
        _refuse(config, crossed.architecture)
        return _checked(CrossedBlueprint(config=config, device=device, dtype=dtype, checkpoint=crossed))
    frames = read_frame_checkpoint(folder)
    if frames is not None:
        _refuse(config, frames.architecture)
        if isinstance(config.speculation, Speculation):
            raise InvalidRequest(
                f"speculation is given for {frames.architecture}, which reads frames; allowed: speculation='auto' or "
                "None"
            )
        return _checked(FrameBlueprint(config=config, device=device, dtype=dtype, checkpoint=frames))
    diarizer = read_diarizer_checkpoint(folder)
    if diarizer is not None:
        _refuse(config, diarizer.architecture)
        return _checked(DiarizerBlueprint(config=config, device=device, dtype=dtype, checkpoint=diarizer))
    text = read_text_checkpoint(folder)
    if not text.causal:
        _refuse(config, text.architecture, quantizes=True)
    if text.kind is not Kind.DECODER:
        _refuse_template(config, text.architecture)
    if config.chat_template is not None:
        replace_template(text.tokenizer, config.chat_template)
    if text.quantized:
        if device.type != "cpu":
            raise InvalidRequest(f"{folder} has quantized weights; allowed: device='cpu'")
        dtype = find_dtype(config.dtype, device, int8=Library.load() is None)
    return _checked(TextBlueprint(config=config, device=device, dtype=dtype, checkpoint=text))


def _checked(blueprint: _AnyBlueprint) -> _AnyBlueprint:
    """Checks the settings before anything is loaded. Raises `InvalidRequest` if the sizes are too small for one
    sequence, or if keys and values cannot have the chosen dtype."""
    blueprint.check_kv_dtype(blueprint.not_native())
    check_sizes(blueprint.config, blueprint.sizes)
    return blueprint


def _refuse_template(config: EngineConfig, kind: str) -> None:
    if config.chat_template is not None:
        raise InvalidRequest(
            f"chat_template is given for {kind}, which has no conversations; allowed: decoders. Leave it out"
        )


def _refuse(config: EngineConfig, kind: str, *, quantizes: bool = False) -> None:
    """Refuses the settings of decoders, and unless the model ``quantizes``, a quantization."""
    _refuse_template(config, kind)
    if config.quantization is not None and not quantizes:
        raise InvalidRequest(
            f"quantization={config.quantization!r} is given for {kind}; allowed: Whisper, decoders and encoders. Use "
            "quantization=None"
        )


@frozen(kw_only=True, eq=False)
class Blueprints:
    """The blueprint of the model, and that of its draft model if the configuration has one."""

    main: AnyBlueprint
    draft: AnyBlueprint | None

    @classmethod
    def read(cls, model: str | Path, config: EngineConfig) -> Blueprints:
        """Reads the blueprints, each as `read_blueprint` does.

        Raises:
            InvalidRequest: as in `read_blueprint`, or the draft model has another kind or vocabulary.
        """
        main = read_blueprint(model, config)
        if config.max_positions > main.decoder.positions:
            raise InvalidRequest(
                f"max_positions={config.max_positions}; allowed: up to {main.decoder.positions}, the positions of "
                f"{main.checkpoint.architecture}, or 0 for all of them"
            )
        name = config.speculation.draft if isinstance(config.speculation, Speculation) else None
        if name is None:
            return cls(main=main, draft=None)
        own = evolve(config, self_kv_bytes=0, cross_kv_bytes=0, chat_template=None)
        try:
            draft = read_blueprint(name, own)
        except InvalidRequest as error:
            raise InvalidRequest(f"the draft model {name}: {error}") from error
        _check_draft(main, draft)
        return cls(main=main, draft=draft)

    @property
    def all(self) -> tuple[AnyBlueprint, ...]:
        """The blueprints, one or two."""
        return (self.main,) if self.draft is None else (self.main, self.draft)

    @property
    def kind(self) -> Kind:
        """The kind of the model."""
        return self.main.checkpoint.kind if isinstance(self.main, TextBlueprint) else Kind.ENCODER_DECODER

    def sized(self, weights: int, measure: Callable[..., Available] = Available.of) -> Blueprints:
        """Returns the blueprints with the numbers of pages and slots that fit beside ``weights`` bytes in the memory
        that ``measure`` finds. The draft model gets the same numbers as the model, since their pages hold the same
        tokens. Numbers that were chosen before stay.

        Raises:
            DeviceOutOfMemory: there is not enough room for one sequence.
        """
        if self.main.budget is not None:
            return self
        main, draft = self.main, self.draft
        together = main.sizes if draft is None else main.sizes.beside(draft.sizes)
        available = measure(main.device, weights)
        budget = Budget.choose(main.config, main.sizes, together, available)
        placed = None if draft is None else evolve(draft, budget=budget)
        return Blueprints(main=evolve(main, budget=budget), draft=placed)

    def with_fingerprints(self, fingerprints: Sequence[str]) -> Blueprints:
        """Returns the blueprints with the fingerprints of the weights."""
        main, *rest = [evolve(one, fingerprint=new) for one, new in zip(self.all, fingerprints, strict=True)]
        return Blueprints(main=main, draft=rest[0] if rest else None)

    def describe(self, name: str) -> ModelDescription:
        """Returns the facts about the model that the engine needs. An encoder output counts with the bytes of both
        encoders."""
        sizes = [blueprint.describe(name).encoder_bytes for blueprint in self.all]
        return evolve(self.main.describe(name), encoder_bytes=sum(sizes))


def _check_draft(main: AnyBlueprint, draft: AnyBlueprint) -> None:
    """Raises `InvalidRequest` if the draft model cannot propose tokens for this model."""
    ours, its = main.decoder.vocabulary, draft.decoder.vocabulary
    if ours != its:
        raise InvalidRequest(
            f"the draft model has a vocabulary of {its} tokens; allowed: the same vocabulary as the model, {ours} "
            "tokens"
        )
    if isinstance(main, WhisperBlueprint) and isinstance(draft, WhisperBlueprint):
        ours_read, its_read = main.checkpoint, draft.checkpoint
        windows = [(one.features.window_samples, one.shape.embeddings) for one in (ours_read, its_read)]
        if windows[0] != windows[1]:
            raise InvalidRequest(
                "the draft model reads windows of another length than the model; allowed: the same length"
            )
        return
    if isinstance(main, TextBlueprint) and isinstance(draft, TextBlueprint):
        if draft.checkpoint.kind is Kind.POOLING or draft.checkpoint.family is not None:
            raise InvalidRequest(
                f"the draft model is {draft.checkpoint.architecture}; allowed: a decoder that reads and writes text"
            )
        return
    raise InvalidRequest(
        f"the draft model is {draft.checkpoint.architecture} and the model is {main.checkpoint.architecture}; "
        "allowed: a smaller Whisper for Whisper, a decoder of text for a decoder"
    )
