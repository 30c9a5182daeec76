"""Adapters in peft's files (Hu et al. 2021, "LoRA"): what they add to the weights of linear layers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
from attrs import field, frozen
from torch import Tensor, nn

from ...core.errors import CheckpointError, UnsupportedModel
from .files import is_mapped
from .settings import FileSettings
from .stored import stored_tensors

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Settings of peft that ask for more than a product of two matrices.
_OTHER_WAYS = (
    *("use_dora", "use_qalora", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("lora_bias", "layer_replication", "alora_invocation_tokens"),
)
_OTHER_BEGINNINGS = ("pissa", "olora", "corda", "loftq")  # of training, which change the model's own weights, too


class Change(NamedTuple):
    """The matrices of a linear layer: ``up`` [outputs, rank] @ ``down`` [rank, inputs] by ``scale`` is added to its
    weight."""

    down: Tensor
    up: Tensor
    scale: float


@frozen(kw_only=True, eq=False)
class Adapter:
    """An adapter, as it is stored.

    Args:
        key: a hash of its files: equal keys mean equal adapters.
        changes: by the name of the linear layer, as peft spells it.
        turned: weights of the model are [inputs, outputs], as in GPT-2.
    """

    folder: Path
    key: str
    changes: Mapping[str, Change] = field(repr=False)
    turned: bool

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Reads the adapter in ``folder``.

        Raises:
            CheckpointError: files are missing or damaged.
            UnsupportedModel: the adapter is of another kind.
        """
        settings, path = FileSettings.read_if_there(folder / _CONFIG), folder / _WEIGHTS
        if settings is None or not path.is_file():
            raise CheckpointError(f"{folder} lacks an adapter ({_CONFIG}, {_WEIGHTS}); save one there with peft")
        _check_kind(folder, settings)
        stored, changes = stored_tensors(path), dict[str, Change]()
        names = {re.sub(r"\.lora_[AB]\.weight$", "", name): name for name in sorted(stored)}
        for name, found in names.items():
            if name == found or not {f"{name}.lora_A.weight", f"{name}.lora_B.weight"} <= set(stored):
                raise UnsupportedModel(
                    f"the adapter in {folder} has {found}; allowed: pairs of lora_A.weight and lora_B.weight, of "
                    "linear layers alone. Merge it with peft (merge_and_unload), and save the result"
                )
            down, up = (stored[f"{name}.lora_{side}.weight"].to(dtype=torch.float32) for side in "AB")
            if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1]:
                raise CheckpointError(f"{name} of {path} does not fit itself: {[*down.shape]} and {[*up.shape]}")
            changes[name.removeprefix("base_model.model.")] = Change(down, up, _scale(settings, name, len(down)))
        turned = bool(settings.get("fan_in_fan_out"))
        return cls(folder=folder, key=_hash(folder), changes=changes, turned=turned)

    def fitting(self, shapes: Mapping[str, tuple[int, int]], rank: int) -> Self:
        """Returns the adapter, if it fits linear layers with these ``shapes`` and room for ``rank``.

        Raises:
            CheckpointError: its matrices have other shapes than the model's.
            UnsupportedModel: it changes another layer, or has a larger rank.
        """
        for name, change in self.changes.items():
            if name not in shapes:
                layers = sorted({one.rpartition(".")[2] for one in shapes})
                raise UnsupportedModel(
                    f"the adapter in {self.folder} changes {name}; allowed: {', '.join(layers)} of the decoder's layers"
                    ". Merge it with peft (merge_and_unload), and open the result"
                )
            if (own := (len(change.up), change.down.shape[1])) != shapes[name]:
                raise CheckpointError(
                    f"the adapter in {self.folder} is of another model: {name} has {own[0]} outputs of {own[1]} inputs "
                    f"there, and {shapes[name][0]} of {shapes[name][1]} in the model"
                )
            if len(change.down) > rank:
                raise UnsupportedModel(
                    f"the adapter in {self.folder} has rank {len(change.down)} ({name}); allowed: up to adapter_rank="
                    f"{rank}. Open the engine with EngineConfig(adapter_rank={len(change.down)})"
                )
        return self


def _check_kind(folder: Path, settings: FileSettings) -> None:
    others = [name for name in _OTHER_WAYS if settings.get(name)]
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BEGINNINGS):
        others.append(f"init_lora_weights={begun!r}")
    if settings.get("peft_type") != "LORA" or settings.get("bias") not in (None, "none") or others:
        raise UnsupportedModel(
            f"the adapter in {folder} is of another kind (peft_type={settings.get('peft_type')!r}, "
            f"bias={settings.get('bias')!r}, {', '.join(others) or 'no other settings'}); allowed: LoRA without bias. "
            "Merge it with peft (merge_and_unload), and save the result"
        )


def _scale(settings: FileSettings, name: str, rank: int) -> float:
    alpha = settings.whole("lora_alpha")
    for pattern, own in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = own
            break
    return float(alpha / (rank**0.5 if settings.get("use_rslora") else rank))


def _hash(folder: Path) -> str:
    made = hashlib.blake2b(digest_size=16)
    for name in (_CONFIG, _WEIGHTS):
        with (folder / name).open("rb") as file:
            while piece := file.read(1 << 20):
                made.update(piece)
    return made.hexdigest()


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
    if not all((folder / name).is_file() for name in (_CONFIG, _WEIGHTS)):
        raise CheckpointError(
            f"{folder} lacks its adapter ({_CONFIG}, {_WEIGHTS}), without which the model hears badly; download them "
            "too"
        )
    adapter = Adapter.read(folder)
    for name, change in adapter.changes.items():
        _, _, key = name.partition(".layers.")
        try:
            weight = decoder.get_submodule(f"layers.{key}").get_parameter("weight")
            with torch.no_grad():
                made = (change.up @ change.down) * change.scale
                weight.copy_(weight.float() + (made.T if adapter.turned else made))
        except (AttributeError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{name} of the adapter in {folder} does not fit the model: {error}; download the checkpoint again"
            ) from error
