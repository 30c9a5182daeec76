"""Reads the header of a GGUF file (llama.cpp, Ollama, LM Studio): its settings, and where its tensors lie.

The file is read some bytes at a time, and only what is asked for is decoded. It is not mapped: a map of a file that
becomes shorter meanwhile, as one that is downloaded again, would end the process. `gguf.GGUFReader` cannot be used for
this: it maps the file, makes several arrays for each text of a vocabulary, which takes seconds, and checks no number.
Here each number is checked against the file's size before it is used. The package ``gguf`` knows the kinds of blocks.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from attrs import define, field, frozen

from ...core.errors import CheckpointError, UnsupportedModel

MAGIC: Final = b"GGUF"
KINDS: Final = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""The kinds of tensors that are read."""
PLAIN: Final = KINDS[:3]
"""The kinds that are numbers, not blocks."""
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DIMENSIONS = 4  # of ggml
_MOST_ALIGNED = 1 << 16
_WINDOW = 1 << 20  # bytes that are read at a time
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@frozen
class Listed:
    """A list in the header that has not been decoded."""

    begin: int
    format: str  # of `struct`; "": texts
    count: int


@frozen
class Placed:
    """A tensor's place in the file."""

    path: Path
    begin: int
    kind: str
    shape: tuple[int, ...]  # rows first, as torch has them


@frozen(eq=False)
class GgufFile:
    """The header of a file, or those of the files that a model is split into."""

    path: Path
    settings: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, Placed] = field(repr=False)
    parts: tuple[tuple[Path, int], ...]  # the model's files, and the bytes of their headers

    def listed(self, name: str) -> list[Any]:
        """Decodes the list ``name``; empty: there is none. Raises `CheckpointError` if the value is no list."""
        found = self.settings.get(name, Listed(0, "", 0))
        if not isinstance(found, Listed):
            raise CheckpointError(f"{self.path} has {name}={found!r}; allowed: a list. Download the file again")
        with opened(self.path) as header:
            header.at = found.begin
            return list(header.values(found.format, found.count)) if found.format else header.texts(found.count, name)


