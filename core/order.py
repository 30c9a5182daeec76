"""The order of requests wherever they wait: at the door, for encoder outputs, for places and pages."""

from __future__ import annotations

from .checks import integer

ARRIVALS_PER_PRIORITY = 1024
MOST_PRIORITY = 100
_PRIORITY = integer(-MOST_PRIORITY, MOST_PRIORITY, "; the smallest is the most urgent; leave it out for 0")


def order_of(priority: int, arrival: int) -> int:
    """Returns the sort key of a request; the smallest comes first. One level of priority is worth 1,024 arrivals. So no
    request starves: for each level of difference fewer than 1,024 later requests overtake it."""
    return priority * ARRIVALS_PER_PRIORITY + arrival


def read_priority(priority: object) -> int:
    """Returns ``priority`` as a plain integer, since numbers of NumPy overflow in `order_of`. Raises `InvalidRequest`
    if it is not allowed."""
    checked: int = _PRIORITY.of("priority", priority)
    return checked
