"""Steps in which every sequence feeds one token, in fixed shapes: what a captured graph can replay.

`PagedStep` (paged.py) cuts a step as its lengths ask for; a graph knows no lengths. So here a step has as many rows and
pages as its `Bucket` says, and everything that differs from step to step lies in tensors whose addresses stay. Rows
that are left over read and write the page that no sequence owns; so that it stays zero, zeros are written::

    bucket of 4 rows, 2 pages    token  start  slot            page table
    a sequence at position 5       17     5     page 9, 1        3  9
    a sequence at position 2        4     2     page 0, 2        0  zeros
    left over                       0     0     zeros            zeros  zeros     (twice)

Nothing here asks the device for a number, nor takes one to it: that could not be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..memory.kv import PagedKV

_NUMBERS = 4  # of a row, beside its page table


@frozen(kw_only=True)
class FixedRow:
    """One token of one sequence."""

    token: int
    start: int  # its index in the sequence
    position: int  # as the model counts it
    page_table: tuple[int, ...]


@frozen
class Bucket:
    """The shape of a step."""

    rows: int
    pages: int  # of the longest sequence


@frozen(kw_only=True)
class Buckets:
    """Which shapes there are: rows by powers of two up to 8, then by eights; pages by powers of two."""

    rows: int  # most, 1 or more
    pages: int  # most, 1 or more: those of a sequence of full length
    cells: int  # most rows times pages, 1 or more: what attention gathers at once is bounded

    def fit(self, rows: Sequence[FixedRow], page_size: int) -> Bucket | None:
        """The bucket of a step; ``None``: it is too large."""
        pages = max((row.start // page_size + 1 for row in rows), default=1)
        count = max(1, len(rows))
        if count > self.rows or pages > self.pages:
            return None
        wide = min(self.pages, _power(pages))
        tall = min(self.rows, _power(count) if count <= 8 else -(-count // 8) * 8)
        return Bucket(tall, wide) if tall * wide <= self.cells else None

    @property
    def numbers(self) -> int:
        """Most numbers that describe a step."""
        return _NUMBERS * self.rows + min(self.rows * self.pages, self.cells)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


@frozen(kw_only=True, eq=False)
class FixedInputs:
    """A step's tensors, views of buffers that outlive it."""

    bucket: Bucket
    token_ids: Tensor  # [rows]
    starts: Tensor  # [rows]
    positions: Tensor  # [rows]
    slot_mapping: Tensor  # [rows], page * page_size + offset
    table: Tensor  # [rows * pages] pages
    logits: Tensor  # [rows, vocabulary], written by the step

    @classmethod
    def of(cls, bucket: Bucket, numbers: Tensor, logits: Tensor) -> FixedInputs:
        """Views the beginnings of ``numbers`` [`Buckets.numbers`] and ``logits`` [most rows, vocabulary]."""
        rows = bucket.rows
        lengths = [*[rows] * _NUMBERS, rows * bucket.pages]
        token_ids, starts, positions, slot_mapping, table = torch.split_with_sizes(numbers[: sum(lengths)], lengths)
        return cls(
            bucket=bucket,
            token_ids=token_ids,
            starts=starts,
            positions=positions,
            slot_mapping=slot_mapping,
            table=table,
            logits=logits[:rows],
        )

    def on(self, device: torch.device) -> FixedInputs:
        """The same on ``device``."""
        return FixedInputs(
            bucket=self.bucket,
            token_ids=self.token_ids.to(device),
            starts=self.starts.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            table=self.table.to(device),
            logits=self.logits.to(device),
        )


def describe(bucket: Bucket, rows: Sequence[FixedRow], page_size: int, nobodys: int) -> Tensor:
    """The numbers of a step, on the host, in the order of `FixedInputs`.

    Args:
        nobodys: the page that no sequence owns.
    """
    spare = bucket.rows - len(rows)
    ends = [row.start // page_size + 1 for row in rows]
    slots = [row.page_table[row.start // page_size] * page_size + row.start % page_size for row in rows]
    table: list[int] = []
    for row, end in zip(rows, ends, strict=True):
        table += row.page_table[:end]
        table += [nobodys] * (bucket.pages - end)
    columns = ([row.token for row in rows], [row.start for row in rows], [row.position for row in rows])
    numbers = [number for column in columns for number in (*column, *[0] * spare)]
    numbers += [*slots, *[nobodys * page_size] * spare, *table, *[nobodys] * (spare * bucket.pages)]
    return torch.tensor(numbers, dtype=torch.long)


@define(eq=False)
class FixedStep:
    """One step's attention, as `paged.PagedStep` is: handed to every layer, and gone with the step."""

    paged: PagedKV
    inputs: FixedInputs
    _masks: dict[int | None, Tensor] = field(init=False, factory=dict, repr=False)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `paged.PagedStep.attend`."""
        inputs, rows = self.inputs, self.inputs.bucket.rows
        spare = inputs.slot_mapping >= self.paged.pages * self.paged.page_size
        written = torch.cat([keys.flatten(1), values.flatten(1)], 1).masked_fill(spare[:, None], 0)
        self.paged.write(layer, inputs.slot_mapping, written)
        known, told = self.paged.gather(layer, inputs.table, rows)
        split = queries.view(rows, known.shape[1], queries.shape[1] // known.shape[1], -1)  # those that share a head
        attended = _attention(split, known, told, self._mask(window), scale, softcap)
        return attended.reshape(queries.shape)

    def _mask(self, window: int | None) -> Tensor:
        """[rows, 1, 1, positions], 0 or -inf; made once for all layers with the same window."""
        if window not in self._masks:
            starts = self.inputs.starts[:, None]
            keys = torch.arange(self.inputs.bucket.pages * self.paged.page_size, device=starts.device)
            hidden = keys > starts
            if window is not None:
                hidden |= keys <= starts - window
            mask = torch.zeros(hidden.shape, dtype=self.paged.dtype, device=starts.device)
            self._masks[window] = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        return self._masks[window]


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """[rows, kv_heads, queries of a head, head_dim] of ``keys`` [rows, kv_heads, positions, head_dim]."""
    if softcap is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(queries.dtype), values)
