"""The small scheduler for a model with recurrent layers, and mistakes that one makes with its states.

Each running request has a state. At the ends of pages its state is kept under the key of the last page that it has
read, and a request with the same prefix goes on from a copy. What is kept gives way to what is needed, the oldest
first.
"""

from __future__ import annotations

from collections import Counter

from attrs import evolve

from triolet_kit import findings
from triolet_kit import paged_device as device
from triolet_kit import scheduler_play as play
from triolet_kit import state_device as states
from triolet_kit.schedulers import Step

from .small_scheduler import Sequence, SmallScheduler


class StatefulScheduler(SmallScheduler):
    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.free_states = list(range(self.limits.states))
        self.kept: dict[object, int] = {}  # by page key
        self.readers = Counter[int]()  # of kept states
        self.own: dict[Sequence, int] = {}
        self.sources: dict[Sequence, int] = {}  # until the first chunk is answered
        self.begun: set[Sequence] = set()  # and what was planned of those
        self.left_over: dict[Sequence, list[int]] = {}

    # -- books -------------------------------------------------------------------------------------------------------

    def states_left(self) -> int:
        return len(self.free_states) + sum(not self.readers[state] for state in self.kept.values())

    def take_state(self) -> int:
        if not self.free_states:
            oldest = next(key for key, state in self.kept.items() if not self.readers[state])
            self.free_states.append(self.kept.pop(oldest))
        return self.free_states.pop()

    def let_go(self, sequence: Sequence) -> None:
        """It has copied the state that it goes on from, or never will."""
        source = self.sources.pop(sequence, None)
        if source is None:
            return
        self.readers[source] -= 1
        if not self.readers[source] and source not in self.kept.values():
            self.free_states.append(source)

    def take_page(self) -> int:
        page = super().take_page()
        for key in [key for key in self.kept if key not in self.found]:
            state = self.kept.pop(key)
            if not self.readers[state]:
                self.free_states.append(state)
        return page

    # -- planning ----------------------------------------------------------------------------------------------------

    def state_key(self, sequence: Sequence, pages: int) -> object:
        return self.page_key(sequence, pages - 1)

    def cached_pages(self, sequence: Sequence) -> list[int]:
        pages = super().cached_pages(sequence) if self.limits.states > 1 else []
        while pages and self.state_key(sequence, len(pages)) not in self.kept:
            pages.pop()
        return pages

    def admit(self) -> None:
        waiting = self.waiting
        for sequence in sorted(waiting, key=self.order):
            pages = self.cached_pages(sequence)
            source = self.kept.get(self.state_key(sequence, len(pages))) if pages else None
            self.waiting = [sequence]
            if self.states_left() > (source is not None and not self.readers[source]):
                super().admit()
            self.waiting = [one for one in waiting if one not in self.running]
            if sequence in self.waiting:
                break
        self.keep_some()

    def join(self, sequence: Sequence, pages: list[int]) -> None:
        super().join(sequence, pages)
        if pages:
            self.sources[sequence] = self.kept[self.state_key(sequence, len(pages))]
            self.readers[self.sources[sequence]] += 1
        self.own[sequence] = self.take_state()
        self.begun.discard(sequence)

    def run(self, sequence: Sequence, length: int, pages: int) -> None:
        super().run(sequence, length, pages)
        who, life, chunk = self.chunks[-1]
        source = None if sequence in self.begun else self.sources.get(sequence)
        self.begun.add(sequence)
        self.chunks[-1] = who, life, evolve(chunk, state=self.own[sequence], source=source)

    def keep_some(self) -> None:
        """With what states the step has left."""
        for at, (who, life, chunk) in enumerate(self.chunks):
            stop = chunk.start + chunk.length
            end = stop - stop % self.limits.page_size
            if end > chunk.start and self.states_left():
                self.chunks[at] = who, life, evolve(chunk, keeps=((end, self.take_state()),))

    # -- answers -----------------------------------------------------------------------------------------------------

    def update(self, step: Step, tokens: dict[str, int]) -> list[str]:
        answered = [(sequence, life == sequence.life, chunk) for sequence, life, chunk in self.flights[0]]
        for sequence, runs, _ in answered:
            if runs:
                self.let_go(sequence)
        ended = super().update(step, tokens)
        for sequence, runs, chunk in answered:
            for end, state in chunk.keeps:
                key = self.state_key(sequence, end // self.limits.page_size)
                if runs and key in self.found and key not in self.kept:
                    self.kept[key] = state
                else:
                    self.free_states.append(state)
        return ended

    def leave(self, sequence: Sequence) -> None:
        if sequence in self.own:
            self.left_over.setdefault(sequence, []).append(self.own.pop(sequence))
        super().leave(sequence)

    def settle(self, sequence: Sequence) -> None:
        super().settle(sequence)
        if not sequence.in_flight and sequence not in self.own:
            self.let_go(sequence)
            self.free_states += self.left_over.pop(sequence, [])


class GivesBackItsStateInFlight(StatefulScheduler):
    """A state comes back at once, though a step in flight changes it."""

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        self.free_states += self.left_over.pop(sequence, [])


class GoesOnInPlace(StatefulScheduler):
    """Who hits changes the kept state, and makes no copy."""

    def run(self, sequence: Sequence, length: int, pages: int) -> None:
        super().run(sequence, length, pages)
        who, life, chunk = self.chunks[-1]
        if chunk.source is not None:
            self.free_states.append(self.own[sequence])
            self.own[sequence] = chunk.source
            self.chunks[-1] = who, life, evolve(chunk, state=chunk.source, source=None)

    def settle(self, sequence: Sequence) -> None:
        self.left_over[sequence] = [
            one for one in self.left_over.get(sequence, []) if one not in self.kept.values() and not self.readers[one]
        ]
        super().settle(sequence)


class KeepsOnePageOff(StatefulScheduler):
    """What is kept is listed under the page before the last one that it has read."""

    def update(self, step: Step, tokens: dict[str, int]) -> list[str]:
        size = self.limits.page_size
        for at, (sequence, life, chunk) in enumerate(self.flights[0]):
            keeps = tuple((max(end - size, size), state) for end, state in chunk.keeps)
            self.flights[0][at] = sequence, life, evolve(chunk, keeps=keeps)
        return super().update(step, tokens)


class KeepsByTheLastPageAlone(StatefulScheduler):
    """Kept states are found by the tokens of one page."""

    def state_key(self, sequence: Sequence, pages: int) -> object:
        tokens, _ = self.page_key(sequence, pages - 1)
        return tokens[(pages - 1) * self.limits.page_size :]

    def take_page(self) -> int:
        return SmallScheduler.take_page(self)

    def update(self, step: Step, tokens: dict[str, int]) -> list[str]:
        self.found = AnyKey(self.found)
        return super().update(step, tokens)


class AnyKey(dict):  # type: ignore[type-arg]
    """Finds the keys of pages and those of states."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or not isinstance(key[0], tuple)  # type: ignore[index]


class HitsPagesAlone(StatefulScheduler):
    """Cached pages are enough."""

    def cached_pages(self, sequence: Sequence) -> list[int]:
        return SmallScheduler.cached_pages(self, sequence)

    def join(self, sequence: Sequence, pages: list[int]) -> None:
        SmallScheduler.join(self, sequence, pages)
        self.own[sequence] = self.take_state()
        self.begun.discard(sequence)


class FreesTheStateOfWhoRuns(StatefulScheduler):
    """A step that is answered gives back the state of its requests."""

    def update(self, step: Step, tokens: dict[str, int]) -> list[str]:
        self.free_states += [self.own[one] for one, _, chunk in self.flights[0] if chunk.start == 0 and one in self.own]
        return super().update(step, tokens)


class LosesTheStateOfWhoLeaves(StatefulScheduler):
    """Whose client leaves keeps its state."""

    def finish(self, request_id: str) -> None:
        self.own.pop(self.sequences.get(request_id), None)  # type: ignore[call-overload]
        super().finish(request_id)


class KeepsInTheSourceOfAnother(StatefulScheduler):
    """A state that is read is still free to be taken."""

    def states_left(self) -> int:
        return len(self.free_states) + len(self.kept)

    def take_state(self) -> int:
        self.readers.clear()
        return super().take_state()

    def let_go(self, sequence: Sequence) -> None:
        self.sources.pop(sequence, None)


class HasMoreStatesThanThereAre(StatefulScheduler):
    """What is kept is not counted."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.free_states += [self.limits.states, self.limits.states + 1]


class NamesNoState(StatefulScheduler):
    """The adapter forgets them."""

    def run(self, sequence: Sequence, length: int, pages: int) -> None:
        super().run(sequence, length, pages)
        who, life, chunk = self.chunks[-1]
        self.chunks[-1] = who, life, evolve(chunk, state=None)


MUTANTS_OF_STATES = {
    GivesBackItsStateInFlight: play.FREE_FOLLOWS,
    GoesOnInPlace: states.STATE_HITS,
    KeepsOnePageOff: states.STATE_HITS,
    KeepsByTheLastPageAlone: states.STATE_HITS,
    HitsPagesAlone: states.STATE_HITS,
    FreesTheStateOfWhoRuns: states.STATE_IN_USE,
    KeepsInTheSourceOfAnother: states.STATE_IN_USE,
    LosesTheStateOfWhoLeaves: findings.ALWAYS_FREED,
    HasMoreStatesThanThereAre: device.BALANCE,
    NamesNoState: findings.SPEAKS,
}
