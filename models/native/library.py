"""The native library as ctypes sees it. `native/step.h` explains each field."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_size_t, c_void_p
from enum import IntEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from attrs import define, field

from ...core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

MOST_THREADS = 64
"""The largest number of threads, which is the number of counters that the library has."""

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid", "quick_gelu", "relu2")
ACTIVATIONS = {name: index for index, name in enumerate(_ACTIVATIONS)} | {"swish": 0, "gelu_new": 2}
"""Activations that the library computes, by their names in configurations."""

_NAME = "triolet.models.native.step"


class Kind(IntEnum):
    """The kind of an operation."""

    NORM, LINEAR, TURN, ATTEND, NORM_ADD, CROSS, ATTEND_ALL, LOOKUP, CONVOLVE, KEEP, RECALL, LSTM = range(12)
    ROUTE, EXPERTS, MIX, COPY, RECUR, GATE, ADAPT = range(12, 19)


class Norm(IntEnum):
    """The norm that is applied to each row that an operation reads."""

    NONE, ROOT_MEAN_SQUARE, LAYER = range(3)


class Ending(IntEnum):
    """The way in which a linear layer's outputs are written to their buffer."""

    STORE, ADD, GATED, ACTIVATED, CAPPED, GATED_BY, ADD_ACTIVATED = range(7)


class StepPart(IntEnum):
    """The operations that a step runs: all of them, all but the head, or the head alone. The head is the last one."""

    WHOLE, HEADLESS, HEAD = range(3)


class Fault(IntEnum):
    """The reason why a step is refused."""

    FINE, ROWS, POSITION, PAGE, WANTED, TABLE, SLOT, PART, TOKEN, DRAW = range(10)


class Choice(IntEnum):
    """The choice from a row's logits: nothing, one token, or the likeliest tokens that may follow a beam."""

    NOTHING, TOKEN, BEAM = range(3)


class Change(IntEnum):
    """The way in which a number changes a token's logit."""

    ADDED, SCALED, REPLACED = range(3)


class SectionData(Structure):
    """The struct ``Section``."""

    _fields_ = (("packing", c_int32), ("panels", c_int32), ("weights", c_void_p))


class MatrixData(Structure):
    """The struct ``Matrix``."""

    _fields_ = (
        *((name, c_int32) for name in ("format", "inputs", "outputs", "panels")),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("sections", POINTER(SectionData)),
        ("order", c_void_p),
        ("section_count", c_int32),
        ("planes", c_int32),
    )


class OperationData(Structure):
    """The struct ``Operation``."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "source", "to", "wanted", "norm")),
        ("epsilon", c_float),
        ("gain", c_void_p),
        ("shift", c_void_p),
        ("matrix", POINTER(MatrixData)),
        ("ending", c_int32),
        ("activation", c_int32),
        ("cap", c_float),
        *((name, c_int32) for name in ("layer", "heads", "kv_heads", "size", "value_size", "turned", "table")),
        ("query_gain", c_void_p),
        ("key_gain", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        *(
            (name, c_int32)
            for name in (
                "window",
                "ahead",
                "place",
                "column",
                "paired",
                "together",
                "quantized",
                "by_chunk",
                "distance_count",
                "delta",
            )
        ),
        ("distances", c_void_p),
        ("places", c_void_p),
        ("place_keys", POINTER(MatrixData)),
        ("place_queries", POINTER(MatrixData)),
    )


class BufferData(Structure):
    """The struct ``Buffer``."""

    _fields_ = (("data", c_void_p), ("width", c_int32))


class LayerData(Structure):
    """The struct ``Layer``."""

    _fields_ = (("pages", c_void_p), ("width", c_int32))


class TurnsData(Structure):
    """The struct ``Turns``."""

    _fields_ = (("cosines", c_void_p), ("sines", c_void_p), ("count", c_int64), ("half", c_int32))


class ModelData(Structure):
    """The struct ``Model``."""

    _fields_ = (
        ("operations", c_void_p),
        ("buffers", c_void_p),
        ("turns", c_void_p),
        *((name, c_int32) for name in ("count", "buffer_count", "turns_count", "threads", "chooses")),
        *((name, c_int32) for name in ("most_rows", "positions", "kv_format")),
        ("kv", c_void_p),
        *((name, c_int32) for name in ("layers", "pages", "page_size")),
        ("cross", c_void_p),
        *((name, c_int32) for name in ("slots", "cross_heads", "embeddings", "cross_size")),
        *((name, c_int32) for name in ("state", "kept", "kept_rows", "block")),
        ("room", c_void_p),
    )


class StepData(Structure):
    """The struct ``Step``."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "wanted_count", "chunk_count", "table_size", "part")),
        *(
            (name, c_void_p)
            for name in ("positions", "chunks", "tables", "wanted", "tokens", "types", "adapters", "draws")
        ),
        *((name, c_void_p) for name in ("edits", "bans", "found", "allowed", "cosines", "sines", "seen", "states")),
        *((name, c_void_p) for name in ("copies", "saved", "saved_rows")),
        *((name, c_int32) for name in ("edit_count", "ban_count", "found_count", "allowed_size", "copy_count")),
        *((name, c_int32) for name in ("save_count", "in_windows", "fed")),
    )


