"""The conformance kit passes caches that are sound, and catches every fault that was planted."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from attrs import define, field
from hypothesis import settings
from hypothesis.errors import FlakyFailure

from triolet.core.errors import InvariantViolation
from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import State
from triolet.core.ledger_values import Decisions, Hold
from triolet.core.trace import (
    ALWAYS_FREED,
    BOOKS_BALANCE,
    ENCODE_ONCE,
    EVERY_ACQUIRE_ANSWERED,
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    NO_USE_BEFORE_READY,
)
from triolet.testing import conformance
from triolet.testing.cache_strategies import workloads
from triolet.testing.cache_workloads import Ask, Encoded, Free, Release, Workload
from triolet.testing.conformance import Answer, check_encoder_cache, play

THOROUGH = settings(max_examples=600)
BRIEF = settings(max_examples=300, print_blob=False)


@define(eq=False)
class LedgerCache:
    """Our own ledger behind the five methods: its decisions are kept until somebody asks."""

    capacity: int
    ledger: EncoderLedger = field(init=False)
    holds: Counter[tuple[str, str]] = field(factory=Counter)
    untold: set[str] = field(factory=set)  # dispatched, but nobody was told to encode them yet
    freeing: list[str] = field(factory=list)
    closed: bool = False

    def __attrs_post_init__(self) -> None:
        self.ledger = EncoderLedger(self.capacity)

    def acquire(self, holder: str, key: str, size: int) -> Answer:
        if not self.ledger.holds(holder, key):
            decisions = self.ledger.acquire(holder, key, size=size, embeddings=1, payload=key)
            if decisions.refused:
                return Answer.REFUSED
            self.obey(decisions)
        if Hold(holder, key) in self.ledger.waiting():
            return Answer.WAIT
        self.holds[holder, key] += 1
        if self.ledger.state(key) is State.READY:
            return Answer.READY
        if key not in self.untold:
            return Answer.PENDING
        self.untold.remove(key)
        return Answer.ENCODE

    def encoded(self, key: str, stored: bool) -> None:
        if stored:
            self.obey(self.ledger.encoded([key], now=0.0))
        else:
            self.call_off(key)
        if self.closed:
            self.obey(self.ledger.evict_idle(now=1.0, idle_seconds=1.0))

    def release(self, holder: str, key: str) -> None:
        self.holds[holder, key] -= 1
        if self.holds[holder, key] > 0:
            return
        del self.holds[holder, key]
        if not self.ledger.holds(holder, key):
            return  # the encoding that it waited for failed before it was told to do it
        self.obey(self.ledger.release(holder, key, now=0.0))
        if key in self.untold and not self.ledger.entries()[key][1]:
            self.call_off(key)

    def call_off(self, key: str) -> None:
        self.untold.discard(key)
        for hold in [hold for hold in self.holds if hold[1] == key]:
            del self.holds[hold]
        error = RuntimeError("called off")
        decisions = self.ledger.encode_failed([key], error)
        if decisions.retried:  # it would be tried once more
            self.ledger.take_encode_batch(1)
            decisions = self.ledger.encode_failed([key], error)
        self.obey(decisions)

    def take_freed(self) -> tuple[str, ...]:
        keys, self.freeing = tuple(self.freeing), []
        self.obey(self.ledger.freed(keys))
        return keys

    def close(self) -> None:
        self.closed = True
        self.obey(self.ledger.close(now=0.0))

    def obey(self, decisions: Decisions) -> None:
        self.freeing += decisions.free
        self.untold |= {job.key for job in self.ledger.take_encode_batch(1 << 30)}


@define(eq=False)
class PlainCache:
    """The least that is sound: idle outputs are evicted oldest first, and nobody has a place in a queue."""

    capacity: int
    taken: int = 0
    sizes: dict[str, int] = field(factory=dict)  # of what is being encoded, resident or about to be freed
    holders: dict[str, list[str]] = field(factory=dict)
    encoding: set[str] = field(factory=set)
    leaving: list[str] = field(factory=list)  # evicted, not handed out yet
    closed: bool = False

    def acquire(self, holder: str, key: str, size: int) -> Answer:
        if self.is_refused(size):
            return Answer.REFUSED
        if key in self.leaving:
            return Answer.WAIT
        if key in self.sizes:
            return self.join(holder, key)
        self.make_room(size)
        if self.taken + size > self.capacity:
            return Answer.WAIT
        self.reserve(holder, key, size)
        return Answer.ENCODE

    def is_refused(self, size: int) -> bool:
        return size > self.capacity

    def join(self, holder: str, key: str) -> Answer:
        self.holders[key].append(holder)
        return Answer.PENDING if key in self.encoding else Answer.READY

    def reserve(self, holder: str, key: str, size: int) -> None:
        self.taken += size
        self.sizes[key] = size
        self.holders[key] = [holder]
        self.encoding.add(key)

    def encoded(self, key: str, stored: bool) -> None:
        self.encoding.remove(key)
        if not stored:
            self.forget(key)
        elif self.closed:
            self.evict(key)

    def release(self, holder: str, key: str) -> None:
        if holder in self.holders.get(key, ()):
            self.holders[key].remove(holder)

    def make_room(self, size: int) -> None:
        for key in list(self.sizes):
            if self.taken - sum(self.sizes[gone] for gone in self.leaving) + size <= self.capacity:
                return
            if self.is_idle(key):
                self.evict(key)

    def is_idle(self, key: str) -> bool:
        return not self.holders[key] and key not in self.encoding and key not in self.leaving

    def evict(self, key: str) -> None:
        self.leaving.append(key)

    def take_freed(self) -> list[str]:
        keys, self.leaving = self.leaving, []
        for key in keys:
            self.forget(key)
        return keys

    def forget(self, key: str) -> None:
        self.taken -= self.sizes.pop(key)
        del self.holders[key]

    def close(self) -> None:
        self.closed = True
        for key in self.sizes:
            if self.is_idle(key):
                self.evict(key)


SOUND = [LedgerCache, PlainCache]


@pytest.mark.parametrize("make_cache", SOUND)
def test_a_sound_cache_passes(make_cache):
    check_encoder_cache(make_cache, settings=THOROUGH)


class FreedWhileEncoded(PlainCache):
    """E1: the output of an aborted request is offered for freeing before it was computed."""

    def is_idle(self, key):
        return not self.holders[key] and key not in self.leaving


class BytesTakenTwice(PlainCache):
    """E2: reuse of an idle output takes its bytes a second time."""

    def join(self, holder, key):
        if not self.holders[key]:
            self.taken += self.sizes[key]
        return super().join(holder, key)


class AbortIsForgotten(PlainCache):
    """E3: an abort while the output is being encoded does not release it."""

    def release(self, holder, key):
        if key not in self.encoding:
            super().release(holder, key)


class FirstReaderFrees(PlainCache):
    """E5: an output is idle as soon as its first reader is done."""

    def release(self, holder, key):
        self.holders[key] = []


class ReservedWhileLeaving(PlainCache):
    """E6: an output that was evicted, but not freed yet, is reserved anew: the late free will delete the new one."""

    def acquire(self, holder, key, size):
        if key in self.leaving:
            self.encoding.add(key)
            self.holders[key].append(holder)
            return Answer.ENCODE
        return super().acquire(holder, key, size)


class SetOfHolders(PlainCache):
    """E7: a request that needs an output twice counts once; it is freed at its first occurrence."""

    def join(self, holder, key):
        if holder in self.holders[key]:
            self.holders[key].remove(holder)
        return super().join(holder, key)


class BytesGivenBackAtEveryRelease(PlainCache):
    """E8: every release gives the bytes back."""

    def release(self, holder, key):
        super().release(holder, key)
        if key in self.sizes:
            self.taken -= self.sizes[key]


class Phantom(PlainCache):
    """E9: an encoding that was called off leaves its key listed as cached."""

    def encoded(self, key, stored):
        super().encoded(key, stored=True)
        if not stored:
            self.taken -= self.sizes[key]
            self.sizes[key], self.holders[key] = 0, []

    def is_idle(self, key):
        return super().is_idle(key) and self.sizes[key] > 0


class TooLargeWaits(PlainCache):
    """E11: what is larger than the cache waits for ever."""

    def is_refused(self, size):
        return False


class HitOnWhatIsBeingEncoded(PlainCache):
    """Whoever comes second is told to read, while the first is still encoding."""

    def join(self, holder, key):
        super().join(holder, key)
        return Answer.READY


class EverybodyEncodes(PlainCache):
    """Whoever comes second is told to encode, too."""

    def join(self, holder, key):
        answer = super().join(holder, key)
        return Answer.ENCODE if answer is Answer.PENDING else answer


class BytesGivenBackBeforeTheFree(PlainCache):
    """Bytes are given back when the free is planned, not when it was carried out."""

    def evict(self, key):
        super().evict(key)
        self.taken -= self.sizes[key]
        self.sizes[key] = 0


class LateEncodingsStay(PlainCache):
    """What is encoded after `close` is never freed."""

    def encoded(self, key, stored):
        self.encoding.remove(key)
        if not stored:
            self.forget(key)


class IdleIsNeverEvicted(PlainCache):
    """Idle outputs keep their room."""

    def make_room(self, size):
        pass


class FreedTwice(PlainCache):
    """`close` hands every output out twice."""

    def close(self):
        super().close()
        self.leaving += self.leaving

    def forget(self, key):
        if key in self.sizes:
            super().forget(key)


class LateFailuresAreFreed(PlainCache):
    """What fails after `close` is handed out, though it never was on the device."""

    def encoded(self, key, stored):
        super().encoded(key, stored or self.closed)


class LateFailuresAreUnknown(PlainCache):
    """What fails after `close` is no longer in the books."""

    def encoded(self, key, stored):
        super().encoded(key, stored)
        if self.closed and not stored:
            raise KeyError(key)


class ThreeReaders(PlainCache):
    """A fourth reader is not counted."""

    def join(self, holder, key):
        answer = super().join(holder, key)
        if len(set(self.holders[key])) > 3:
            self.holders[key].pop()
        return answer


class FourKeys(PlainCache):
    """With four keys in the books, the oldest makes room: whoever reads it."""

    def acquire(self, holder, key, size):
        oldest = next(iter(self.sizes), None)
        if len(self.sizes) >= 4 and oldest not in self.leaving and oldest not in self.encoding:
            self.evict(oldest)
        return super().acquire(holder, key, size)


class SizesOf32Bits(PlainCache):
    """Sizes wrap around."""

    def acquire(self, holder, key, size):
        return super().acquire(holder, key, size % 2**32)


class SizesModulo6(PlainCache):
    """Sizes wrap around, early."""

    def acquire(self, holder, key, size):
        return super().acquire(holder, key, size % 6)


FAULTS = [  # with the promise that each breaks, and the workload that Hypothesis shrank it to
    (FreedWhileEncoded, BOOKS_BALANCE, Workload(1, {"a": 1}, [Ask("r0", "a")], hurried=True)),
    (
        BytesTakenTwice,
        EVERY_ACQUIRE_ANSWERED,
        Workload(1, {"a": 1}, [Ask("r0", "a"), Release("r0", "a"), Ask("r0", "a")]),
    ),
    (AbortIsForgotten, EVERY_ACQUIRE_ANSWERED, Workload(1, {"a": 1}, [Ask("r0", "a"), Release("r0", "a")])),
    (FirstReaderFrees, NO_FREE_WHILE_HELD, Workload(1, {"a": 1}, [Ask("r0", "a"), Ask("r0", "a"), Release("r0", "a")])),
    (ReservedWhileLeaving, ENCODE_ONCE, Workload(1, {"a": 1}, [Ask("r0", "a")])),
    (SetOfHolders, NO_FREE_WHILE_HELD, Workload(1, {"a": 1}, [Ask("r0", "a"), Ask("r0", "a"), Release("r0", "a")])),
    (BytesGivenBackAtEveryRelease, BOOKS_BALANCE, Workload(1, {"a": 1}, [Ask("r0", "a")])),
    (Phantom, NO_PHANTOM, Workload(1, {"a": 1}, [Ask("r0", "a"), Encoded("a", stored=False), Ask("r0", "a")])),
    (TooLargeWaits, EVERY_ACQUIRE_ANSWERED, Workload(2, {"a": 3}, [Ask("r0", "a")])),
    (HitOnWhatIsBeingEncoded, NO_USE_BEFORE_READY, Workload(1, {"a": 1}, [Ask("r0", "a"), Ask("r0", "a")])),
    (EverybodyEncodes, ENCODE_ONCE, Workload(1, {"a": 1}, [Ask("r0", "a"), Ask("r0", "a")])),
    (BytesGivenBackBeforeTheFree, BOOKS_BALANCE, Workload(1, {"a": 1}, [Ask("r0", "a")])),
    (LateEncodingsStay, ALWAYS_FREED, Workload(1, {"a": 1}, [Ask("r0", "a")], hurried=True)),
    (IdleIsNeverEvicted, EVERY_ACQUIRE_ANSWERED, Workload(1, {"a": 1}, [Ask("r0", "a")])),
    (FreedTwice, BOOKS_BALANCE, Workload(1, {})),
    (
        LateFailuresAreFreed,
        BOOKS_BALANCE,
        Workload(1, {"a": 1}, [Ask("r0", "a")], hurried=True, late=[Encoded("a", stored=False)]),
    ),
    (
        ThreeReaders,
        NO_FREE_WHILE_HELD,
        Workload(1, {"a": 1}, [Ask("r0", "a"), Ask("r1", "a"), Ask("r2", "a"), Ask("r3", "a")]),
    ),
    (
        FourKeys,
        NO_FREE_WHILE_HELD,
        Workload(4, dict.fromkeys("abcd", 1), [Ask("r0", "a"), Ask("r0", "b"), Ask("r0", "c"), Ask("r0", "d")]),
    ),
    (SizesOf32Bits, BOOKS_BALANCE, Workload(5_000_000_000, {"a": 5_000_000_000}, [Ask("r0", "a")])),
    (SizesModulo6, BOOKS_BALANCE, Workload(7, {"a": 7}, [Ask("r0", "a")])),
]


@pytest.mark.parametrize(("broken", "invariant", "shrunk"), FAULTS, ids=[broken.__name__ for broken, *_ in FAULTS])
def test_a_planted_fault_is_found_by_the_name_of_the_promise_it_breaks(broken, invariant, shrunk):
    """Of the known faults E1 to E11, those that are an encoder cache's own. The kit finds each, the shrunk workload
    shows it again, and without the fault the same workload is played to its end. E4 is a scheduler's: see
    `tests/properties/test_planner.py`; E10 a device's: see `test_adapters.py`."""
    with pytest.raises(InvariantViolation) as found:
        check_encoder_cache(broken, settings=BRIEF)
    assert found.value.invariant == invariant
    assert any("Workload(" in note for note in found.value.__notes__), "the note says how to play it again"
    with pytest.raises(InvariantViolation) as again:
        play(broken, shrunk)
    assert again.value.invariant == invariant
    assert len(again.value.history) <= len(found.value.history)
    play(PlainCache, shrunk)


