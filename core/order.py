"""Who comes first, wherever requests queue: a rule by which nobody starves.

One level of priority is worth `ARRIVALS_PER_PRIORITY` arrivals. So a request is overtaken by those that come later and
are more urgent, but only by as many of them as its priority is behind theirs, times that number.
"""

from __future__ import annotations

ARRIVALS_PER_PRIORITY = 1024


def order_of(priority: int, arrival: int) -> int:
    """The key of the ``arrival``-th request: the smallest comes first. A smaller ``priority`` is more urgent."""
    return priority * ARRIVALS_PER_PRIORITY + arrival
