"""Sound engines that do it otherwise than `StepEngine`: the kit must find nothing in any of them."""

from __future__ import annotations

from triolet_kit.step_engine import StepEngine


class FreesAtTheLastRelease(StepEngine):
    """Keeps nothing that nobody reads."""

    def begin_step(self, budget):
        super().begin_step(budget)
        while self.idle:
            self.evict_oldest()


class FreesAStepLater(StepEngine):
    """The room of what is evicted is there from the next step on, since the device frees last."""

    coming = 0

    def begin_step(self, budget):
        self.left, self.coming = self.left + self.coming, 0
        super().begin_step(budget)

    def schedule(self, request, key, size):
        return "later" if key in self.frees else super().schedule(request, key, size)

    def try_make_room(self, size):
        while size > self.left + self.coming and self.idle:
            self.evict_oldest()
        return size <= self.left

    def evict_oldest(self):
        size = self.sizes[next(iter(self.idle))]
        super().evict_oldest()
        self.left, self.coming = self.left - size, self.coming + size

    def reset(self):
        super().reset()
        self.left, self.coming = self.left + self.coming, 0


class SharesFromTheNextStepOn(StepEngine):
    """Who asks for what this step encodes for another waits for the next step."""

    def schedule(self, request, key, size):
        if key in self.encodes and request not in self.readers[key]:
            return "later"
        return super().schedule(request, key, size)


class EncodesForThePreempted(StepEngine):
    """What a step was to encode for a preempted request is encoded all the same, and evicted in a later step at the
    earliest."""

    def preempt(self, request):
        self.finish(request)

    def try_make_room(self, size):
        settled = [key for key in self.idle if key not in self.encodes]
        if size > self.left + sum(self.sizes[key] for key in settled):
            return False
        while size > self.left:
            key = settled.pop(0)
            self.forget(key)
            self.frees.append(key)
        return True


class TakesFreesBack(StepEngine):
    """If what a step was to encode is called off, the outputs stay that were evicted for it."""

    def begin_step(self, budget):
        super().begin_step(budget)
        self.evicted = {}

    def evict_oldest(self):
        key = next(iter(self.idle))
        self.evicted[key] = self.sizes[key]
        super().evict_oldest()

    def call_off(self, key):
        if key not in self.encodes:
            return  # it stays on the device
        super().call_off(key)
        for old in list(self.frees):
            if old in self.encodes:
                self.encodes.remove(old)
                self.budget += self.sizes[old]
                self.frees.remove(old)
            elif self.evicted[old] <= self.left:
                self.sizes[old], self.readers[old], self.idle[old] = self.evicted[old], set(), None
                self.left -= self.evicted[old]
                self.frees.remove(old)


class OneAtATime(StepEngine):
    """Who comes first waits until all that was there is gone, and everybody waits behind."""

    def schedule(self, request, key, size):
        others = any(readers - {request} for readers in self.readers.values())
        if others and request not in self.readers.get(key, ()):
            return "later" if size <= self.room else "never"
        return super().schedule(request, key, size)


ENGINES = (
    StepEngine,
    FreesAtTheLastRelease,
    FreesAStepLater,
    SharesFromTheNextStepOn,
    EncodesForThePreempted,
    TakesFreesBack,
    OneAtATime,
)


class ReadsInItsOwnStep(StepEngine):
    """An encoder-decoder's: the next step frees what a step has encoded, whoever holds it."""

    def begin_step(self, budget):
        super().begin_step(budget)
        self.frees += self.sizes
        self.reset()
