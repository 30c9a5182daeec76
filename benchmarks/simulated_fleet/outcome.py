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
    """The outcome of a load. Seconds are virtual. Requests of the warm-up are not in the figures, but for ``encodes``.

    Attributes:
        requests: that ended: all that arrived.
        encodes: that were computed, from the start on.
        hit_rate: the share of the requests that needed no encoding of their own.
        mean: seconds from the arrival to the end of a request, those before its replica died included.
        p50, p99: seconds to its first token.
        sent_again: requests whose replica died.
        imbalance: the longest device time of a replica that lived throughout, over the mean.
        told: keys that one router was told, a second.
        p99_by_second: of the requests that arrived in each second.
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
    """The figures of ``ended``, of which those that arrived before ``warm`` do not count."""
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
    """Returns the value of sorted ``values`` that ``share`` of them lie below; NaN where there are none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else math.nan
