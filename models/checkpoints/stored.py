"""The tensors of a checkpoint's files, read piece by piece into memory of their own.

A piece is small, and is converted where it belongs. So reading makes no second copy of a matrix, not even where it is
stored in another dtype than it is wanted in. Nothing of a safetensors file is mapped: what is mapped and touched
counts as the process's memory. The safetensors library reads all of a tensor for each slice where it does not map it.
Pickles are mapped by torch.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Generator
from contextlib import closing
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ...core.errors import CheckpointError

_PIECE = 1 << 20  # bytes
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
    """A tensor of a safetensors file. transformers reads it as it reads a slice of the safetensors library: it indexes
    it with ``...`` and asks the result for another dtype with `to`."""

    path: Path
    name: str
    begin: int  # in the file
    kind: str  # of the values, as the file names it, such as "F32"
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Raises `CheckpointError` for one that torch does not have."""
        if self.kind not in _DTYPES:
            raise CheckpointError(
                f"weight {self.name!r} of {self.path} is of {self.kind}; allowed: {', '.join(_DTYPES)}. Save the "
                "checkpoint again in one of them"
            )
        return _DTYPES[self.kind]

    def pieces(self) -> Generator[Tensor, None, None]:
        """The values in their order, as stored; each piece is overwritten by the next. The file is open from the first
        piece on, until the last was read or the generator is closed.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        dtype, left = self.dtype, prod(self.shape)
        if not left:
            return
        buffer = mmap(-1, min(left * dtype.itemsize, _PIECE))  # not of the C library, which keeps what is freed
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
        """Reads it, into memory as torch aligns it."""
        target = torch.empty(self.shape, device=device, dtype=dtype or self.dtype)
        fill(target, self.pieces())
        return target

    def __getitem__(self, index: Any) -> Any:
        """Returns itself for ``...``; otherwise the values."""
        return self if index is ... else self.to()[index]

    def get_shape(self) -> list[int]:
        """Its sizes, without reading it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype as the file names it, without reading the tensor."""
        return self.kind


@frozen(eq=False)
class MappedTensor:
    """A tensor of a pickle that torch has mapped."""

    _tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._tensor.dtype

    def pieces(self) -> Generator[Tensor, None, None]:
        """The values in their order, as `StoredTensor.pieces` gives them."""
        flat, count = self._tensor.flatten(), _PIECE // self.dtype.itemsize
        for begin in range(0, len(flat), count):
            yield flat[begin : begin + count]


def fill(target: Tensor, pieces: Generator[Tensor, None, None], scale: float = 1.0) -> None:
    """Writes all the values times ``scale`` to ``target``, which is contiguous and has room for exactly these. Closes
    ``pieces`` however it ends: whoever keeps an error would keep the file open."""
    flat, position = target.view(-1), 0
    with closing(pieces):
        for piece in pieces:
            stop = position + len(piece)
            flat[position:stop] = piece if scale == 1.0 else piece.float() * scale
            position = stop


def open_weights(path: Path) -> dict[str, StoredTensor | MappedTensor]:
    """The tensors of a file, by name. Raises `CheckpointError` where it is damaged."""
    if path.suffix == ".safetensors":
        return dict(stored_tensors(path))
    try:  # only the zip archives that torch writes since 1.6 can be mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return {str(name): MappedTensor(value) for name, value in loaded.items() if isinstance(value, Tensor)}
    except Exception as error:  # a damaged archive raises many kinds: wrapped, not hidden
        raise CheckpointError(f"{path} cannot be read: {error}; save the checkpoint again, as safetensors") from error


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises `CheckpointError` where it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu", backend="pread"), path.open("rb") as file:  # which checks it
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download or save the checkpoint again") from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            path=path,
            name=name,
            begin=8 + length + about["data_offsets"][0],
            kind=about["dtype"],
            shape=tuple(about["shape"]),
        )
        for name, about in header.items()
    }