@define(eq=False)
class Header:
    """Takes values from a file, one after the other. None is taken from behind its end. ``data`` has the bytes from
    ``begin`` on."""

    path: Path
    file: BinaryIO
    size: int
    at: int = 0
    data: bytes = b""
    begin: int = 0
    form: str = "GGUF"

    def __enter__(self) -> Header:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def broken(self, told: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is a damaged {self.form} file: {told}; download it again")

    def place(self, count: int) -> int:
        """Returns where ``data`` has the next ``count`` bytes, which are within the file."""
        place = self.at - self.begin
        if 0 <= place <= len(self.data) - count:
            return place
        try:
            self.file.seek(self.at)
            self.data, self.begin = self.file.read(max(count, _WINDOW)), self.at
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        if len(self.data) < count:
            self.broken("it has become shorter")
        return 0

    def values(self, form: str, count: int, what: str = "a list") -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        if count > (self.size - self.at) // size:
            self.broken(f"it ends within {what}")
        place = self.place(count * size)
        found = struct.unpack_from(f"<{count}{form}", self.data, place)
        self.at += count * size
        return found

    def number(self, form: str, what: str) -> Any:
        return self.values(form, 1, what)[0]

    def bytes_of(self, what: str, length: int | None = None) -> bytes:
        """Takes bytes; without a ``length`` a number of 4 bytes tells how many."""
        length = self.number("i", what) if length is None else length
        if not 0 <= length <= self.size - self.at:
            self.broken(f"{what} has {length} bytes, more than the file")
        place = self.place(length)
        self.at += length
        return self.data[place : place + length]

    def text(self, what: str) -> str:
        found = self.bytes_of(what, self.number("Q", what))
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            self.broken(f"{what} is no text ({error})")

    def texts(self, count: int, what: str) -> list[str]:
        return [self.text(f"text {index} of {what}") for index in range(count)]

    def value(self, name: str) -> Any:
        kind = self.number("I", name)
        if kind == _STRING:
            return self.text(name)
        if kind != _ARRAY:
            return self.number(self._format(kind, name), name)
        kind, count = self.number("I", name), self.number("Q", name)
        if kind == _ARRAY:
            self.broken(f"{name} is a list of lists")
        if kind == _STRING:
            return self._skipped(count, name)
        found = Listed(self.at, self._format(kind, name), count)
        size = struct.calcsize(f"<{found.format}")
        if count > (self.size - self.at) // size:
            self.broken(f"{name} has {count} values, more than the file")
        self.at += count * size
        return found

    def _format(self, kind: int, name: str) -> str:
        if kind not in _FORMATS:
            self.broken(f"{name} is of the type {kind}, which no version of GGUF has")
        return _FORMATS[kind]

    def _skipped(self, count: int, name: str) -> Listed:
        """Passes over texts. A vocabulary has hundreds of thousands, so they are not decoded."""
        begin, take = self.at, struct.Struct("<Q").unpack_from
        if count > (self.size - begin) // 8:
            self.broken(f"{name} has {count} texts, more than the file")
        left = count
        while left:
            if self.at > self.size - 8:
                self.broken(f"it ends within {name}")
            place = self.place(8)
            data, last = self.data, len(self.data) - 8
            while left and place <= last:
                place += 8 + take(data, place)[0]
                left -= 1
            self.at = self.begin + place
        if self.at > self.size:
            self.broken(f"it ends within {name}")
        return Listed(begin, "", count)


def opened(path: Path, form: str = "GGUF") -> Header:
    try:
        file = path.open("rb")
        return Header(path, file, os.fstat(file.fileno()).st_size, form=form)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of one file.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModel: its version, byte order, or the kind of a tensor is not supported.
    """
    with opened(path) as header:
        magic = bytes(header.values("B", 4, "its magic number"))
        if magic != MAGIC:
            header.broken(f"it begins with {magic!r}, not with {MAGIC!r}")
        version = header.number("I", "its version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            told = "was written for big-endian machines" if swapped else f"is of version {version} of GGUF"
            raise UnsupportedModel(f"{path} {told}; allowed: versions 2 and 3, little-endian. Convert the model again")
        tensors, count = header.number("Q", "its counts"), header.number("Q", "its counts")
        if 24 * tensors + 13 * count > header.size:  # the least bytes of each
            header.broken(
                f"it says that it has {count} settings and {tensors} tensors, more than the file has room for"
            )
        settings: dict[str, Any] = {}
        for index in range(count):
            name = header.text(f"the name of setting {index}")
            if name in settings:
                header.broken(f"it has {name} twice")
            settings[name] = header.value(name)
        placed = _tensors(header, tensors, settings.get("general.alignment", 32))
        return GgufFile(path, settings, placed, ((path, header.at),))


def _tensors(header: Header, count: int, alignment: Any) -> dict[str, Placed]:
    """Reads the table of tensors. Each lies behind the header and before the file's end, and no two share bytes."""
    if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNED or alignment & (alignment - 1):
        header.broken(f"general.alignment is {alignment!r}")
    told = dict[str, tuple[tuple[int, ...], int, int]]()
    for index in range(count):
        name = header.text(f"the name of tensor {index}")
        dimensions = header.number("I", f"tensor {name}")
        if not 0 < dimensions <= _DIMENSIONS:
            header.broken(f"tensor {name} has {dimensions} dimensions")
        shape = header.values("Q", dimensions, f"tensor {name}")[::-1]
        if name in told:
            header.broken(f"it has the tensor {name} twice")
        told[name] = shape, header.number("I", f"tensor {name}"), header.number("Q", f"tensor {name}")
    start = -(-header.at // alignment) * alignment
    found, places = dict[str, Placed](), list[tuple[int, int, str]]()
    for name, (shape, number, offset) in told.items():
        kind, values, size = kind_of(header.path, name, number)
        if not all(shape) or shape[-1] % values:
            header.broken(f"tensor {name} of {kind} has the shape {shape}; rows of {kind} are whole blocks of {values}")
        length = prod(shape) // values * size
        if offset % alignment or start + offset + length > header.size:
            header.broken(
                f"tensor {name} has {length} bytes at {offset}; the file has {max(0, header.size - start)} for "
                f"tensors, which begin at multiples of {alignment}"
            )
        found[name] = Placed(header.path, start + offset, kind, shape)
        places.append((offset, length, name))
    places.sort()
    for (offset, length, one), (following, _, other) in pairwise(places):
        if offset + length > following:
            header.broken(f"the tensors {one} and {other} overlap")
    return found


def kind_of(path: Path, name: str, number: int) -> tuple[str, int, int]:
    """Returns a kind's name, the values in a block and the block's bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise UnsupportedModel(
            f"tensor {name} of {path} is of the kind {number}, which this version of the package gguf does not know; "
            f"allowed: {', '.join(KINDS)}"
        ) from None
    if kind.name not in KINDS:
        raise UnsupportedModel(
            f"tensor {name} of {path} is of the kind {kind.name}; allowed: {', '.join(KINDS)}. Take a file of the same "
            "model with one of these kinds, such as Q4_K_M or Q8_0, or quantize it again"
        )
    return (kind.name, *GGML_QUANT_SIZES[kind])


def split_files(path: Path, *, here: bool = True) -> tuple[Path, ...]:
    """Returns all files of the model, of which ``path`` may be one part (``-00001-of-00003.gguf``).

    Args:
        here: all parts must be there.

    Raises:
        CheckpointError: a part is missing.
    """
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 0 < int(found["number"]) <= count:
        raise CheckpointError(f"{path} has a number that none of {count} parts has; download it again")
    files = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing and here:
        raise CheckpointError(f"{path.parent} lacks {', '.join(missing[:3])}, parts of {path.name}; download them too")
    return tuple(files)


def read_split(path: Path) -> GgufFile:
    """Reads the headers of the model of which ``path`` is the only or one file. The settings are those of the first.

    Raises:
        CheckpointError: as in `read_gguf`; a part is missing or belongs to another model.
        UnsupportedModel: as in `read_gguf`.
    """
    files = [read_gguf(file) for file in split_files(path)]
    first, tensors = files[0], dict[str, Placed]()
    for number, file in enumerate(files):
        told = file.settings.get("split.no", 0), file.settings.get("split.count", 1) or 1
        if told != (number, len(files)):
            raise CheckpointError(
                f"{file.path} says that it is part {told[0]!r} of {told[1]!r} (split.no, split.count); its name says "
                f"{number} of {len(files)}. Download it again, with its name"
            )
        if twice := sorted(tensors.keys() & file.tensors.keys()):
            raise CheckpointError(f"{file.path} has the tensor {twice[0]}, as another part has; download them again")
        tensors |= file.tensors
    return GgufFile(first.path, first.settings, tensors, tuple(file.parts[0] for file in files))