def test_a_cache_that_raises_where_an_encoding_fails_late_is_found():
    with pytest.raises(KeyError) as found:
        check_encoder_cache(LateFailuresAreUnknown, settings=BRIEF)
    assert any("the encoding of a fails" in note for note in found.value.__notes__)


def test_after_the_close_only_the_device_does_something():
    """And what is said of encodings that nobody began is passed over."""
    late = [Ask("r0", "b"), Release("r0", "a"), Encoded("b"), Encoded("a"), Free(), Encoded("a", stored=False), Free()]
    for make_cache in SOUND:
        play(make_cache, Workload(2, {"a": 1, "b": 1}, [Ask("r0", "a")], hurried=True, late=late))


def test_a_slow_machine_is_no_finding(monkeypatch):
    """Hypothesis complains of inputs that take more than a second to draw, and of a test that takes more than its
    deadline."""

    def slow(workload):
        time.sleep(0.2)
        return workload

    monkeypatch.setattr(conformance, "workloads", lambda: workloads().map(slow))
    check_encoder_cache(PlainCache, settings=settings(max_examples=11, deadline=1, suppress_health_check=[]))


def test_a_cache_that_is_not_the_same_twice_is_flaky():
    """As the docstring says."""
    broken = [FreedTwice]

    def make_cache(capacity):
        return broken.pop()(capacity) if broken else PlainCache(capacity)

    with pytest.raises(FlakyFailure):
        check_encoder_cache(make_cache, settings=BRIEF)


