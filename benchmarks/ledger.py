"""What the encoder ledger costs a message, by how many entries it has: medians in microseconds. The rows are alike.

python benchmarks/ledger.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

from triolet.core.ledger import EncoderLedger

SIZE = 100  # bytes of an entry
TIMES = 500


def main() -> None:
    """Prints one row for each number of entries."""
    table = {entries: costs(entries) for entries in (10, 100, 1_000, 10_000)}
    print(f"{'entries':>8}" + "".join(f"{message:>22}" for message in table[10]))
    for entries, row in table.items():
        print(f"{entries:8}" + "".join(f"{cost:22.1f}" for cost in row.values()))


def costs(entries: int) -> dict[str, float]:
    """Medians in microseconds, by what is asked of a ledger with so many entries."""
    full = _full(entries)
    return {
        "acquire that waits": _median(_wait(full), range(TIMES)),
        "withdrawal": _median(_withdraw(full), reversed(range(TIMES))),
        "hit and release": _median(_hit(full), range(TIMES)),
        "encode cycle": _median(_cycle(_full(entries)), range(TIMES)),
    }


def _full(entries: int) -> EncoderLedger:
    """Every byte is taken by an entry that somebody holds."""
    ledger = EncoderLedger(entries * SIZE)
    for number in range(entries):
        ledger.acquire(f"h{number}", f"k{number}", size=SIZE, embeddings=1, payload=None)
    ledger.encoded([job.key for job in ledger.take_encode_batch()], now=0.0)
    return ledger


def _wait(ledger: EncoderLedger) -> Callable[[int], object]:
    return lambda number: ledger.acquire(f"w{number}", f"x{number}", size=SIZE, embeddings=1, payload=None)


def _withdraw(ledger: EncoderLedger) -> Callable[[int], object]:
    return lambda number: ledger.release(f"w{number}", f"x{number}", now=0.0)


def _hit(ledger: EncoderLedger) -> Callable[[int], object]:
    def hit(number: int) -> None:
        ledger.acquire(f"r{number}", "k0", size=SIZE, embeddings=1, payload=None)
        ledger.release(f"r{number}", "k0", now=0.0)

    return hit


def _cycle(ledger: EncoderLedger) -> Callable[[int], object]:
    """An entry is evicted for the next one, which is encoded and held; its holder leaves."""
    ledger.release("h0", "k0", now=0.0)

    def cycle(number: int) -> None:
        evicted = ledger.acquire(f"c{number}", f"c{number}", size=SIZE, embeddings=1, payload=None)
        ledger.freed(evicted.free)
        ledger.encoded([job.key for job in ledger.take_encode_batch()], now=0.0)
        ledger.release(f"c{number}", f"c{number}", now=0.0)

    return cycle


def _median(call: Callable[[int], object], numbers: Iterable[int]) -> float:
    """Microseconds."""
    seconds = []
    for number in numbers:
        begun = time.thread_time()
        call(number)
        seconds.append(time.thread_time() - begun)
    return statistics.median(seconds) * 1e6


if __name__ == "__main__":
    main()
