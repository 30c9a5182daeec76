"""Reads the weights of a draft head, which transformers' classes leave out."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from .files import find_weights

PREFIX = "mtp."
"""The beginning of the names of such weights (Qwen3.5)."""


def read_draft_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the weights of the draft head in ``folder`` by their names in it, in memory of their own; none if there
    is no head."""
    found: dict[str, Tensor] = {}
    for path in find_weights(folder):
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name.startswith(PREFIX):
                    found[name.removeprefix(PREFIX)] = file.get_tensor(name).to(dtype, copy=True)
    return found
