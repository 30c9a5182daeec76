"""Merges the LoRA adapter (Hu et al. 2021) that some checkpoints carry beside their weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...core.errors import CheckpointError, UnsupportedModel
from .files import is_mapped
from .settings import FileSettings
from .stored import stored_tensors

# Settings of peft that ask for more than a product of two matrices.
_OTHER_WAYS = ("use_dora", "fan_in_fan_out", "modules_to_save", "alpha_pattern", "lora_bias", "layer_replication")


def merge_adapter(decoder: nn.Module, model: Path, within: str = "") -> None:
    """Adds the adapter beside a checkpoint's weights, or in its folder ``within``, to those of ``decoder``, whose
    layers the adapter names. The sum is made in float32.

    Raises:
        CheckpointError: files of the adapter are missing or damaged, its matrices do not fit, or the checkpoint's own
            weights are pickles.
        UnsupportedModel: the adapter is of another kind.
    """
    if is_mapped(model):
        raise CheckpointError(f"the weights of {model}, which has an adapter, are pickles; save them as safetensors")
    folder = model / within
    settings = FileSettings.read_if_there(folder / "adapter_config.json")
    path = folder / "adapter_model.safetensors"
    if settings is None or not path.is_file():
        raise CheckpointError(
            f"{folder} lacks its adapter (adapter_config.json, adapter_model.safetensors), without which the model "
            "hears badly; download them too"
        )
    others = [name for name in _OTHER_WAYS if settings.get(name)]
    if settings.get("peft_type") != "LORA" or settings.get("bias") not in (None, "none") or others:
        raise UnsupportedModel(
            f"the adapter in {folder} is of another kind (peft_type={settings.get('peft_type')!r}, "
            f"bias={settings.get('bias')!r}, {', '.join(others) or 'no other settings'}); allowed: LoRA without bias. "
            "Merge it with peft (merge_and_unload), and save the result"
        )
    stored = stored_tensors(path)
    names = {name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight") for name in stored}
    for name in sorted(names):
        _, _, key = name.partition(".layers.")
        try:
            down, up = (stored[f"{name}.lora_{side}.weight"].to(dtype=torch.float32) for side in "AB")
            weight = decoder.get_submodule(f"layers.{key}").get_parameter("weight")
            rank = len(down) ** 0.5 if settings.get("use_rslora") else len(down)
            with torch.no_grad():
                weight.copy_(weight.float() + (up @ down) * (settings.whole("lora_alpha") / rank))
        except (AttributeError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{name} of {path} does not fit the model: {error}; download the checkpoint again"
            ) from error
