"""The shapes of the tensors in a checkpoint's files, for estimates. No weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from .files import find_weights
from .loading import stored_weights
from .quantized import READ, QuantizedTensor
from .stored import StoredTensor
from .weights import open_weights

_PANEL = 32  # outputs that the native library packs together
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")
_TOGETHER = re.compile(
    r"(?<=\.)((?P<enter>in_proj_\w+|linear_attn\.\w+_proj)|(?P<read>[qkvg]_proj)|(?P<widen>gate_proj|up_proj|w1|w3))\.weight$"
)


@frozen
class StoredShape:
    """The shape and dtype of a tensor, and the kind of the blocks in which it is held."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str | None = None


def shapes_of(folder: Path, told: Mapping[str, Any] | None = None) -> dict[str, StoredShape]:
    """Returns the shape of each tensor in the files of ``folder``, by name.

    Args:
        told: the quantization that config.json names.
    """
    if told is not None and told.get("quant_method") in READ:
        found = {name: _shape_of(name, one) for name, one in stored_weights(folder, StoredTensor, told).items()}
    else:
        stored = [open_weights(path) for path in find_weights(folder)]
        found = {name: _shape_of(name, one) for each in stored for name, one in each.items()}
    for names in joined(found):
        kinds = {found[name].kind for name in names}
        odd = None in kinds or any(found[name].shape[0] % _PANEL for name in names)
        if len(kinds) > 1 and odd:  # such blocks cannot lie together
            found |= {name: StoredShape(found[name].shape, torch.float32) for name in names}
    return found


def joined(names: Iterable[str]) -> list[list[str]]:
    """Groups linear layers by the matrices that they are packed into: queries, keys and values are neighbours, and so
    are gates and what they multiply, what enters a recurrent part, and all experts of a layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        kind = _TOGETHER.search(name)
        matrix = name if kind is None else f"{name[: kind.start()]}{kind.lastgroup}"
        found.setdefault(_EXPERT.sub(".experts.", matrix), []).append(name)
    return list(found.values())


def _shape_of(name: str, stored: Any) -> StoredShape:
    """The shape of a tensor as it is held. Some experts are decoded: those of which two would share a panel, those with
    an order of inputs, and those in int8."""
    kind, of_expert, shape = getattr(stored, "block_kind", None), ".experts." in name, stored.shape
    ordered = getattr(stored, "input_order", None) is not None
    if kind is not None and getattr(stored, "turned", False):
        shape = (*shape[:-2], shape[-1], shape[-2])
    if of_expert and (ordered or shape[-2] % _PANEL):
        kind = None
    if isinstance(stored, QuantizedTensor) and stored.in_int8 and not of_expert:
        return StoredShape(shape, torch.int8, kind)
    return StoredShape(shape, getattr(stored, "narrowest", stored.dtype), kind)
