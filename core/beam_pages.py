"""The pages that hold the KV of beams, which share a page until one of them writes to it.

The full pages of the prompt are shared by all beams, and never written. Behind them each block of positions has as many
pages as there are beams. A beam refers to one page of each block::

    prompt      block 0          block 1          block 2 (being written)
    p0 p1       [2 3 4]          [5 6 7]          [8 9 10]
    beam 0         2                5                8
    beam 1         2                5                9        beams 0 and 1 parted in block 2
    beam 2         3                5                10       page 4 is of no beam any more; 6 and 7 were never written

When beams go on, references are permuted and no KV moves. Where two beams refer to one page of the block that is
written next, all but the first of them get a copy in a page of the block that no beam refers to: there is always one.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

Copy = tuple[int, int]
"""A copy of one page to another."""


@define(eq=False)
class BeamPages:
    """The references of a search's beams. Places in a page table stand for pages, since the table only ever grows.

    Args:
        page_size: positions of a page.
        shared: how many full pages the prompt has.
        size: pages of each block after them: the most beams that there can be.
    """

    page_size: int
    shared: int
    size: int
    _blocks: list[list[int]] = field(factory=list, init=False)  # for each block: of each beam, which of its pages
    _beams: int = field(default=1, init=False)

    def go_on(self, parents: Sequence[int]) -> None:
        """The next beams continue those with the indices ``parents``."""
        assert 0 < len(parents) <= self.size, f"{len(parents)} beams; there are pages for 1 to {self.size}"
        self._blocks = [[block[parent] for parent in parents] for block in self._blocks]
        self._beams = len(parents)

    def enter(self, position: int, page_table: Sequence[int]) -> tuple[Copy, ...]:
        """Gives each beam a page of its own to write ``position`` to, which lies after the full pages of the prompt.
        Returns the copies to make before that, none of which reads a page that another one writes."""
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
        """The pages of one beam, in the order of its positions."""
        own = (self._page(page_table, index, block[beam]) for index, block in enumerate(self._blocks))
        return (*page_table[: self.shared], *own)

    def _page(self, page_table: Sequence[int], index: int, page: int) -> int:
        return page_table[self.shared + index * self.size + page]


def prompt_pages(page_table: Sequence[int], shared: int) -> tuple[int, ...]:
    """The pages that the prompt is read into: the full ones, and the first page of the block after them."""
    return tuple(page_table[: shared + 1])


def pages_of_beams(positions: int, *, page_size: int, shared: int, size: int) -> int:
    """Returns the number of pages that ``positions`` of ``size`` beams take whose prompt has ``shared`` full pages."""
    blocks = -(-positions // page_size)
    return blocks + (size - 1) * max(0, blocks - shared)