def test_a_workload_is_its_repr():
    """What a failure prints is what `play` takes."""
    workload = Workload(
        2,
        {"a": 2},
        [Ask("r0", "a"), Encoded("a", stored=False), Release("r0", "a"), Free()],
        hurried=True,
        late=[Encoded("a")],
    )
    assert eval(repr(workload)) == workload


def test_operations_that_cannot_be_are_passed_over():
    operations = [Encoded("a"), Release("r0", "a"), Free(), Ask("r0", "b"), Ask("r0", "b")]
    play(PlainCache, Workload(1, {"a": 1, "b": 2}, operations))


def test_the_history_tells_every_operation_in_words():
    """Asks that are told to wait once more are left out: they would fill pages."""

    class NeverFrees(PlainCache):
        def take_freed(self):
            return []

    operations = [Ask("r0", "a"), Ask("r1", "b"), Ask("r1", "b"), Release("r1", "b"), Encoded("a"), Ask("r2", "b")]
    with pytest.raises(InvariantViolation) as found:
        play(NeverFrees, Workload(2, {"a": 1, "b": 2}, operations))
    assert found.value.history == (
        "r0 asks for a (1 of 2 bytes): ENCODE",
        "r1 asks for b (2 of 2 bytes): WAIT",
        "r1 no longer waits for b",
        "a is encoded",
        "r2 asks for b (2 of 2 bytes): WAIT",
        "the last request asks for everything (2 of 2 bytes): WAIT",
        "r0 releases a",
        "a late comer asks for a (1 of 2 bytes): WAIT",
    )
    assert "r2 for b and the last request for everything and a late comer for a: a wait for ever" in str(found.value)


