"""Sequences of tokens fed to a native program, chunk by chunk and beside each other, in an order that is drawn."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.library import Library
from triolet.models.native.program import Program
from triolet.models.native.runner import Runner

PAGES, MOST_ROWS, VOCABULARY = 280, 80, 83


def loaded() -> Library:
    library = Library.load()
    assert library is not None
    return library


@frozen
class Told:
    """Tokens, the pages that they lie in, the lengths of the chunks that they are fed in, and the number of the encoder
    output that they are about."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    output: int = 0


class Fed:
    """A model that was opened, and what it answered: logits of each position."""

    most_pages = PAGES
    most_at_once = MOST_ROWS  # rows of a step
    page_size: int
    runner: Runner
    program: Program

    def feed(self, parts: Sequence[tuple[Told, int, int]], states: Sequence[Tensor] = ()) -> list[Tensor]:
        """Logits of each part's rows: positions ``start`` to ``stop`` of a sequence, whose state changes."""
        raise NotImplementedError

    def all_of(self, sequences: Sequence[Told], draw: random.Random) -> list[Tensor]:
        """Feeds all of them, some of their next chunks in each step. Logits of each sequence."""
        found: list[list[Tensor]] = [[] for _ in sequences]
        states = [torch.zeros(self.program.state, dtype=torch.float32) for _ in sequences]
        at = [0] * len(sequences)
        left = [list(one.cuts) for one in sequences]
        while waiting := [index for index, cuts in enumerate(left) if cuts]:
            chosen: list[tuple[int, int]] = []
            for index in draw.sample(waiting, draw.randint(1, len(waiting))):
                if sum(count for _, count in chosen) + left[index][0] <= self.most_at_once:
                    chosen.append((index, left[index].pop(0)))
            parts = [(sequences[index], at[index], at[index] + count) for index, count in chosen]
            given = [states[index] for index, _ in chosen]
            for (index, count), logits in zip(chosen, self.feed(parts, given), strict=True):
                found[index].append(logits)
                at[index] += count
        return [torch.cat(parts) for parts in found]


@functools.cache
def packed(
    decoder_of: Callable[[str], CausalDecoder], made: object, name: str, *, int8: bool, again: bool
) -> CausalDecoder:
    """``decoder_of(name)``, packed. ``made`` is the module of which it is a copy. ``again``: packed once more, for what
    is compared to the bit."""
    decoder = decoder_of(name)
    assert decoder.unknown() is None
    decoder.pack(int8=int8)
    return decoder


@contextmanager
def opened(kind: Callable[..., Fed], *given: Any, **options: Any) -> Iterator[Any]:
    with torch.inference_mode():
        one = kind(*given, **options)
        try:
            yield one
        finally:
            one.runner.release()


def cut(length: int, draw: random.Random) -> tuple[int, ...]:
    """Chunks of up to the most rows, often of one."""
    cuts: list[int] = []
    while left := length - sum(cuts):
        cuts.append(min(left, draw.choice([1, draw.randint(1, 12), draw.randint(1, MOST_ROWS)])))
    return tuple(cuts)


def sequences_of(
    lengths: Sequence[int], page_size: int, draw: random.Random, *, most: int = PAGES, outputs: int = 1
) -> list[Told]:
    pages = draw.sample(range(most), most)
    made = []
    for length in lengths:
        own = [pages.pop() for _ in range(-(-length // page_size))]
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(length))
        made.append(Told(tokens, tuple(own), cut(length, draw), draw.randrange(outputs)))
    return made


def assert_same_bits(alone: Fed, sequences: Sequence[Told], bits: Sequence[Tensor], draw: random.Random) -> None:
    """That each sequence alone, in other pages and chunks, has the same logits."""
    for sequence, expected in zip(sequences, bits, strict=True):
        length = len(sequence.tokens)
        pages = draw.sample(range(alone.most_pages), -(-length // alone.page_size))
        other = evolve(sequence, pages=tuple(pages), cuts=cut(length, draw))
        assert torch.equal(alone.all_of([other], draw)[0], expected)
