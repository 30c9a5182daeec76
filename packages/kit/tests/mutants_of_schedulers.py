"""Mistakes that one makes in a scheduler, each in the small one, and the promise that each breaks."""

from __future__ import annotations

from dataclasses import replace

from attrs import evolve

from triolet_kit import findings
from triolet_kit import paged_device as device
from triolet_kit import scheduler_play as play
from triolet_kit.schedulers import Chunk, Item, NewRequest, Step

from .small_scheduler import Sequence, SmallScheduler


class GivesBackInFlight(SmallScheduler):
    """Pages come back at once, though a step in flight uses them."""

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        pages, sequence.leaving = sequence.leaving, []
        self.give_back(pages)


class JoinsWhatIsHalfItsOwn(SmallScheduler):
    """A page whose beginning is the rest of the prompt is joined, and written behind it: no copy on write."""

    def join(self, sequence: Sequence, pages: list[int]) -> None:
        rest, size = tuple(sequence.tokens[:-1]), self.limits.page_size
        for (tokens, _), page in list(self.found.items()):
            if len(tokens) == (len(pages) + 1) * size and tokens[: len(rest)] == rest and len(rest) > len(pages) * size:
                super().join(sequence, [*pages, page])
                sequence.fed = sequence.answered = len(rest)
                return
        super().join(sequence, pages)


class HashesWithoutParent(SmallScheduler):
    """A page is found by its own tokens alone."""

    def page_key(self, sequence: Sequence, page: int) -> object:
        tokens, items = super().page_key(sequence, page)
        return tokens[page * self.limits.page_size :], items


class HashesWithoutItems(SmallScheduler):
    """Two images look alike."""

    def page_key(self, sequence: Sequence, page: int) -> object:
        return super().page_key(sequence, page)[0], ()


class LeaksOnPreemption(SmallScheduler):
    """Who is preempted forgets its pages."""

    def preempt(self, victim: Sequence) -> None:
        victim.pages = []
        super().preempt(victim)


class FreesTwice(SmallScheduler):
    """A client that leaves after the end frees the pages of its request once more."""

    def leave(self, sequence: Sequence) -> None:
        pages = list(sequence.pages)
        super().leave(sequence)
        if sequence.ended:
            sequence.pages = pages

    def finish(self, request_id: str) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self.end(sequence)

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.users[page] = max(0, self.users[page] - 1)
            if not self.users[page]:
                (self.keep if page in self.keys else self.free.append)(page)


class ServesTheLastFirst(SmallScheduler):
    """A stack instead of a queue."""

    def place(self, request: NewRequest) -> tuple[int, int]:
        return request.priority, -self.arrivals


class FreesWhatIsHalfRead(SmallScheduler):
    """An item counts as read with its first position."""

    def is_read(self, item: Item, position: int) -> bool:
        return item.start < position


class EvictsAndRemembers(SmallScheduler):
    """What was evicted can still be hit."""

    def evict(self, key: str) -> None:
        self.sizes[key] = 0
        if key not in self.frees:
            self.frees.append(key)

    def make_room(self, size: int) -> bool:
        idle = [key for key, count in self.holders.items() if not count and self.sizes[key] and key not in self.encodes]
        while sum(self.sizes.values()) + size > self.limits.room and idle:
            self.evict(idle.pop(0))
        return sum(self.sizes.values()) + size <= self.limits.room


class EncodesOneStepLate(SmallScheduler):
    """Encodings go out with the step behind the one that reads them."""

    late: tuple[str, ...] = ()

    def schedule(self) -> Step | None:
        step = super().schedule()
        if step is None and not self.late:
            return None
        if step is None:
            self.flights.append([])
        now, self.late = self.late, step.encodes if step is not None else ()
        return Step(encodes=now) if step is None else evolve(step, encodes=now)


class EncodesForEachReader(SmallScheduler):
    """Every request encodes for itself what is there already."""

    def hold(self, key: str, size: int) -> bool:
        if key in self.holders and key not in self.encodes and not self.holders[key]:
            self.encodes.append(key)
        return super().hold(key, size)


class ForgetsTheBudget(SmallScheduler):
    """Newcomers are not taken off the budget of the step."""

    def admit(self) -> None:
        left = self.left
        for sequence in sorted(self.waiting, key=self.order):
            self.left, self_waiting = left, self.waiting
            self.waiting = [sequence]
            super().admit()
            self.waiting = [other for other in self_waiting if other not in self.running]
            if sequence in self.waiting:
                return


