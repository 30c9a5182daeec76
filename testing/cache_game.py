"""The clients and the device of an encoder cache, and the judgement of it: `conformance` says what it must do."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

from attrs import define, field

from ..core.errors import InvariantViolation
from ..core.trace import (
    ALWAYS_FREED,
    BOOKS_BALANCE,
    ENCODE_ONCE,
    EVERY_ACQUIRE_ANSWERED,
    NO_FREE_WHILE_HELD,
    NO_PHANTOM,
    NO_USE_BEFORE_READY,
)
from .cache_workloads import Ask, Encoded, Free, Operation, Release, Workload
from .kit.wrong_adapter import WrongAdapter, as_texts, check_methods

PATIENCE = 8
"""Rounds without any progress after which a client that still waits counts as waiting for ever."""


class Answer(enum.Enum):
    """The answer to an acquire. The first three are a hold, which one `EncoderCache.release` ends."""

    READY = "the output is on the device: read it until you release it"
    ENCODE = "room is reserved: encode it, then call encoded(); all who hold it may read then"
    PENDING = "somebody else's encoding is under way: read it once encoded() was called"
    WAIT = "no room now: you hold nothing; ask again later"
    REFUSED = "larger than the whole cache: do not ask again"


class EncoderCache(Protocol):
    """What the kit needs of a cache manager: decisions about keys and bytes. It never sees tensors."""

    def acquire(self, holder: str, key: str, size: int) -> Answer:
        """``holder`` (a request) acquires ``key``, whose output takes ``size`` bytes, the same in every call.

        A request in which a key occurs twice acquires twice and releases twice. A holder of the key takes no further
        room, so it is never told WAIT. A request that was told WAIT acquires again and again, until it gets another
        answer or gives up with `release`.
        """
        ...

    def encoded(self, key: str, stored: bool) -> None:
        """The encoding of ``key`` has ended: once for each ENCODE, sooner or later, held or not, and also after
        `close`.

        With ``stored`` the output is on the device and its holders read it. Without (the encoder failed, or was called
        off before it began) there is no output, the bytes are free, and all holds of the key are over, without a
        release: a request that still needs the output acquires it anew.
        """
        ...

    def release(self, holder: str, key: str) -> None:
        """``holder`` gives one hold of ``key`` back, or no longer waits for it."""
        ...

    def take_freed(self) -> Iterable[str]:
        """Hands out the keys whose outputs the caller drops from the device now. The call may come late: until then the
        outputs take room, afterwards they do not. A key that is handed out is no longer cached."""
        ...

    def close(self) -> None:
        """No request holds, waits or acquires any more; encodings under way still end. `take_freed` must hand out every
        output that is on the device, or comes to be there."""
        ...


MakeCache = Callable[[int], EncoderCache]
"""Makes an empty cache of so many bytes."""


# -- the game --------------------------------------------------------------------------------------------------------

_LAST, _LATE, _EVERYTHING = "the last request", "a late comer", "everything"


@define(eq=False)
class _Game:
    """The clients and the device: the answers that clients got, and where each output is."""

    cache: EncoderCache
    capacity: int
    sizes: dict[str, int]
    history: list[str] = field(factory=list)
    holds: Counter[tuple[str, str]] = field(factory=Counter)
    waiting: dict[tuple[str, str], None] = field(factory=dict)  # in the order of their acquires
    encoding: dict[str, None] = field(factory=dict)
    device: dict[str, None] = field(factory=dict)

    # -- operations --------------------------------------------------------------------------------------------------

    def do(self, operation: Operation) -> None:
        """Does one operation, if it is possible."""
        match operation:
            case Ask(holder, key):
                self.ask(holder, key)
            case Release(holder, key):
                self.release(holder, key)
            case Encoded(key, stored):
                self.end_encoding(key, stored=stored)
            case Free():
                self.free()

    def ask(self, holder: str, key: str) -> Answer:
        """Acquires, and judges the answer."""
        hold, size = (holder, key), self.sizes[key]
        answer = self.cache.acquire(holder, key, size)
        if answer is not Answer.WAIT or hold not in self.waiting:
            again = " once more" if hold in self.waiting else ""
            self.tell(f"{holder} asks{again} for {key} ({size} of {self.capacity} bytes): {_name(answer)}")
        if answer is Answer.WAIT:
            self.judge_wait(hold, size)
            self.waiting[hold] = None
            return answer
        self.waiting.pop(hold, None)
        match answer:
            case Answer.READY:
                self.judge_ready(holder, key)
            case Answer.ENCODE:
                self.judge_encode(holder, key)
                self.encoding[key] = None
            case Answer.PENDING:
                self.judge_pending(holder, key)
            case Answer.REFUSED:
                self.judge_refused(holder, key, size)
                return answer
            case _:
                raise WrongAdapter(f"acquire answered {answer!r}; allowed: a member of triolet.testing.Answer")
        self.holds[hold] += 1
        return answer

    def release(self, holder: str, key: str) -> None:
        """Ends one hold, or a wait."""
        hold = (holder, key)
        if hold in self.waiting:
            del self.waiting[hold]
            self.tell(f"{holder} no longer waits for {key}")
        elif self.holds[hold]:
            self.holds[hold] -= 1
            self.tell(f"{holder} releases {key}")
        else:
            return
        self.cache.release(holder, key)

    def end_encoding(self, key: str, *, stored: bool) -> None:
        """Ends the encoding of ``key``, if there is one."""
        if key not in self.encoding:
            return
        del self.encoding[key]
        if stored:
            self.device[key] = None
        else:
            self.holds = Counter({hold: count for hold, count in self.holds.items() if hold[1] != key})
        self.tell(f"{key} is encoded" if stored else f"the encoding of {key} fails; its holds are over")
        self.cache.encoded(key, stored)

    def free(self) -> bool:
        """The device drops the outputs that it is told to. True if there were any."""
        keys = as_texts(self.cache.take_freed(), "what take_freed returned")
        if keys:
            self.tell(f"to be freed: {', '.join(keys)}")
        for key in keys:
            self.judge_free(key)
            del self.device[key]
        return bool(keys)

    # -- judgement ---------------------------------------------------------------------------------------------------

    def judge_wait(self, hold: tuple[str, str], size: int) -> None:
        holder, key = hold
        if size > self.capacity:
            self.fail(EVERY_ACQUIRE_ANSWERED, f"{holder} is told to wait for {key}, which can never fit")
        if self.holds[hold]:
            self.fail(EVERY_ACQUIRE_ANSWERED, f"{holder} is told to wait for {key}, which it holds already")

    def judge_ready(self, holder: str, key: str) -> None:
        if key in self.encoding:
            self.fail(NO_USE_BEFORE_READY, f"{holder} may read {key}, which is still being encoded")
        if key not in self.device:
            self.fail(NO_PHANTOM, f"{holder} may read {key}, which is not on the device")

    def judge_encode(self, holder: str, key: str) -> None:
        if key in self.encoding:
            self.fail(ENCODE_ONCE, f"{holder} is to encode {key}, which is being encoded already")
        if key in self.device:
            self.fail(ENCODE_ONCE, f"{holder} is to encode {key}, which is on the device still")
        taken = sum(self.sizes[other] for other in (*self.device, *self.encoding, key))
        if taken > self.capacity:
            there = ", ".join(sorted((*self.device, *self.encoding))) or "nothing"
            self.fail(
                BOOKS_BALANCE,
                f"{holder} is to encode {key} beside {there}: {taken} bytes in a cache of {self.capacity}",
            )

    def judge_pending(self, holder: str, key: str) -> None:
        if key in self.device:
            self.fail(EVERY_ACQUIRE_ANSWERED, f"{holder} is to wait for an encoding of {key} that has ended")
        if key not in self.encoding:
            self.fail(NO_PHANTOM, f"{holder} is to wait for an encoding of {key} that nobody was told to do")

    def judge_refused(self, holder: str, key: str, size: int) -> None:
        if size <= self.capacity:
            self.fail(EVERY_ACQUIRE_ANSWERED, f"{holder} is refused {key}, which can fit")

    def judge_free(self, key: str) -> None:
        if key in self.encoding:
            self.fail(BOOKS_BALANCE, f"{key} is freed while it is being encoded")
        if key not in self.device:
            self.fail(BOOKS_BALANCE, f"{key} is freed, but it is not on the device")
        holders = sorted({holder for (holder, held), count in self.holds.items() if held == key and count})
        if holders:
            self.fail(NO_FREE_WHILE_HELD, f"{key} is freed while {', '.join(holders)} may read it")

    def fail(self, invariant: str, what: str) -> NoReturn:
        raise InvariantViolation(invariant, what, tuple(self.history))

    def tell(self, what: str) -> None:
        self.history.append(what)

    # -- the end -----------------------------------------------------------------------------------------------------

    def serve_everybody(self) -> None:
        """Ends every encoding, releases every hold, serves waiting requests, then one that needs the whole cache."""
        self.end_encodings()
        self.sizes[_EVERYTHING] = self.capacity
        for (holder, key), count in list(self.holds.items()):
            if count:
                self.push_out()
                self.give_back(holder, key)
        self.push_out(come_late=True)
        self.give_everything_back()
        self.serve_waiting()
        self.serve(_LAST, _EVERYTHING)
        self.serve_waiting()

    def push_out(self, *, come_late: bool = False) -> None:
        """One request needs the whole capacity; another may acquire the oldest output meanwhile."""
        if self.device:
            oldest = next(iter(self.device))
            self.ask(_LAST, _EVERYTHING)
            if come_late:
                self.ask(_LATE, oldest)
            self.free()
            self.end_encodings()

    def end_encodings(self) -> None:
        for key in list(self.encoding):
            self.end_encoding(key, stored=True)

    def serve_waiting(self) -> None:
        """Serves in rounds: carries out frees, then every waiting request acquires again."""
        patience = PATIENCE
        while self.waiting and patience:
            progress = self.free()
            for holder, key in list(self.waiting):
                progress = self.serve(holder, key) or progress
            patience = PATIENCE if progress else patience - 1
        if self.waiting:
            waits = " and ".join(f"{holder} for {key}" for holder, key in self.waiting)
            self.fail(EVERY_ACQUIRE_ANSWERED, f"{waits}: a wait for ever, though nobody holds anything")

    def serve(self, holder: str, key: str) -> bool:
        """Acquires, encodes where told to, and releases at once. True if the request was served."""
        answer = self.ask(holder, key)
        if answer is Answer.ENCODE:
            self.end_encoding(key, stored=True)
        if answer not in {Answer.WAIT, Answer.REFUSED}:
            self.release(holder, key)
        return answer is not Answer.WAIT

    def give_everything_back(self) -> None:
        for holder, key in list(self.holds):
            self.give_back(holder, key)

    def give_back(self, holder: str, key: str) -> None:
        """Releases all holds that one request has of one key."""
        for _ in range(self.holds[holder, key]):
            self.release(holder, key)

    def close(self, late: Iterable[Operation] = ()) -> None:
        """Closes the cache. Encodings under way end afterwards: as ``late`` says, or else stored."""
        for holder, key in list(self.waiting):
            self.release(holder, key)
        self.give_everything_back()
        self.tell("close")
        self.cache.close()
        for operation in late:
            if isinstance(operation, Encoded | Free):
                self.do(operation)
        self.free()
        self.end_encodings()
        while self.free():
            pass
        if self.device:
            self.fail(
                ALWAYS_FREED, f"{', '.join(self.device)} on the device after close, and nobody is told to free it"
            )


def _name(answer: object) -> str:
    return answer.name if isinstance(answer, Answer) else repr(answer)


def play(make_cache: MakeCache, workload: Workload) -> None:
    """Plays ``workload`` on a new cache, brings it to its end, and checks every promise on the way.

    The end of a workload is fair to the cache: every encoding ends, every holder releases, frees are carried out, and
    waiting requests go on acquiring. Then every waiting request must be served. So must a request for the whole
    capacity: first while others still hold outputs, each time before one of them releases, and again when no hold is
    left. This request pushes out outputs that are wrongly taken for idle, and would wait for ever for bytes that the
    books have lost. Meanwhile another request acquires an output that is on its way out. Last comes
    `EncoderCache.close`. A ``hurried`` workload closes at once, with encodings under way that end afterwards.

    Raises:
        InvariantViolation: a promise is broken; ``history`` are the operations that led there.
        WrongAdapter: the adapter lacks a method, or an answer is none of the protocol; a TypeError.
        Exception: any error of the cache, with the operations that led there in a note.
    """
    cache = make_cache(workload.capacity)
    check_methods(cache, ("acquire", "encoded", "release", "take_freed", "close"), "triolet.testing.EncoderCache")
    game = _Game(cache, workload.capacity, dict(workload.sizes))
    try:
        for operation in workload.operations:
            game.do(operation)
        if not workload.hurried:
            game.serve_everybody()
        game.close(workload.late)
    except (InvariantViolation, WrongAdapter):
        raise
    except Exception as error:
        error.add_note("\n  ".join(["the cache raised it; what happened:", *game.history]))
        raise
