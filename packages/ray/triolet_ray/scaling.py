"""The number of replicas that a cluster needs for the work that it has. Pure."""

from __future__ import annotations

import math

USED = 0.75
"""The share of all places that requests may take before another replica is wanted. The remaining places are for bursts
that are shorter than the start of a replica."""

ENCODINGS = 4
"""The number of encodings that may wait at one replica before another replica is wanted. If the encoder processes one
item at a time, each encoding waits for a launch of its own."""


def wanted_replicas(requests: float, encodings: float, *, places: int, least: int, most: int) -> int:
    """Returns the number of replicas, from ``least`` to ``most``, that has places for all requests and lets no
    encodings pile up.

    Args:
        requests: the requests that have not ended, of all replicas together.
        encodings: the encodings that wait, of all replicas together.
        places: the number of requests that one replica runs at once.
    """
    for_requests = math.ceil(requests / (USED * places))
    for_encodings = math.ceil(encodings / ENCODINGS)
    return max(least, min(most, max(for_requests, for_encodings)))
