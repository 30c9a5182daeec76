"""The statistics of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from attrs import AttrsInstance, fields

from triolet.actors.statistics import EngineStatistics
from triolet.core.plan import DeviceMemory
from triolet.core.power import Power

Value = TypeVar("Value", bound=AttrsInstance)


def total(several: Sequence[EngineStatistics]) -> EngineStatistics:
    """Returns the sums over ``several``, at least one."""
    return EngineStatistics(
        power=Power.AWAKE,
        requests=_sum([one.requests for one in several]),
        encoder_cache=_sum([one.encoder_cache for one in several]),
        device=DeviceMemory(
            device=f"{len(several)} replicas on {several[0].device.device}",
            by_owner=_sum_mappings([one.device.by_owner for one in several]),
        ),
    )


def _sum(several: Sequence[Value]) -> Value:
    kind = type(several[0])
    columns: dict[str, list[Any]] = {one.name: [getattr(value, one.name) for value in several] for one in fields(kind)}
    return kind(
        **{
            name: _sum_mappings(values) if isinstance(values[0], Mapping) else sum(values)
            for name, values in columns.items()
        }
    )


def _sum_mappings(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for one in several:
        counted.update(one)
    return dict(counted)
