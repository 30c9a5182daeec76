"""Attention of decoders over paged KV: a step's chunks of any lengths, flattened into `Rows`, whose order is free.

Chunks are taken by length, those of one length by position: the sequences that decode (one row each) come first, the
short contexts before the long ones::

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
from operator import attrgetter

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..memory.kv import PagedKV
from ..memory.rows import Rows

_SHORT = 16  # rows of a chunk that is attended together with others
_PIECE = 256  # rows of a long chunk that are attended together


@frozen(kw_only=True)
class _Limits:
    """Bytes of one layer that a span of short chunks gathers."""

    gathered: int
    wasted: int  # of those, for filling up the shorter ones

    @classmethod
    def of(cls, device: torch.device) -> _Limits:
        """The limits: on the CPU what stays in the cache (16 sequences of 1,024 positions in 5 instead of 27 ms on one
        core); else few launches count more."""
        if device.type == "cpu":
            return cls(gathered=2 << 20, wasted=128 << 10)
        return cls(gathered=256 << 20, wasted=64 << 20)


@frozen(kw_only=True, eq=False)
class _Chunk:
    """A chunk of the step."""

    row: int  # its first
    start: int  # position of that row
    length: int
    table: Sequence[int]  # its pages, up to that of its last row

    def pages(self, page_size: int, window: int | None) -> tuple[int, Sequence[int]]:
        """The pages that it reads, and how many are left out before them."""
        first = 0 if window is None else max(0, self.start - window + 1) // page_size
        return first, self.table[first:]


def _chunks(rows: Rows, page_size: int) -> list[_Chunk]:
    """Returns the chunks by length, then by position."""
    found: list[_Chunk] = []
    row = 0
    for length, table, _, _ in rows.chunks:
        pages = rows.tables[table : table + (rows.positions[row + length - 1] // page_size) + 1]
        found.append(_Chunk(row=row, start=rows.positions[row], length=length, table=pages))
        row += length
    return sorted(found, key=attrgetter("length", "start"))


@frozen(kw_only=True, eq=False)
class Short:
    """Short chunks of one length, each reading equally many pages."""

    rows: Tensor | None = None  # [count * length]; None: all of the step
    count: int
    length: int
    table: Tensor  # [count * pages] pages
    mask: Tensor  # [count, 1 or heads, length, pages * page_size], see `mask_of`

    def attend(self, paged: PagedKV, layer: int, queries: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention of ``queries`` [count * length, heads, head_dim], in the same shape."""
        keys, values = paged.gather(layer, self.table, self.count)
        heads = keys.shape[1]
        if self.length == 1:  # the query heads that share a key's head are its rows: nothing is repeated
            split = queries.reshape(self.count, heads, queries.shape[1] // heads, -1)
            mask = self.mask if self.mask.shape[1] == 1 else self.mask.view(*split.shape[:3], -1)
            return _attention(split, keys, values, mask, scale, softcap).reshape(queries.shape)
        split = queries.reshape(self.count, self.length, *queries.shape[1:]).transpose(1, 2)
        attended = _attention(split, keys, values, self.mask, scale, softcap)
        return attended.transpose(1, 2).reshape(queries.shape)


@frozen(kw_only=True, eq=False)
class _Fresh:
    """A chunk from position 0 on."""

    rows: slice
    mask: Tensor | None  # [length, length], or one for each head; None: causal

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
        split, keys, values = (rows.transpose(0, 1)[None] for rows in (queries, keys, values))
        return _attention(split, keys, values, self.mask, scale, softcap)[0].transpose(0, 1)


@frozen(kw_only=True, eq=False)
class _Long:
    """A chunk in the middle: pieces of (first row of the chunk, rows, first and past last position of the gathered
    that they read, mask [rows, positions])."""

    rows: slice
    table: Tensor
    pieces: tuple[tuple[int, int, int, int, Tensor], ...]

    def attend(self, paged: PagedKV, layer: int, queries: Tensor, scale: float, softcap: float | None) -> Tensor:
        keys, values = paged.gather(layer, self.table, 1)
        split, parts = queries.transpose(0, 1)[None], list[Tensor]()
        for first, count, start, stop, mask in self.pieces:
            asked, known, told = split[:, :, first : first + count], keys[:, :, start:stop], values[:, :, start:stop]
            parts.append(_attention(asked, known, told, mask, scale, softcap)[0].transpose(0, 1))
        return torch.cat(parts)


_Span = Short | _Fresh | _Long


@define(eq=False)
class PagedStep:
    """One step's attention: handed to every layer's attention function. It lives as long as the step.

    ``distances`` [distances, heads] is added to the scores by the distance of query and key; the last row is that of
    all farther keys (T5; Raffel et al. 2020, section 2.1). ``None``: nothing is added.
    """

    paged: PagedKV
    rows: Rows
    distances: Tensor | None = field(default=None, repr=False)
    _places: Tensor = field(init=False, repr=False)  # [rows], page * page_size + offset
    _spans: dict[tuple[int | None, bool], tuple[_Span, ...]] = field(init=False, factory=dict, repr=False)

    @_places.default
    def _find_places(self) -> Tensor:
        return self.rows.places(self.paged.page_size).to(self.paged.device)

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
        self.paged.write(layer, self._places, torch.cat([keys.flatten(1), values.flatten(1)], 1))
        spans = self._spans_of(window, masked=softcap is not None or self.distances is not None)
        if len(spans) == 1 and isinstance(spans[0], Short):
            return spans[0].attend(self.paged, layer, queries, scale, softcap)
        attended = queries.new_empty(queries.shape)
        for span in spans:
            if isinstance(span, Short):
                rows = span.rows
                assert rows is not None, "a span among several knows its rows"
                part = span.attend(self.paged, layer, queries.index_select(0, rows), scale, softcap)
                attended.index_copy_(0, rows, part)
            elif isinstance(span, _Fresh):
                own = span.rows
                attended[own] = span.attend(queries[own], keys[own], values[own], scale, softcap)
            else:
                attended[span.rows] = span.attend(self.paged, layer, queries[span.rows], scale, softcap)
        return attended

    def _spans_of(self, window: int | None, *, masked: bool) -> tuple[_Span, ...]:
        """The step's rows as they are attended together under ``window``.

        Args:
            masked: whether a mask is needed even where causality would do.
        """
        if (window, masked) not in self._spans:
            self._spans[window, masked] = tuple(self._cut(window, masked=masked))
        return self._spans[window, masked]

    def _cut(self, window: int | None, *, masked: bool) -> Iterator[_Span]:
        chunks = _chunks(self.rows, self.paged.page_size)
        short = sum(part.length <= _SHORT for part in chunks)
        yield from self._cut_short(chunks[:short], window)
        for part in chunks[short:]:
            yield self._fresh(part, window, masked=masked) if part.start == 0 else self._long(part, window)

    def _cut_short(self, chunks: Sequence[_Chunk], window: int | None) -> Iterator[Short]:
        limits, page_bytes = _Limits.of(self.paged.device), self.paged.page_bytes
        taken: list[_Chunk] = []
        most = pages = 0
        for part in chunks:
            count = len(part.pages(self.paged.page_size, window)[1])
            widest = max(most, count)
            gathered = widest * (len(taken) + 1)
            wasted = gathered - pages - count
            full = gathered * page_bytes > limits.gathered or wasted * page_bytes > limits.wasted
            if taken and (part.length != taken[0].length or full):
                yield self._short(taken, most, window)
                taken, pages, widest = [], 0, count
            taken.append(part)
            most, pages = widest, pages + count
        if taken:
            yield self._short(taken, most, window)

    def _short(self, chunks: Sequence[_Chunk], most: int, window: int | None) -> Short:
        size, length, device = self.paged.page_size, chunks[0].length, self.paged.device
        table: list[int] = []
        firsts: list[int] = []
        rows: list[int] = []
        for part in sorted(chunks, key=attrgetter("row")):
            left_out, pages = part.pages(size, window)
            table += pages
            table += [self.paged.pages] * (most - len(pages))  # the page of zeros
            firsts.append(part.start - left_out * size)
            rows += range(part.row, part.row + length)
        queries = torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
        return Short(
            rows=torch.tensor(rows, device=device),
            count=len(chunks),
            length=length,
            table=torch.tensor(table, device=device),
            mask=self._mask(queries[:, None, :, None], most * size, window),
        )

    def _fresh(self, part: _Chunk, window: int | None, *, masked: bool) -> _Fresh:
        rows = slice(part.row, part.row + part.length)
        if not masked and (window is None or part.length <= window):
            return _Fresh(rows=rows, mask=None)
        queries = torch.arange(part.length, device=self.paged.device)[:, None]
        return _Fresh(rows=rows, mask=self._mask(queries, part.length, window))

    def _long(self, part: _Chunk, window: int | None) -> _Long:
        size, device = self.paged.page_size, self.paged.device
        left_out, pages = part.pages(size, window)
        pieces = []
        for offset in range(0, part.length, _PIECE):
            count = min(_PIECE, part.length - offset)
            position = part.start + offset - left_out * size
            start = 0 if window is None else max(0, position - window + 1)
            queries = torch.arange(position - start, position - start + count, device=device)[:, None]
            stop = position + count
            pieces.append((offset, count, start, stop, self._mask(queries, stop - start, window)))
        rows = slice(part.row, part.row + part.length)
        return _Long(rows=rows, table=torch.tensor(pages, device=device), pieces=tuple(pieces))

    def _mask(self, queries: Tensor, width: int, window: int | None) -> Tensor:
        return mask_of(queries, width, window, self.paged.dtype, self.distances)


def mask_of(
    queries: Tensor, width: int, window: int | None, dtype: torch.dtype, distances: Tensor | None = None
) -> Tensor:
    """Returns a mask: 0, or the addend by distance, where a query at position ``queries`` sees one of ``width`` keys,
    else -inf: in the shape of both, or with the heads before the queries."""
    keys = torch.arange(width, device=queries.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    if distances is None:
        return torch.zeros(hidden.shape, dtype=dtype, device=queries.device).masked_fill_(hidden, -torch.inf)
    apart = (queries - keys).clamp_(0, len(distances) - 1)
    added = distances.to(dtype)[apart].masked_fill_(hidden[..., None], -torch.inf)  # [..., rows, keys, heads]
    return added.movedim(-1, -3) if added.dim() == 3 else added[:, 0].movedim(-1, -3)


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Attention [n, heads, rows, head_dim] over ``keys`` [n, kv_heads, positions, head_dim]; without a mask it is
    causal."""
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
