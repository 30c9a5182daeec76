"""`Program`: a decoder as the list of operations that the native library runs for each step; `Runner` runs it.

A program names buffers, one row for each token fed, and reads weights where they are. It holds tensors, the library
their addresses: whoever takes the tensors away closes the runner first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import addressof, c_char, sizeof
from itertools import chain
from struct import Struct
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from ...core.errors import EngineError
from ...core.plan import Chunk
from .library import (
    MOST_THREADS,
    BufferData,
    Fault,
    Kind,
    Library,
    ModelData,
    Norm,
    OperationData,
    Part,
    StepData,
    TurnsData,
)
from .panels import Panels

MULTIPLE = 16  # widths that are normalized are multiples of it


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
        paired: they are turned with their neighbours instead.
        table: by which of the program's tables.
        window: positions that a row sees, its own included; 0: all.
        distances: float32 [heads, distances], added to scores by the distance of query and key; the last one is that of
            all farther.
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
    paired: bool = False
    distances: Tensor | None = None


@define(eq=False)
class Program:
    """Is written once, operation after operation. Buffer 0 has the embeddings [rows, hidden], the last one the logits
    [wanted, vocabulary]."""

    widths: list[int] = field(factory=list, init=False)
    turns: list[tuple[Tensor, Tensor]] = field(factory=list, init=False)  # cosines and sines [positions, half]
    has_head: bool = field(default=False, init=False)  # without one the last buffer has the last hidden states
    _operations: list[OperationData] = field(factory=list, init=False, repr=False)
    _tensors: list[Tensor] = field(factory=list, init=False, repr=False)
    _matrices: list[Panels] = field(factory=list, init=False, repr=False)  # others'

    def buffer(self, width: int) -> int:
        """A new buffer's number."""
        self.widths.append(width)
        return len(self.widths) - 1

    def norm(self, source: int, to: int, norm: Normed, *, wanted: bool = False, add: bool = False) -> None:
        """The norm of each row of ``source``: of those that are wanted, one behind the other; or ``add``\\ ed to
        ``to``."""
        kind = Kind.NORM_ADD if add else Kind.NORM
        self._add(kind=kind, source=source, to=to, wanted=int(wanted), **self._normed(norm))

    def look_up(self, to: int, matrix: Panels, scale: float) -> None:
        """Embeddings of the step's tokens, where it is given some: rows of ``matrix``, times ``scale``."""
        self._matrices.append(matrix)
        self._add(kind=Kind.LOOKUP, source=to, to=to, matrix=matrix.data(), scale=scale)

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
        self._matrices.append(matrix)
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
            "paired": one.paired,
            "distances": self._kept(one.distances),
            "distance_count": 0 if one.distances is None else one.distances.shape[1],
        }
        self._add(kind=Kind.TURN, to=source, **told)
        self._add(kind=Kind.ATTEND, to=to, **told)

    @property
    def in_int8(self) -> bool:
        """Whether any matrix is."""
        return any(one.in_int8 for one in self._matrices)

    def cross(self, source: int, to: int, attention: Attention) -> None:
        """Attends from the queries in ``source`` [rows, heads * size], which are scaled in place, to the slot of each
        row."""
        one = attention
        told = {"layer": one.layer, "heads": one.heads, "kv_heads": one.kv_heads, "size": one.size, "scale": one.scale}
        self._add(kind=Kind.CROSS, source=source, to=to, **told)

    def attend_all(self, source: int, to: int, *, heads: int, size: int) -> None:
        """Attends from each row to all rows of the step, by the scaled queries, keys and values in ``source``
        [rows, 3 * heads * size]."""
        told = {"heads": heads, "kv_heads": heads, "size": size, "scale": 1.0}
        self._add(kind=Kind.ATTEND_ALL, source=source, to=to, **told)

    @property
    def looks_up(self) -> bool:
        """Whether it may be fed with tokens."""
        return bool(self._operations) and self._operations[0].kind == Kind.LOOKUP

    def operations(self) -> bytearray:
        """As the library reads them, one after the other, as long as the program has them."""
        return bytearray(b"".join(map(bytes, self._operations)))

    def tensors(self) -> Iterator[Tensor]:
        """What the operations read that is the program's own: not the matrices."""
        yield from self._tensors
        for pair in self.turns:
            yield from pair

    def release(self) -> None:
        """Forgets every tensor and operation."""
        self._operations.clear()
        self._tensors.clear()
        self._matrices.clear()
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
    """What a step is fed, as flat numbers.

    Args:
        positions: of each row; a chunk's follow each other.
        chunks: for each, how many rows it has, where in ``tables`` its pages begin, its slot, and how many embeddings
            are in it.
        tables: the pages of one chunk after the other.
        wanted: the rows whose results are wanted.
        order: which of a step's chunks they are.
        starts: the first row of each.
    """

    positions: Sequence[int]
    chunks: Sequence[tuple[int, int, int, int]]
    tables: Sequence[int]
    wanted: Sequence[int]
    order: Sequence[int] = ()
    starts: Sequence[int] = ()

    @classmethod
    def all_of(cls, count: int) -> Rows:
        """The rows of one item that reads no pages: each is wanted."""
        return cls(positions=range(count), chunks=[(count, 0, 0, 0)], tables=(), wanted=range(count))

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        wanted: Sequence[tuple[int, int]],
        page_size: int,
        lengths: Callable[[int], int] | None = None,
    ) -> Rows:
        """The rows of a step's chunks, one chunk after the other.

        Args:
            wanted: as (index of the chunk, offset in it).
            lengths: how many embeddings are in a slot. Chunks of one slot are neighbours then.
        """
        order: Sequence[int] = range(len(chunks))
        if lengths is not None:
            order = sorted(order, key=lambda index: _slot(chunks[index]))
        positions, starts, tables = list[int](), list[int](), list[int]()
        told: list[tuple[int, int, int, int]] = []
        for index in order:
            part, slot = chunks[index], 0
            starts.append(len(positions))
            if lengths is not None:
                slot = _slot(part)
            told.append((part.length, len(tables), slot, 0 if lengths is None else lengths(slot)))
            positions += range(part.start, part.start + part.length)
            tables += part.page_table[: -(-(part.start + part.length) // page_size)]
        first = starts if lengths is None else dict(zip(order, starts, strict=True))
        return cls(
            positions=positions,
            chunks=told,
            tables=tables,
            wanted=[first[index] + offset for index, offset in wanted],
            order=order,
            starts=starts,
        )

    def pieces(self, most: int, page_size: int) -> Iterator[tuple[int, int, Rows, list[int]]]:
        """The same in pieces of up to ``most`` rows: the first row and the one after the last, the piece with the pages
        of its own chunks, and which of the wanted are in it."""
        count = len(self.positions)
        if count <= most:
            yield 0, count, self, list(range(len(self.wanted)))
            return
        chunks, left = list(reversed(self.chunks)), 0
        for start in range(0, count, most):
            stop, own, tables = min(start + most, count), list[tuple[int, int, int, int]](), list[int]()
            left = stop - start
            while left:
                length, table, slot, embeddings = chunks.pop()
                taken = min(length, left)
                if taken < length:
                    chunks.append((length - taken, table, slot, embeddings))
                left -= taken
                own.append((taken, len(tables), slot, embeddings))
                tables += self.tables[table : table + self.positions[stop - left - 1] // page_size + 1]
            inside = [index for index, row in enumerate(self.wanted) if start <= row < stop]
            wanted = [self.wanted[index] - start for index in inside]
            piece = Rows(positions=self.positions[start:stop], chunks=own, tables=tables, wanted=wanted)
            yield start, stop, piece, inside


@frozen(kw_only=True)
class Draw:
    """How a token is chosen of a row's logits: the likeliest where ``temperature`` is 0, else at ``point``, in [0, 1),
    of the cumulative chances. The others are as in `SamplingParams`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    point: float


_DRAW = Struct("=4d2if4x")


def _drawn(draw: Draw | None) -> bytes:
    """As the library reads it, with a place for its answer."""
    if draw is None:
        return _DRAW.pack(0.0, 0.0, 0.0, 0.0, -1, 0, 0.0)
    return _DRAW.pack(draw.temperature, draw.top_p, draw.min_p, draw.point, draw.top_k, 0, 0.0)


def _place(memory: np.ndarray[Any, Any]) -> int:
    """Where an array lies, as long as it lives."""
    place: int = memory.__array_interface__["data"][0]
    return place


def _address(memory: bytearray) -> int:
    """Where ``memory`` lies, as long as it lives and its size stays."""
    return addressof(c_char.from_buffer(memory))


def _slot(part: Chunk) -> int:
    assert part.cross_slot is not None, f"sequence {part.sequence_id} of an encoder-decoder model has no cross slot"
    return part.cross_slot


@define(eq=False)
class Runner:
    """A program at work, on threads of its own. `release` ends them."""

    _library: Library = field(repr=False)
    _program: Program = field(repr=False)
    _handle: Any = field(repr=False)
    _buffers: list[BufferData] = field(repr=False)  # those of the rows and the results are each step's
    _held: list[Any] = field(repr=False)  # what the library has addresses of
    _tensors: list[Tensor] = field(repr=False)  # the other buffers, and the room
    _rows: int
    _page_size: int

    @classmethod
    def open(
        cls,
        library: Library,
        program: Program,
        keys_values: Tensor | None,
        cross: Tensor | None = None,
        *,
        rows: int,
        positions: int,
        threads: int,
        level: int = 0,
    ) -> Runner:
        """Takes the memory, and starts the threads.

        Args:
            keys_values: the pages, float32 [layers, pages, page_size, 2 * width], keys before values; ``None``: the
                program reads none.
            cross: the slots, float32 [layers, 2, slots, heads, embeddings, size], keys before values; ``None``: the
                program reads none.
            rows: the most of one call; a step of more is several calls.
            positions: the most of a sequence.
        """
        # no ctypes arrays: their types are in cycles; and no comprehensions: closures, see `core.frames`
        count, inner, operations = len(program.widths), list[Tensor](), program.operations()
        table, buffers, turns = bytearray(count * sizeof(BufferData)), list[BufferData](), bytearray()
        for index, width in enumerate(program.widths):
            buffers.append(BufferData.from_buffer(table, index * sizeof(BufferData)))
            buffers[-1].width = width
            if 0 < index < count - 1:
                inner.append(torch.empty(rows, width))
                buffers[-1].data = inner[-1].data_ptr()
        for cosines, sines in program.turns:
            turns += bytes(TurnsData(cosines.data_ptr(), sines.data_ptr(), *cosines.shape))
        model = ModelData(
            operations=_address(operations),
            buffers=_address(table),
            turns=_address(turns) if turns else None,
            count=len(operations) // sizeof(OperationData),
            buffer_count=count,
            turns_count=len(program.turns),
            threads=min(threads, MOST_THREADS),
            most_rows=rows,
            positions=positions,
        )
        if keys_values is not None:
            model.keys_values = keys_values.data_ptr()
            model.layers, model.pages, model.page_size, width = keys_values.shape
            model.kv_width = width // 2
        if cross is not None:
            model.cross = cross.data_ptr()
            _, _, model.slots, model.cross_heads, model.embeddings, model.cross_size = cross.shape
        room = torch.empty(library.room(model), dtype=torch.uint8)
        model.room = room.data_ptr()
        handle = library.open(model, level)
        held = [operations, table, turns, keys_values, cross]
        return cls(library, program, handle, buffers, held, [*inner, room], rows, max(1, model.page_size))

    def step(
        self, inputs: Tensor, rows: Rows, *, hidden: bool = False, kept: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Runs a step of ``inputs``, float32 [rows, hidden], which are overwritten.

        Args:
            hidden: the last hidden states are wanted, though there is a head.
            kept: is filled with what is in buffers when the step is over, [rows, width] each.

        Returns:
            What is wanted, float32: logits [wanted, vocabulary], or last hidden states [wanted, hidden].

        Raises:
            EngineError: a number is out of its range. Nothing was computed.
        """
        program = self._program
        shape = (len(rows.positions), program.widths[0])
        assert inputs.shape == shape, f"inputs of {tuple(inputs.shape)}; the plan is of {shape}"
        assert inputs.dtype == torch.float32, f"the library reads float32, not {inputs.dtype}"
        assert inputs.is_contiguous(), "the library reads value by value"
        headless = hidden and program.has_head
        found = torch.empty(len(rows.wanted), program.widths[-2 if headless else -1])
        own = self._buffers[len(program.widths) - 2].data
        for start, stop, piece, wanted in rows.pieces(self._rows, self._page_size):
            whole = len(wanted) == len(found)
            part = found if whole else torch.empty(len(wanted), found.shape[1])
            self._buffers[0].data = inputs[start:stop].data_ptr()
            self._buffers[len(program.widths) - (2 if headless else 1)].data = part.data_ptr()
            try:
                self._run(piece, Part.HEADLESS if headless else Part.WHOLE)
            finally:
                self._buffers[len(program.widths) - 2].data = own
            for index, target in (kept or {}).items():
                target[start:stop] = self._tensors[index - 1][: stop - start]
            if not whole:
                found[wanted] = part
        return found

    def choose(
        self, fed: Tensor | Sequence[int], rows: Rows, draws: Sequence[Draw | None]
    ) -> tuple[list[tuple[int, float] | None], Tensor]:
        """Runs a step, and chooses a token of each row that is wanted and has a draw. Of tokens alone Python's lock is
        given back once: numpy makes room without that.

        Args:
            fed: embeddings as for `step`, or the tokens [rows] of a program that looks them up.

        Returns:
            Tokens, each with its log-probability, which is NaN where a logit is not finite; and all logits.

        Raises:
            EngineError: a number is out of its range. Nothing was computed.
        """
        program, last = self._program, len(self._program.widths) - 1
        assert program.has_head, "the program ends with the last hidden states"
        assert isinstance(fed, Tensor) or program.looks_up, "the program is fed with embeddings"
        found: list[tuple[int, float] | None] = [None] * len(draws)
        logits = np.empty((len(draws), program.widths[-1]), np.float32)
        for start, stop, piece, wanted in rows.pieces(self._rows, self._page_size):
            part = logits if len(wanted) == len(draws) else np.empty((len(wanted), program.widths[-1]), np.float32)
            inputs = (
                fed[start:stop].numpy() if isinstance(fed, Tensor) else np.empty((stop - start, program.widths[0]), "f")
            )
            self._buffers[0].data, self._buffers[last].data = _place(inputs), _place(part)
            told = bytearray(b"".join(_drawn(draws[index]) for index in wanted))
            self._run(piece, Part.WHOLE, () if isinstance(fed, Tensor) else fed[start:stop], told)
            for index, (place, row) in enumerate(zip(wanted, part, strict=True)):
                *_, token, logprob = _DRAW.unpack_from(told, index * _DRAW.size)
                found[place] = None if draws[place] is None else (token, logprob)
                if part is not logits:
                    logits[place] = row
        return found, torch.from_numpy(logits)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of last hidden states, float32 [rows, hidden]."""
        program = self._program
        assert program.has_head, "the program ends with the last hidden states"
        assert hidden.shape[1] == program.widths[-2], f"hidden states of {hidden.shape[1]}, not {program.widths[-2]}"
        found = torch.empty(len(hidden), program.widths[-1])
        own = self._tensors[len(program.widths) - 3]
        for start in range(0, len(hidden), self._rows):
            count = min(self._rows, len(hidden) - start)
            own[:count] = hidden[start : start + count]
            self._buffers[len(program.widths) - 1].data = found[start:].data_ptr()
            self._run(Rows(positions=(), chunks=(), tables=(), wanted=range(count)), Part.HEAD)
        return found

    def _run(self, rows: Rows, part: Part, fed: Sequence[int] = (), draws: bytearray | None = None) -> None:
        chunks, tokens = array("i", chain.from_iterable(rows.chunks)), array("i", fed)
        positions, tables, wanted = (array("i", told) for told in (rows.positions, rows.tables, rows.wanted))
        told = StepData(
            rows=len(positions),
            wanted_count=len(wanted),
            chunk_count=len(rows.chunks),
            table_size=len(tables),
            part=part,
            positions=positions.buffer_info()[0],
            chunks=chunks.buffer_info()[0],
            tables=tables.buffer_info()[0],
            wanted=wanted.buffer_info()[0],
            tokens=tokens.buffer_info()[0] if fed else None,
            draws=_address(draws) if draws else None,
        )
        fault = self._library.step(self._handle, told)
        if fault is not Fault.FINE:
            raise EngineError(f"the native library refuses a step of {len(positions)} rows: {fault.name.lower()}")

    @property
    def in_int8(self) -> bool:
        """Whether inputs of products are quantized."""
        return self._program.in_int8

    def tensors(self) -> Iterator[Tensor]:
        """The buffers, the room, and what the program has of its own."""
        yield from self._tensors
        yield from self._program.tensors()

    def __del__(self) -> None:
        """Ends the threads of a runner that nobody took over; else `release` has."""
        self.release()

    def release(self) -> None:
        """Ends the threads, and forgets all memory."""
        if self._handle is not None:
            self._library.close(self._handle)
        self._handle = None
        self._buffers.clear()
        self._held.clear()
        self._tensors.clear()
        self._program.release()
