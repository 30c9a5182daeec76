"""Reads the weights of a draft head, which transformers' classes leave out."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from .files import find_weights

PREFIX = "mtp."
"""The beginning of the names of such weights (Qwen3.5)."""


def read_draft_weights(folder: Path, dtype: torch.dtype, prefix: str = PREFIX) -> dict[str, Tensor]:
    """Returns the weights in ``folder`` whose names begin with ``prefix``, by the rest of their names, in memory of
    their own."""
    found: dict[str, Tensor] = {}
    for path in find_weights(folder):
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name.startswith(prefix):
                    one = file.get_tensor(name)
                    kind = dtype if one.is_floating_point() else one.dtype
                    found[name.removeprefix(prefix)] = one.to(kind, copy=True)
    return found
