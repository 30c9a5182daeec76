"""Steps in which every sequence feeds one token, in fixed shapes, so that a captured graph can replay them.

`PagedStep` (paged.py) cuts a step according to its lengths, but the shapes of a graph are fixed. So here a step has as
many rows and pages as its `Bucket` says, and everything that differs from step to step lies in tensors with fixed
addresses. Spare rows read and write the page that no sequence owns; they write zeros, so the page stays zero::

    bucket of 4 rows, 2 pages    token  start  slot            page table
    a sequence at position 5       17     5     page 9, 1        3  9
    a sequence at position 2        4     2     page 0, 2        0  zeros
    left over                       0     0     zeros            zeros  zeros     (twice)

Nothing here copies a number from or to the device, since a graph cannot capture such a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import asdict, define, field, frozen
from torch import Tensor

from ..memory.kv import PagedKV
from ..memory.rows import Rows
from .paged import Scores, Short, mask_of

_NUMBERS = 4  # numbers of a row, not counting its page table


@frozen
class Bucket:
    """The fixed shape of a step."""

    rows: int
    pages: int  # of each row, as many as the longest sequence needs


@frozen(kw_only=True)
class Buckets:
    """The available shapes. The number of rows is a power of two up to 8, then a multiple of 8; the number of pages is
    a power of two."""

    rows: int  # most, 1 or more
    pages: int  # most, 1 or more: the pages of a sequence of full length
    cells: int  # most rows times pages, 1 or more; bounds what attention gathers at once

    def fit(self, rows: Rows, page_size: int) -> Bucket | None:
        """Returns the smallest bucket that fits a step; ``None``: the step is too large for all."""
        pages = max(rows.positions, default=0) // page_size + 1
        count = max(1, len(rows.positions))
        if count > self.rows or pages > self.pages:
            return None
        wide = min(self.pages, _power(pages))
        tall = min(self.rows, _power(count) if count <= 8 else -(-count // 8) * 8)
        return Bucket(tall, wide) if tall * wide <= self.cells else None

    @property
    def numbers(self) -> int:
        """The most numbers that describe a step."""
        return _NUMBERS * self.rows + min(self.rows * self.pages, self.cells)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


@frozen(eq=False)
class FixedInputs:
    """The tensors of a step: views of buffers that outlive the step."""

    bucket: Bucket
    token_ids: Tensor  # [rows]
    starts: Tensor  # [rows]
    positions: Tensor  # [rows]
    slot_mapping: Tensor  # [rows], page * page_size + offset
    table: Tensor  # [rows * pages] pages
    logits: Tensor  # [rows, vocabulary], written by the step

    @classmethod
    def of(cls, bucket: Bucket, numbers: Tensor, logits: Tensor) -> FixedInputs:
        """Makes the inputs as views of the first elements of ``numbers`` [`Buckets.numbers`] and ``logits`` [most rows,
        vocabulary]."""
        rows = bucket.rows
        lengths = [*[rows] * _NUMBERS, rows * bucket.pages]
        tensors = *torch.split_with_sizes(numbers[: sum(lengths)], lengths), logits[:rows]
        return cls(bucket, *tensors)

    def on(self, device: torch.device) -> FixedInputs:
        """Returns the same inputs on ``device``."""
        tensors = asdict(self, recurse=False, filter=lambda _, value: isinstance(value, Tensor))
        return FixedInputs(bucket=self.bucket, **{name: tensor.to(device) for name, tensor in tensors.items()})


def describe(
    bucket: Bucket, rows: Rows, token_ids: Sequence[int], positions: Sequence[int], page_size: int, nobodys: int
) -> Tensor:
    """Returns the numbers that describe a step, on the host, in the order of `FixedInputs`.

    Args:
        rows: the rows of the step, one for each chunk.
        positions: the positions of the rows, as the model counts them.
        nobodys: the page that no sequence owns.
    """
    spare = bucket.rows - len(token_ids)
    columns = (token_ids, rows.positions, positions)
    numbers = [number for column in columns for number in (*column, *[0] * spare)]
    numbers += [*rows.places(page_size).tolist(), *[nobodys * page_size] * spare]
    for start, (_, table, _, _) in zip(rows.positions, rows.chunks, strict=True):
        pages = rows.tables[table : table + start // page_size + 1]
        numbers += [*pages, *[nobodys] * (bucket.pages - len(pages))]
    return torch.tensor(numbers + [nobodys] * (spare * bucket.pages), dtype=torch.long)


@define(eq=False)
class FixedStep:
    """The attention of one step, like `paged.PagedStep`: passed to every layer, and dropped with the step."""

    paged: PagedKV
    inputs: FixedInputs
    _spans: dict[int | None, Short] = field(init=False, factory=dict, repr=False)

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends as `paged.PagedStep.attend` does."""
        spare = (self.inputs.slot_mapping >= self.paged.pages * self.paged.page_size)[:, None, None]
        self.paged.write(layer, self.inputs.slot_mapping, keys.masked_fill(spare, 0), values.masked_fill(spare, 0))
        return self._span(window).attend(self.paged, layer, queries, Scores(scale, softcap, sinks))

    def _span(self, window: int | None) -> Short:
        """Returns the span of all rows, made once for all layers with the same window."""
        if window not in self._spans:
            bucket, starts = self.inputs.bucket, self.inputs.starts[:, None, None, None]
            mask = mask_of(starts, bucket.pages * self.paged.page_size, window, self.paged.dtype)
            self._spans[window] = Short(count=bucket.rows, length=1, table=self.inputs.table, mask=mask)
        return self._spans[window]
