"""`Program`: a decoder as the list of operations that the native library runs for each step; `Runner` runs it.

A program names buffers, one row for each token fed, and reads weights where they are. It holds tensors, the library
their addresses: whoever takes the tensors away closes the runner first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from ...core.errors import EngineError
from .library import BufferData, Fault, Kind, Library, ModelData, Norm, OperationData, StepData, TurnsData
from .panels import Panels

MULTIPLE = 16  # widths and sizes of heads are multiples of it


@frozen(kw_only=True, eq=False)
class Normed:
    """A norm of what an operation reads: layer norm where there is a ``shift``, else root mean square."""

    gain: Tensor  # float32 [width]
    epsilon: float
    shift: Tensor | None = None


@frozen(kw_only=True, eq=False)
class Attention:
    """How a layer attends.

    Args:
        turned: how many leading dimensions of a head are turned, in halves (Su et al. 2021); 0: none.
        table: by which of the program's tables.
        window: positions that a row sees, its own included; 0: all.
        soft_cap: scores go through ``soft_cap * tanh(score / soft_cap)``; 0: they do not.
    """

    layer: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    turned: int
    table: int = 0
    window: int = 0
    soft_cap: float = 0.0
    epsilon: float = 0.0
    query_gain: Tensor | None = None  # float32 [size] of norms of each head
    key_gain: Tensor | None = None


@define(eq=False)
class Program:
    """Is written once, operation after operation. Buffer 0 has the embeddings [rows, hidden], the last one the logits
    [wanted, vocabulary]."""

    widths: list[int] = field(factory=list, init=False)
    turns: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)  # cosines and sines [positions, half]
    _operations: list[OperationData] = field(factory=list, init=False, repr=False)
    _tensors: list[Tensor] = field(factory=list, init=False, repr=False)

    def buffer(self, width: int) -> int:
        """A new buffer's number."""
        self.widths.append(width)
        return len(self.widths) - 1

    def norm(self, source: int, to: int, norm: Normed, *, wanted: bool = False, add: bool = False) -> None:
        """The norm of each row of ``source``: of those that are wanted, one behind the other; or ``add``\\ ed to
        ``to``."""
        kind = Kind.NORM_ADD if add else Kind.NORM
        self._add(kind=kind, source=source, to=to, wanted=int(wanted), **self._normed(norm))

    def linear(
        self,
        source: int,
        to: int,
        matrix: Panels,
        ending: int,
        *,
        norm: Normed | None = None,
        activation: int = 0,
        cap: float = 0.0,
        wanted: bool = False,
    ) -> None:
        """Products of each row with ``matrix``; ``wanted``: the rows are as many as are wanted."""
        self._tensors += matrix.tensors()
        told = {} if norm is None else self._normed(norm)
        self._add(
            kind=Kind.LINEAR,
            source=source,
            to=to,
            wanted=2 * wanted,
            matrix=matrix.data(),
            ending=ending,
            activation=activation,
            cap=cap,
            **told,
        )

    def attend(self, source: int, to: int, attention: Attention) -> None:
        """Turns the queries and keys in ``source`` [rows, (heads + 2 * kv_heads) * size], writes keys and values to the
        pages, and attends."""
        one = attention
        assert one.size % MULTIPLE == 0, f"heads of {one.size}; allowed: multiples of {MULTIPLE}"
        told = {
            "source": source,
            "layer": one.layer,
            "heads": one.heads,
            "kv_heads": one.kv_heads,
            "size": one.size,
            "turned": one.turned,
            "table": one.table,
            "query_gain": self._kept(one.query_gain),
            "key_gain": self._kept(one.key_gain),
            "epsilon": one.epsilon,
            "scale": one.scale,
            "soft_cap": one.soft_cap,
            "window": one.window,
        }
        self._add(kind=Kind.TURN, to=source, **told)
        self._add(kind=Kind.ATTEND, to=to, **told)

    def operations(self) -> Any:
        """As an array of the library's."""
        return (OperationData * len(self._operations))(*self._operations)

    def tensors(self) -> Iterator[Tensor]:
        """What the operations read."""
        yield from self._tensors
        for pair in self.turns:
            yield from pair

    def release(self) -> None:
        """Forgets every tensor and operation."""
        self._operations.clear()
        self._tensors.clear()
        self.turns.clear()

    def _add(self, **told: Any) -> None:
        self._operations.append(OperationData(**told))

    def _normed(self, norm: Normed) -> dict[str, Any]:
        assert len(norm.gain) % MULTIPLE == 0, f"rows of {len(norm.gain)}; allowed: multiples of {MULTIPLE}"
        kind = Norm.ROOT_MEAN_SQUARE if norm.shift is None else Norm.LAYER
        gain, shift = self._kept(norm.gain), self._kept(norm.shift)
        return {"norm": kind, "gain": gain, "shift": shift, "epsilon": norm.epsilon}

    def _kept(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.dtype == torch.float32, f"the library reads float32, not {tensor.dtype}"
        assert tensor.is_contiguous(), "the library reads value by value"
        self._tensors.append(tensor)
        return tensor.data_ptr()


@frozen(kw_only=True, eq=False)
class Rows:
    """What a step is fed, as lists of numbers.

    Args:
        positions: of each row; a chunk's are one behind the other.
        chunks: for each, how many rows it has, and where in ``tables`` its pages begin.
        wanted: the rows whose logits are wanted.
    """

    positions: Sequence[int]
    chunks: Sequence[tuple[int, int]]
    tables: Sequence[int]
    wanted: Sequence[int]


@define(eq=False)
class Runner:
    """A program at work, on threads of its own. `release` ends them."""

    _library: Library = field(repr=False)
    _program: Program = field(repr=False)
    _handle: Any = field(repr=False)
    _held: list[Any] = field(repr=False)  # what the library has addresses of
    _tensors: list[Tensor] = field(repr=False)  # the buffers, then the room

    @classmethod
    def open(
        cls,
        library: Library,
        program: Program,
        keys_values: Tensor,
        *,
        rows: int,
        positions: int,
        threads: int,
        level: int = 0,
    ) -> Runner:
        """Takes the memory, and starts the threads.

        Args:
            keys_values: the pages, float32 [layers, pages, page_size, 2 * width], keys before values.
            rows: the most of a step.
            positions: the most of a sequence.
        """
        buffers = [torch.empty(rows, width) for width in program.widths]
        operations = program.operations()
        data = (BufferData * len(buffers))(*[BufferData(one.data_ptr(), one.shape[1]) for one in buffers])
        turns = (TurnsData * len(program.turns))(
            *[TurnsData(cos.data_ptr(), sin.data_ptr(), len(cos), cos.shape[1]) for cos, sin in program.turns]
        )
        layers, pages, page_size, width = keys_values.shape
        model = ModelData(
            operations=ctypes.addressof(operations),
            buffers=ctypes.addressof(data),
            turns=ctypes.addressof(turns),
            count=len(operations),
            buffer_count=len(buffers),
            turns_count=len(program.turns),
            threads=threads,
            most_rows=rows,
            positions=positions,
            keys_values=keys_values.data_ptr(),
            layers=layers,
            pages=pages,
            page_size=page_size,
            kv_width=width // 2,
        )
        room = torch.empty(library.room(model), dtype=torch.uint8)
        model.room = room.data_ptr()
        handle = library.open(model, level)
        return cls(library, program, handle, [operations, data, turns, keys_values], [*buffers, room])

    @property
    def embeddings(self) -> Tensor:
        """Where the next step's rows go, float32 [rows, hidden]."""
        return self._tensors[0]

    def step(self, rows: Rows) -> Tensor:
        """Runs a step whose rows are in `embeddings`. Returns logits [wanted, vocabulary], which the next step
        overwrites.

        Raises:
            EngineError: a number is out of its range. Nothing was computed.
        """
        numbers = [
            torch.tensor(told, dtype=torch.int32) for told in (rows.positions, rows.chunks, rows.tables, rows.wanted)
        ]
        positions, chunks, tables, wanted = (one.data_ptr() for one in numbers)
        fault = self._library.step(
            self._handle,
            StepData(
                rows=len(rows.positions),
                wanted_count=len(rows.wanted),
                chunk_count=len(rows.chunks),
                table_size=len(rows.tables),
                positions=positions,
                turn_rows=None,
                chunks=chunks,
                tables=tables,
                wanted=wanted,
            ),
        )
        if fault is not Fault.FINE:
            raise EngineError(f"the native library refuses a step of {len(rows.positions)} rows: {fault.name.lower()}")
        return self._tensors[-2][: len(rows.wanted)]

    def tensors(self) -> Iterator[Tensor]:
        """The buffers and the room."""
        return iter(self._tensors)

    def release(self) -> None:
        """Ends the threads, and forgets all memory."""
        if self._handle is not None:
            self._library.close(self._handle)
        self._handle = None
        self._held.clear()
        self._tensors.clear()
        self._program.release()
