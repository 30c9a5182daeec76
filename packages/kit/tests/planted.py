"""Bugs planted into `StepEngine`, one a class: those that other engines shipped, and others that their design invites.

No adapter knows of them: each is behind the `Adapter` that the sound engine has.
"""

from __future__ import annotations

from triolet_kit.step_engine import Adapter, StepEngine


class OfferedInItsOwnStep(StepEngine):
    """E1: the entry of a request that is preempted is idle in the step that reserved it, and is evicted in it: its
    free comes before its encoding."""

    def preempt(self, request):
        self.finish(request)


class ReuseTakesRoomTwice(StepEngine):
    """E2: reuse of an idle entry takes its room a second time."""

    def schedule(self, request, key, size):
        if key in self.idle:
            self.left -= size
        return super().schedule(request, key, size)


class AbortIsForgotten(StepEngine):
    """E3: a request that ends before it has read gives nothing back."""

    def finish(self, request):
        pass


class FirstReaderFrees(StepEngine):
    """E5: an entry is idle as soon as one of its readers is done."""

    def release(self, request, key):
        if request in self.readers.get(key, ()):
            self.readers[key].remove(request)
            self.idle[key] = None


class LateFrees(StepEngine):
    """E6: the frees of a step are sent with the next one; an entry that was evicted and reserved again is deleted."""

    late: tuple[str, ...] = ()

    def begin_step(self, budget):
        sent, self.late = self.late, ()
        super().begin_step(budget)
        self.frees = list(sent)

    def evict_oldest(self):
        key = next(iter(self.idle))
        self.forget(key)
        self.late = (*self.late, key)


class EveryReleaseGivesRoomBack(StepEngine):
    """E8: a request that goes on decoding gives its room back in every step."""

    def release(self, request, key):
        if key in self.idle:
            self.left += self.sizes[key]
        super().release(request, key)


class PhantomOfThePreempted(StepEngine):
    """E9: preemption takes the encoding out of the step, and leaves the entry listed as cached."""

    def call_off(self, key):
        self.encodes.remove(key)
        self.budget += self.sizes[key]


class SharersLoseTheEncoding(StepEngine):
    """Preemption calls off what others share."""

    def reserve(self, request, key, size):
        super().reserve(request, key, size)
        self.owners = {**getattr(self, "owners", {}), key: request}

    def preempt(self, request):
        self.finish(request)
        for key in list(self.encodes):
            if self.owners[key] == request:
                self.encodes.remove(key)
                self.budget += self.sizes[key]
                if not self.readers[key]:
                    self.forget(key)


class FreesAreLost(StepEngine):
    """An eviction gives the room back, and the runner never hears of it."""

    def evict_oldest(self):
        self.forget(next(iter(self.idle)))


class TooLargeWaits(StepEngine):
    """E11: an item that can never fit waits for ever."""

    def schedule(self, request, key, size):
        answer = super().schedule(request, key, size)
        return "later" if answer == "never" else answer


class FailuresStayListed(StepEngine):
    """An encoding that failed leaves its entry listed as cached, idle."""

    def step_done(self, failed):
        for key in failed:
            self.readers[key] = set()
            self.idle[key] = None


class CalledOffTwice(StepEngine):
    """What is called off gives its budget back, and so does every preemption after it."""

    called_off = 0

    def begin_step(self, budget):
        super().begin_step(budget)
        self.called_off = 0

    def call_off(self, key):
        self.called_off += self.sizes[key]
        super().call_off(key)

    def preempt(self, request):
        super().preempt(request)
        self.budget += self.called_off


class ResetKeepsTheBooks(StepEngine):
    """A reset empties the entries and forgets the room that they took."""

    def reset(self):
        left = self.left
        super().reset()
        self.left = left


class ClosedInFlight(StepEngine):
    """The close leaves what a step in flight encodes to the end of that step, which does nothing about it."""

    def __init__(self, room):
        super().__init__(room)
        self.in_flight = []

    def begin_step(self, budget):
        super().begin_step(budget)
        self.in_flight.append(self.encodes)

    def step_done(self, failed):
        self.in_flight.pop(0)
        super().step_done(failed)

    def close(self):
        super().close()
        for key in (key for encodes in self.in_flight for key in encodes):
            self.idle.pop(key, None)


def behind_the_adapter(engine: type[StepEngine]) -> type[Adapter]:
    return type(engine.__name__, (Adapter,), {"make_engine": engine, "__module__": __name__})
