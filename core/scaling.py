"""The number of replicas that a cluster wants, by what they have to do. Pure."""

from __future__ import annotations

import math

from attrs import frozen

USED = 0.75
"""The share of all places that requests may take before another replica is wanted: the rest is for bursts, which last
shorter than a replica takes to start."""

ENCODINGS = 4
"""Encodings that may wait at one replica before another one is wanted. Each waits for a launch of its own where the
encoder takes one item at a time."""


@frozen(kw_only=True)
class Demand:
    """The work of all replicas together: ``requests`` that have not ended, and ``encodings`` that wait."""

    requests: float
    encodings: float


def wanted_replicas(demand: Demand, *, places: int, least: int, most: int) -> int:
    """Returns a number of replicas from ``least`` to ``most``, so many that requests find places and encodings do not
    pile up.

    Args:
        places: requests that one replica runs at once.
    """
    for_requests = math.ceil(demand.requests / (USED * places))
    for_encodings = math.ceil(demand.encodings / ENCODINGS)
    return max(least, min(most, max(for_requests, for_encodings)))
