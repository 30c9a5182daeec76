"""Checkpoints whose matrices other programs quantized: which are read, and their tensors, one for each matrix.

A matrix of 4 bits in groups, or of 8 in symmetric ones, is kept as it is: its numbers become blocks that the native
library packs. All others are read as the numbers with fractions that they stand for.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from math import prod
from typing import Any, Self

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from ...core.errors import CheckpointError, UnsupportedModel
from .layouts import Columns, Layout, Normal, Rows, schemes
from .stored import StoredTensor
from .unread import UnreadSlice

READ = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "torchao")
"""The kinds of quantized checkpoints that are read without the library that wrote them."""

_ENDS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_shape", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"),
    *("SCB", "weight_format"),
)
_TORCHAO = {  # how its tensors are called, and what compressed-tensors calls them
    "_weight_qdata": "weight",
    "_weight_scale": "weight_scale",
    "_weight_zero_point": "weight_zero_point",
}
_KINDS_OF_TORCHAO = ("Int8DynamicActivationInt8WeightConfig", "Int8WeightOnlyConfig")
_INPUTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale")
_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_STRATEGIES = ("block", "channel", "group", "tensor")
_GROUP = 32  # inputs of the smallest block
_ROWS = 1024  # that are read at a time


def unknown_quantization(told: Mapping[str, Any]) -> str | None:
    """Returns what is not read of the quantization that config.json names, and what is; ``None``: all is read."""
    method = told["quant_method"]
    if method not in READ:
        return f"by {method} (supported: {', '.join(READ)})"
    if method == "torchao":
        kinds = told.get("quant_type")
        every = {"default": kinds} if not isinstance(kinds, Mapping) else kinds
        names = {str(one.get("_type") if isinstance(one, Mapping) else one) for one in every.values()}
        others = ", ".join(sorted(names - {*_KINDS_OF_TORCHAO}))
        return f"by torchao as {others} (supported: {' and '.join(_KINDS_OF_TORCHAO)})" if others else None
    if method == "gptq":
        form = told.get("checkpoint_format") or told.get("format") or "gptq"
        if told.get("bits") not in (4, 8):
            return f"by gptq with {told.get('bits')} bits (supported: 4 and 8)"
        return None if form in ("gptq", "gptq_v2") else f"by gptq in the format {form} (supported: gptq and gptq_v2)"
    if method == "awq":
        form = str(told.get("version") or told.get("format") or "gemm").lower()
        bits = told.get("bits", told.get("w_bit"))
        if bits != 4:
            return f"by awq with {bits} bits (supported: 4)"
        return None if form == "gemm" else f"by awq in the layout {form} (supported: gemm)"
    if method == "fp8" and told.get("scale_fmt") not in (None, "float"):
        return f"to fp8 with scales of the kind {told['scale_fmt']} (supported: numbers with fractions)"
    return _unknown_scheme(told) if method == "compressed-tensors" else None


def _unknown_scheme(told: Mapping[str, Any]) -> str | None:
    """`unknown_quantization` of compressed-tensors."""
    groups = told.get("config_groups")
    each = [one for one in (*groups.values(), {}) if isinstance(one, Mapping)] if isinstance(groups, Mapping) else [{}]
    forms = {str(one.get("format") or told.get("format") or "dense") for one in each} - set(_FORMATS)
    zeroed = told.get("sparsity_config")
    sparse = zeroed.get("format", "dense") if isinstance(zeroed, Mapping) else "dense"
    if told.get("transform_config"):
        return "by compressed-tensors with rotations of inputs (supported: without)"
    if forms - {"mixed-precision"} or sparse != "dense":
        found = ", ".join(sorted(forms)) or sparse
        return f"by compressed-tensors in the format {found} (supported: {', '.join(_FORMATS)})"
    for weights in schemes(told):
        bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)) or strategy not in (None, *_STRATEGIES):
            return (
                f"by compressed-tensors to {kind} with {bits} bits and scales by {strategy} (supported: int with 4 or "
                f"8 bits, float with 8, by {', '.join(_STRATEGIES)})"
            )
    return None


@frozen(eq=False, kw_only=True)
class QuantizedTensor(UnreadSlice):
    """The rows of a quantized matrix, from row ``first`` on. ``path``, ``name`` and ``begin`` are those of its
    numbers."""

    layout: Layout = field(repr=False)
    first: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values that are read."""
        return torch.float32

    def pieces(self) -> Generator[Tensor, None, None]:
        """Yields the values in order, as numbers with fractions."""
        inputs, rows = self.layout.shape[1], prod(self.shape) // self.layout.shape[1]
        for start in range(self.first, self.first + rows, _ROWS):
            yield self.layout.numbers(start, min(start + _ROWS, self.first + rows)).weights().reshape(-1)
        assert prod(self.shape) % inputs == 0, "a part has whole rows"

    def cut(self, first: int, shape: tuple[int, ...]) -> Self:
        """Returns the values from the one with the number ``first`` on, which begins a row."""
        row, inputs = divmod(first, self.layout.shape[1])
        assert inputs == 0, "a part has whole rows"
        return evolve(self, first=self.first + row, shape=shape)

    def sample(self) -> Iterator[Tensor]:
        """Yields a few of the stored numbers of each part."""
        for part in self.layout.parts.values():
            yield from part.sample()

    def get_dtype(self) -> str:
        """Returns the dtype of the values as a file would name it."""
        return "F32"

    @property
    def in_int8(self) -> bool:
        """True if the matrix is in int8 with one scale for each output, or one for all."""
        own = self.layout
        plain = isinstance(own, Rows) and own.is_whole and own.grid[1] == 1 and own.scales.name.endswith("weight_scale")
        return plain and own.bits == 8 and own.is_symmetric

    def int8(self) -> tuple[Tensor, Tensor]:
        """Reads the numbers and the scales [outputs] of a matrix `in_int8`."""
        own = self.layout.numbers(0, self.shape[0])
        return (own.values ^ 128).view(torch.int8), own.scales[:, 0]

    @property
    def block_kind(self) -> str | None:
        """The kind of the blocks that `blocks` gives; ``None``: the matrix is not kept as it is."""
        own, inputs = self.layout, self.layout.shape[1]
        if not own.is_whole or self.in_int8 or inputs % _GROUP or len(self.shape) != 2:
            return None
        groups = torch.zeros(inputs, dtype=torch.int32) if own.groups is None else own.groups.sort().values
        even = [
            size for size in (128, _GROUP) if inputs % size == 0 and bool((groups.view(-1, size).diff() == 0).all())
        ]
        if not even or own.bits == 4:
            return f"INT4_{even[0]}" if even else None
        return "Q8_0" if own.is_symmetric and own.scales.kind == "F16" else None

    @property
    def input_order(self) -> Tensor | None:
        """The input that each input of the blocks is, int32; ``None``: the same one."""
        groups = self.layout.groups
        if groups is None or bool((groups.diff() >= 0).all()):
            return None
        return groups.argsort(stable=True).int()

    def blocks(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of some rows, as uint8 [rows, bytes of a row]."""
        own, kind, order = self.layout.numbers(self.first + start, self.first + stop), self.block_kind, self.input_order
        assert own.zeros is not None, "only whole numbers are kept as blocks"
        size = 128 if kind == "INT4_128" else _GROUP
        inputs = torch.arange(self.layout.shape[1]) if order is None else order
        first = inputs[::size] * 0 if own.groups is None else own.groups[inputs[::size]]
        values, scales, zeros = own.values[:, inputs], own.scales[:, first], own.zeros[:, first].to(torch.uint8)
        if kind != "Q8_0":
            return int4_blocks(values, scales, zeros)
        if bool((zeros != 128).any()):
            raise self.layout.bad("config.json has sym, but zero is not always 128")
        halves = scales.half()[..., None].view(torch.uint8)
        return torch.cat([halves, values.view(*scales.shape, size) ^ 128], -1).flatten(1)


def int4_blocks(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Returns blocks of 4 bits, uint8 [rows, bytes of a row]. `native/packings.h` says how they lie.

    Args:
        values: uint8 [rows, inputs].
        scales: float32 [rows, groups].
        zeros: uint8 [rows, groups].
    """
    halves = values.view(*scales.shape, -1, 2, 16)
    pairs = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(2)
    heads = [scales.contiguous()[..., None].view(torch.uint8), functional.pad(zeros[..., None], (0, 3))]
    return torch.cat([*heads, pairs], -1).flatten(1)


def quantized_tensors(stored: Mapping[str, StoredTensor], told: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Joins the tensors that each quantized matrix is stored in.

    Args:
        stored: all tensors of a checkpoint, by name.
        told: the quantization that config.json names.

    Raises:
        CheckpointError: tensors are missing, or do not belong together.
        UnsupportedModel: a tensor of torchao is of another kind than those that are known.
    """
    layers: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    named = _of_torchao(stored) if told["quant_method"] == "torchao" else stored
    for name, one in named.items():
        layer, _, end = name.rpartition(".")
        if told["quant_method"] == "bitsandbytes" and ".weight." in name:
            layer, _, end = name.partition(".weight.")
            layers.setdefault(layer, {})[f"weight.{end}"] = one
        elif end in _ENDS:
            layers.setdefault(layer, {})[end] = one
        elif end not in _INPUTS:
            found[name] = one
    for layer, parts in layers.items():
        if (weight := found.pop(f"{layer}.weight", None)) is not None:
            parts["weight"] = weight
        nested = any(end.startswith("weight.") for end in parts)
        own = (Columns if "qweight" in parts else Normal if nested else Rows)(layer, parts, told)
        at: Any = {"path": own.stored.path, "name": own.stored.name, "begin": own.stored.begin}
        found[f"{layer}.weight"] = QuantizedTensor(**at, kind="F32", shape=own.shape, layout=own)
    bare = [one for name, one in found.items() if name.endswith(".weight") and not one.dtype.is_floating_point]
    bare += [one for one in found.values() if one.kind.startswith("F8")]
    if bare:
        raise CheckpointError(f"weight {bare[0].name!r} of {bare[0].path} is of {bare[0].kind}, and has no scales")
    return found


def _of_torchao(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of torchao under the names that compressed-tensors has for them."""
    found = dict[str, StoredTensor]()
    for name, one in stored.items():
        layer, _, end = name.rpartition(".")
        if end.startswith("_weight_") and end not in _TORCHAO:
            raise UnsupportedModel(
                f"{one.path} has {name}, which is not known of torchao (known: {', '.join(_TORCHAO)}); give the "
                "checkpoint before it was quantized"
            )
        found[f"{layer}.{_TORCHAO[end]}" if end in _TORCHAO else name] = one
    return found


def quantization_of(config: Any) -> Mapping[str, Any] | None:
    """The quantization that config.json names; ``None``: the weights are not quantized."""
    told: Any = getattr(config, "quantization_config", None)
    if told is None:
        return None
    found = dict(told if isinstance(told, Mapping) else told.to_dict())
    method = found.get("quant_method")
    return found | {"quant_method": str(getattr(method, "value", method))}
