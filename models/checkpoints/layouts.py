"""The ways in which other programs store a quantized matrix: the tensors from which its rows are read.

A layout gives the numbers of some rows as they are, with their scales and zeros, and keeps none of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ...core.errors import CheckpointError
from .stored import StoredTensor

_OF_AWQ = [0, 4, 1, 5, 2, 6, 3, 7]  # where eight outputs lie in an integer
_ONES = {4: 0x11111111, 8: 0x01010101}  # what GPTQ takes from an integer of zeros
_SCALES = ("weight_scale", "weight_scale_inv", "SCB")
_STATE = "weight.quant_state.bitsandbytes__"


@frozen(eq=False)
class Numbers:
    """Some rows of a quantized matrix.

    Args:
        values: [rows, inputs], in whole numbers of 0 or more if the matrix has ``zeros``.
        scales: float32 [rows, groups], or [rows, inputs].
        zeros: [rows, groups], the number that stands for zero; ``None``: 0 does.
        groups: int64 [inputs], the group of each input; ``None``: scales and zeros are those of one group, or of each
            input.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None

    def weights(self) -> Tensor:
        """Returns the weights, float32 [rows, inputs]."""
        values, every = self.values.float(), slice(None) if self.groups is None else self.groups
        if self.zeros is not None:
            values = values - self.zeros.float()[:, every]
        return values * self.scales[:, every]


class Layout:
    """The tensors of one matrix.

    Args:
        name: of the layer.
        parts: by the ends of their names.
        told: the quantization that config.json names.

    Raises:
        CheckpointError: a part is missing or has another shape.
    """

    stored: StoredTensor  # the numbers
    scales: StoredTensor
    shape: tuple[int, int]  # outputs and inputs
    groups: Tensor | None = None  # as in `Numbers`
    bits = 8
    is_whole = False  # numbers of 4 or 8 bits, with a zero for each group
    is_symmetric = False  # zero is in the middle of the numbers

    def __init__(self, name: str, parts: Mapping[str, StoredTensor], told: Mapping[str, Any]) -> None:
        self.name, self.parts, self.told = name, parts, told
        for end, size in self.find().items():
            if self.part(end).shape != size:
                raise self.bad(f"{end} has the shape {list(self.part(end).shape)}; allowed: {list(size)}")

    def find(self) -> Mapping[str, tuple[int, ...]]:
        """Finds the parts and the shape. Returns the shapes that parts must have."""
        raise NotImplementedError

    def numbers(self, start: int, stop: int) -> Numbers:
        """Reads the rows from ``start`` to ``stop``."""
        raise NotImplementedError

    def part(self, end: str) -> StoredTensor:
        """Returns a part. Raises `CheckpointError` if there is none."""
        if end not in self.parts:
            raise self.bad(f"there is no {end}")
        return self.parts[end]

    def bad(self, reason: str) -> CheckpointError:
        """Returns the error for parts that do not belong together."""
        path = next(iter(self.parts.values())).path
        return CheckpointError(f"the quantized layer {self.name!r} of {path}: {reason}. Download the checkpoint again")

    def listed(self, end: str, count: int) -> Tensor:
        """Returns the group of each input, one of ``count``, as the part ``end`` lists them."""
        groups = whole(self.part(end)).long()
        if groups.shape != self.shape[1:] or bool(((groups < 0) | (groups >= count)).any()):
            raise self.bad(f"{end} does not name one of {count} groups for each of {self.shape[1]} inputs")
        return groups


