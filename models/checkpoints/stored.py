"""The tensors of a checkpoint's files, read piece by piece into memory of their own.

A piece is small, and is converted directly into the target. So reading makes no second copy of a matrix, even if the
stored dtype differs from the wanted one. Safetensors files are not mapped, since mapped pages that are read count as
the process's memory. The safetensors library cannot be used for this: without mapping, it reads a whole tensor for each
slice. Pickles are mapped by torch.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from ...core.errors import CheckpointError

_PIECE = 1 << 20  # bytes
SAMPLE = 256
"""Values of a tensor that go into a fingerprint."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@frozen(eq=False, kw_only=True)
class StoredTensor:
    """A tensor of a safetensors file. transformers treats it like a slice of the safetensors library: it indexes it
    with ``...``, and converts the result to another dtype with `to`.
    """

    path: Path
    name: str
    begin: int  # offset in the file
    kind: str  # the dtype of the values, as the file names it, such as "F32"
    shape: tuple[int, ...]

    has_parts = True  # `part` can be called

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values. Raises `CheckpointError` if torch does not have it."""
        if self.kind not in _DTYPES:
            raise CheckpointError(
                f"weight {self.name!r} of {self.path} is of {self.kind}; allowed: {', '.join(_DTYPES)}. Save the "
                "checkpoint again in one of them"
            )
        return _DTYPES[self.kind]

    def pieces(self) -> Generator[Tensor, None, None]:
        """Yields the values in order, in the stored dtype; each piece overwrites the one before. The file is open from
        the first piece until the last has been read or the generator is closed.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        dtype, left = self.dtype, prod(self.shape)
        if not left:
            return
        buffer = mmap(-1, min(left * dtype.itemsize, _PIECE))  # not from the C library, which keeps freed memory
        values, room = torch.frombuffer(buffer, dtype=dtype), memoryview(buffer)
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin)
                while left:
                    piece = values[:left]
                    if file.readinto(room[: piece.nbytes]) != piece.nbytes:
                        told = f"weight {self.name!r} of {self.path} cannot be read: the file ends within it"
                        raise CheckpointError(told)
                    yield piece
                    left -= len(piece)
        except OSError as error:
            raise CheckpointError(f"weight {self.name!r} of {self.path} cannot be read: {error}") from error

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the tensor in another dtype, as transformers asks for it."""
        return self.read(dtype or self.dtype, device)

    def read(self, dtype: torch.dtype, device: Any = None) -> Tensor:
        """Reads the tensor into memory that torch has allocated."""
        target = torch.empty(self.shape, device=device, dtype=dtype)
        fill(target, self.pieces())
        return target

    @property
    def block_kind(self) -> str | None:
        """The kind of the blocks that `blocks` gives; ``None``: the tensor is stored as plain numbers."""
        return None

    def blocks(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of some rows, as uint8, if the tensor has a `block_kind`."""
        raise NotImplementedError(f"{self.name} rows {start} to {stop}: plain numbers are not blocks")

    @property
    def input_order(self) -> Tensor | None:
        """The input that each input of the blocks is, int32; ``None``: the same one."""
        return None

    def part(self, index: int) -> Self:
        """Returns the values at ``index`` of the first dimension."""
        return self.cut(index * prod(self.shape[1:]), self.shape[1:])

    def sample(self) -> Iterator[Tensor]:
        """Yields a few values from the middle."""
        count, most = prod(self.shape), min(prod(self.shape), SAMPLE)
        yield self.cut((count - most) // 2, (most,)).read(self.dtype)

    def cut(self, first: int, shape: tuple[int, ...]) -> Self:
        """Returns the values from the one with the number ``first`` on, as a tensor of ``shape``."""
        return evolve(self, begin=self.begin + first * self.dtype.itemsize, shape=shape)

    def __getitem__(self, index: Any) -> Any:
        """Returns this object for ``...``, otherwise the values at ``index``."""
        return self if index is ... else self.read(self.dtype)[index]

    def get_shape(self) -> list[int]:
        """Returns the tensor's sizes, without reading the tensor."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Returns the dtype as the file names it, without reading the tensor."""
        return self.kind


@frozen(eq=False)
class MappedTensor:
    """A tensor of a pickle that torch has mapped."""

    _tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's sizes."""
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._tensor.dtype

    def pieces(self) -> Generator[Tensor, None, None]:
        """Yields the values in order, as `StoredTensor.pieces` does."""
        flat, count = self._tensor.flatten(), _PIECE // self.dtype.itemsize
        for begin in range(0, len(flat), count):
            yield flat[begin : begin + count]


def fill(target: Tensor, pieces: Generator[Tensor, None, None], scale: float = 1.0) -> None:
    """Writes all values times ``scale`` to ``target``, which is contiguous and has room for exactly these values.
    Closes ``pieces`` in every case, since otherwise a kept error would keep the file open."""
    flat, position = target.view(-1), 0
    with closing(pieces):
        for piece in pieces:
            stop = position + len(piece)
            flat[position:stop] = piece if scale == 1.0 else piece.float() * scale
            position = stop


def stored_tensors(path: Path, made: type[StoredTensor] = StoredTensor) -> dict[str, StoredTensor]:
    """Opens the tensors of a safetensors file, by name, as objects of the class ``made``. Raises `CheckpointError` if
    the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file, safe_open(path, framework="pt", device="cpu", backend="pread"):  # checks it
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download or save the checkpoint again") from error
    header.pop("__metadata__", None)
    return {
        name: made(
            path=path,
            name=name,
            begin=8 + length + about["data_offsets"][0],
            kind=about["dtype"],
            shape=tuple(about["shape"]),
        )
        for name, about in header.items()
    }
