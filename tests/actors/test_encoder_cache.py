"""The encoder-cache actor alone, between two channels that the test holds: what goes out, and in which order."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from triolet.actors import messages as m
from triolet.actors.encoder_cache import EncoderCache
from triolet.core import events
from triolet.core.batch_size import BatchSize
from triolet.core.ledger import EncoderLedger
from triolet.core.request import EncoderItem


class Bench:
    """An actor whose ledger has room for three items of ten bytes, and whose encode batches have two."""

    def __init__(self) -> None:
        self.send, inbox = trio.open_memory_channel[m.EncoderCacheMessage](math.inf)
        to_scheduler, self.scheduler = trio.open_memory_channel[m.SchedulerMessage](math.inf)
        to_runner, self.runner = trio.open_memory_channel[m.RunnerMessage](math.inf)
        self.told: list[events.Event] = []
        self.cache = EncoderCache(
            inbox=inbox,
            to_scheduler=to_scheduler,
            to_runner=to_runner,
            ledger=EncoderLedger(30, BatchSize(2)),
            idle_seconds=math.inf,
            emit=self.told.append,
        )

    async def gets(self, *messages: m.EncoderCacheMessage) -> list[m.RunnerMessage]:
        """What goes to the runner after ``messages`` that came together."""
        for message in messages:
            self.send.send_nowait(message)
        await trio.testing.wait_all_tasks_blocked()
        out = []
        while self.runner.statistics().current_buffer_used:
            out.append(self.runner.receive_nowait())
        return out

    async def fill(self) -> None:
        """Three outputs are resident, and nobody holds them."""
        holders = {key: f"r/{key}" for key in "abc"}
        await self.gets(*(acquire(holder, key) for key, holder in holders.items()))
        await self.gets(m.Encoded(("a", "b")))
        await self.gets(m.Encoded(("c",)))
        await self.gets(*(m.Release(holder, key) for key, holder in holders.items()))


@pytest.fixture
async def bench(nursery: trio.Nursery) -> Bench:
    made = Bench()
    await nursery.start(made.cache.run)
    return made


def acquire(holder: str, key: str, order: int = 0) -> m.Acquire:
    return m.Acquire(holder, EncoderItem(key=key, payload=None, embeddings=1, size=10), order)


async def test_the_frees_of_one_batch_of_messages_are_one_message(bench):
    await bench.fill()
    (free,) = await bench.gets(acquire("x", "x"), acquire("y", "y"), acquire("z", "z"))
    assert free == m.Free(("a", "b", "c"), 0), "what is decided together goes out together"
    (encode,) = await bench.gets(m.Freed(("a", "b", "c")))
    assert [item.key for item in encode.items] == ["x", "y"], "room that comes back together fills a batch"


async def test_frees_do_not_wait_behind_an_encode_batch(bench):
    await bench.fill()
    await bench.gets(acquire("x", "x"))
    out = await bench.gets(m.Freed(("a",)), acquire("y", "y"))
    assert [type(message) for message in out] == [m.Free, m.Encode]


async def test_frees_that_were_decided_before_a_restart_are_not_sent_after_it(bench):
    await bench.fill()
    (encode,) = await bench.gets(acquire("x", "x"), m.RunnerRestarted(1, asleep=False))
    assert [item.key for item in encode.items] == ["x"], "what is gone needs no free"


async def test_a_batch_that_is_too_large_is_told_of(bench):
    await bench.gets(acquire("x", "x"), acquire("y", "y"))
    (encode,) = await bench.gets(m.EncodeBroken(("x", "y"), MemoryError("full")))
    assert [item.key for item in encode.items] == ["x"]
    assert events.EncodeBroke(("x", "y"), error="MemoryError: full") in bench.told
    assert events.EncodeShrunk(1) in bench.told
    assert events.EncodeRetried(("x", "y")) in bench.told


async def test_an_item_that_fails_alone_twice_is_refused_with_its_error(bench):
    """A release that crosses the refusal is nobody's mistake."""
    await bench.gets(acquire("x", "x"))
    for _ in range(2):
        await bench.gets(m.EncodeBroken(("x",), RuntimeError("boom")))
    assert bench.told.count(events.EncodeRetried(("x",))) == 1
    (refused,) = [event for event in bench.told if isinstance(event, events.EntryRefused)]
    assert "RuntimeError: boom" in refused.error
    assert not await bench.gets(m.Release("x", "x"))


async def test_what_is_dropped_is_told_before_what_takes_its_room(bench):
    await bench.gets(*(acquire(key, key) for key in "abcd"))
    await bench.gets(m.Release("c", "c"))
    told = [event for event in bench.told if isinstance(event, events.EntryDropped | events.EntryReserved)]
    assert told[-2:] == [events.EntryDropped("c"), events.EntryReserved("d", 10)], "books balance: c's room is d's"
