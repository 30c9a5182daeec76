"""The encoder cache of a small, correct step engine, and its adapter to the step protocol. It is the example of
``docs/adapt_your_cache.md``. ``triolet-kit triolet_kit.step_engine:Adapter`` checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .steps import StepPlanned, Wanted


class StepEngine:
    """The encoder cache of a small step engine: the readers of each output, the frees and encodings of the step that is
    being planned, and the room that is left.
    """

    def __init__(self, room: int) -> None:
        self.room = self.left = room
        self.sizes: dict[str, int] = {}  # of the outputs that are on the device once the planned steps have run
        self.readers: dict[str, set[str]] = {}
        self.idle: dict[str, None] = {}  # outputs without readers, the oldest first
        self.frees: list[str] = []
        self.encodes: list[str] = []
        self.budget = 0
        self.closed = False

    def begin_step(self, budget: int) -> None:
        self.frees, self.encodes, self.budget = [], [], budget
        while self.closed and self.idle:
            self.evict_oldest()

    def schedule(self, request: str, key: str, size: int) -> str:
        """Answers ``request``, which needs to read ``key`` in this step."""
        if size > self.room:
            return "never"
        if key in self.sizes:
            self.idle.pop(key, None)
            self.readers[key].add(request)
            return "hit"
        if size > self.budget or not self.try_make_room(size):
            return "later"
        self.reserve(request, key, size)
        return "encode"

    def try_make_room(self, size: int) -> bool:
        if size > self.left + sum(self.sizes[key] for key in self.idle):
            return False
        while size > self.left:
            self.evict_oldest()
        return True

    def evict_oldest(self) -> None:
        key = next(iter(self.idle))
        self.forget(key)
        self.frees.append(key)

    def reserve(self, request: str, key: str, size: int) -> None:
        self.left -= size
        self.budget -= size
        self.sizes[key], self.readers[key] = size, {request}
        self.encodes.append(key)

    def forget(self, key: str) -> None:
        self.left += self.sizes.pop(key)
        del self.readers[key]
        self.idle.pop(key, None)

    def preempt(self, request: str) -> None:
        """Preempts ``request`` while a step is planned. Encodings of this step that only ``request`` needs are
        cancelled.
        """
        self.finish(request)
        for key in [key for key in self.encodes if key in self.idle]:
            self.call_off(key)

    def call_off(self, key: str) -> None:
        self.encodes.remove(key)
        self.budget += self.sizes[key]
        self.forget(key)

    def release(self, request: str, key: str) -> None:
        if request in self.readers.get(key, ()):
            self.readers[key].remove(request)
            if not self.readers[key]:
                self.idle[key] = None

    def finish(self, request: str) -> None:
        for key in self.readers:
            self.release(request, key)

    def step_done(self, failed: Iterable[str]) -> None:
        for key in failed:
            self.forget(key)

    def reset(self) -> None:
        for key in list(self.sizes):
            self.forget(key)

    def close(self) -> None:
        self.closed = True


class Adapter:
    """`StepEngine` as a `triolet_kit.steps.StepCache`."""

    make_engine = StepEngine

    def __init__(self, room: int) -> None:
        self.engine = self.make_engine(room)
        self.executed, self.release, self.finish = self.engine.step_done, self.engine.release, self.engine.finish
        self.reset, self.close = self.engine.reset, self.engine.close

    def plan(self, wanted: Sequence[Wanted], budget: int) -> StepPlanned:
        self.engine.begin_step(budget)
        answers = []
        for one in wanted:
            match one:
                case "ask", request, key, size:
                    answers.append(self.engine.schedule(request, key, size))
                case "preempt", request:
                    self.engine.preempt(request)
        return answers, self.engine.frees, self.engine.encodes
