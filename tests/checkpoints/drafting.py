"""Tiny checkpoints of Qwen3.5 with a draft head, as its checkpoints store one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .families import make_checkpoint


def add_draft_head(folder: Path, *, right: bool = False, seed: int = 3) -> None:
    """Adds a draft head with random weights to the checkpoint in ``folder``; ``right``: every layer of the checkpoint
    and of the head adds nothing, so a token depends on the one before alone, and the head is always right."""
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    weights, layer = load_file(path), "model.layers.1."  # which attends to all positions
    width = weights["model.norm.weight"].shape[0]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32) * 0.3

    head = {f"layers.0.{name.removeprefix(layer)}": each.clone() for name, each in weights.items() if layer in name}
    head |= {name: each + 0.1 * each.std() * drawn(*each.shape) for name, each in head.items() if each.dim() > 1}
    head |= {f"{name}.weight": drawn(width) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    head["fc.weight"] = drawn(width, 2 * width)
    if right:
        ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        for each in (name for name in (*weights, *head) if name.endswith(ends)):
            (weights if each in weights else head)[each].zero_()
        head["fc.weight"] = torch.cat(
            [torch.eye(width, dtype=torch.float32), torch.zeros(width, width, dtype=torch.float32)], 1
        )
        head |= {name: torch.zeros(width, dtype=torch.float32) for name in ("pre_fc_norm_embedding.weight",)}
        head["norm.weight"] = weights["model.norm.weight"].clone()
    stored = {**weights, **{f"mtp.{name}": each.contiguous() for name, each in head.items()}}
    save_file(stored, path, metadata={"format": "pt"})


def make_drafting(folder: Path, *, right: bool = False) -> Path:
    """Writes a checkpoint with a draft head to ``folder``, and returns it."""
    make_checkpoint("qwen3_5_text", folder)
    add_draft_head(folder, right=right)
    return folder