class Odd(PlainCache):
    """Answers ``answer`` to one who asks a second time."""

    answer: object = None

    def join(self, holder, key):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "encoded", "invariant", "told"),
    [
        (Answer.WAIT, True, EVERY_ACQUIRE_ANSWERED, "which it holds already"),
        (Answer.REFUSED, True, EVERY_ACQUIRE_ANSWERED, "refused a, which can fit"),
        (Answer.PENDING, True, EVERY_ACQUIRE_ANSWERED, "an encoding of a that has ended"),
        (Answer.ENCODE, True, ENCODE_ONCE, "on the device still"),
        (Answer.READY, False, NO_USE_BEFORE_READY, "still being encoded"),
    ],
)
def test_an_answer_that_is_not_so_is_told(answer, encoded, invariant, told):
    broken = type("Broken", (Odd,), {"answer": answer})
    between = [Encoded("a")] if encoded else []
    with pytest.raises(InvariantViolation, match=told) as found:
        play(broken, Workload(1, {"a": 1}, [Ask("r0", "a"), *between, Ask("r0", "a")]))
    assert found.value.invariant == invariant


def test_a_wait_for_an_encoding_that_nobody_does_is_a_phantom():
    class Broken(PlainCache):
        def acquire(self, holder, key, size):
            return Answer.PENDING

    with pytest.raises(InvariantViolation, match="nobody was told to do"):
        play(Broken, Workload(1, {"a": 1}, [Ask("r0", "a")]))


def test_an_answer_of_another_type_is_told():
    broken = type("Broken", (Odd,), {"answer": True})
    with pytest.raises(TypeError, match="answered True; allowed: a member of"):
        play(broken, Workload(1, {"a": 1}, [Ask("r0", "a"), Ask("r0", "a")]))


def test_what_the_cache_raises_comes_with_what_happened():
    class Broken(PlainCache):
        def close(self):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no") as found:
        play(Broken, Workload(1, {"a": 1}, [Ask("r0", "a")], hurried=True))
    assert "r0 asks for a (1 of 1 bytes): ENCODE" in found.value.__notes__[0]
