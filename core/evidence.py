"""How often a request must crash alone before it is to blame, and not chance.

A device that fails now and then fails lone requests too. How likely that is, the latest steps tell: those without the
request, and those that failed with it and that it has survived since.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from attrs import define, field

_WINDOW = 64  # steps that are remembered
_CHANCE = 1e-4  # a request is to blame when chance would do the same to an innocent one less often than this
_MOST = 8


@define(eq=False)
class Evidence:
    """The latest steps, and whom their failures accuse."""

    _steps: deque[set[str] | None] = field(factory=lambda: deque(maxlen=_WINDOW), init=False)

    def step_done(self) -> None:
        """A step went well."""
        self._steps.append(None)

    def step_failed(self, request_ids: Iterable[str]) -> None:
        """A step with these requests failed."""
        self._steps.append(set(request_ids))

    def cleared(self, request_id: str) -> None:
        """The request has run well since, or is gone: the failures that it was part of are not laid at its door."""
        for accused in self._steps:
            if accused is not None:
                accused.discard(request_id)

    def blamed(self, request_id: str) -> None:
        """The request was to blame: the failures that it was part of say nothing of the device."""
        self._steps = deque(
            (None if accused is not None and request_id in accused else accused for accused in self._steps), _WINDOW
        )

    def crashes_to_blame(self, request_id: str, least: int, *, steps: int = 1) -> int:
        """Crashes alone, with no token sampled between them, that make it guilty: ``least`` on a device that fails
        nobody else, more on one that does, where little is known of the device, and where the request takes several
        ``steps`` to its next token, each of which may fail; `_MOST` for each step at most."""
        others = [accused for accused in self._steps if accused is None or request_id not in accused]
        failures = sum(accused is not None for accused in others)
        rate = (failures + 0.5) / (len(others) + 1)
        attempt = min(1 - (1 - rate) ** steps, 1 - 1e-9)  # one of them fails
        return max(least, min(_MOST * steps, math.ceil(math.log(_CHANCE) / math.log(attempt))))
