"""The figures of a card, as JSON has them: what the model is, and a row for each format. A run adds what is missing."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers

import triolet

from ..core.errors import InvalidRequest, UnsupportedModel
from ..core.model import ModelDescription
from ..core.speech import Detection
from ..models.checkpoints.files import converses, find_weights, read_config, resolve
from ..models.checkpoints.gguf_folder import file_of
from ..models.checkpoints.shapes import shapes_of
from ..models.checkpoints.whisper_ggml import read_model
from .judges import REFERENCE, Figures, Given, judge_of
from .machine import Machine

PARTS = ("accuracy", "speed")
"""The parts of the figures, each of which can be measured by itself."""

_SHAPE = (
    *("encoder_layers", "encoder_num_hidden_layers", "decoder_layers", "decoder_num_hidden_layers"),
    *("num_hidden_layers", "d_model", "hidden_size", "vocab_size"),
)
_DETECTED = {
    Detection.PROBED: "the model finds it, with a probability for each",
    Detection.WRITTEN: "the model writes it beside the text",
    Detection.SILENT: "the model does not say which it heard",
    Detection.NAMED: "the request is refused",
}


async def measure(
    given: Given,
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    parts: Sequence[str],
    kept: Figures,
    keep: Callable[[str], None],
) -> None:
    """Adds to ``kept`` the figures that it lacks.

    Args:
        rows: the model of each row, and the engine's settings. The first is the model of the card.
        keep: is called with the name of each row and part that was measured.

    Raises:
        InvalidRequest: ``kept`` is of another model or of other inputs, or a model of this kind has no card.
    """
    model, settings = next(iter(rows.values()))
    folder = resolve(model)
    async with triolet.Engine(folder, config=given.config(settings)) as engine:
        judge = judge_of(given, folder, engine.model, kept)
        about: Figures = {"kind": judge.kind, "inputs": judge.inputs, "facts": facts(folder, engine.model)}
        about["language"] = given.language
    if any(kept.setdefault(name, value) != value for name, value in about.items()):
        raise InvalidRequest(
            f"the figures are of another model or other inputs than {model}; give --figures a new file"
        )
    told, before = run_of(given.threads), dict(kept.get("runs", {}))
    for name, (place, asked) in rows.items():
        row, there = kept.setdefault("rows", {REFERENCE: {}}).setdefault(name, {}), resolve(place)
        for part in parts:
            if part in row or "refused" in row:
                continue
            try:  # opened twice: the first time a model may be compared with transformers
                async with triolet.Engine(there, config=given.config(asked)) as engine:
                    row["held"] = engine.statistics().device.by_owner["weights"] / 1e6
            except (InvalidRequest, UnsupportedModel) as error:
                if place == model and asked == settings:
                    raise
                row["refused"] = str(error)
                keep(f"{name}: refused")
                continue
            row["size"] = ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f}" for path in weights_of(there))
            if part == "accuracy":
                row[part] = await judge.accuracy(there, asked)
            else:
                begun = time.perf_counter()
                async with triolet.Engine(there, config=given.config({**asked, **judge.settings})) as engine:
                    row[part] = {"open": time.perf_counter() - begun, **await judge.speed(engine)}
            kept.setdefault("runs", {})[part] = "; ".join([*filter(None, [before.get(part)]), told])
            keep(f"{name}: {part}")
    kept["rows"] = {name: kept["rows"][name] for name in dict.fromkeys((REFERENCE, *rows, *kept["rows"]))}


def run_of(threads: int) -> str:
    """Returns the day, the machine and the versions of a run."""
    machine = Machine.measure(threads)
    speeds = ", ".join(f"{name} {value:.0f} GFLOP/s" for name, value in machine.gigaflops.items())
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (triolet, transformers, torch))
    told = f"{machine.cpu}, {threads} threads, load {machine.load:.1f}, {speeds}, {machine.gigabytes:.0f} GB/s"
    return f"{datetime.date.today()}, {told}, {versions}"


def facts(folder: Path, model: ModelDescription) -> dict[str, str]:
    """Returns what a model is and can do, as far as its files and its class say."""
    config, speech, pooling = read_config(folder), model.speech, model.default_pooling
    stored = shapes_of(folder, config.get("quantization_config"))
    found = {
        "checkpoint": origin_of(folder),
        "licence": licence_of(folder) or "its files do not say",
        "class": model.architecture,
        "parameters": f"{sum(prod(one.shape) for one in stored.values()) / 1e6:.1f} million",
        "shape": ", ".join(f"`{name}` {config[name]:,}" for name in _SHAPE if isinstance(config.get(name), int)),
    }
    if speech is None:
        found["longest text"] = f"{config.get('max_position_embeddings', model.max_positions):,} tokens"
        if pooling is None:
            return {**found, "conversations": "a chat template" if converses(folder) else "no: it continues texts"}
        return {**found, "vector": f"`pooling={pooling.kind!r}`" + ", of length 1" * pooling.normalize}
    can, rate = speech.facts, model.sampling_rate
    window = f"{can.window_samples / rate:g} s of {rate / 1000:g} kHz"
    return {
        **found,
        "longest window": f"{window}; longer recordings are cut at pauses, so they may have any length",
        "languages": ", ".join(can.languages) or "none can be named",
        "if no language is named": _DETECTED[can.detection],
        "tasks": ", ".join(can.tasks),
        "times of words": can.word_times or f"none: {can.word_fault}",
        "text before a window": f"up to {can.history_tokens} tokens",
        "options of its own": ", ".join(f"`{name}`" for name in sorted(can.options)) or "none",
    }


def weights_of(folder: Path) -> tuple[Path, ...]:
    """Returns the files with the weights; of a GGUF file its parts."""
    parts = _gguf(folder)
    return find_weights(folder) if parts is None else tuple(path for path, _ in parts.parts)


def origin_of(folder: Path) -> str:
    """Returns the commit of a checkpoint in the hub's cache, and for any folder the beginning of a hash of its
    weights."""
    digest = hashlib.sha256()
    for path in weights_of(folder):
        with path.open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
    commit = f"commit {folder.name}, " if folder.parent.name == "snapshots" else ""
    return f"{commit}weights {digest.hexdigest()[:16]} (SHA-256)"


def licence_of(folder: Path) -> str:
    """Returns the licence that a model's GGUF file or its README.md names; empty: neither does."""
    if (file := _gguf(folder)) is not None:
        return str(file.settings.get("general.license", ""))
    page = folder / "README.md"
    lines = page.read_text(encoding="utf-8", errors="replace").splitlines() if page.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("license:")), "")


def _gguf(folder: Path) -> Any:
    """The GGUF file, or the one of whisper.cpp, of a folder with its settings; ``None``: it is another folder."""
    file = file_of(folder)
    return None if file is None else read_model(file)
