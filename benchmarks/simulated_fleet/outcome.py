"""The outcome of a load on a fleet, in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from attrs import frozen

from .replica import SimRequest


@frozen(kw_only=True)
class Played:
    """The outcome of a load. Seconds are virtual. The figures leave out the requests of the warm-up, except for
    ``encodes``.

    Attributes:
        requests: the number of requests that ended, which is all that arrived.
        encodes: the number of encodings, from the start on.
        hit_rate: the share of the requests that needed no encoding of their own.
        mean: seconds from the arrival to the end of a request, including those before a replica died with it.
        p50, p99: percentiles of the seconds from the arrival of a request to its first token.
        sent_again: the number of requests whose replica died.
        imbalance: the longest device time of a replica that lived throughout, over the mean.
        told: the number of keys that were reported to one router in a second.
        p99_by_second: ``p99`` of the requests that arrived in each second.
    """

    requests: int
    encodes: int
    hit_rate: float
    mean: float
    p50: float
    p99: float
    sent_again: int
    imbalance: float
    told: float
    p99_by_second: tuple[float, ...]


def summary(ended: Sequence[SimRequest], *, warm: float, busy: Sequence[float], encodes: int, told: float) -> Played:
    """Returns the figures of those ``ended`` requests that arrived at ``warm`` or later."""
    counted = sorted((one for one in ended if one.arrived >= warm), key=lambda one: one.arrived)
    waits = sorted(one.first - one.arrived for one in counted)
    by_second = groupby(counted, key=lambda one: int(one.arrived))
    return Played(
        requests=len(counted),
        encodes=encodes,
        hit_rate=fmean(one.hit for one in counted) if counted else math.nan,
        mean=fmean(one.ended - one.arrived for one in counted) if counted else math.nan,
        p50=quantile(waits, 0.5),
        p99=quantile(waits, 0.99),
        sent_again=sum(one.sent > 1 for one in counted),
        imbalance=max(busy) / fmean(busy) if any(busy) else math.nan,
        told=told,
        p99_by_second=tuple(quantile(sorted(one.first - one.arrived for one in group), 0.99) for _, group in by_second),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the quantile ``share`` of ``values``, which are sorted; NaN: there are no values."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else math.nan
