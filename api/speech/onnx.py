"""The weights in an ONNX file, read without a package for it.

An ONNX file is a message of Protocol Buffers: fields, each a number, a kind and a value. Three of its messages are
needed, by the field numbers of ``onnx.proto`` (ONNX 1.x): the model's graph, the graph's initializers, and in each of
these the shape, the type, the name and the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ...core.errors import CheckpointError

_GRAPH = 7  # of a model
_INITIALIZER = 5  # of a graph
_DIMS, _TYPE, _NAME, _RAW = 1, 2, 8, 9  # of a tensor
_FLOAT = 1  # a type
_VARINT, _WIDE, _BYTES, _NARROW = 0, 1, 2, 5  # kinds of values


def read_tensors(data: bytes) -> dict[str, npt.NDArray[np.float32]]:
    """The float32 initializers of the graph by their names; views of ``data``.

    Raises:
        CheckpointError: not an ONNX file, or a damaged one.
    """
    try:
        graphs = [value for number, value in _fields(memoryview(data)) if number == _GRAPH]
        found = [value for graph in graphs for number, value in _fields(_bytes(graph)) if number == _INITIALIZER]
        return dict(tensor for value in found if (tensor := _tensor(_bytes(value))) is not None)
    except (IndexError, ValueError) as error:
        raise CheckpointError(
            f"{len(data)} bytes are not a whole ONNX file ({error}); install its package anew"
        ) from error


def _tensor(message: memoryview) -> tuple[str, npt.NDArray[np.float32]] | None:
    """Name and value; ``None`` for another type."""
    dims: list[int] = []
    kind, name, raw = None, "", memoryview(b"")
    for number, value in _fields(message):
        if number == _DIMS:
            dims += [value] if isinstance(value, int) else _varints(value)
        elif number == _TYPE:
            kind = value
        elif number == _NAME:
            name = bytes(_bytes(value)).decode()
        elif number == _RAW:
            raw = _bytes(value)
    if kind != _FLOAT:
        return None
    if len(raw) != 4 * math.prod(dims):
        raise ValueError(f"tensor {name!r} of shape {dims} has {len(raw)} bytes")
    return name, np.frombuffer(raw, "<f4").reshape(dims)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The number and the value of each field."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_WIDE, _NARROW):
            size = 8 if kind == _WIDE else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes where {len(message) - at} are left")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
        if byte < 128:
            return value, at


def _varints(message: memoryview) -> list[int]:
    values, at = [], 0
    while at < len(message):
        value, at = _varint(message, at)
        values.append(value)
    return values


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number where bytes are due")  # noqa: TRY004  (the file is wrong, not a type)
    return value
