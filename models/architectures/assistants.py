"""Reads an assistant's checkpoint, except the weights, and refuses one that is made for another model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import InvalidRequest
from ..checkpoints.files import read_config, resolve
from ..checkpoints.settings import FileSettings
from .layer_sizes import layer_sizes
from .text_checkpoint import TextCheckpoint, check_float_weights, read_transformers_config

_KIND, _FITS = "gemma4_assistant", ("gemma4", "gemma4_text")


@frozen
class AssistantFiles:
    """The facts in an assistant's files, apart from the weights.

    Args:
        sources: for each kind of layers, the model's layer whose keys and values the assistant's layers read.
    """

    plain: FileSettings = field(repr=False)
    sources: Mapping[str, int] = field(repr=False)

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.plain.path.parent

    def config(self) -> Any:
        """Returns transformers' configuration, which the caller may change."""
        return read_transformers_config(self.plain)


def read_assistant(named: str, model: TextCheckpoint) -> AssistantFiles:
    """Reads the assistant ``named``, a folder or hub id, which is to propose tokens for ``model``.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
        UnsupportedModel: its weights are quantized.
        InvalidRequest: it is no assistant, or is made for another model.
    """
    folder, text = resolve(named), model.config.get_text_config()
    plain = FileSettings(folder / "config.json", read_config(folder))
    check_float_weights(plain)
    kinds, shape = list(getattr(text, "layer_types", None) or ()), model.shape
    writes = {kind: index for index, kind in enumerate(kinds) if shape.kv[index].source is None}
    if plain.get("model_type") != _KIND:
        raise _refused(named, f"it is of model_type {plain.get('model_type')!r}", f"model_type {_KIND!r}")
    if model.config.model_type not in _FITS:
        told = f"it is made for Gemma 4, and {model.architecture} is of model_type {model.config.model_type!r}"
        raise _refused(named, told, "without one, the checkpoint's own draft head or the text itself proposes tokens")
    config: Any = read_transformers_config(plain)
    own = config.get_text_config()
    sizes = layer_sizes(folder, own)
    got = {
        "width": config.backbone_hidden_size,
        "vocabulary": own.vocab_size,
        "window": own.sliding_window,
        "rotary positions": {kind: own.rope_parameters.get(kind) for kind in {*own.layer_types}},
        "keys and values of layers": {kind: _sizes(one) for kind, one in zip(own.layer_types, sizes, strict=True)},
    }
    needed = {
        "width": shape.hidden,
        "vocabulary": shape.vocabulary,
        "window": text.sliding_window,
        "rotary positions": {kind: text.rope_parameters.get(kind) for kind in {*own.layer_types}},
        "keys and values of layers": {
            kind: _sizes(shape.kv[writes[kind]]) if kind in writes else None for kind in own.layer_types
        },
    }
    for fact, value in got.items():
        if value != needed[fact]:
            told = f"it is made for another model than {model.place}: {fact} {value}"
            raise _refused(named, told, f"those of the model, {needed[fact]}")
    parts, asked = config.num_centroids, config.centroid_intermediate_top_k
    if config.use_ordered_embeddings and not (0 < asked <= parts and own.vocab_size % parts == 0):
        told = f"it has num_centroids={parts} and centroid_intermediate_top_k={asked} for {own.vocab_size} tokens"
        raise _refused(named, told, "as many tokens for each centroid, and up to all centroids")
    return AssistantFiles(plain, {kind: writes[kind] for kind in got["rotary positions"]})


def _sizes(layer: Any) -> str:
    return f"{layer.heads} heads of {layer.size} and {layer.value_size}"


def _refused(named: str, told: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"draft_head={named!r}: {told}; allowed: {allowed}")
