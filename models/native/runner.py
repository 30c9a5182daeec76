"""`Runner`: runs a program once for each step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from ctypes import addressof, c_char, sizeof
from itertools import chain
from math import nan
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from ...core.errors import EngineError
from ..memory.rows import Rows
from .draws import NONE, Arrays, Chosen, Draw
from .library import (
    MOST_THREADS,
    BufferData,
    Fault,
    LayerData,
    Library,
    ModelData,
    OperationData,
    StepData,
    StepPart,
    TurnsData,
)
from .panels import FORMATS
from .program import Program

_FLOATS = torch.float32
"""The dtype in which the library computes. A tensor whose address it gets names its dtype, since the default dtype
belongs to the program."""


def _floats(tensor: Tensor, count: int = 0) -> int:
    """Returns the address of a tensor of which the library reads or writes ``count`` numbers. It is valid as long as
    the tensor lives."""
    assert tensor.dtype == _FLOATS, f"the library computes in float32, not {tensor.dtype}"
    assert tensor.is_contiguous(), "the library reads and writes value by value"
    assert tensor.numel() >= count, f"{tensor.numel()} numbers where the library needs {count}"
    return tensor.data_ptr()


def _address(memory: bytearray) -> int | None:
    """Returns the address of ``memory``, which is valid as long as ``memory`` lives and keeps its size."""
    return addressof(c_char.from_buffer(memory)) if memory else None


_UNKNOWN = Chosen(NONE, nan, (), [])


@define(eq=False)
class Runner:
    """A program at work, on threads of its own. `release` ends them."""

    _library: Library = field(repr=False)
    _program: Program = field(repr=False)
    _handle: Any = field(repr=False)
    _buffers: list[BufferData] = field(repr=False)  # each step sets the addresses of the first and the last one
    _held: list[Any] = field(repr=False)  # memory that the library has addresses of
    _tensors: list[Tensor] = field(repr=False)  # the inner buffers, and the library's working memory
    _rows: int
    _page_size: int
    _given: bool = field(default=False, init=False)  # the buffers of what is added are not empty

    @classmethod
    def open(
        cls,
        library: Library,
        program: Program,
        keys_values: Sequence[Tensor] | Tensor | None,
        cross: Tensor | None = None,
        *,
        rows: int,
        positions: int,
        threads: int,
        level: int = 0,
        states: int = 1,
    ) -> Runner:
        """Allocates the memory, and starts the threads.

        Args:
            keys_values: for each layer the pages, [pages, page_size, numbers] in float32, float16 or bfloat16, keys
                before values; or none, of no numbers. ``None``: the program reads no pages.
            cross: the slots, [layers, 2, slots, heads, embeddings, size] in the same dtype, keys before values;
                ``None``: the program reads no slots.
            rows: the largest number of rows of one call; a larger step takes several calls.
            positions: the largest number of positions of a sequence.
            states: the largest number of states with rows in one call.
        """
        # No ctypes arrays, since their types are in reference cycles. No comprehensions, since they are closures, see
        # `core.tracebacks`.
        count, inner, operations = len(program.widths), list[Tensor](), program.operations()
        table, buffers, turns = bytearray(count * sizeof(BufferData)), list[BufferData](), bytearray()
        for index, width in enumerate(program.widths):
            buffers.append(BufferData.from_buffer(table, index * sizeof(BufferData)))
            buffers[-1].width = width
            if 0 < index < count - 1:
                inner.append(torch.empty(rows, width, dtype=_FLOATS))
                buffers[-1].data = _floats(inner[-1], rows * width)
        for cosines, sines in program.turns:
            turns += bytes(TurnsData(_floats(cosines), _floats(sines, cosines.numel()), *cosines.shape))
        model = ModelData(
            operations=_address(operations),
            buffers=_address(table),
            turns=_address(turns) if turns else None,
            count=len(operations) // sizeof(OperationData),
            buffer_count=count,
            turns_count=len(program.turns),
            threads=min(threads, MOST_THREADS),
            chooses=program.chooses,
            most_rows=rows,
            positions=positions,
            state=program.state,
            kept=program.kept,
            kept_rows=(states if keys_values is None else rows) * program.kept,
            block=program.block,
        )
        layers = bytearray()
        for part in () if keys_values is None else keys_values:
            layers += bytes(LayerData(part.data_ptr(), part.shape[2]))
            model.pages = max(model.pages, len(part))
            model.kv_format, model.page_size, model.layers = FORMATS[part.dtype], part.shape[1], model.layers + 1
        model.kv = _address(layers) if layers else None
        if cross is not None:
            assert not layers or model.kv_format == FORMATS[cross.dtype], "pages and slots are of one dtype"
            model.kv_format = FORMATS[cross.dtype]
            model.cross = cross.data_ptr()
            _, _, model.slots, model.cross_heads, model.embeddings, model.cross_size = cross.shape
        room = torch.empty(library.room(model), dtype=torch.uint8)
        model.room = room.data_ptr()
        handle = library.open(model, level)
        for number, index in enumerate(program.added):
            inner[index - 1].fill_(0.0 if number else 1.0)
        held = [operations, table, turns, layers, keys_values, cross]
        return cls(library, program, handle, buffers, held, [*inner, room], rows, max(1, model.page_size))

    def step(
        self,
        fed: Tensor | Sequence[int],
        rows: Rows,
        *,
        hidden: bool = False,
        kept: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Runs a step.

        Args:
            fed: embeddings, float32 [rows, hidden], which are overwritten; or tokens [rows], if the program looks
                tokens up. Beside embeddings, ``rows`` may have tokens.
            hidden: return last hidden states, even if the program has a head.
            kept: for some buffers, a tensor [rows, width] that receives the contents of the buffer.

        Returns:
            For each wanted row, in float32, logits [wanted, vocabulary] or last hidden states [wanted, hidden].

        Raises:
            EngineError: a number of the step is out of its range. If the step takes several calls, earlier calls may
                have been computed.
        """
        program = self._program
        self._check(fed, rows)
        inputs = fed if isinstance(fed, Tensor) else torch.empty(len(fed), program.widths[0], dtype=_FLOATS)
        headless = hidden and program.has_head
        found = torch.empty(len(rows.wanted), program.widths[-2 if headless else -1], dtype=_FLOATS)
        own = self._buffers[len(program.widths) - 2].data
        for start, stop, piece, wanted in rows.pieces(self._rows, self._page_size, whole=program.attends_to_all):
            first = wanted[0] if wanted else 0
            together = not wanted or wanted[-1] - first == len(wanted) - 1
            part = found[first : first + len(wanted)] if together else found.new_empty(len(wanted), found.shape[1])
            self._buffers[0].data = _floats(inputs[start:stop], (stop - start) * program.widths[0])
            self._buffers[len(program.widths) - (2 if headless else 1)].data = _floats(part)
            try:
                tokens = piece.tokens if isinstance(fed, Tensor) else fed[start:stop]
                self._run(piece, StepPart.HEADLESS if headless else StepPart.WHOLE, tokens)
            finally:
                self._buffers[len(program.widths) - 2].data = own
            for index, target in (kept or {}).items():
                target[start:stop] = self._tensors[index - 1][: stop - start]
            if not together:
                found[wanted] = part
        return found

    def _check(self, fed: Tensor | Sequence[int], rows: Rows) -> None:
        count = len(rows.positions)
        if isinstance(fed, Tensor):
            shape = (count, self._program.widths[0])
            assert fed.shape == shape, f"inputs of {tuple(fed.shape)}; the plan is of {shape}"
            assert not self._program.adds_positions, "the program adds positions to the embeddings that it looks up"
            assert rows.tokens or not self._program.needs_tokens, "the program looks up more than embeddings"
        else:
            assert self._program.looks_up, "the program is fed with embeddings"
            assert len(fed) == count, f"{len(fed)} tokens; the plan is of {count}"

    def choose(
        self,
        fed: Tensor | Sequence[int],
        rows: Rows,
        draws: Sequence[Draw],
        copies: Sequence[tuple[int, int]] = (),
        *,
        hidden: list[Tensor] | None = None,
    ) -> list[Chosen]:
        """Runs a step, and answers the draw of each wanted row. If tokens are fed, Python's lock is released only once,
        since numpy allocates memory without releasing it.

        Args:
            fed: as for `step`.
            draws: one for each wanted row.
            copies: pairs of pages; before the step the first page of a pair is copied to the second. No page is in two
                pairs.
            hidden: gets the hidden states behind the last layer, [rows, hidden], of one call after the other.

        Returns:
            The answers, one for each draw.

        Raises:
            EngineError: a number of the step is out of its range. If the step takes several calls, earlier calls may
                have been computed.
        """
        program, last = self._program, len(self._program.widths) - 1
        assert program.chooses, "the program chooses no tokens"
        self._check(fed, rows)
        found = [_UNKNOWN] * len(draws)
        for start, stop, piece, wanted in rows.pieces(self._rows, self._page_size):
            inputs = (stop - start) * program.widths[0]
            first_and_last: Any = np.empty(inputs + len(wanted) * program.widths[-1], np.float32)  # buffers
            place = addressof(c_char.from_buffer(first_and_last))
            self._buffers[0].data = _floats(fed[start:stop], inputs) if isinstance(fed, Tensor) else place
            self._buffers[last].data = place + 4 * inputs
            told = Arrays.of([draws[index] for index in wanted])
            tokens = piece.tokens if isinstance(fed, Tensor) else fed[start:stop]
            self._run(piece, StepPart.WHOLE, tokens, told, () if start else copies)
            if hidden is not None:
                own = fed[start:stop] if isinstance(fed, Tensor) else torch.from_numpy(first_and_last[:inputs])
                hidden.append(own.view(stop - start, program.widths[0]))
            for index, answer in zip(wanted, told.answers(), strict=True):
                found[index] = answer
        return found

    def read(self, frames: Tensor, tokens: Sequence[int], rows: Rows, *, scores: bool) -> Tensor:
        """Runs a step of a program of transducers, in one call.

        Args:
            frames: float32 [rows, width], which are overwritten.
            tokens: the tokens of all rows, of which the wanted ones are fed; empty: none is.
            scores: scores are asked for.

        Returns:
            The scores of all rows, float32 [rows, outputs].
        """
        found = torch.empty(len(frames), self._program.widths[-1], dtype=_FLOATS)
        self._buffers[0].data = _floats(frames, len(rows.positions) * self._program.widths[0])
        self._buffers[len(self._program.widths) - 1].data = _floats(found)
        self._run(rows, StepPart.WHOLE if scores else StepPart.HEADLESS, tokens)
        return found

    def last_hidden(self, count: int) -> Tensor:
        """Returns a copy of the last hidden states of the ``count`` wanted rows of the last call."""
        return self._tensors[len(self._program.widths) - 3][:count].clone()

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits [rows, vocabulary] from last hidden states, float32 [rows, hidden]."""
        program = self._program
        assert program.has_head, "the program ends with the last hidden states"
        assert hidden.shape[1] == program.widths[-2], f"hidden states of {hidden.shape[1]}, not {program.widths[-2]}"
        found = torch.empty(len(hidden), program.widths[-1], dtype=_FLOATS)
        own = self._tensors[len(program.widths) - 3]
        for start in range(0, len(hidden), self._rows):
            count = min(self._rows, len(hidden) - start)
            own[:count] = hidden[start : start + count]
            self._buffers[len(program.widths) - 1].data = _floats(found[start:])
            self._run(Rows(positions=(), chunks=(), tables=(), wanted=range(count)), StepPart.HEAD)
        return found

    def _run(
        self,
        rows: Rows,
        part: StepPart,
        fed: Sequence[int] = (),
        draws: Arrays | None = None,
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        flat = chain.from_iterable
        numbers, firsts = array("i"), list[int]()  # all whole numbers of the step, one list after the other
        lists = (rows.positions, flat(rows.chunks), rows.tables, rows.wanted, fed, rows.types, flat(copies), rows.seen)
        for each in (*lists, rows.adapters, [row for row, _ in rows.saves]):
            firsts.append(len(numbers) * numbers.itemsize)
            numbers.extend(each)
        place, _ = numbers.buffer_info()
        positions, chunks, tables, wanted, tokens, types, pairs, seen, adapters, saved_rows = [
            place + first for first in firsts
        ]
        assert len(rows.states) in {0, len(rows.chunks)}, f"{len(rows.states)} states of {len(rows.chunks)} chunks"
        states = array("Q", [_floats(state, self._program.state) for state in rows.states])
        counts = len(rows.positions), len(rows.wanted), len(rows.chunks), len(rows.tables)
        told = StepData(*counts, part, positions, chunks, tables, wanted, copies=pairs, copy_count=len(copies))
        told.tokens, told.types = tokens if fed else None, types if rows.types else None
        told.adapters = adapters if rows.adapters else None
        told.seen, told.in_windows, told.fed = seen if rows.seen else None, rows.in_windows, bool(rows.tokens)
        told.cosines, told.sines = map(_floats, rows.turns) if rows.turns else (None, None)
        self._give(rows.added)
        told.states = states.buffer_info()[0] if states else None
        saved = array("Q", [_floats(state, self._program.state) for _, state in rows.saves])
        told.saved, told.saved_rows, told.save_count = saved.buffer_info()[0], saved_rows, len(saved)
        if draws is not None and draws.draws:
            told.draws, told.edits, told.found, told.allowed = map(
                _address, (draws.draws, draws.edits, draws.found, draws.allowed)
            )
            told.bans = draws.bans.buffer_info()[0]
            told.edit_count, told.ban_count, told.found_count, told.allowed_size = draws.counts
        fault = self._library.step(self._handle, told)
        if fault is not Fault.FINE:
            raise EngineError(f"the native library refuses a step of {len(rows.positions)} rows: {fault.name.lower()}")

    def _give(self, added: Sequence[Tensor]) -> None:
        """Puts what is added into its buffers: nothing, unless it is given."""
        own = [self._tensors[index - 1] for index in self._program.added[1:]]
        for index, buffer in enumerate(own if added or self._given else ()):
            buffer.zero_() if not added else buffer[: len(added[index])].copy_(added[index])
        self._given = bool(added)

    def turned(self, positions: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor] | tuple[()]:
        """Returns the cosines and sines [rows, half] for ``positions`` in three dimensions, int64 [3, rows]: each angle
        turns by one of them. The numbers are those of positions in one dimension."""
        axes = self._program.axes
        assert axes, "the program's positions have one dimension"
        places = torch.from_numpy(positions[list(axes)]).T
        cosines, sines = self._program.turns[0]
        return cosines.gather(0, places), sines.gather(0, places)

    @property
    def program(self) -> Program:
        """The program."""
        return self._program

    @property
    def uncounted(self) -> int | None:
        """The token whose position is 0, while positions of other tokens count from 1; ``None``: every token counts,
        from 0."""
        return self._program.uncounted

    @property
    def rows(self) -> int:
        """The largest number of rows of one call."""
        return self._rows

    @property
    def kept(self) -> int:
        """The most rows that a chunk's state keeps."""
        return self._program.kept

    @property
    def block(self) -> int:
        """The number of rows that see the same rows."""
        return self._program.block

    def new_state(self) -> Tensor:
        """Returns the state of a chunk that begins."""
        return torch.empty(self._program.state, dtype=_FLOATS)

    @property
    def in_int8(self) -> bool:
        """True if the library quantizes the inputs of linear layers."""
        return self._program.in_int8

    def tensors(self) -> Iterator[Tensor]:
        """Yields the buffers, the library's working memory, and the program's own tensors."""
        yield from self._tensors
        yield from self._program.tensors()

    def __del__(self) -> None:
        """Ends the threads of a runner that nobody has released."""
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
