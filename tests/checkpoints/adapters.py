"""Adapters in peft's layout with random weights, and transformers' model with one merged into it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn


def linears_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
    """The outputs and inputs of the linear layers of a decoder's layers, by their names; of those alone that are called
    one of ``names``."""
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = {}
    for name, each in module.named_modules():
        turned = type(each).__name__ == "Conv1D"
        if not (turned or type(each) is nn.Linear) or name == "lm_head":
            continue
        if names is None or name.rpartition(".")[2] in names:
            outputs, inputs = reversed(each.weight.shape) if turned else each.weight.shape
            found[name] = (outputs, inputs)
    return found


def save_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]], *, seed: int, rank: int = 4, size: float = 0.5, **settings: Any
) -> Path:
    """Writes an adapter of linear layers. ``size``: of what it adds to a layer's outputs."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, weights = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in shapes.items():
        down = torch.randn(rank, inputs, generator=draw) / inputs**0.5
        up = torch.randn(outputs, rank, generator=draw) * size / rank**0.5
        weights |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(told | settings))
    return folder


def merged(model: Path, adapter: Path | None) -> Any:
    """transformers' model, with an adapter merged into its weights in float32."""
    module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is None:
        return module
    settings, weights = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name in {name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight")}:
        down, up = (weights[f"{name}.lora_{side}.weight"].float() for side in "AB")
        scale = settings["lora_alpha"] / (len(down) ** 0.5 if settings.get("use_rslora") else len(down))
        layer = module.get_submodule(name.removeprefix("base_model.model."))
        change = up @ down * scale
        with torch.no_grad():
            layer.weight += change.T if type(layer).__name__ == "Conv1D" else change
    return module


def tokens_of(module: Any, prompt: list[int], count: int) -> list[int]:
    """The greedy tokens of transformers' model, which no token ends."""
    module.generation_config.eos_token_id = None
    with torch.inference_mode():
        given = torch.tensor([prompt])
        found = module.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False)
    return found[0, len(prompt) :].tolist()
