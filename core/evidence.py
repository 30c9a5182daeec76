"""How often a request must crash alone before it is to blame, and not chance.

A device that fails now and then fails lone requests too. What the latest steps without the request have suffered tells
how likely that is.
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

    _steps: deque[frozenset[str] | None] = field(factory=lambda: deque(maxlen=_WINDOW), init=False)

    def step_done(self) -> None:
        """A step went well."""
        self._steps.append(None)

    def step_failed(self, request_ids: Iterable[str]) -> None:
        """A step with these requests failed."""
        self._steps.append(frozenset(request_ids))

    def crashes_to_blame(self, request_id: str, least: int) -> int:
        """Crashes alone, in a row, that make it guilty: ``least`` on a device that fails nobody else, more on one that
        does."""
        others = sum(failed is not None and request_id not in failed for failed in self._steps)
        rate = (others + 0.5) / (_WINDOW + 1)
        return max(least, min(_MOST, math.ceil(math.log(_CHANCE) / math.log(rate))))
