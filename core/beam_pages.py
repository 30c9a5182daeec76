"""The pages that hold the KV of beams, which share a page until one of them writes to it.

All beams share the full pages of the prompt, which are never written. After these pages, each block of positions has as
many pages as there may be beams. A beam refers to one page of each block::

    prompt      block 0          block 1          block 2 (being written)
    p0 p1       [2 3 4]          [5 6 7]          [8 9 10]
    beam 0         2                5                8
    beam 1         2                5                9        beams 0 and 1 differ from block 2 on
    beam 2         3                5                10       page 4 is not used any more; 6 and 7 were never written

When beams go on, references are permuted and no KV moves. If several beams refer to the same page of the block that is
written next, all but the first get a copy. The copy lies in a page of the block that no beam refers to. Such a page
always exists.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

Copy = tuple[int, int]
"""The page to copy from and the page to copy to."""


@define(eq=False)
class BeamPages:
    """The pages that the beams of a search refer to. Pages are kept as indices into the page table, which only ever
    grows.

    Args:
        page_size: the number of positions of a page.
        shared: the number of full pages of the prompt.
        size: the number of pages of each later block, which is the largest number of beams.
    """

    page_size: int
    shared: int
    size: int
    _blocks: list[list[int]] = field(factory=list, init=False)  # per block: each beam's page
    _beams: int = field(default=1, init=False)

    def go_on(self, parents: Sequence[int]) -> None:
        """Notes that the next beams continue those with the indices ``parents``."""
        assert 0 < len(parents) <= self.size, f"{len(parents)} beams; there are pages for 1 to {self.size}"
        self._blocks = [[block[parent] for parent in parents] for block in self._blocks]
        self._beams = len(parents)

    def enter(self, position: int, page_table: Sequence[int]) -> tuple[Copy, ...]:
        """Gives each beam a page of its own to write ``position`` to. The position lies after the full pages of the
        prompt. Returns the copies to make before the write. No copy reads a page that another copy writes."""
        index = position // self.page_size - self.shared
        assert 0 <= index <= len(self._blocks), f"position {position} is written out of order"
        if index == len(self._blocks):
            self._blocks.append([0] * self._beams if position % self.page_size else list(range(self._beams)))
        block, copies = self._blocks[index], []
        spare = [page for page in range(self.size) if page not in block]
        seen: set[int] = set()
        for beam, page in enumerate(block):
            if page in seen:
                block[beam] = spare.pop()
                copies.append((self._page(page_table, index, page), self._page(page_table, index, block[beam])))
            seen.add(page)
        return tuple(copies)

    def table(self, beam: int, page_table: Sequence[int]) -> tuple[int, ...]:
        """Returns the pages of one beam, in the order of its positions."""
        own = (self._page(page_table, index, block[beam]) for index, block in enumerate(self._blocks))
        return (*page_table[: self.shared], *own)

    def _page(self, page_table: Sequence[int], index: int, page: int) -> int:
        return page_table[self.shared + index * self.size + page]


def prompt_pages(page_table: Sequence[int], shared: int) -> tuple[int, ...]:
    """Returns the pages that the prompt is read into: its full pages, and the first page of the block after them."""
    return tuple(page_table[: shared + 1])


def pages_of_beams(positions: int, *, page_size: int, shared: int, size: int) -> int:
    """Returns the number of pages that ``positions`` of ``size`` beams need if the prompt has ``shared`` full pages."""
    blocks = -(-positions // page_size)
    return blocks + (size - 1) * max(0, blocks - shared)
