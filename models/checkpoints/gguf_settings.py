"""Reads the settings that a GGUF file has for its architecture, each with a check; among them rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import Factory, define, field

from ...core.errors import CheckpointError, UnsupportedModel
from .gguf_file import GgufFile

_YARN = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
_STILL = 1e29  # a factor of numbers that are not turned
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@define(eq=False)
class Told:
    """The settings of a file's architecture, by llama.cpp's names."""

    file: GgufFile
    prefix: str = Factory(lambda told: told.architecture, takes_self=True)  # of the names
    read: set[str] = field(factory=set, init=False)

    def get(self, name: str) -> Any:
        self.read.add(name)
        return self.file.settings.get(f"{self.prefix}.{name}")

    @property
    def architecture(self) -> str:
        return str(self.file.settings["general.architecture"])

    @property
    def layers(self) -> int:
        """The layers of the model. The file's last blocks may be for draft tokens."""
        drafting = self.whole("nextn_predict_layers") if self.get("nextn_predict_layers") else 0
        if drafting >= (blocks := self.whole("block_count")):
            raise self.bad("nextn_predict_layers", drafting, f"fewer than the {blocks} blocks")
        return blocks - drafting

    @property
    def head(self) -> int:
        """The numbers of a head."""
        if self.get("attention.key_length"):
            return self.whole("attention.key_length")
        width, heads = self.whole("embedding_length"), self.whole("attention.head_count")
        if width < heads:
            raise self.bad("embedding_length", width, f"{heads}, the heads, or more")
        return width // heads

    def whole(self, name: str, *, least: int = 1) -> int:
        """Returns a size. One that is told for each layer is the same for all that have it: 0 says that one has not."""
        value = self.get(name)
        if value is not None and not isinstance(value, int):
            values = set(self.each(name)) - {0} or {0}
            if len(values) != 1:
                raise UnsupportedModel(f"{self.file.path} has layers that differ in {name}; allowed: one for all")
            (value,) = values
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 32:
            raise self.bad(name, value, f"a whole number, {least} or more")
        return value

    def each(self, name: str) -> list[Any]:
        return self.file.listed(f"{self.prefix}.{name}")

    def spread(self, name: str) -> list[int]:
        """Returns a size of each layer."""
        if isinstance(self.get(name), int):
            return [self.whole(name)] * self.layers
        found = self.each(name)[: self.layers]
        if len(found) != self.layers or not all(isinstance(one, int) and 0 < one < 1 << 32 for one in found):
            raise self.bad(name, found, f"{self.layers} whole numbers")
        return found

    def wholes(self, names: Mapping[str, str]) -> dict[str, int]:
        """Returns those of the sizes that the file tells, by transformers' names."""
        return {theirs: self.whole(name, least=0) for name, theirs in names.items() if self.get(name) is not None}

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise self.bad(name, value, "true or false")
        return bool(value)

    def only(self, name: str, *allowed: Any) -> Any:
        """Returns a setting of which ``allowed`` are known. Raises `UnsupportedModel` if it is another."""
        value = self.get(name)
        if value not in allowed:
            raise UnsupportedModel(
                f"{self.file.path} ({self.architecture}) has {name}={value!r}; allowed: "
                f"{', '.join(map(str, allowed))}. Give the checkpoint that it was converted from"
            )
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self.bad(name, value, "a number")
        return float(str(np.float32(value)))  # the shortest number that was stored so

    def bad(self, name: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path} has {name}={value!r}; allowed: {allowed}. Download the file again")

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def rows(self, tensor: str) -> int:
        """Returns the rows of a matrix; 0: there is none."""
        return self.file.tensors[tensor].shape[0] if self.has(tensor) else 0

    def tensor(self, name: str) -> list[float]:
        """Returns the values of a small tensor."""
        if not self.has(name):
            raise CheckpointError(f"{self.file.path} has no {name}; download it again")
        at = self.file.tensors[name]
        if at.kind != "F32" or len(at.shape) > 1:
            raise self.bad(name, f"{at.kind} {at.shape}", "a row of F32")
        return [float(str(value)) for value in np.fromfile(at.path, "<f4", at.shape[0], offset=at.begin)]


def rope(told: Told, *, partial: bool = False, size: int | None = None) -> dict[str, Any]:
    """Returns transformers' settings of rotary positions.

    Args:
        partial: they may turn a part of a head.
        size: the numbers of a head that may be turned; ``None``: all.
    """
    made: dict[str, Any] = {"rope_theta": told.real("rope.freq_base", 10_000.0), "rope_type": "default"}
    if made["rope_theta"] <= 0.0:
        raise told.bad("rope.freq_base", made["rope_theta"], "a number above 0")
    size = size or told.head
    turning = size if told.get("rope.dimension_count") is None else told.whole("rope.dimension_count", least=0) or size
    if turning != size and not partial:
        raise told.bad("rope.dimension_count", turning, f"{size}, the numbers of a head")
    if partial:
        made["partial_rotary_factor"] = turning / size
    kind = told.get("rope.scaling.type")
    if told.has("rope_factors_long.weight"):
        told.get("rope.scaling.attn_factor")  # follows from the lengths
        factors = {f"{one}_factor": told.tensor(f"rope_factors_{one}.weight") for one in ("long", "short")}
        name = "rope.scaling.original_context_length"
        length = told.whole("context_length" if told.get(name) is None else name)
        return made | {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}
    if told.has("rope_freqs.weight"):
        return made | _factored(told, made["rope_theta"], turning)
    if kind in {None, "none"}:
        return made
    if kind not in {"linear", "yarn"}:
        raise UnsupportedModel(f"{told.file.path} has positions of type {kind!r}; allowed: linear and yarn")
    made |= {"rope_type": kind, "factor": told.real("rope.scaling.factor")}
    if kind == "yarn":
        made["original_max_position_embeddings"] = told.whole("rope.scaling.original_context_length")
        found = {theirs: f"rope.scaling.yarn_{name}" for name, theirs in _YARN.items()}
        made |= {theirs: told.real(name) for theirs, name in found.items() if told.get(name) is not None}
    return made


def _factored(told: Told, base: float, size: int) -> dict[str, Any]:
    """Returns the settings that explain the factors of positions: Llama 3.1's, or Gemma 4's. The file has the factors
    alone."""
    factors = np.asarray(told.tensor("rope_freqs.weight"))
    if len(factors) != size // 2:
        raise told.bad("rope_freqs.weight", factors.shape, f"{size // 2} numbers")
    if (factors == 1.0).all():
        return {}
    turned = int((factors == 1.0).sum())
    if (factors[:turned] == 1.0).all() and (factors[turned:] > _STILL).all():
        return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    factor, (low, high, length) = float(factors.max()), _LLAMA3.values()
    waves = 2 * math.pi * base ** (np.arange(0, size, 2) / size)
    smooth = np.clip((length / waves - low) / (high - low), 0.0, 1.0)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        raise UnsupportedModel(
            f"{told.file.path} has factors of positions (rope_freqs.weight) that are not Llama 3.1's or Gemma 4's; "
            "give the checkpoint that it was converted from"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
