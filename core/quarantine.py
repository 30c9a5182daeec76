"""Who crashes the steps: suspects, how they are told apart, and when one of them is poison.

The requests of a failed step are suspects until they run well. They run in halves, so that the one that crashes the
steps is found by bisection. A request that has crashed alone more often than chance explains fails (`Evidence`): a
device that fails now and then fails lone requests too. How likely that is, the latest steps tell: those without the
request, and those that failed with it and that it has survived since.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from attrs import define, field

from .errors import PoisonRequest

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


@define(eq=False)
class _Suspect:
    failed_steps: int = 0  # that it was part of, since the last one that went well
    crashes_alone: int = 0


@define(eq=False)
class Quarantine:
    """The suspects, by request id. ``crashes_alone``: how many crashes at least make a request poison."""

    crashes_alone: int
    _suspects: dict[str, _Suspect] = field(factory=dict, init=False)
    _evidence: Evidence = field(factory=Evidence, init=False)

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._suspects

    def __iter__(self) -> Iterator[str]:
        return iter(self._suspects)

    def step_done(self) -> None:
        """A step went well. It clears those who sampled a token in it, see `clear`, and nobody else."""
        self._evidence.step_done()

    def step_failed(self, request_ids: tuple[str, ...]) -> None:
        """A step with these requests failed: each of them is a suspect."""
        self._evidence.step_failed(request_ids)
        for request_id in request_ids:
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.failed_steps += 1
            suspect.crashes_alone += len(request_ids) == 1

    def poison(self, request_id: str, error: Exception, *, steps: int) -> PoisonRequest | None:
        """The error of a suspect that is known for poison now.

        Args:
            steps: how many it takes to its next token.
        """
        crashes = self._suspects[request_id].crashes_alone
        if crashes < self._evidence.crashes_to_blame(request_id, self.crashes_alone, steps=steps):
            return None
        poison = PoisonRequest(
            f"request {request_id} crashed its step {crashes} times, alone in it; the other requests go on. The last "
            f"error was {type(error).__name__}: {error}"
        )
        poison.__cause__ = error
        self._evidence.blamed(request_id)
        return poison

    def clear(self, request_id: str) -> None:
        """It sampled a token, or has ended: whatever crashed the steps it was in, the request is no suspect."""
        if self._suspects.pop(request_id, None) is not None:
            self._evidence.cleared(request_id)

    def turns(self, request_ids: Iterable[str]) -> Iterator[frozenset[str]]:
        """Who of these suspects may run, in a step of their own: the first turn in which somebody has something to run.

        Half of those that were part of the most failed steps come first: a half that fails again is then the most
        suspicious. Where these wait for room, the other half may run, and then the less suspicious: their end makes
        room.
        """
        levels: dict[int, list[str]] = {}
        for request_id in request_ids:
            levels.setdefault(self._suspects[request_id].failed_steps, []).append(request_id)
        for level in sorted(levels, reverse=True):
            group = levels[level]
            half = max(1, len(group) // 2)
            yield frozenset(group[:half])
            yield frozenset(group[half:])
