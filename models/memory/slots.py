"""`CrossKV`: cross-attention keys and values of encoder outputs, in slots of one tensor.

A step's rows are ordered by slot. Slots next to each other, with similar lengths and the same number of rows each, are
one view of the pool and are attended together::

    slot        |  2   |  3   |  4 |  7      |          runs: (2..3, 40 positions, the first masked from 38 on),
    length      |  38  |  40  |  9 |  300    |                (4, 9 positions), (7, 300 positions)

Each slot has room for the longest encoder output. Positions past the length of a slot are read only together with a
longer neighbour. They are zeroed before that, and masked, so garbage cannot reach a result, not even as ``0 * NaN``.
The native library reads no further than the length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import itemgetter

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .allocator import large_empty
from .rows import Rows

_PART = 192  # rows that are written at once: as many as the native library computes in a row, and few enough for caches
_FILLED = 0.25  # the largest part of a run that may lie past the ends of shorter slots


@define(eq=False)
class CrossKV:
    """Cross-attention keys and values, [layers, 2, slots, kv_heads, embeddings, head_dim]: written once per slot, read
    in place by every sequence on the same item."""

    slots: int
    embeddings: int  # positions of a slot
    _pool: Tensor = field(repr=False)
    _lengths: list[int] = field(repr=False)  # positions in use, for each slot
    _clean: list[int] = field(repr=False)  # positions without garbage, from the first on, for each slot

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
    ) -> CrossKV:
        """Allocates the memory. On the CPU the system commits memory only when it is written."""
        pool = large_empty((layers, 2, slots, heads, embeddings, head_dim), dtype, device)
        return cls(slots, embeddings, pool, [0] * slots, [0] * slots)

    def another(self, slots: int, dtype: torch.dtype | None = None) -> CrossKV:
        """Returns a new pool of ``slots`` slots of the same shape, in the same or another dtype."""
        layers, _, _, *sizes = self._pool.shape
        pool = self._pool.new_empty(layers, 2, slots, *sizes, dtype=dtype)
        return CrossKV(slots, self.embeddings, pool, [0] * slots, [0] * slots)

    @property
    def layers(self) -> int:
        """Number of layers of the decoder."""
        return len(self._pool)

    def begin(self, slot: int, length: int) -> None:
        """Prepares the slot for new contents with ``length`` positions in every layer."""
        assert 1 <= length <= self.embeddings, f"{length} positions for a slot of {self.embeddings}"
        self._lengths[slot] = self._clean[slot] = length

    def write(self, slot: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values of one layer, each [kv_heads, length, head_dim], with the length that `begin` set."""
        self._pool[layer, 0, slot, :, : self._lengths[slot]] = _nearest(keys, self._pool.dtype)
        self._pool[layer, 1, slot, :, : self._lengths[slot]] = _nearest(values, self._pool.dtype)

    def write_all(self, slot: int, output: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """Replaces the contents of the slot by the keys and values of an encoder output [length, width].

        Args:
            compute: returns keys and values of all layers, [rows, layers * 2 * kv_heads * size], of some rows of
                ``output``. If heads have fewer than head_dim numbers, zeros follow these.
        """
        layers, _, _, heads, _, _ = self._pool.shape
        self.begin(slot, len(output))
        for start in range(0, len(output), _PART):
            part = _nearest(compute(output[start : start + _PART]), self._pool.dtype)
            split, rows = part.view(len(part), layers, 2, heads, -1), slice(start, start + len(part))
            self._pool[:, :, slot, :, rows, : split.shape[-1]] = split.permute(1, 2, 3, 0, 4)
            self._pool[:, :, slot, :, rows, split.shape[-1] :] = 0

    def clean(self, slot: int, length: int) -> None:
        """Zeroes the positions from the end of the slot's contents up to ``length``."""
        if self._clean[slot] < length:
            self._pool[:, :, slot, :, self._clean[slot] : length] = 0
            self._clean[slot] = length

    def keys(self, layer: int, slot: int) -> Tensor:
        """Returns the keys in ``slot``, [kv_heads, length, head_dim]."""
        return self._pool[layer, 0, slot, :, : self._lengths[slot]]

    def read(self, layer: int, run: SlotRun) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a run as views, each [slots, kv_heads, length, head_dim]."""
        keys, values = self._pool[layer, :, run.slot : run.slot + run.slots, :, : run.length]
        return keys, values

    def length(self, slot: int) -> int:
        """Returns the number of positions in use in ``slot``."""
        return self._lengths[slot]

    def lengths(self, first: int, count: int) -> list[int]:
        """Returns the number of positions in use for each of ``count`` slots, from slot ``first`` on."""
        return self._lengths[first : first + count]

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the pool."""
        return (self._pool,)

    def release(self) -> None:
        """Forgets the pool."""
        self._pool = torch.empty(0)


@frozen(kw_only=True, eq=False)
class SlotRun:
    """Neighbouring slots of similar lengths, each read by the same number of rows."""

    start: int  # first row, in the order of the slots
    slot: int  # first slot
    slots: int
    rows: int  # per slot
    length: int  # of the longest slot
    mask: Tensor | None  # [slots, 1, 1, length], 0 or -inf; None: all slots have the same length


@define(eq=False)
class CrossStep:
    """Cross-attention of one step. The object lives as long as the step."""

    cross: CrossKV
    _runs: tuple[SlotRun, ...]

    @classmethod
    def of(cls, cross: CrossKV, rows: Rows) -> CrossStep:
        """Returns the cross-attention for a step with ``rows``, which are ordered by slot."""
        return cls(cross, tuple(_runs(cross, rows)))

    def attend(self, layer: int, queries: Tensor, *, scale: float) -> Tensor:
        """Attends from ``queries`` [rows, heads, head_dim] to the slots of their sequences. The result has the same
        shape."""
        parts = list(map(partial(self._attend_run, layer, queries, scale), self._runs))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_run(self, layer: int, every: Tensor, scale: float, run: SlotRun) -> Tensor:
        """Attends to the slots of one run. Query heads that share a key head are computed as further rows of that head,
        so that keys need not be repeated.
        """
        queries = every[run.start : run.start + run.slots * run.rows]
        keys, values = self.cross.read(layer, run)
        heads = keys.shape[1]
        split = queries.view(run.slots, run.rows, heads, -1, queries.shape[-1])  # [slots, rows, kv_heads, shared, size]
        shared = split.shape[3]
        split = split.permute(0, 2, 3, 1, 4).reshape(run.slots, heads, shared * run.rows, -1)
        attended = _attend(split, keys, values, run.mask, scale)
        back = attended.view(run.slots, heads, shared, run.rows, -1).permute(0, 3, 1, 2, 4)
        return back.reshape(queries.shape)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attends, with two products if there is one query row on the CPU, else with the fused kernel. For one row two
    products are faster (2.0 against 2.8 ms a layer for 16 windows of `tiny` on two cores)."""
    if queries.shape[-2] == 1 and queries.device.type == "cpu" and queries.dtype == torch.float32:
        scores = torch.matmul(queries * scale, keys.transpose(-1, -2))
        return torch.matmul((scores if mask is None else scores + mask).softmax(-1), values)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def _nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds ``numbers`` to ``dtype`` as the native library does: finite numbers beyond the range of ``dtype`` become
    its largest number or minus that; infinity and NaN stay."""
    if numbers.dtype == dtype:
        return numbers
    most, (least, largest) = torch.finfo(dtype).max, numbers.aminmax()
    if not (float(least) >= -most and float(largest) <= most):
        numbers = torch.where(numbers.isfinite(), numbers.clamp(-most, most), numbers)
    return numbers.to(dtype)


def _runs(cross: CrossKV, rows: Rows) -> list[SlotRun]:
    taken: list[tuple[int, int, int]] = []  # for each run: first slot, number of slots, rows per slot
    for slot, members in groupby(rows.chunks, key=itemgetter(2)):
        count = sum(length for length, *_ in members)
        if taken and _joins(cross, taken[-1], slot, count):
            first, slots, _ = taken.pop()
            taken.append((first, slots + 1, count))
        else:
            taken.append((slot, 1, count))
    runs: list[SlotRun] = []
    start = 0
    for first, slots, count in taken:
        lengths = cross.lengths(first, slots)
        for slot in range(first, first + slots):
            cross.clean(slot, max(lengths))
        mask = _mask(lengths, cross)
        runs.append(SlotRun(start=start, slot=first, slots=slots, rows=count, length=max(lengths), mask=mask))
        start += slots * count
    return runs


def _joins(cross: CrossKV, run: tuple[int, int, int], slot: int, rows: int) -> bool:
    """True if ``slot`` may be attended together with ``run``, which comes just before."""
    first, count, wanted = run
    if first + count != slot or wanted != rows:
        return False
    lengths = cross.lengths(first, count + 1)
    read = max(lengths) * len(lengths)
    return read - sum(lengths) <= _FILLED * read


def _mask(lengths: list[int], cross: CrossKV) -> Tensor | None:
    if min(lengths) == max(lengths):
        return None
    (pool,) = cross.tensors()
    hidden = torch.arange(max(lengths), device=pool.device) >= torch.tensor(lengths, device=pool.device)[:, None]
    mask = pool.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return mask[:, None, None]
