"""`VariedCrossKV`: cross-attention keys and values of encoder outputs of different lengths, in slots.

A step's rows are ordered by slot, so that slots next to each other, of similar lengths and equally many rows, are one
view of the pool and are attended together::

    slot        |  2   |  3   |  4 |  7      |          runs: (2..3, 40 positions, the first masked from 38 on),
    length      |  38  |  40  |  9 |  300    |                (4, 9 positions), (7, 300 positions)

A slot is as long as the longest encoder output, so room is counted in slots. What lies behind a slot's length is zero,
and masked where a longer neighbour is read beside it: garbage cannot reach a result, not even as ``0 * NaN``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.plan import Chunk

_FILLED = 0.25  # of what a run reads, at most, lies behind the end of a shorter slot


@define(eq=False)
class VariedCrossKV:
    """Cross-attention keys and values, [layers, 2, slots, kv_heads, embeddings, head_dim]: written once per slot, read
    in place by every sequence on the same item."""

    slots: int
    embeddings: int  # positions of a slot
    _pool: Tensor = field(repr=False)
    _lengths: list[int] = field(repr=False)  # positions in use of each slot
    _used: list[int] = field(repr=False)  # behind so many positions each slot is zero

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        slots: int,
        heads: int,
        embeddings: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> VariedCrossKV:
        """Takes the memory; on the CPU the system commits it only when it is written."""
        pool = torch.empty(layers, 2, slots, heads, embeddings, head_dim, dtype=dtype, device=device)
        return cls(slots, embeddings, pool, [0] * slots, [embeddings] * slots)

    def another(self, slots: int) -> VariedCrossKV:
        """Slots of their own, of the same kind."""
        layers, _, _, heads, embeddings, head_dim = self._pool.shape
        return VariedCrossKV.allocate(
            layers=layers,
            slots=slots,
            heads=heads,
            embeddings=embeddings,
            head_dim=head_dim,
            dtype=self._pool.dtype,
            device=self._pool.device,
        )

    @property
    def layers(self) -> int:
        """Layers of the decoder."""
        return len(self._pool)

    @property
    def row(self) -> tuple[int, int]:
        """Heads of one position, and the numbers of each."""
        return self._pool.shape[3], self._pool.shape[5]

    def begin(self, slot: int, length: int) -> None:
        """The slot is to be written anew, with ``length`` positions in every layer."""
        assert 1 <= length <= self.embeddings, f"{length} positions for a slot of {self.embeddings}"
        self._pool[:, :, slot, :, length : self._used[slot]] = 0
        self._lengths[slot] = self._used[slot] = length

    def write(self, slot: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values, each [kv_heads, length, head_dim], where `begin` has told the length."""
        self._pool[layer, 0, slot, :, : self._lengths[slot]] = keys
        self._pool[layer, 1, slot, :, : self._lengths[slot]] = values

    def read(self, layer: int, run: VariedRun) -> tuple[Tensor, Tensor]:
        """Keys and values of a run, each [slots, kv_heads, length, head_dim]: views."""
        keys, values = self._pool[layer, :, run.slot : run.slot + run.slots, :, : run.length]
        return keys, values

    def length(self, slot: int) -> int:
        """Positions in use of a slot."""
        return self._lengths[slot]

    def lengths(self, first: int, count: int) -> list[int]:
        """Positions in use of ``count`` slots."""
        return self._lengths[first : first + count]

    def tensors(self) -> tuple[Tensor, ...]:
        """The pool."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool = torch.empty(0)


@frozen(kw_only=True, eq=False)
class VariedRun:
    """Neighbouring slots of similar lengths with the same number of reading rows each."""

    start: int  # first row, in the order of the slots
    slot: int  # first slot
    slots: int
    rows: int  # per slot
    length: int  # of the longest
    mask: Tensor | None  # [slots, 1, 1, length], 0 or -inf; None: all are of one length


@define(eq=False)
class CrossStep:
    """One step's cross-attention. It lives as long as the step."""

    cross: VariedCrossKV
    _order: Tensor | None  # [rows] in the order of the slots; None: they are
    _runs: tuple[VariedRun, ...]

    @classmethod
    def of(
        cls, cross: VariedCrossKV, chunks: Sequence[Chunk], starts: Sequence[int], device: torch.device
    ) -> CrossStep:
        """The step of ``chunks``, whose first rows are ``starts``."""
        ordered = sorted(zip(map(_slot, chunks), starts, chunks, strict=True), key=lambda each: each[:2])
        rows = [row for _, start, part in ordered for row in range(start, start + part.length)]
        order = None if rows == sorted(rows) else torch.tensor(rows, device=device)
        return cls(cross, order, tuple(_runs(cross, [part for _, _, part in ordered], device)))

    def attend(self, layer: int, queries: Tensor, *, scale: float) -> Tensor:
        """Attention of ``queries`` [rows, heads, head_dim] over the slots of their sequences, in the same shape."""
        ordered = queries if self._order is None else queries[self._order]
        parts = list(map(partial(self._attend_run, layer, ordered, scale), self._runs))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._order is None:
            return attended
        return torch.empty_like(attended).index_copy_(0, self._order, attended)

    def _attend_run(self, layer: int, ordered: Tensor, scale: float, run: VariedRun) -> Tensor:
        """The query heads that share a key's head are further rows of it: nothing is repeated."""
        queries = ordered[run.start : run.start + run.slots * run.rows]
        keys, values = self.cross.read(layer, run)
        heads = keys.shape[1]
        split = queries.view(run.slots, run.rows, heads, -1, queries.shape[-1])  # [slots, rows, kv_heads, shared, size]
        shared = split.shape[3]
        split = split.permute(0, 2, 3, 1, 4).reshape(run.slots, heads, shared * run.rows, -1)
        attended = scaled_dot_product_attention(split, keys, values, attn_mask=run.mask, scale=scale)
        back = attended.view(run.slots, heads, shared, run.rows, -1).permute(0, 3, 1, 2, 4)
        return back.reshape(queries.shape)


