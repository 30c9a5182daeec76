"""Matrices that are held in float16 and multiplied in float32.

Most published weights were trained or saved in 16 bits. In float32 they fill twice the memory, and a decoder's step is
as slow as reading them. FBGEMM multiplies inputs in float32 by a matrix in float16, which it widens in registers, and
adds up in float32: the numbers are those of the matrix in float32, from half the bytes.

float16 has fewer exponents than bfloat16 and float32. So a matrix that does not fit as it is, is divided by a power of
two that leaves room for all its values, and the products are multiplied by it, which rounds nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from attrs import define, field
from torch import Tensor

from ..memory.native import NativeMemory

_PART = 4096  # outputs that are packed together: of more, packing takes twice the time
_EXPONENTS = 15  # float16 holds all values below the power of two
_FILLED, _COLUMNS = 512, 16  # FBGEMM packs so many inputs and outputs at once, and fills the last ones up
_LEAST = 2.0**-100  # of factors: far below it float32 does not hold the factor itself
_WAITING = 64 << 20


@define(eq=False)
class PackedMatrix(NativeMemory):
    """A matrix [outputs, inputs] as FBGEMM reads it, or room for one that a `Packer` packs."""

    outputs: int
    inputs: int
    factor: float  # of the products: what is packed are the values over it
    _parts: tuple[Any, ...] = field(default=(), repr=False)  # `torch.ScriptObject`, of `_PART` outputs each

    @classmethod
    def like(cls, weight: Tensor) -> Self | None:
        """Room for ``weight`` [outputs, inputs], float32; ``None``: float16 does not hold all of its values, they would
        take as much room as in float32, or torch has no FBGEMM here."""
        outputs, inputs = weight.shape
        if not is_available() or _nbytes(outputs, inputs) >= weight.nbytes:
            return None
        largest = max(map(abs, map(float, weight.aminmax())))
        if not math.isfinite(largest):
            return None
        for factor in dict.fromkeys((1.0, _factor(largest))):
            if factor >= _LEAST and is_lossless(weight, factor):
                return cls(outputs, inputs, factor)
        return None

    def halved(self, weight: Tensor) -> Tensor:
        """The values that are packed, float16 [outputs, inputs], as a plain tensor."""
        return torch.cat([_divided(part, self.factor).half() for part in torch.split(weight, _PART)])

    def pack(self, weight: Tensor) -> None:
        """Packs the matrix that the room is for."""
        self._parts = tuple(map(partial(_pack, self.factor), torch.split(weight, _PART)))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Products [rows, outputs] with ``inputs`` [rows, inputs], both float32. With AVX-512 a row's do not depend on
        the other rows; without, FBGEMM adds up one or two rows in another order than more."""
        found = [torch.ops.quantized.linear_dynamic_fp16(inputs, part) for part in self._parts]
        products = found[0] if len(found) == 1 else torch.cat(found, 1)
        return products if self.factor == 1.0 else products.mul_(self.factor)

    def nbytes(self) -> int:
        return _nbytes(self.outputs, self.inputs)


@define(eq=False)
class Packer:
    """Packs matrices in threads, while the next ones are read. Until it is packed a matrix is there in float32, too: up
    to `_WAITING` bytes of them, or one that is larger."""

    _pool: ThreadPoolExecutor
    _begun: deque[tuple[Future[None], int]] = field(factory=deque, init=False)  # with the bytes in float32

    @classmethod
    @contextmanager
    def open(cls, threads: int) -> Iterator[Self]:
        """Its threads are gone when the block ends, and all matrices are packed when it ends without an error."""
        with ThreadPoolExecutor(threads, thread_name_prefix="triolet packer") as pool:
            packer = cls(pool)
            yield packer
            packer._wait(-1)

    def pack(self, weight: Tensor) -> PackedMatrix | None:
        """``weight`` packed, when the block has ended; ``None``: see `PackedMatrix.like`."""
        matrix = PackedMatrix.like(weight)
        if matrix is not None:
            self._wait(_WAITING - weight.nbytes)
            self._begun.append((self._pool.submit(matrix.pack, weight), weight.nbytes))
        return matrix

    def _wait(self, most: int) -> None:
        """Until no more than so many bytes are not packed yet; with less than 0, until all are."""
        while self._begun and sum(count for _, count in self._begun) > most:
            self._begun.popleft()[0].result()


def is_available() -> bool:
    """Whether torch has FBGEMM here, and nobody has chosen another engine for quantized products in this process."""
    return torch.backends.quantized.engine in {"fbgemm", "x86"}


def is_lossless(weight: Tensor, factor: float) -> bool:
    """Whether float16 holds every value of ``weight``, float32 and finite, over ``factor``."""
    return all(map(partial(_is_lossless, factor), torch.split(weight, _PART)))


def _is_lossless(factor: float, part: Tensor) -> bool:
    divided = _divided(part, factor)
    return bool((divided.half() == divided).all())  # a value too large becomes infinite, and differs


def _factor(largest: float) -> float:
    """A power of two over which float16 holds values up to ``largest``, and hardly larger ones."""
    return math.ldexp(1.0, math.frexp(largest)[1] - _EXPONENTS)


def _nbytes(outputs: int, inputs: int) -> int:
    whole = -(-outputs // _COLUMNS) * _COLUMNS
    return -(-inputs // _FILLED) * _FILLED * whole * torch.float16.itemsize


def _pack(factor: float, part: Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(_divided(part, factor), None)


def _divided(part: Tensor, factor: float) -> Tensor:
    return part if factor == 1.0 else part / factor
