"""Attention of decoders over paged KV: the chunks of a step have any lengths and are flattened into `Rows`, in any
order.

Chunks are sorted by length, and chunks of the same length by position. So the sequences that decode (one row each) come
first, with short contexts before long ones::

    chunks  | 1 row at 3 | 1 row at 9 | 1 row at 300 | 40 rows at 0 | 64 rows at 128 |
    spans   | short chunks with similar contexts     | fresh        | long           |

For a span of short chunks, the pages are gathered and attention is computed in one call. The gathered bytes (`_Limits`)
bound the number of chunks in a span, since on the CPU a copy that stays in the cache is several times faster. A chunk
that begins at position 0 needs no pages, since its keys have just been computed. A long chunk that begins later is cut
into pieces, each of which reads no further than its rows may see.

Spans and masks are made once per step for each sliding window that occurs, and all layers share them.
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

_SHORT = 16  # most rows of a chunk that shares a call with other chunks
_PIECE = 256  # most rows of a long chunk in one call


@frozen(kw_only=True)
class _Limits:
    """The most bytes of one layer that a span of short chunks gathers."""

    gathered: int
    wasted: int  # the part of these bytes that pads the shorter chunks

    @classmethod
    def of(cls, device: torch.device) -> _Limits:
        """Chooses the limits for ``device``. On the CPU they keep the copy in the cache (on one core, 16 sequences of
        1,024 positions take 5 ms instead of 27). On other devices few launches matter more."""
        if device.type == "cpu":
            return cls(gathered=2 << 20, wasted=128 << 10)
        return cls(gathered=256 << 20, wasted=64 << 20)


@frozen(eq=False)
class Scores:
    """The scores of queries and keys of one layer: their products, and what becomes of these before the softmax."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [heads]

    @property
    def are_written(self) -> bool:
        """True if torch's own attention does not do all of it, so that scores are written, and need a mask."""
        return self.softcap is not None or self.sinks is not None

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Computes attention [n, heads, rows, value_dim] over ``keys`` [n, kv_heads, positions, head_dim]. Without a
        mask it is causal."""
        if not self.are_written:
            return scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
        assert mask is not None, "scores that are written are masked"
        repeats = queries.shape[1] // keys.shape[1]
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        scores = torch.matmul(queries, keys.transpose(-1, -2)) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores, count = scores + mask, keys.shape[-2]
        if self.sinks is not None:  # of heads, or of the heads of a key, whose rows these are
            own = self.sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1)
            scores = torch.cat([scores, own.expand(len(scores), -1, scores.shape[2], 1)], -1)
        weights = scores.softmax(-1, dtype=torch.float32)[..., :count].to(queries.dtype)
        return torch.matmul(weights, values)


@frozen(kw_only=True, eq=False)
class _Chunk:
    """A chunk of the step."""

    row: int  # its first row
    start: int  # the position of that row
    length: int
    table: Sequence[int]  # the sequence's pages up to the page of the last row
    seen: Sequence[int] = ()  # the last position that each row sees; empty: its own

    def pages(self, page_size: int, window: int | None) -> tuple[int, Sequence[int]]:
        """Returns the number of pages that are skipped, and the pages that the chunk reads after these."""
        first = 0 if window is None else max(0, self.start - window + 1) // page_size
        return first, self.table[first:]


def _chunks(rows: Rows, page_size: int, window: int | None) -> list[_Chunk]:
    """Returns the chunks as a layer with a ``window`` has them, sorted by length, then by position."""
    found: list[_Chunk] = []
    row = 0
    for length, table, _, _ in rows.chunks:
        pages = rows.tables[table : table + (rows.positions[row + length - 1] // page_size) + 1]
        seen = () if rows.in_windows and window is None else rows.seen[row : row + length]
        found.append(_Chunk(row=row, start=rows.positions[row], length=length, table=pages, seen=seen))
        row += length
    return sorted(found, key=attrgetter("length", "start"))


@frozen(kw_only=True, eq=False)
class Short:
    """Short chunks of the same length, each of which reads the same number of pages."""

    rows: Tensor | None = None  # [count * length]; None: all rows of the step
    count: int
    length: int
    table: Tensor  # [count * pages] pages
    mask: Tensor  # [count, 1 or heads, length, pages * page_size], see `mask_of`

    def attend(self, paged: PagedKV, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        """Computes the attention of ``queries`` [count * length, heads, head_dim]; the result has values for keys."""
        keys, values = paged.gather(layer, self.table, self.count)
        heads, shape = keys.shape[1], (*queries.shape[:2], values.shape[-1])
        if self.length == 1:  # query heads that share a key head become its rows, so that nothing is repeated
            split = queries.reshape(self.count, heads, queries.shape[1] // heads, -1)
            mask = self.mask if self.mask.shape[1] == 1 else self.mask.view(*split.shape[:3], -1)
            return scores.attend(split, keys, values, mask).reshape(shape)
        split = queries.reshape(self.count, self.length, *queries.shape[1:]).transpose(1, 2)
        return scores.attend(split, keys, values, self.mask).transpose(1, 2).reshape(shape)


@frozen(kw_only=True, eq=False)
class _Fresh:
    """A chunk that begins at position 0."""

    rows: slice
    mask: Tensor | None  # [length, length], or one for each head; None: causal

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        split, keys, values = (rows.transpose(0, 1)[None] for rows in (queries, keys, values))
        return scores.attend(split, keys, values, self.mask)[0].transpose(0, 1)


@frozen(kw_only=True, eq=False)
class _Long:
    """A long chunk that begins after position 0. Each of its ``pieces`` is (first row in the chunk, number of rows,
    start and stop of the gathered positions that the rows read, mask [rows, positions])."""

    rows: slice
    table: Tensor
    pieces: tuple[tuple[int, int, int, int, Tensor], ...]

    def attend(self, paged: PagedKV, layer: int, queries: Tensor, scores: Scores) -> Tensor:
        keys, values = paged.gather(layer, self.table, 1)
        split, parts = queries.transpose(0, 1)[None], list[Tensor]()
        for first, count, start, stop, mask in self.pieces:
            asked, known, told = split[:, :, first : first + count], keys[:, :, start:stop], values[:, :, start:stop]
            parts.append(scores.attend(asked, known, told, mask)[0].transpose(0, 1))
        return torch.cat(parts)


_Span = Short | _Fresh | _Long


@define(eq=False)
class PagedStep:
    """The attention of one step, passed to the attention function of every layer. It lives as long as the step.

    ``distances`` [distances, heads] is added to the scores by the distance of query and key; the last row applies to
    all greater distances (T5; Raffel et al. 2020, section 2.1). ``None``: nothing is added.
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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Stores ``keys`` [rows, kv_heads, head_dim] and ``values`` [rows, kv_heads, value_dim], and computes causal
        attention of each chunk to its own sequence.

        Args:
            queries: [rows, heads, head_dim], heads a multiple of kv_heads.
            window: a row sees this many positions, its own included; ``None``: all.
            softcap: scores go through ``softcap * tanh(score / softcap)``.
            sinks: [heads], scores of a key without a value, which all rows see; ``None``: there is none.

        Returns:
            [rows, heads, value_dim].
        """
        scores = Scores(scale, softcap, sinks)
        self.paged.write(layer, self._places, keys, values)
        spans = self._spans_of(window, masked=scores.are_written or self.distances is not None)
        if len(spans) == 1 and isinstance(spans[0], Short):
            return spans[0].attend(self.paged, layer, queries, scores)
        attended = queries.new_empty(*queries.shape[:2], values.shape[-1])
        for span in spans:
            if isinstance(span, Short):
                rows = span.rows
                assert rows is not None, "a span among several knows its rows"
                part = span.attend(self.paged, layer, queries.index_select(0, rows), scores)
                attended.index_copy_(0, rows, part)
            elif isinstance(span, _Fresh):
                own = span.rows
                attended[own] = span.attend(queries[own], keys[own], values[own], scores)
            else:
                attended[span.rows] = span.attend(self.paged, layer, queries[span.rows], scores)
        return attended

    def _spans_of(self, window: int | None, *, masked: bool) -> tuple[_Span, ...]:
        """Returns the step's rows in spans, each attended in one call, for ``window``.

        Args:
            masked: True: every chunk gets a mask, even if causal attention needs none.
        """
        if (window, masked) not in self._spans:
            self._spans[window, masked] = tuple(self._cut(window, masked=masked))
        return self._spans[window, masked]

    def _cut(self, window: int | None, *, masked: bool) -> Iterator[_Span]:
        chunks = _chunks(self.rows, self.paged.page_size, window)
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
        seen: list[list[int]] = []
        rows: list[int] = []
        for part in sorted(chunks, key=attrgetter("row")):
            left_out, pages = part.pages(size, window)
            table += pages
            table += [self.paged.pages] * (most - len(pages))  # padding: the page of zeros
            firsts.append(part.start - left_out * size)
            seen.append([last - left_out * size for last in part.seen])
            rows += range(part.row, part.row + length)
        queries = torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
        return Short(
            rows=torch.tensor(rows, device=device),
            count=len(chunks),
            length=length,
            table=torch.tensor(table, device=device),
            mask=self._mask(
                queries[:, None, :, None],
                most * size,
                window,
                torch.tensor(seen, device=device)[:, None, :, None] if chunks[0].seen else None,
            ),
        )

    def _fresh(self, part: _Chunk, window: int | None, *, masked: bool) -> _Fresh:
        rows = slice(part.row, part.row + part.length)
        if not masked and not part.seen and (window is None or part.length <= window):
            return _Fresh(rows=rows, mask=None)
        queries = torch.arange(part.length, device=self.paged.device)[:, None]
        return _Fresh(rows=rows, mask=self._mask(queries, part.length, window, self._seen(part.seen, 0)))

    def _long(self, part: _Chunk, window: int | None) -> _Long:
        size, device = self.paged.page_size, self.paged.device
        left_out, pages = part.pages(size, window)
        pieces = []
        for offset in range(0, part.length, _PIECE):
            count = min(_PIECE, part.length - offset)
            position = part.start + offset - left_out * size
            start = 0 if window is None else max(0, position - window + 1)
            queries = torch.arange(position - start, position - start + count, device=device)[:, None]
            seen = part.seen[offset : offset + count]
            stop = position + count if not seen else seen[-1] + 1 - left_out * size
            mask = self._mask(queries, stop - start, window, self._seen(seen, left_out * size + start))
            pieces.append((offset, count, start, stop, mask))
        rows = slice(part.row, part.row + part.length)
        return _Long(rows=rows, table=torch.tensor(pages, device=device), pieces=tuple(pieces))

    def _seen(self, seen: Sequence[int], first: int) -> Tensor | None:
        """Returns the last positions that rows see, counted from ``first``, [rows, 1]; ``None``: their own."""
        return torch.tensor(seen, device=self.paged.device)[:, None] - first if seen else None

    def _mask(self, queries: Tensor, width: int, window: int | None, seen: Tensor | None) -> Tensor:
        return mask_of(queries, width, window, self.paged.dtype, self.distances, seen)


def mask_of(
    queries: Tensor,
    width: int,
    window: int | None,
    dtype: torch.dtype,
    distances: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Returns the mask [queries, width] for queries at the positions ``queries`` and ``width`` keys; with
    ``distances``, [heads, queries, width]. Where a query sees a key, the mask has 0 or the number that ``distances``
    adds, otherwise -inf. ``seen``: the last position that each query sees; ``None``: its own.
    """
    keys = torch.arange(width, device=queries.device)
    hidden = keys > (queries if seen is None else seen)
    if window is not None:
        hidden |= keys <= queries - window
    if distances is None:
        return torch.zeros(hidden.shape, dtype=dtype, device=queries.device).masked_fill_(hidden, -torch.inf)
    apart = (queries - keys).clamp_(0, len(distances) - 1)
    added = distances.to(dtype)[apart].masked_fill_(hidden[..., None], -torch.inf)  # [..., rows, keys, heads]
    return added.movedim(-1, -3) if added.dim() == 3 else added[:, 0].movedim(-1, -3)
