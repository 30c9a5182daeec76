"""The variables of a model of CTranslate2: their names, shapes and places in its file ``model.bin``.

The layout is that of ``ctranslate2/specs/model_spec.py``, little endian: the version, the name of the kind of model,
its revision, the variables with their values, and other names of variables. Nothing is allocated by a number of the
file, since every number is compared with the bytes that are left.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

from attrs import frozen

from ...core.errors import CheckpointError, UnsupportedModel

MODEL = "model.bin"
_VERSIONS = (5, 6)
_KINDS = (("F32", 4), ("I8", 1), ("I16", 2), ("I32", 4), ("F16", 2), ("BF16", 2))  # with bytes, by number
_WHOLE = {"I8": "b", "I16": "h", "I32": "i"}


@frozen
class Variable:
    """The place of a variable, with the kind that safetensors would call it."""

    begin: int  # offset in the file
    kind: str
    shape: tuple[int, ...]
    whole: int | None = None  # the value of a whole number without dimensions


@frozen
class ModelFile:
    """The names in a ``model.bin``. A variable may have several, since the converter stores equal ones once: ``tied``
    has the other names, each with the first one."""

    path: Path
    spec: str  # the kind of model, such as "WhisperSpec"
    variables: Mapping[str, Variable]
    tied: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> ModelFile:
        """Reads everything but values.

        Raises:
            CheckpointError: the file cannot be read, or is damaged.
            UnsupportedModel: another version of CTranslate2 has written it.
        """
        try:
            with path.open("rb") as file:
                return _Reader(path, file, path.stat().st_size).model()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def variable(self, name: str, dimensions: int) -> Variable:
        """Returns a variable. Raises `CheckpointError` if it is missing or has another number of dimensions."""
        if name not in self.variables:
            raise self.bad(f"has no variable {name!r}")
        found = self.variables[name]
        if len(found.shape) != dimensions:
            raise self.bad(f"has the variable {name!r} of shape {found.shape}; allowed: {dimensions} dimensions")
        return found

    def bad(self, what: str) -> CheckpointError:
        """Returns the error to raise if something is wrong with the file."""
        return _damaged(self.path, what)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; download or convert the model again")


@frozen
class _Reader:
    path: Path
    file: BinaryIO
    size: int  # bytes of the file

    def model(self) -> ModelFile:
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self.path} begins with {version}; allowed: {' or '.join(map(str, _VERSIONS))}, the versions of "
                "CTranslate2's files. Convert the model again"
            )
        spec, _revision = self._text("its kind"), self._number("I", "its revision")
        variables, tied = dict[str, Variable](), dict[str, str]()
        for index in range(self._number("I", "the number of its variables")):
            name = self._text(f"the name of variable {index}")
            if name in variables:
                raise _damaged(self.path, f"has the variable {name!r} twice")
            variables[name] = self._variable(name)
        for index in range(self._number("I", "the number of its other names")):
            other, meant = self._text(f"other name {index}"), self._text(f"the meaning of other name {index}")
            if other in variables or meant not in variables:
                raise _damaged(self.path, f"has the name {other!r} for {meant!r}; allowed: new names of variables")
            variables[other], tied[other] = variables[meant], meant
        if left := self.size - self.file.tell():
            raise _damaged(self.path, f"has {left} bytes after its last name")
        return ModelFile(self.path, spec, variables, tied)

    def _variable(self, name: str) -> Variable:
        what = f"the variable {name!r}"
        shape = tuple(self._number("I", what) for _ in range(self._number("B", what)))
        number, length = self._number("B", what), self._number("I", what)
        if number >= len(_KINDS):
            raise _damaged(self.path, f"has {what} of dtype {number}; allowed: 0 to {len(_KINDS) - 1}")
        (kind, each), begin = _KINDS[number], self.file.tell()
        if length != prod(shape) * each or not length:
            raise _damaged(self.path, f"has {what} of shape {shape} and {kind} in {length} bytes")
        if length > self.size - begin:
            raise _damaged(self.path, f"ends within {what}")
        whole = self._number(_WHOLE[kind], what) if not shape and kind in _WHOLE else None
        self.file.seek(begin + length)
        return Variable(begin, kind, shape, whole)

    def _number(self, form: str, what: str) -> int:
        (found,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))
        return int(found)

    def _text(self, what: str) -> str:
        return self._take(self._number("H", what), what).removesuffix(b"\0").decode(errors="replace")

    def _take(self, count: int, what: str) -> bytes:
        found = self.file.read(count)
        if len(found) != count:
            raise _damaged(self.path, f"ends within {what}")
        return found