class Columns(Layout):
    """GPTQ's, and AWQ's of the kind GEMM: inputs lie one after the other."""

    is_whole = True

    def find(self) -> Mapping[str, tuple[int, ...]]:
        self.of_awq = self.told["quant_method"] == "awq"
        self.stored, self.scales, zeros = self.part("qweight"), self.part("scales"), self.part("qzeros")
        if {len(self.scales.shape), len(zeros.shape), len(self.stored.shape)} != {2} or 0 in self.scales.shape:
            raise self.bad("qweight, qzeros and scales are not three matrices")
        groups, outputs = self.scales.shape
        self.bits = 32 * zeros.shape[1] // outputs
        if self.bits not in ({4} if self.of_awq else {4, 8}):
            raise self.bad(f"its numbers have {self.bits} bits; allowed: 4{'' if self.of_awq else ' or 8'}")
        each, rows = 32 // self.bits, self.stored.shape[0]
        self.shape = outputs, rows if self.of_awq else rows * each
        self.groups, self.is_symmetric = self._groups(groups), bool(self.told.get("sym"))
        return {
            "qweight": (rows, outputs // each if self.of_awq else outputs),
            "qzeros": (groups, outputs // each),
            "scales": (groups, outputs // each * each),
        }

    def _groups(self, count: int) -> Tensor:
        if "g_idx" in self.parts:
            return self.listed("g_idx", count)
        inputs = self.shape[1]
        told = self.told.get("group_size", self.told.get("q_group_size"))
        size = inputs // count if inputs % count == 0 else told if isinstance(told, int) and told > 0 else inputs
        if -(-inputs // size) != count:
            raise self.bad(f"it has {count} groups for {inputs} inputs, and config.json says {told} in each")
        return torch.arange(inputs) // size

    def numbers(self, start: int, stop: int) -> Numbers:
        each = 32 // self.bits
        first, last = start // each, -(-stop // each)
        own, zeros = slice(start - first * each, stop - first * each), columns(self.part("qzeros"), first, last)
        if self.of_awq:
            values = unpacked(columns(self.stored, first, last), 4)[:, :, _OF_AWQ].flatten(1)[:, own].T
            zeros = unpacked(zeros, 4)[:, :, _OF_AWQ].flatten(1)
        else:
            values = unpacked(columns(self.stored, start, stop), self.bits).transpose(0, 1).flatten(1)
            whole_ones = "gptq_v2" in {self.told.get("checkpoint_format"), self.told.get("format")}
            zeros = unpacked(zeros if whole_ones else zeros + _ONES[self.bits], self.bits).flatten(1)
        return Numbers(values, columns(self.scales, start, stop).float().T, zeros[:, own].T, self.groups)


class Rows(Layout):
    """Compressed-tensors', FP8's and those of bitsandbytes in int8: rows of numbers, perhaps packed."""

    def find(self) -> Mapping[str, tuple[int, ...]]:
        self.packed = "weight_packed" in self.parts
        self.stored = self.part("weight_packed" if self.packed else "weight")
        self.scales = self.part(next((one for one in _SCALES if one in self.parts), _SCALES[0]))
        matrix, scales = self.stored.shape, (*self.scales.shape, 1, 1)[: max(2, len(self.scales.shape))]
        if len(matrix) != 2 or len(scales) != 2 or 0 in (*matrix, *scales):
            raise self.bad(f"numbers {list(matrix)} and scales {list(self.scales.shape)} are not matrices")
        if self.packed and self.part("weight_shape").shape != (2,):
            raise self.bad("weight_shape does not have two numbers")
        outputs, inputs = whole(self.part("weight_shape")).tolist() if self.packed else matrix
        self.shape, self.grid = (outputs, inputs), scales
        self.bits = 32 * matrix[1] // max(1, inputs) if self.packed else 8
        if self.bits not in {4, 8}:
            raise self.bad(f"its numbers have {self.bits} bits; allowed: 4 or 8")
        blocks = [self.told.get("weight_block_size"), *(one.get("block_structure") for one in schemes(self.told))]
        known = [list(one) for one in blocks if isinstance(one, list) and len(one) == 2 and min(map(_size, one)) > 0]
        self.blocks = [-(-every // count) for every, count in zip(self.shape, scales, strict=True)]
        if known and scales[0] not in {1, outputs}:
            self.blocks = known[0]
        if any(-(-every // one) != count for every, one, count in zip(self.shape, self.blocks, scales, strict=True)):
            raise self.bad(f"scales {list(scales)} do not fit {list(self.shape)} numbers")
        if "weight_g_idx" in self.parts:
            self.groups = self.listed("weight_g_idx", scales[1])
        elif scales[1] > 1:
            self.groups = torch.arange(inputs) // self.blocks[1]
        self.is_whole, zeros = not self.stored.dtype.is_floating_point, self.parts.get("weight_zero_point")
        self.is_symmetric = zeros is None or (zeros.dtype != torch.int32 and not bool(whole(zeros).any()))
        return {"weight_packed": (outputs, -(-inputs * self.bits // 32))} if self.packed else {}

    def numbers(self, start: int, stop: int) -> Numbers:
        scales = whole(self.scales).float().reshape(self.grid) / (127.0 if self.scales.name.endswith("SCB") else 1.0)
        rows, width = torch.arange(start, stop) // self.blocks[0], self.stored.shape[1]
        values, zeros = self.stored.cut(start * width, (stop - start, width)).read(self.stored.dtype), None
        if self.is_whole:
            packed = unpacked(values, self.bits).flatten(1) if self.packed else values.view(torch.uint8) ^ 128
            values, zeros = packed[:, : self.shape[1]], self._zeros().expand(self.grid)[rows]
        return Numbers(values, scales[rows], zeros, self.groups)

    def _zeros(self) -> Tensor:
        middle = 1 << (self.bits - 1)
        if "weight_zero_point" not in self.parts:
            return torch.full((1, 1), middle, dtype=torch.int32)
        zeros = whole(self.part("weight_zero_point"))
        if self.packed and zeros.dtype == torch.int32:  # packed along the outputs
            zeros = unpacked(zeros, self.bits).transpose(1, 2).flatten(0, 1)[: self.shape[0]]
        else:
            zeros = zeros.reshape(len(zeros) if zeros.dim() else 1, -1).int() + middle
        if zeros.shape != self.grid:
            raise self.bad(f"weight_zero_point has the shape {list(zeros.shape)}; allowed: {list(self.grid)}")
        return zeros


class Normal(Layout):
    """The four bits of bitsandbytes, which are places in a table."""

    def find(self) -> Mapping[str, tuple[int, ...]]:
        self.stored, self.scales = self.part("weight"), self.part("weight.absmax")
        state = self.part(next((end for end in self.parts if end.startswith(_STATE)), _STATE))
        try:
            self.state = json.loads(bytes(whole(state).tolist()))
            outputs, inputs = map(int, self.state["shape"])
            self.size = int(self.state["blocksize"])
        except (KeyError, TypeError, ValueError) as error:
            raise self.bad(f"its quant_state cannot be read: {error!r}") from error
        if inputs % 2 or inputs < 1 or self.size < 1:
            raise self.bad(f"it has {inputs} inputs in blocks of {self.size}; allowed: an even number")
        self.shape, count = (outputs, inputs), outputs * inputs
        return {"weight": (count // 2, 1), "weight.absmax": (-(-count // self.size),), "weight.quant_map": (16,)}

    def numbers(self, start: int, stop: int) -> Numbers:
        inputs = self.shape[1]
        begin, end = start * inputs, stop * inputs
        pairs = self.stored.cut(begin // 2, ((end - begin) // 2,)).read(torch.uint8)
        places = torch.stack([pairs >> 4, pairs & 15], -1).view(-1, inputs).long()
        own = torch.arange(begin, end) // self.size
        return Numbers(whole(self.part("weight.quant_map"))[places], self._largest()[own].view(-1, inputs))

    def _largest(self) -> Tensor:
        """The largest number of each block, which may be quantized itself."""
        stored = whole(self.scales)
        if "weight.nested_absmax" not in self.parts:
            return stored.float()
        nested = whole(self.part("weight.nested_absmax")).repeat_interleave(int(self.state["nested_blocksize"]))
        table = whole(self.part("weight.nested_quant_map"))
        return table[stored.long()] * nested[: len(stored)] + float(self.state["nested_offset"])


def schemes(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns what compressed-tensors writes of the weights of each group of layers."""
    groups = told.get("config_groups")
    every = list(groups.values()) if isinstance(groups, Mapping) else []
    found = [one.get("weights") for one in every if isinstance(one, Mapping)]
    return [one for one in found if isinstance(one, Mapping)]


def _size(value: Any) -> int:
    return value if isinstance(value, int) else 0


def whole(stored: StoredTensor) -> Tensor:
    """Reads a whole tensor."""
    return stored.read(stored.dtype)


def columns(stored: StoredTensor, start: int, stop: int) -> Tensor:
    """Returns the columns from ``start`` to ``stop`` of a matrix. All are read, since a row has few bytes of each."""
    return whole(stored)[:, start:stop]


def unpacked(integers: Tensor, bits: int) -> Tensor:
    """Returns the numbers of 4 or 8 bits in integers of 32 bits, uint8 [..., numbers of an integer], the lowest bits
    first."""
    whole_bytes = integers.contiguous().view(torch.uint8).view(*integers.shape, 4)
    return whole_bytes if bits == 8 else torch.stack([whole_bytes & 15, whole_bytes >> 4], -1).flatten(-2)
