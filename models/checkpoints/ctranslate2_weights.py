"""The weights of a Whisper of CTranslate2, as tensors that are read piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from functools import partial
from math import prod
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from ...core.errors import CheckpointError
from .ctranslate2_file import ModelFile, Variable
from .ctranslate2_whisper import WORDS, Converted
from .stored import StoredTensor

SCALES = "scales"
"""The name, in place of ``weight``, under which a matrix in int8 has the sizes of its steps."""

_LAYER = re.compile(r"(encoder|decoder)/layer_(0|[1-9][0-9]{0,3})/(.+)")
_PARTS = {  # of a layer; rows of one variable may be several matrices
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
}
_OTHERS = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/position_encodings": "model.encoder.embed_positions",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/embeddings": "model.decoder.embed_tokens",
    "decoder/position_encodings": "model.decoder.embed_positions",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "decoder/projection": "proj_out",
}
_LEAVES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}


@frozen(eq=False, kw_only=True)
class _Steps(StoredTensor):
    """The sizes of steps, one for each row: what values in int8 are multiplied with. The file has their inverses."""

    def pieces(self) -> Generator[Tensor, None, None]:
        for piece in super().pieces():
            yield _checked(self, piece.float()).reciprocal()


@frozen(eq=False, kw_only=True)
class _Wide(StoredTensor):
    """Integers that are read as the numbers that they stand for. ``divisors`` has one for each row, or for all."""

    divisors: StoredTensor
    has_parts = False  # divisors are not cut

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def pieces(self) -> Generator[Tensor, None, None]:
        divisors = _checked(self.divisors, self.divisors.read(torch.float32).view(-1))
        each, first = prod(self.shape) // len(divisors), 0
        for piece in _as(StoredTensor, self).pieces():
            yield piece.float() / divisors[torch.arange(first, first + len(piece)) // each]
            first += len(piece)


def whisper_tensors(path: Path) -> dict[str, StoredTensor]:
    """Opens the tensors of a ``model.bin``, by transformers' names. Matrices in int8 stay so; convolutions in int8 and
    what is in int16 are read as float32.

    Raises:
        CheckpointError: the file is damaged, or has a variable that Whisper does not have.
        UnsupportedModel: the model is not Whisper.
    """
    file, found = Converted.open(path.parent).file, dict[str, StoredTensor]()
    for full, variable in file.variables.items():
        place, _, leaf = full.rpartition("/")
        if not variable.shape or leaf.endswith("_scale") or file.tied.get(full) == WORDS:
            continue
        names = _names(place)
        if not names or leaf not in _LEAVES or variable.shape[0] % len(names):
            raise file.bad(f"has the variable {full!r} of shape {variable.shape}, which Whisper does not have")
        scale, rows = _scale(file, full, variable), variable.shape[0] // len(names)
        for index, name in enumerate(names):
            # No bias of keys: it is zero, and added to all scores of a query it would change nothing.
            if leaf != "bias" or not name.endswith(".k_proj"):
                found.update(_tensors(path, f"{name}.{_LEAVES[leaf]}", variable, scale, index * rows, rows))
    return found


def _names(place: str) -> tuple[str, ...]:
    """Returns the modules that have the variables in ``place``; empty: none has."""
    if place in _OTHERS:
        return (_OTHERS[place],)
    match = _LAYER.fullmatch(place)
    parts = _PARTS.get(match[3], ()) if match else ()
    return tuple(f"model.{match[1]}.layers.{match[2]}.{part}" for part in parts) if match else ()


def _scale(file: ModelFile, full: str, variable: Variable) -> Variable | None:
    """Returns 127 / the largest size of a row's values in int8, or one number for all in int16; ``None``: the values
    are what they are."""
    if variable.kind not in {"I8", "I16"}:
        return None
    scale = file.variables.get(f"{file.tied.get(full, full)}_scale")
    shape = variable.shape[:1] if variable.kind == "I8" else ()
    if scale is None or scale.shape != shape or scale.kind not in {"F32", "F16", "BF16"}:
        raise file.bad(f"has the variable {full!r} in {variable.kind} without scales of shape {shape}")
    return scale


def _tensors(
    path: Path, name: str, variable: Variable, scale: Variable | None, first: int, rows: int
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensor that has ``rows`` rows of a variable from row ``first`` on, and perhaps its scales."""

    def opened(name: str, one: Variable) -> StoredTensor:
        whole = StoredTensor(path=path, name=name, begin=one.begin, kind=one.kind, shape=one.shape)
        return whole.cut(first * prod(one.shape[1:]), (rows, *one.shape[1:])) if one.shape else whole

    values, of_scales = opened(name, variable), f"{name.removesuffix('weight')}{SCALES}"
    if scale is None:
        yield name, values
    elif variable.kind == "I8" and len(variable.shape) == 2:
        yield name, values
        yield of_scales, _as(_Steps, opened(of_scales, scale))
    else:
        yield name, _as(partial(_Wide, divisors=opened(of_scales, scale)), values)


def _as(made: Callable[..., StoredTensor], one: StoredTensor) -> StoredTensor:
    return made(path=one.path, name=one.name, begin=one.begin, kind=one.kind, shape=one.shape)


def _checked(stored: StoredTensor, scales: Tensor) -> Tensor:
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise CheckpointError(f"{stored.path} has scales of {stored.name!r} that are not finite, or not positive")
    return scales
