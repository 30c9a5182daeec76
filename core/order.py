"""The order of requests where they wait: at the door, for encoder outputs, for places and pages."""

from __future__ import annotations

from .errors import InvalidRequest

ARRIVALS_PER_PRIORITY = 1024
MOST_PRIORITY = 100


def order_of(priority: int, arrival: int) -> int:
    """The sort key of a request, smallest first. One level of priority is worth 1,024 arrivals, so that no request
    starves: for each level of urgency fewer than 1,024 later requests overtake it."""
    return priority * ARRIVALS_PER_PRIORITY + arrival


def check_priority(priority: object) -> None:
    """Raises `InvalidRequest` where ``priority`` is not allowed."""
    integer = isinstance(priority, int) and not isinstance(priority, bool)
    if not (integer and priority in range(-MOST_PRIORITY, MOST_PRIORITY + 1)):
        raise InvalidRequest(
            f"priority={priority!r}; allowed: an integer from -{MOST_PRIORITY} (most urgent) to {MOST_PRIORITY}; leave "
            "it out for 0"
        )
