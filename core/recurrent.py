"""The states of sequences in models with recurrent layers: a state is what such layers have made of all tokens so far.

A state has the same size after each token, and a step changes it in place. So it is never shared: what starts from a
state gets a copy. A step may also write copies of a state as it is within a chunk (`triolet.core.plan.Keep`): for
the prefix cache, or for the case that draft tokens prove wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field

from .plan import Chunk, Keep

StateCopy = tuple[int, int]
"""The state to copy from and the state to copy to."""


@define(eq=False)
class OwnState:
    """The state of one sequence: which of its states it is, and how many tokens it has read.

    Draft tokens are fed before it is known which are right, and a state cannot be taken back. So a chunk with draft
    tokens also writes a second state, as it is before them. If some prove wrong, that state counts, and the next chunk
    begins with the accepted ones: they are read again. This costs rows of the next step, of which there are few, while
    a state after each draft token would cost memory for all of them, and a swap of two states alone would read the
    chunk's other tokens again as well.
    """

    _current: int | None = field(default=None, init=False)
    _read: int = field(default=0, init=False)
    _end: int = field(default=0, init=False)  # of the last chunk
    _before_drafts: tuple[int, int] = field(default=(0, 0), init=False)  # of the last chunk: a position, and its state

    def enter(self, part: Chunk, cached: int | None) -> StateCopy | None:
        """Prepares for a chunk. If it is the first one and goes on from the ``cached`` state, returns the copy to make
        before the chunk is fed. A sequence that begins with position 0 has a state of zeros."""
        if self._current is not None:
            assert self._current in part.states, f"sequence {part.sequence_id} lost its state {self._current}"
            return None
        self._current, self._read = part.states[0], part.start
        assert (cached is None) == (part.start == 0), f"sequence {part.sequence_id} goes on from no state"
        return None if cached is None else (cached, self._current)

    def fed(self, part: Chunk, proposed: int) -> Chunk:
        """Returns the chunk as it is fed, ``proposed`` draft tokens included: from the first token on that the state
        has not read, with the state alone, and with all that is kept."""
        assert self._current is not None, "`enter` comes first"
        length, keeps = part.start + part.length - self._read, part.keeps
        if proposed:
            spare = next(state for state in part.states if state != self._current)
            self._before_drafts = part.start + part.length, spare
            keeps = (*keeps, Keep(*self._before_drafts))
        self._end = part.start + part.length + proposed
        keeps = tuple([keep for keep in keeps if keep.position <= part.start + part.length + proposed])
        return evolve(part, start=self._read, length=length + proposed, states=(self._current,), keeps=keeps)

    def leave(self, *, right: bool = True) -> None:
        """Notes that the last chunk was fed, and whether all of its draft tokens were ``right``."""
        self._read = self._end
        if not right:
            self._read, self._current = self._before_drafts


@define(eq=False)
class BeamStates:
    """The states of the beams of a search, as indices into the states of its sequence. ``size`` is the most beams."""

    size: int
    _own: list[int] = field(factory=lambda: [0], init=False)
    _copies: list[StateCopy] = field(factory=list, init=False)

    def go_on(self, parents: Sequence[int]) -> None:
        """Notes that the next beams continue those with the indices ``parents``. The first that continues a beam takes
        over its state, and each other gets a copy in a state that no beam needs any more."""
        assert 0 < len(parents) <= self.size, f"{len(parents)} beams; there are states for 1 to {self.size}"
        continued = [self._own[parent] for parent in parents]
        spare = [state for state in range(self.size) if state not in continued]
        own, seen = list[int](), set[int]()
        for state in continued:
            own.append(spare.pop() if state in seen else state)
            if state in seen:
                self._copies.append((state, own[-1]))
            seen.add(state)
        self._own = own

    def enter(self, states: Sequence[int]) -> tuple[StateCopy, ...]:
        """Returns the copies to make before the next chunk is fed. No copy reads a state that another one writes."""
        copies = tuple((states[source], states[target]) for source, target in self._copies)
        self._copies.clear()
        return copies

    def of(self, beam: int, states: Sequence[int]) -> int:
        """Returns the state of one beam."""
        return states[self._own[beam]]
