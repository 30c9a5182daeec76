"""Prepares the planner's chunks for a network, which knows of no beams: checks each chunk, and turns a chunk of a beam
search into one chunk for each beam.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from ..core.beam_pages import Copy, pages_of_beams, prompt_pages
from ..core.plan import Chunk
from .blueprints.blueprint import AnyPages, Parts
from .memory.recurrent_states import RecurrentStates
from .networks.network import Feed, Record


def check_chunk(part: Chunk, record: Record, parts: Parts) -> None:
    """Asserts that the chunk is possible. A bad index must not reach the device: on CUDA it would destroy the process's
    context."""
    end, known = part.start + part.length, _known(record)
    assert 0 <= part.start < end <= known, f"sequence {part.sequence_id}: chunk {part.start}..{end} of {known} tokens"
    assert end + part.draft_tokens <= parts.network.positions, (
        f"sequence {part.sequence_id}: position {end + part.draft_tokens - 1} is past the last"
    )
    if parts.paged is None:
        assert part.start == 0, f"sequence {part.sequence_id}: a prompt is read whole, but starts at {part.start}"
        assert end == record.start.prompt_length, f"sequence {part.sequence_id}: a prompt is read whole, not to {end}"
    else:
        _check_pages(parts.paged, part, record)
    states = 0 if parts.states is None else parts.states.states
    own = (*part.states, *(keep.state for keep in part.keeps))
    assert bool(own) == bool(states), f"sequence {part.sequence_id}: states {own} of {states}"
    assert all(0 <= state < states for state in own), f"sequence {part.sequence_id}: states {own} of {states}"
    slots = 0 if parts.cross is None else parts.cross.slots
    assert part.cross_slot is None or 0 <= part.cross_slot < slots, f"sequence {part.sequence_id}: unknown slot"
    over = record.search is not None and record.search.state.done  # steps planned before the end feed nothing
    assert not part.samples or end == known or over, f"sequence {part.sequence_id}: samples at {end} of {known} tokens"


def _known(record: Record) -> int:
    """The number of tokens of the sequence; if its search is done, the most tokens that its request allows."""
    if record.search is None:
        return len(record.tokens)
    if record.search.state.done:
        return record.start.prompt_length + record.start.max_tokens
    return record.start.prompt_length + record.search.state.length


def _check_pages(paged: AnyPages, part: Chunk, record: Record) -> None:
    end, size, search = part.start + part.length + part.draft_tokens, paged.page_size, record.search
    if part.page_table is not record.page_table:  # the planner makes a new one when a page comes to it
        known = 0 <= min(part.page_table) <= max(part.page_table) < paged.pages
        assert known, f"sequence {part.sequence_id}: pages of {paged.pages} are unknown"
        record.page_table = part.page_table
    needed = -(-end // size)
    if search is not None and part.start >= search.prompt_length:
        pages = search.pages
        needed = pages_of_beams(end, page_size=size, shared=pages.shared, size=pages.size)
    assert len(part.page_table) >= needed, f"sequence {part.sequence_id}: pages are missing"


def with_state(feed: Feed, states: RecurrentStates) -> Feed:
    """Returns the chunk as it is fed, see `OwnState`. Its state is prepared, except for those of beams."""
    part, own, proposed = feed.part, feed.record.own, len(feed.proposed)
    if feed.record.search is not None and part.start >= feed.record.search.prompt_length:
        return feed
    known = evolve(part, length=part.length - proposed)
    copy = own.enter(known, feed.record.start.state)
    fed = own.fed(known, proposed)
    if copy is not None:
        states.copy([copy])
    elif fed.start == 0:
        states.begin(fed.states[0])
    return evolve(feed, part=fed)


def spread_all(feeds: Sequence[Feed], states: RecurrentStates | None) -> tuple[list[Feed], list[range], list[Copy]]:
    """Returns the feeds of a step (a search has one for each beam), the range of feeds that belongs to each chunk, and
    the pages to copy before the step. The states of beams are copied."""
    every: list[Feed] = []
    owned: list[range] = []
    copies: list[Copy] = []
    for feed in feeds:
        part, record, search, first = feed.part, feed.record, feed.record.search, len(every)
        if search is None:
            every.append(feed)
        elif part.start < search.prompt_length:
            read = evolve(part, page_table=prompt_pages(part.page_table, search.pages.shared))
            every.append(Feed(part=read, record=record))
        elif not search.state.done:
            copies += search.pages.enter(part.start, part.page_table)
            if states is not None:
                states.copy(search.states.enter(part.states))
            for index, beam in enumerate(search.state.beams):
                table = search.pages.table(index, part.page_table)
                of_beam = () if states is None else (search.states.of(index, part.states),)
                own = evolve(part, page_table=table, beams=1, states=of_beam)
                tokens = [*record.tokens, *beam.token_ids]
                row = Record(record.start, tokens, track=search.tracks[index], notes=record.notes, search=search)
                every.append(Feed(part=own, record=row))
        owned.append(range(first, len(every)))
    return every, owned, copies
