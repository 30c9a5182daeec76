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
from attrs import asdict, define, field, frozen
from torch import Tensor

from ..memory.kv import PagedKV
from ..memory.rows import Rows
from .paged import Short, mask_of

_NUMBERS = 4  # of a row, beside its page table


@frozen
class Bucket:
    """The shape of a step."""

    rows: int
    pages: int  # of the longest sequence


@frozen(kw_only=True)
class Buckets:
    """The shapes that there are: rows by powers of two up to 8, then by eights; pages by powers of two."""

    rows: int  # most, 1 or more
    pages: int  # most, 1 or more: those of a sequence of full length
    cells: int  # most rows times pages, 1 or more: what attention gathers at once is bounded

    def fit(self, rows: Rows, page_size: int) -> Bucket | None:
        """The bucket of a step; ``None``: it is too large."""
        pages = max(rows.positions, default=0) // page_size + 1
        count = max(1, len(rows.positions))
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
        tensors = asdict(self, recurse=False, filter=lambda _, value: isinstance(value, Tensor))
        return FixedInputs(bucket=self.bucket, **{name: tensor.to(device) for name, tensor in tensors.items()})


def describe(
    bucket: Bucket, rows: Rows, token_ids: Sequence[int], positions: Sequence[int], page_size: int, nobodys: int
) -> Tensor:
    """The numbers of a step, on the host, in the order of `FixedInputs`.

    Args:
        rows: one of each chunk.
        positions: as the model counts them.
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
    """One step's attention, as `paged.PagedStep` is: handed to every layer, and gone with the step."""

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
    ) -> Tensor:
        """Attends as `paged.PagedStep.attend` does."""
        spare = self.inputs.slot_mapping >= self.paged.pages * self.paged.page_size
        written = torch.cat([keys.flatten(1), values.flatten(1)], 1).masked_fill(spare[:, None], 0)
        self.paged.write(layer, self.inputs.slot_mapping, written)
        return self._span(window).attend(self.paged, layer, queries, scale, softcap)

    def _span(self, window: int | None) -> Short:
        """Returns the span of all rows, made once for all layers with the same window."""
        if window not in self._spans:
            bucket, starts = self.inputs.bucket, self.inputs.starts[:, None, None, None]
            mask = mask_of(starts, bucket.pages * self.paged.page_size, window, self.paged.dtype)
            self._spans[window] = Short(count=bucket.rows, length=1, table=self.inputs.table, mask=mask)
        return self._spans[window]
