"""`read_blueprint` chooses the blueprint of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from ...core.config import EngineConfig, Speculation
from ...core.errors import InvalidRequest
from ...core.model import Kind
from ..architectures.assistants import read_assistant
from ..architectures.conversations import replace_template
from ..architectures.crossed_checkpoint import read_crossed_checkpoint
from ..architectures.diarization import read_diarizer_checkpoint
from ..architectures.frames_checkpoint import read_frame_checkpoint
from ..architectures.text_checkpoint import TextCheckpoint, read_text_checkpoint
from ..checkpoints.files import read_config, resolve
from ..checkpoints.settings import FileSettings
from ..checkpoints.turns import TURNS
from ..checkpoints.whisper_checkpoint import Checkpoint, is_whisper, read_checkpoint
from ..checkpoints.whisper_tokenizer import whole_tokenizer
from ..machine.devices import find_device, find_dtype
from ..memory.budget import check_sizes
from ..native.library import Library
from .crossed_blueprint import CrossedBlueprint
from .diarizer_blueprint import DiarizerBlueprint
from .frame_blueprint import FrameBlueprint
from .text_blueprint import TextBlueprint
from .whisper_blueprint import WhisperBlueprint

AnyBlueprint = WhisperBlueprint | CrossedBlueprint | FrameBlueprint | DiarizerBlueprint | TextBlueprint

_TAKES: Mapping[type[AnyBlueprint], frozenset[str]] = {
    WhisperBlueprint: frozenset({"speculation"}),
    CrossedBlueprint: frozenset({"speculation"}),
    FrameBlueprint: frozenset(),
    DiarizerBlueprint: frozenset({"speculation"}),
    TextBlueprint: frozenset({"speculation", "chat_template", "draft_head"}),
}
"""The settings that a kind of model takes, of those that not all kinds take."""


def read_blueprint(model: str | Path, config: EngineConfig) -> AnyBlueprint:
    """Returns the blueprint of the checkpoint ``model``, a folder or hub id.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
        UnsupportedModel: the engine cannot run the architecture.
        InvalidRequest: the device does not exist, the kind of model does not take a setting, or the sizes are too small
            for one sequence.
    """
    folder, device = resolve(model), find_device(config.device)
    with TURNS.turn():  # transformers reads configurations, tokenizers and processors
        checkpoint, made = _read(folder)
        stored = isinstance(checkpoint, TextCheckpoint | Checkpoint) and checkpoint.quantized
        if (stored or config.quantization is not None) and device.type != "cpu":
            told = (
                f"{checkpoint.place} has quantized weights"
                if stored
                else f"quantization={config.quantization!r} is given"
            )
            raise InvalidRequest(f"{told}, and device={str(device)!r}; allowed: device='cpu'")
        int8 = (stored or config.quantization is not None) and Library.load() is None  # else the library computes
        dtype = find_dtype(config.dtype, device, int8=int8)
        blueprint = made(config=config, device=device, dtype=dtype, checkpoint=checkpoint)
        _check(blueprint)
        if isinstance(blueprint, TextBlueprint) and config.draft_head is not None:
            blueprint.check_drafts()
            blueprint = evolve(blueprint, assistant=read_assistant(config.draft_head, blueprint.checkpoint))
        if config.chat_template is not None:
            replace_template(whole_tokenizer(checkpoint.tokenizer), config.chat_template)
    return blueprint


def _read(folder: Path) -> tuple[Any, Callable[..., AnyBlueprint]]:
    """Returns the checkpoint in ``folder``, read but for its weights, and the class of its blueprint."""
    if is_whisper(folder):
        return read_checkpoint(folder), WhisperBlueprint
    plain = FileSettings(folder / "config.json", read_config(folder))
    if (crossed := read_crossed_checkpoint(plain)) is not None:
        return crossed, CrossedBlueprint
    if (frames := read_frame_checkpoint(plain)) is not None:
        return frames, FrameBlueprint
    if (diarizer := read_diarizer_checkpoint(plain)) is not None:
        return diarizer, DiarizerBlueprint
    return read_text_checkpoint(plain), TextBlueprint


def _check(blueprint: AnyBlueprint) -> None:
    """Checks the settings before anything is loaded.

    Raises:
        InvalidRequest: the kind of model does not take a setting, keys and values or weights cannot have the chosen
            format, the sizes are too small for one sequence, or a sequence is to be longer than the model allows.
    """
    config, name, most = blueprint.config, blueprint.checkpoint.architecture, blueprint.decoder.positions
    takes = _TAKES[type(blueprint)] - (set() if blueprint.kind is Kind.DECODER else {"chat_template", "draft_head"})
    speculation = config.speculation if isinstance(config.speculation, Speculation) else None
    refusals = {  # the setting, what is told of it, and the end of the refusal
        "chat_template": (config.chat_template, "chat_template", ", which has no conversations; allowed: decoders"),
        "draft_head": (config.draft_head, "draft_head", ", which no draft head fits; allowed: Gemma 4"),
        "speculation": (speculation, "speculation", ", which reads frames; allowed: speculation='auto' or None"),
    }
    for setting, (given, told, allowed) in refusals.items():
        if given is not None and setting not in takes:
            raise InvalidRequest(f"{told} is given for {name}{allowed}. Leave it out")
    blueprint.check_formats(blueprint.not_native())
    check_sizes(config, blueprint.sizes)
    if config.max_positions > most:
        raise InvalidRequest(
            f"max_positions={config.max_positions}; allowed: up to {most}, the positions of {name}, or 0 for all of "
            "them"
        )
