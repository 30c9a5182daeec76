"""Serve's autoscaling policy: asks `triolet_ray.scaling`."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from .scaling import wanted_replicas

ENCODINGS = "encodings"  # the metric that replicas report


class ByDemand:
    """The policy that Serve creates and calls every few seconds. ``places`` is the number of requests that one replica
    runs at once.
    """

    def __init__(self, places: int) -> None:
        self._places = places

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas, and an empty state for the next call."""
        told = (context.aggregated_metrics or {}).get(ENCODINGS, {})
        wanted = wanted_replicas(
            context.total_num_requests,
            sum(told.values()),
            places=self._places,
            least=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
        )
        return wanted, {}