@define(eq=False)
class Library:
    """The loaded library. Its calls release Python's lock while they run."""

    _calls: ctypes.CDLL = field(repr=False)

    @staticmethod
    def load() -> Library | None:
        """Returns the library of this process. ``None``: the package was installed without a compiler, or the library
        cannot be loaded.

        Raises:
            EngineError: the library was compiled from other sources than those in the checkout of the package.
        """
        return _loaded()

    @property
    def level(self) -> int:
        """The level of this processor's instruction set, as x86-64 counts levels: 1, 3 (AVX2, with the products of
        AVX-VNNI if there are some), 4 (AVX-512 with VNNI) or 5 (with products in bfloat16, too). Other processors have
        level 1."""
        return int(self._calls.triolet_level())

    def packed_bytes(self, packing: int, inputs: int) -> int:
        """Returns the bytes of a panel of a packing, whose outputs have so many inputs."""
        return int(self._calls.triolet_packed_bytes(packing, inputs))

    def pack(self, packing: int, blocks: Tensor, inputs: int, to: Tensor) -> None:
        """Packs ``blocks``, contiguous bytes [outputs, bytes of a row], into panels at the beginning of ``to``."""
        self._calls.triolet_pack(packing, blocks.data_ptr(), len(blocks), inputs, to.data_ptr())

    def unpack(self, packing: int, panels: Tensor, inputs: int, outputs: Tensor, to: Tensor) -> None:
        """Writes the weights of ``outputs``, int64, of panels to ``to``, float32 [outputs, inputs]."""
        count = len(outputs)
        self._calls.triolet_unpack(packing, panels.data_ptr(), inputs, outputs.data_ptr(), count, to.data_ptr())

    def room(self, model: ModelData) -> int:
        """Returns the bytes that ``model`` needs in addition to its buffers."""
        size = int(self._calls.triolet_room(byref(model)))
        assert size, "an operation would leave the buffers, pages or tables that the model names"
        return size

    def open(self, model: ModelData, level: int) -> Any:
        """Starts the threads of ``model``, and returns a handle. The memory of ``model`` must not move before `close`.

        Args:
            level: the level of the instruction set to use; 0: the best one.

        Raises:
            EngineError: the threads cannot be started.
        """
        handle = self._calls.triolet_open(byref(model), level)
        if not handle:
            raise EngineError(
                f"the native library cannot start {model.threads} threads; allowed: 1 to {MOST_THREADS}, if the "
                "system lets this process have as many. Use EngineConfig(threads=1)"
            )
        return handle

    def step(self, handle: Any, step: StepData) -> Fault:
        """Runs a step, or refuses it before any memory is written."""
        fault = self._calls.triolet_step(handle, byref(step))
        return Fault(fault) if fault else Fault.FINE  # found without a call of the class, which takes longer

    def close(self, handle: Any) -> None:
        """Ends the threads, and returns when they are gone. In a fork of their process, does nothing."""
        self._calls.triolet_close(handle)


@cache  # `dlopen` loads a library once for each process, too; ctypes' objects for it are in reference cycles
def _loaded() -> Library | None:
    found = find_spec(_NAME)
    if found is None or found.origin is None:
        return None
    try:
        calls = ctypes.CDLL(found.origin)
    except OSError as error:  # built for another machine or another C library
        logging.getLogger("triolet").warning("the native library cannot be loaded: %s; install triolet again", error)
        return None
    _check_sources(calls, Path(__file__).parents[2] / "native")
    calls.triolet_room.argtypes, calls.triolet_room.restype = [POINTER(ModelData)], c_size_t
    calls.triolet_open.argtypes, calls.triolet_open.restype = [POINTER(ModelData), c_int32], c_void_p
    calls.triolet_close.argtypes, calls.triolet_close.restype = [c_void_p], None
    calls.triolet_step.argtypes, calls.triolet_step.restype = [c_void_p, POINTER(StepData)], c_int32
    calls.triolet_packed_bytes.argtypes, calls.triolet_packed_bytes.restype = [c_int32, c_int32], c_int64
    calls.triolet_pack.argtypes = [c_int32, c_void_p, c_int32, c_int32, c_void_p]
    calls.triolet_unpack.argtypes = [c_int32, c_void_p, c_int32, c_void_p, c_int64, c_void_p]
    calls.triolet_pack.restype = calls.triolet_unpack.restype = None
    calls.triolet_level.argtypes, calls.triolet_level.restype = [], c_int32
    return Library(calls)


def _check_sources(calls: ctypes.CDLL, folder: Path) -> None:
    """Refuses a library of other sources than those in ``folder``, where only a checkout has some: after a pull, it
    might read structs of today as those of yesterday."""
    sources = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])  # no copies that an editor keeps
    told = getattr(calls, "triolet_made_of", None)  # older ones do not tell
    if sources and (told is None or told() & 0xFFFFFFFF != crc32(b"".join(path.read_bytes() for path in sources))):
        raise EngineError(
            f"the native library was compiled from other sources than those in {folder}; compile it anew: "
            f"pip install --no-deps --editable {folder.parent}"
        )