class RunsTheDead(SmallScheduler):
    """Who leaves while a step of it is in flight goes on running."""

    def finish(self, request_id: str) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is not None and not sequence.in_flight:
            super().finish(request_id)


class GoesOnBehindTheEnd(SmallScheduler):
    """The end-of-text is a token as any other."""

    def update(self, step: Step, tokens: dict[str, int]) -> list[str]:
        harmless = {name: token or 1 for name, token in tokens.items()}
        return super().update(step, harmless)


class DeliversOneTooMany(SmallScheduler):
    """The last token that was asked for is not the last."""

    def add_request(self, request: NewRequest) -> bool:
        return super().add_request(replace(request, max_tokens=request.max_tokens + 1)) or super().add_request(request)


class SamplesOneTooMany(SmallScheduler):
    """With two steps in flight, a token behind the last one is sampled before that one is there."""

    def run(self, sequence: Sequence, length: int, pages: int) -> None:
        super().run(sequence, length, pages)
        last, behind = self.chunks[-1][2], sequence.fed == sequence.limit - 1
        room = len(sequence.pages) * self.limits.page_size > sequence.fed
        if behind and last.samples and room and self.left and sequence.in_flight < self.limits.steps_in_flight:
            self.later = evolve(last, start=sequence.fed, length=1)

    later: Chunk | None = None

    def schedule(self) -> Step | None:
        if self.later is None:
            return super().schedule()
        chunk, self.later = self.later, None
        sequence = self.sequences[chunk.request]
        if sequence.ended or not sequence.in_flight:
            return super().schedule()
        self.flights.append([(sequence, sequence.life, chunk)])
        sequence.in_flight += 1
        sequence.sampling += 1
        return Step(chunks=[chunk])


class FindsWhatIsOverwritten(SmallScheduler):
    """A page that is taken for new content stays listed under the old one."""

    def take_page(self) -> int:
        if self.free:
            return super().take_page()
        page = next(iter(self.unused))
        del self.unused[page]
        self.users[page] = 1
        return page

    def keep(self, page: int) -> None:
        self.unused[page] = None


class GoesOnBehindNothing(SmallScheduler):
    """Who was preempted goes on where it was, in new pages."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.kept: dict[str, int] = {}

    def preempt(self, victim: Sequence) -> None:
        self.kept[victim.request.id] = victim.fed
        super().preempt(victim)

    def join(self, sequence: Sequence, pages: list[int]) -> None:
        super().join(sequence, pages)
        kept = self.kept.get(sequence.request.id, 0)
        if kept > sequence.fed:
            sequence.pages += [self.take_page() for _ in range(self.missing(sequence, kept))]
            sequence.fed = kept
            sequence.listed = len(sequence.pages)


class NeverRefuses(SmallScheduler):
    """What can never fit waits in the queue."""

    def fits(self, request: NewRequest) -> bool:
        return True


class RefusesTheLargest(SmallScheduler):
    """What just fits is refused."""

    def fits(self, request: NewRequest) -> bool:
        return super().fits(request) and -(-len(request.tokens) // self.limits.page_size) < self.limits.pages


class KeepsReading(SmallScheduler):
    """Who leaves keeps its items for ever."""

    def release_all(self, sequence: Sequence) -> None:
        if not sequence.ended:
            super().release_all(sequence)


MUTANTS = {
    GivesBackInFlight: play.FREE_FOLLOWS,
    JoinsWhatIsHalfItsOwn: device.SHARED_WRITTEN,
    HashesWithoutParent: device.PREFIX_HITS,
    HashesWithoutItems: device.PREFIX_HITS,
    FindsWhatIsOverwritten: device.PREFIX_HITS,
    GoesOnBehindNothing: device.PREFIX_HITS,
    FreesTwice: device.GIVEN_AWAY,
    LeaksOnPreemption: findings.ALWAYS_FREED,
    KeepsReading: findings.ALWAYS_FREED,
    ServesTheLastFirst: play.STARVES,
    NeverRefuses: play.STARVES,
    RefusesTheLargest: play.REFUSED,
    FreesWhatIsHalfRead: findings.NO_FREE_WHILE_HELD,
    EvictsAndRemembers: findings.NO_PHANTOM,
    EncodesOneStepLate: device.BEFORE_READY,
    EncodesForEachReader: findings.ENCODE_ONCE,
    ForgetsTheBudget: device.BALANCE,
    RunsTheDead: play.TERMINAL,
    GoesOnBehindTheEnd: play.TERMINAL,
    DeliversOneTooMany: play.TERMINAL,
    SamplesOneTooMany: play.TERMINAL,
}
