"""Is your encoder cache sound? This kit plays its clients and its device, and looks for a workload that breaks it.

::

    def test_my_cache_keeps_its_promises():
        check_encoder_cache(MyCache)  # MyCache(capacity) has the five methods of `EncoderCache`

The clients acquire, wait, read, withdraw and acquire again; the device encodes late, fails, and carries out frees late.
A broken promise is an `InvariantViolation` with the promise's name, the shrunk `Workload` in a note, and the operations
that led there. ``docs/adapt_your_cache.md`` adapts a manager of the stepping kind and mends it, one finding after
another.

The promises (names as in `triolet.core.trace`):

- **no free while held**: a key that `EncoderCache.take_freed` hands out has no holder.
- **no use before ready**: no client is told READY while the output is still being encoded.
- **no phantom**: no client is told READY or PENDING for an output that is neither on the device nor on its way there.
- **encode once**: no client is told ENCODE while the output is being encoded, or is still on the device.
- **books balance**: outputs on the device and on their way there never exceed the capacity together; a freed output
  was on the device, and is freed once.
- **every acquire is answered**: see `play` for the assumptions; an output larger than the capacity is REFUSED at once.
- **always freed eventually**: after `EncoderCache.close`, when the last encoding has ended, no output is left.

Not checked: how fair the cache is while others go on acquiring, which idle output it evicts first, and whether it is of
any use: a cache that never shares an output, that frees at the last release, or whose books grow with every WAIT,
breaks no promise.
"""

from __future__ import annotations

import hypothesis

from .cache_game import PATIENCE, Answer, EncoderCache, MakeCache, play
from .cache_strategies import workloads
from .cache_workloads import Ask, Encoded, Free, Operation, Release, Workload

__all__ = [
    "PATIENCE",
    "WORKLOADS",
    "Answer",
    "Ask",
    "Encoded",
    "EncoderCache",
    "Free",
    "MakeCache",
    "Operation",
    "Release",
    "Workload",
    "check_encoder_cache",
    "play",
    "workloads",
]

WORKLOADS = 1000
"""How many workloads `check_encoder_cache` plays by default: a few seconds."""


def check_encoder_cache(make_cache: MakeCache, *, settings: hypothesis.settings | None = None) -> None:
    """Looks for a `Workload` that breaks the cache, and shrinks it.

    Args:
        make_cache: makes an empty cache of so many bytes.
        settings: how long to look, ``hypothesis.settings(max_examples=10_000)`` say; by default the current profile
            with `WORKLOADS` examples. Their deadline is ignored: a slow machine breaks no promise.

    Raises:
        InvariantViolation: the first promise broken; the notes hold the workload, for `play`.
        WrongAdapter: the adapter lacks a method, or an answer is none of the protocol; a TypeError.
        Exception: any error of the cache, with the operations that led there in a note.
        hypothesis.errors.FlakyFailure: an exception group: the cache broke a promise, and did not when the same
            workload was played again. State of one cache must not reach the next.
        hypothesis.errors.FailedHealthCheck: called within another property, unless ``settings`` suppress that check.
    """
    chosen = settings or hypothesis.settings(max_examples=WORKLOADS)
    phases = [phase for phase in chosen.phases if phase is not hypothesis.Phase.explain]  # its comments split the repr
    chosen = hypothesis.settings(
        chosen,
        phases=phases,
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=[*chosen.suppress_health_check, hypothesis.HealthCheck.too_slow],
    )

    @chosen
    @hypothesis.given(workload=workloads())
    def every_workload(workload: Workload) -> None:
        play(make_cache, workload)

    every_workload()
