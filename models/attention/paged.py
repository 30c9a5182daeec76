"""Attention of decoder-only models over paged KV: a step's chunks of any lengths, flattened into rows.

Rows lie in the order of `PagedLayout`: chunks by length, those of one length by position. So the sequences that decode
(one row each) come first, the short contexts before the long ones, and whatever is attended together is a view::

    chunks  | 1 row at 3 | 1 row at 9 | 1 row at 300 | 40 rows at 0 | 64 rows at 128 |
    spans   | short chunks with similar contexts     | fresh        | long           |

A span of short chunks gathers its pages and is attended in one call; how many chunks it holds is bounded by what it
gathers (`_Limits`), since on the CPU a copy that stays in the cache is several times faster. A chunk from position 0 on
needs no pages: its keys are those just computed. A long chunk in the middle is attended in pieces, each of which reads
no further than it may see.

Spans and masks are made once per step for each sliding window that occurs, and shared by the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.plan import Chunk
from ..memory.kv import PagedKV

_SHORT = 16  # rows of a chunk that is attended together with others
_PIECE = 256  # rows of a long chunk that are attended together


@frozen(kw_only=True)
class _Limits:
    """Bytes of one layer that a span of short chunks gathers."""

    gathered: int
    wasted: int  # of those, for filling up the shorter ones

    @classmethod
    def of(cls, device: torch.device) -> _Limits:
        """On the CPU what stays in the cache (16 sequences of 1,024 positions in 5 instead of 27 ms on one core); else
        few launches count more."""
        if device.type == "cpu":
            return cls(gathered=2 << 20, wasted=128 << 10)
        return cls(gathered=256 << 20, wasted=64 << 20)


@frozen(kw_only=True, eq=False)
class PagedLayout:
    """Where a step's rows lie."""

    order: tuple[int, ...]  # index among the step's chunks, in the order of the rows
    chunks: tuple[Chunk, ...]  # in the order of the rows
    starts: tuple[int, ...]  # first row of each, in the order of the rows
    positions: Tensor  # [rows]
    slot_mapping: Tensor  # [rows], page * page_size + offset

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page_size: int, device: torch.device) -> PagedLayout:
        """The layout of at least one chunk."""
        order = sorted(range(len(chunks)), key=lambda index: (chunks[index].length, chunks[index].start))
        ordered = tuple(chunks[index] for index in order)
        lengths = [part.length for part in ordered]
        single = sum(length == 1 for length in lengths)
        rows = [_single_rows(ordered[:single], page_size), *(_long_rows(part, page_size) for part in ordered[single:])]
        indices = torch.cat(rows, 1).to(device)
        return cls(
            order=tuple(order),
            chunks=ordered,
            starts=tuple(accumulate(lengths[:-1], initial=0)),
            positions=indices[0],
            slot_mapping=indices[1],
        )


