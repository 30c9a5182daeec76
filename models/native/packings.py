"""Quantized blocks in the native library's order. `native/packings.h` says how they lie in memory.

A block has the numbers of some inputs of one output, with their scales (ggml-common.h of llama.cpp). Blocks are moved,
not rounded: a weight is exactly what ggml makes of its block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import Array
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ..memory.allocator import roomy_empty
from .library import Library, SectionData

# The numbers of packings in the library, by ggml's names of the kinds of blocks. Q8_32 and INT4 are none of them.
PACKINGS = {
    name: number
    for number, name in enumerate(
        (
            *("Q8_32", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
            *("INT4_32", "INT4_128"),
        )
    )
}
_ROWS = 1024  # that are packed or unpacked at a time, a multiple of `PANEL`
_PANEL = 32


@frozen
class Section:
    """Panels of one packing that lie one after the other."""

    kind: str
    panels: int

    def bytes_for(self, inputs: int) -> int:
        """Returns the bytes of all panels."""
        return self.panels * _library().packed_bytes(PACKINGS[self.kind], inputs)


def pack_blocks(weights: Sequence[Any], order: Tensor | None = None) -> tuple[Tensor, tuple[Section, ...]] | None:
    """Packs matrices of blocks with the same inputs one after the other.

    Args:
        weights: tensors [outputs, inputs], which may have a ``block_kind`` and ``blocks_of``.
        order: int64 [outputs], the output of all matrices that is each output of the packed one.

    Returns:
        The packed bytes and their sections; ``None``: a matrix has no blocks, or they cannot lie together as they are.
    """
    kinds: list[Any] = [getattr(weight, "block_kind", None) for weight in weights]
    if any(kind not in PACKINGS for kind in kinds):
        return None
    weights = weights if order is None else _in_order(weights, order)
    runs = [(kind, list(run)) for kind, run in groupby(weights, attrgetter("block_kind"))]
    parts: list[list[Any]] = [part for _, part in runs]
    if any(sum(map(len, part)) % _PANEL for part in parts[:-1]):
        return None
    library, inputs = _library(), weights[0].shape[1]
    sections = tuple(Section(kind, -(-sum(map(len, part)) // _PANEL)) for kind, part in runs)
    packed = roomy_empty((sum(section.bytes_for(inputs) for section in sections),), torch.uint8)
    begin = 0
    for section, part in zip(sections, parts, strict=True):
        number, of_panel = PACKINGS[section.kind], section.bytes_for(inputs) // section.panels
        for rows in _in_panels(part):
            library.pack(number, rows, inputs, packed[begin:])
            begin += -(-len(rows) // _PANEL) * of_panel
    return packed, sections


@frozen(eq=False)
class _Run:
    """Rows of matrices, all of one kind of blocks."""

    block_kind: str
    shape: tuple[int, int]
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def blocks_of(self, start: int, stop: int) -> Tensor:
        """Returns the blocks of some rows."""
        return self.rows[start:stop]


def _in_order(weights: Sequence[Any], order: Tensor) -> list[_Run]:
    """Returns the outputs of matrices in an ``order``, as runs of one kind."""
    kinds = torch.cat([torch.full((len(one),), PACKINGS[one.block_kind], dtype=torch.int64) for one in weights])
    found = list[_Run]()
    for places in torch.split(order, torch.unique_consecutive(kinds[order], return_counts=True)[1].tolist()):
        own = kinds == kinds[places[0]]
        kind = next(name for name, number in PACKINGS.items() if number == kinds[places[0]])
        blocks = torch.cat([one.blocks_of(0, len(one)) for one in weights if one.block_kind == kind])
        found.append(_Run(kind, (len(places), weights[0].shape[1]), blocks[own.cumsum(0)[places] - 1]))
    return found


def _in_panels(weights: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the blocks of whole panels, bytes [rows, bytes of a row], of matrices one after the other."""
    left: Tensor | None = None
    for weight in weights:
        for start in range(0, len(weight), _ROWS):
            rows = weight.blocks_of(start, min(start + _ROWS, len(weight)))
            rows = rows if left is None else torch.cat([left, rows])
            whole = len(rows) - len(rows) % _PANEL
            if whole:
                yield rows[:whole].contiguous()
            left = rows[whole:] if whole < len(rows) else None
    if left is not None:
        yield left.contiguous()


def unpack_rows(packed: Tensor, sections: Sequence[Section], inputs: int, places: Tensor) -> Tensor:
    """Returns the weights of the outputs ``places``, float32 [places, inputs]."""
    found = torch.empty(len(places), inputs, dtype=torch.float32)
    low, high = (int(places.min()), int(places.max())) if len(places) else (0, -1)
    for section, first, begin in _placed(sections, inputs):
        end = first + section.panels * _PANEL
        if high < first or low >= end:  # experts have many sections
            continue
        own = torch.nonzero((places >= first) & (places < end))[:, 0]
        rows, made = (places[own] - first).contiguous(), torch.empty(len(own), inputs, dtype=torch.float32)
        _library().unpack(PACKINGS[section.kind], packed[begin:], inputs, rows, made)
        if len(own) == len(places):
            return made
        found[own] = made
    return found


def section_data(packed: Tensor, sections: Sequence[Section], inputs: int) -> Array[SectionData]:
    """Returns the sections as the library reads them."""
    found = [
        SectionData(PACKINGS[section.kind], section.panels, packed.data_ptr() + begin)
        for section, _, begin in _placed(sections, inputs)
    ]
    return (SectionData * len(found))(*found)


def _placed(sections: Sequence[Section], inputs: int) -> Iterator[tuple[Section, int, int]]:
    """Yields each section, its first output, and the place of its first byte."""
    first = begin = 0
    for section in sections:
        yield section, first, begin
        first, begin = first + section.panels * _PANEL, begin + section.bytes_for(inputs)


def _library() -> Library:
    library = Library.load()
    assert library is not None, "blocks are packed for the library alone"
    return library
