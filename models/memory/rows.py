"""`Rows`: the places of a step's rows in pages and slots. They are found once for each step, and read by the native
library and by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from ...core.plan import Chunk
from .recurrent_states import RecurrentStates


@frozen(kw_only=True, eq=False)
class Rows:
    """The rows of a step, one for each token fed, as flat numbers.

    Args:
        positions: the position of each row in its sequence; the rows of one chunk follow each other.
        chunks: for each chunk, the number of its rows, the index in ``tables`` at which its pages begin, its slot, and
            the number of embeddings in the slot; or of the rows in its state. Where there are no pages, the second
            number is 1 if the chunk continues the sequence of the chunk before.
        tables: the pages of all chunks, one chunk after the other.
        wanted: the rows whose results are wanted.
        order: for each of ``chunks``, its index among the chunks of the step.
        starts: for each of ``chunks``, its first row.
        types: the type of each row's token; empty: all have type 0.
        states: the state of each of ``chunks``, which a step changes; empty: chunks have none.
        saves: rows, ascending, and for each a tensor that gets its chunk's state as it is behind that row.
        seen: the last position that each row sees, which its chunk has; empty: its own.
        in_windows: True: that is so in layers with windows alone; in others each row sees up to its own.
        tokens: the token of each row, whose embeddings are fed, for what else is looked up; empty: nothing is.
        turns: cosines and sines [rows, half] of each row, in place of those of its position; empty: of that.
        added: what is added to the outputs of the first layers, each [rows, hidden]; empty: nothing.
        adapters: the slot of each row's adapter, or -1; empty: no row has one.
    """

    positions: Sequence[int]
    chunks: Sequence[tuple[int, int, int, int]]
    tables: Sequence[int]
    wanted: Sequence[int]
    order: Sequence[int] = ()
    starts: Sequence[int] = ()
    types: Sequence[int] = ()
    states: Sequence[Tensor] = ()
    saves: Sequence[tuple[int, Tensor]] = ()
    seen: Sequence[int] = ()
    in_windows: bool = False
    tokens: Sequence[int] = ()
    turns: Sequence[Tensor] = ()
    added: Sequence[Tensor] = ()
    adapters: Sequence[int] = ()

    @classmethod
    def all_of(cls, *counts: int) -> Rows:
        """Returns the rows of items that read no pages, ``counts`` of each. Every row is wanted."""
        positions = [position for count in counts for position in range(count)]
        chunks = [(count, 0, 0, 0) for count in counts]
        return cls(positions=positions, chunks=chunks, tables=(), wanted=range(len(positions)))

    @classmethod
    def of(
        cls,
        chunks: Sequence[Chunk],
        wanted: Sequence[tuple[int, int]],
        page_size: int,
        lengths: Callable[[int], int] | None = None,
        states: RecurrentStates | None = None,
        kept: int = 0,
    ) -> Rows:
        """Returns the rows of a step's chunks, one chunk after the other.

        Args:
            chunks: the chunks of the step.
            wanted: the rows whose results are wanted, each as (index of the chunk, offset in the chunk).
            page_size: the number of positions of a page.
            lengths: returns the number of embeddings in a slot; chunks are then ordered by slot. ``None``: chunks read
                no slots.
            states: the recurrent states; ``None``: chunks have none.
            kept: the number of rows that each state has.
        """
        order: Sequence[int] = range(len(chunks))
        if lengths is not None:
            order = sorted(order, key=lambda index: slot_of(chunks[index]))
        positions, starts, tables = list[int](), list[int](), list[int]()
        told: list[tuple[int, int, int, int]] = []
        for index in order:
            part, slot = chunks[index], 0
            starts.append(len(positions))
            if lengths is not None:
                slot = slot_of(part)
            told.append((part.length, len(tables), slot, kept if lengths is None else lengths(slot)))
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
            states=() if states is None else [states.of(part.states[0]) for part in chunks],
            saves=() if states is None else sorted(_saves(chunks, starts, states), key=itemgetter(0)),
        )

    def pieces(self, most: int, page_size: int, *, whole: bool = False) -> Iterator[tuple[int, int, Rows, list[int]]]:
        """Yields the same rows in pieces of up to ``most`` rows. A piece has its first row, the row after its last, its
        rows with the pages that they read, and the indices in ``wanted`` of its wanted rows. Rows that see each other
        are in one piece.

        Args:
            whole: no sequence is cut. There are no pages.
        """
        count = len(self.positions)
        if count <= most:
            yield 0, count, self, list(range(len(self.wanted)))
            return
        chunks, stop = list(reversed(self.chunks)), 0
        while stop < count:
            start, own, tables = stop, list[tuple[int, int, int, int]](), list[int]()
            first = len(self.chunks) - len(chunks)
            left = _fitting(chunks, most) if whole else min(most, count - start)
            while self.seen and self.seen[start + left - 1] > self.positions[start + left - 1]:
                left -= 1
            assert left > 0, f"more than {most} rows see each other"
            stop = start + left
            while left:
                length, table, slot, embeddings = chunks.pop()
                taken = min(length, left)
                if taken < length:
                    chunks.append((length - taken, table, slot, embeddings))
                left -= taken
                own.append((taken, len(tables) if self.tables else table, slot, embeddings))
                tables += self.tables[table : table + self.positions[stop - left - 1] // page_size + 1]
            inside = [index for index, row in enumerate(self.wanted) if start <= row < stop]
            wanted = [self.wanted[index] - start for index in inside]
            piece = Rows(
                positions=self.positions[start:stop],
                chunks=own,
                tables=tables,
                wanted=wanted,
                types=self.types[start:stop],
                states=self.states[first : first + len(own)],
                saves=[(row - start, state) for row, state in self.saves if start <= row < stop],
                seen=self.seen[start:stop],
                in_windows=self.in_windows,
                tokens=self.tokens[start:stop],
                turns=[one[start:stop] for one in self.turns],
                added=[one[start:stop] for one in self.added],
                adapters=self.adapters[start:stop],
            )
            yield start, stop, piece, inside

    def places(self, page_size: int) -> Tensor:
        """Returns for each row the place of its keys and values in the pages, page * page_size + offset."""
        lengths, tables, _, _ = np.array(self.chunks, np.int64).reshape(-1, 4).T
        positions = np.array(self.positions, np.int64)
        pages = np.array(self.tables, np.int64)[np.repeat(tables, lengths) + positions // page_size]
        return torch.from_numpy(pages * page_size + positions % page_size)


def _saves(chunks: Sequence[Chunk], starts: Sequence[int], states: RecurrentStates) -> Iterator[tuple[int, Tensor]]:
    for part, row in zip(chunks, starts, strict=True):
        for keep in part.keeps:
            yield row + keep.position - part.start - 1, states.of(keep.state)


def _fitting(chunks: Sequence[tuple[int, int, int, int]], most: int) -> int:
    """Returns the number of rows of the sequences at the end of ``chunks`` that make up to ``most`` rows."""
    fitting = rows = 0
    for length, continues, *_ in reversed(chunks):
        if not continues and rows > most:
            break
        fitting = fitting if continues else rows
        rows += length
    fitting = rows if rows <= most else fitting
    assert fitting, f"a sequence of {rows} rows that must not be cut; the most are {most}"
    return fitting


def slot_of(part: Chunk) -> int:
    """Returns the slot that a chunk reads."""
    assert part.cross_slot is not None, f"sequence {part.sequence_id} of an encoder-decoder model has no cross slot"
    return part.cross_slot
