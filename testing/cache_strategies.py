"""Workloads of an encoder cache as Hypothesis strategies."""

from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st

from .cache_workloads import HOLDERS, KEYS, Ask, Encoded, Free, Operation, Release, Workload

_FITTING = 4  # keys that fit are so many times as likely, size for size, as keys that never fit
_FEW = (1, 2, 3)  # keys and holders of most workloads: few that get in each other's way find faults soonest
_RARELY = 9  # one workload in so many has all keys; one in so many all holders; one in so many large sizes
_LARGE = 5_000_000_000  # bytes of one output; more than 32 bits hold


def _operations(holders: int, keys: int) -> st.SearchStrategy[Operation]:
    """The simplest first: what is drawn shrinks towards the front. Operations on the device are as likely together as
    those of a client."""
    some_holders, some_keys = HOLDERS[:holders], KEYS[:keys]
    acquires = [Ask(holder, key) for holder in some_holders for key in some_keys]
    releases = [Release(holder, key) for holder in some_holders for key in some_keys]
    endings = [Encoded(key) for key in some_keys]
    failures = [Encoded(key, stored=False) for key in some_keys]
    chosen: list[Operation] = [*(Free() for _ in some_keys), *acquires, *endings, *releases, *failures]
    return st.sampled_from(chosen)


def _number(most: int) -> st.SearchStrategy[int]:
    """A number of keys or holders: rarely all."""
    return st.sampled_from([*_FEW * ((_RARELY - 1) // len(_FEW)), *_FEW[: (_RARELY - 1) % len(_FEW)], most])


@st.composite
def _rooms(draw: st.DrawFn, keys: int) -> tuple[int, list[int]]:
    """The capacity, and the bytes of each key: from one to one more than the capacity, so that some keys fill the cache
    exactly, and some can never fit. Many keys fit together."""
    if keys > max(_FEW):
        capacity = draw(st.integers(keys - 2, keys + 2))
        size = st.sampled_from([1] * 2 * capacity + [*range(2, capacity + 2)])
    else:
        capacity = draw(st.integers(1, 4))
        size = st.sampled_from([*range(1, capacity + 1)] * _FITTING + [capacity + 1])
    unit = draw(st.sampled_from([1] * (_RARELY - 1) + [_LARGE]))
    return capacity * unit, [draw(size) * unit for _ in range(keys)]


def _late(keys: Iterable[str]) -> st.SearchStrategy[list[Operation]]:
    """How encodings end after `EncoderCache.close`, and when their outputs are dropped."""
    chosen: list[Operation] = [operation for key in keys for operation in (Encoded(key, stored=False), Encoded(key))]
    return st.lists(st.sampled_from([*chosen, Free()]), max_size=4)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Up to 100 operations, 20 or so on average, of one to three requests on one to three keys, in a cache of 1 to 4
    bytes; rarely of six requests, on six keys, or with sizes that take more than 32 bits."""
    holders, keys = draw(_number(len(HOLDERS))), draw(_number(len(KEYS)))
    capacity, sizes = draw(_rooms(keys))
    some = st.lists(_operations(holders, keys), max_size=10)
    runs = draw(st.lists(some, max_size=10))  # lists of lists: Hypothesis draws long ones, and shrinks them well
    operations = tuple(operation for run in runs for operation in run)
    used = {operation.key for operation in operations if not isinstance(operation, Free)}
    taking = {key: size for key, size in zip(KEYS, sizes, strict=False) if key in used}
    hurried = draw(st.booleans())
    return Workload(capacity, taking, operations, hurried, draw(_late(taking)) if hurried else ())