def _slot(part: Chunk) -> int:
    assert part.cross_slot is not None, f"sequence {part.sequence_id} of an encoder-decoder model has no cross slot"
    return part.cross_slot


def _runs(cross: VariedCrossKV, chunks: Sequence[Chunk], device: torch.device) -> list[VariedRun]:
    """The runs of ``chunks``, which are ordered by slot."""
    taken: list[tuple[int, int, int]] = []  # first slot, slots, rows of each
    for slot, members in groupby(chunks, key=_slot):
        rows = sum(part.length for part in members)
        if taken and _joins(cross, taken[-1], slot, rows):
            first, count, _ = taken.pop()
            taken.append((first, count + 1, rows))
        else:
            taken.append((slot, 1, rows))
    runs: list[VariedRun] = []
    start = 0
    for first, count, rows in taken:
        lengths = cross.lengths(first, count)
        mask = _mask(lengths, cross, device)
        runs.append(VariedRun(start=start, slot=first, slots=count, rows=rows, length=max(lengths), mask=mask))
        start += count * rows
    return runs


def _joins(cross: VariedCrossKV, run: tuple[int, int, int], slot: int, rows: int) -> bool:
    """True if ``slot`` may be attended with the ``run`` before it."""
    first, count, wanted = run
    if first + count != slot or wanted != rows:
        return False
    lengths = cross.lengths(first, count + 1)
    read = max(lengths) * len(lengths)
    return read - sum(lengths) <= _FILLED * read


def _mask(lengths: list[int], cross: VariedCrossKV, device: torch.device) -> Tensor | None:
    if min(lengths) == max(lengths):
        return None
    hidden = torch.arange(max(lengths), device=device) >= torch.tensor(lengths, device=device)[:, None]
    mask = torch.zeros(hidden.shape, dtype=cross.tensors()[0].dtype, device=device).masked_fill_(hidden, -torch.inf)
    return mask[:, None, None]
