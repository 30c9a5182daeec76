"""`read_blueprint` chooses the blueprint of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from ...core.config import EngineConfig, Speculation
from ...core.errors import InvalidRequest
from ...core.model import Kind
from ..architectures.conversations import replace_template
from ..architectures.crossed_checkpoint import is_crossed, read_crossed_checkpoint
from ..architectures.diarization import read_diarizer_checkpoint
from ..architectures.frames_checkpoint import read_frame_checkpoint
from ..architectures.text import read_text_checkpoint
from ..checkpoints.files import resolve
from ..checkpoints.turns import TURNS
from ..checkpoints.whisper import is_whisper, read_checkpoint
from ..machine.devices import find_device, find_dtype
from ..memory.budget import check_sizes
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
    sequence, if a sequence is to be longer than the model allows, or if keys and values cannot have the chosen
    dtype."""
    config, most = blueprint.config, blueprint.decoder.positions
    blueprint.check_kv_dtype(blueprint.not_native())
    check_sizes(config, blueprint.sizes)
    if config.max_positions > most:
        raise InvalidRequest(
            f"max_positions={config.max_positions}; allowed: up to {most}, the positions of "
            f"{blueprint.checkpoint.architecture}, or 0 for all of them"
        )
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