def _single_rows(chunks: Sequence[Chunk], page_size: int) -> Tensor:
    """Positions and slots of chunks of one row, [2, rows]."""
    positions = [part.start for part in chunks]
    slots = [part.page_table[part.start // page_size] * page_size + part.start % page_size for part in chunks]
    return torch.tensor([positions, slots], dtype=torch.long)


def _long_rows(part: Chunk, page_size: int) -> Tensor:
    """Positions and slots of one chunk, [2, rows]."""
    positions = torch.arange(part.start, part.start + part.length)
    first = part.start // page_size
    pages = torch.tensor(part.page_table[first : -(-(part.start + part.length) // page_size)])
    return torch.stack([positions, pages[positions // page_size - first] * page_size + positions % page_size])


@frozen(kw_only=True, eq=False)
class _Short:
    """Short chunks of one length, each reading ``pages`` pages."""

    row: int
    count: int
    length: int
    table: Tensor  # [count * pages] pages
    mask: Tensor  # [count, 1 or heads, length, pages * page_size], see `PagedStep._mask`


@frozen(kw_only=True, eq=False)
class _Fresh:
    """A chunk from position 0 on."""

    row: int
    length: int
    mask: Tensor | None  # [length, length], or one for each head; None: causal


@frozen(kw_only=True, eq=False)
class _Long:
    """A chunk in the middle: pieces of (first row of the chunk, rows, first and past last position of the gathered
    that they read, mask [rows, positions])."""

    row: int
    length: int
    table: Tensor
    pieces: tuple[tuple[int, int, int, int, Tensor], ...]


_Span = _Short | _Fresh | _Long


@define(eq=False)
class PagedStep:
    """One step's attention: handed to every layer's attention function. It lives as long as the step.

    ``distances`` [distances, heads] is added to the scores by the distance of query and key; the last row is that of
    all farther keys (T5; Raffel et al. 2020, section 2.1). ``None``: nothing is added.
    """

    paged: PagedKV
    layout: PagedLayout
    distances: Tensor | None = field(default=None, repr=False)
    _spans: dict[tuple[int | None, bool], tuple[_Span, ...]] = field(init=False, factory=dict, repr=False)

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
        """Stores ``keys`` and ``values`` [rows, kv_heads, head_dim] and attends causally, each chunk to its own
        sequence.

        Args:
            queries: [rows, heads, head_dim], heads a multiple of kv_heads.
            window: a row sees this many positions, its own included; ``None``: all.
            softcap: scores go through ``softcap * tanh(score / softcap)``.

        Returns:
            [rows, heads, head_dim].
        """
        self.paged.write(layer, self.layout.slot_mapping, torch.cat([keys.flatten(1), values.flatten(1)], 1))
        spans = self._spans_of(window, masked=softcap is not None or self.distances is not None)
        if len(spans) == 1 and isinstance(spans[0], _Short):
            return self._attend_short(layer, queries, spans[0], scale, softcap)
        attended = queries.new_empty(queries.shape)
        for span in spans:
            rows = slice(span.row, span.row + span.length * (span.count if isinstance(span, _Short) else 1))
            if isinstance(span, _Short):
                attended[rows] = self._attend_short(layer, queries[rows], span, scale, softcap)
            elif isinstance(span, _Fresh):
                attended[rows] = _attend_fresh(queries[rows], keys[rows], values[rows], span, scale, softcap)
            else:
                self._attend_long(layer, queries[rows], span, scale, softcap, attended[rows])
        return attended

    def _attend_short(self, layer: int, queries: Tensor, span: _Short, scale: float, softcap: float | None) -> Tensor:
        keys, values = self.paged.gather(layer, span.table, span.count)
        grouped = queries.shape[1] // keys.shape[1]
        if span.length == 1:  # the query heads that share a key's head are its rows: nothing is repeated
            split = queries.reshape(span.count, keys.shape[1], grouped, -1)
            mask = span.mask if self.distances is None else span.mask.view(span.count, keys.shape[1], grouped, -1)
            return _attention(split, keys, values, mask, scale, softcap).reshape(queries.shape)
        split = queries.reshape(span.count, span.length, *queries.shape[1:]).transpose(1, 2)
        attended = _attention(split, keys, values, span.mask, scale, softcap)
        return attended.transpose(1, 2).reshape(queries.shape)

    def _attend_long(
        self, layer: int, queries: Tensor, span: _Long, scale: float, softcap: float | None, attended: Tensor
    ) -> None:
        keys, values = self.paged.gather(layer, span.table, 1)
        split = queries.transpose(0, 1)[None]
        for first, count, start, stop, mask in span.pieces:
            part = _attention(
                split[:, :, first : first + count],
                keys[:, :, start:stop],
                values[:, :, start:stop],
                mask,
                scale,
                softcap,
            )
            attended[first : first + count] = part[0].transpose(0, 1)

    def _spans_of(self, window: int | None, *, masked: bool) -> tuple[_Span, ...]:
        """The step's rows as they are attended together under ``window``.

        Args:
            masked: whether a mask is needed even where causality would do.
        """
        if (window, masked) not in self._spans:
            self._spans[window, masked] = tuple(self._cut(window, masked=masked))
        return self._spans[window, masked]

    def _cut(self, window: int | None, *, masked: bool) -> Iterator[_Span]:
        chunks, starts = self.layout.chunks, self.layout.starts
        short = sum(part.length <= _SHORT for part in chunks)
        yield from self._cut_short(chunks[:short], starts[:short], window)
        for part, row in zip(chunks[short:], starts[short:], strict=True):
            yield self._fresh(part, row, window, masked=masked) if part.start == 0 else self._long(part, row, window)

    def _cut_short(self, chunks: Sequence[Chunk], starts: Sequence[int], window: int | None) -> Iterator[_Short]:
        limits = _Limits.of(self._device)
        page_bytes, size = self.paged.page_bytes, self.paged.page_size
        taken: list[Chunk] = []
        most = pages = 0
        for index, part in enumerate(chunks):
            first, last = _page_range(part, size, window)
            count = last - first
            widest = max(most, count)
            gathered = widest * (len(taken) + 1)
            wasted = gathered - pages - count
            full = gathered * page_bytes > limits.gathered or wasted * page_bytes > limits.wasted
            if taken and (part.length != taken[0].length or full):
                yield self._short(taken, starts[index - len(taken)], most, window)
                taken, pages, widest = [], 0, count
            taken.append(part)
            most, pages = widest, pages + count
        if taken:
            yield self._short(taken, starts[len(chunks) - len(taken)], most, window)

    def _short(self, chunks: Sequence[Chunk], row: int, most: int, window: int | None) -> _Short:
        size = self.paged.page_size
        table: list[int] = []
        firsts: list[int] = []
        for part in chunks:
            first, last = _page_range(part, size, window)
            table += part.page_table[first:last]
            table += [self.paged.pages] * (most - last + first)  # the page of zeros
            firsts.append(part.start - first * size)
        length = chunks[0].length
        device = self._device
        queries = torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
        return _Short(
            row=row,
            count=len(chunks),
            length=length,
            table=torch.tensor(table, device=device),
            mask=self._mask(queries[:, None, :, None], most * size, window),
        )

    def _fresh(self, part: Chunk, row: int, window: int | None, *, masked: bool) -> _Fresh:
        if not masked and (window is None or part.length <= window):
            return _Fresh(row=row, length=part.length, mask=None)
        queries = torch.arange(part.length, device=self._device)[:, None]
        return _Fresh(row=row, length=part.length, mask=self._mask(queries, part.length, window))

    def _long(self, part: Chunk, row: int, window: int | None) -> _Long:
        size, device = self.paged.page_size, self._device
        first, last = _page_range(part, size, window)
        origin = first * size
        pieces = []
        for offset in range(0, part.length, _PIECE):
            count = min(_PIECE, part.length - offset)
            position = part.start + offset - origin
            start = 0 if window is None else max(0, position - window + 1)
            queries = torch.arange(position - start, position - start + count, device=device)[:, None]
            stop = position + count
            pieces.append((offset, count, start, stop, self._mask(queries, stop - start, window)))
        table = torch.tensor(part.page_table[first:last], device=device)
        return _Long(row=row, length=part.length, table=table, pieces=tuple(pieces))

    def _mask(self, queries: Tensor, width: int, window: int | None) -> Tensor:
        """0, or what is added by distance, where a query at position ``queries`` sees one of ``width`` keys, else -inf:
        in the shape of both, or with the heads before the queries."""
        keys = torch.arange(width, device=self._device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        dtype = self.paged.dtype
        if self.distances is None:
            return torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        apart = (queries - keys).clamp_(0, len(self.distances) - 1)
        added = self.distances.to(dtype)[apart].masked_fill_(hidden[..., None], -torch.inf)  # [..., rows, keys, heads]
        return added.movedim(-1, -3) if added.dim() == 3 else added[:, 0].movedim(-1, -3)

    @property
    def _device(self) -> torch.device:
        return self.layout.positions.device


def _page_range(part: Chunk, page_size: int, window: int | None) -> tuple[int, int]:
    """The range of the page table that ``part`` reads."""
    first = 0 if window is None else max(0, part.start - window + 1) // page_size
    return first, -(-(part.start + part.length) // page_size)


def _attend_fresh(
    queries: Tensor, keys: Tensor, values: Tensor, span: _Fresh, scale: float, softcap: float | None
) -> Tensor:
    split, keys, values = (rows.transpose(0, 1)[None] for rows in (queries, keys, values))
    return _attention(split, keys, values, span.mask, scale, softcap)[0].transpose(0, 1)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """[n, heads, rows, head_dim] of ``keys`` [n, kv_heads, positions, head_dim]; without a mask it is causal."""
    if softcap is None:
        return scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
    assert mask is not None, "capped scores are masked"
    repeats = queries.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(queries.dtype), values)
