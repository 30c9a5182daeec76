"""The search for the request that crashes steps: suspects, how they are tried, and when one is poison.

The requests of a failed step are suspects until each samples a token. Suspects run in halves, so that bisection finds
the one that crashes the steps. A device that fails now and then crashes innocent requests too. So a suspect is poison
only when it has crashed alone in its step more often than chance explains (`StepHistory`). The latest steps give the
chance: those without the suspect, and failed ones of requests that were cleared since.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

from attrs import define, field

from ..errors import PoisonRequest

_WINDOW = 64  # steps that are remembered
_CHANCE = 1e-4  # a request is poison when chance would do the same to an innocent one less often than this
_MOST = 8


@define(eq=False)
class StepHistory:
    """The latest steps, and which requests were part of the failed ones."""

    _steps: deque[set[str] | None] = field(factory=lambda: deque(maxlen=_WINDOW), init=False)

    def step_done(self) -> None:
        """A step went well."""
        self._steps.append(None)

    def step_failed(self, request_ids: Iterable[str]) -> None:
        """A step with these requests failed."""
        self._steps.append(set(request_ids))

    def cleared(self, request_id: str) -> None:
        """The request has run well since, or is gone: the failed steps that it was in no longer count against it."""
        for accused in self._steps:
            if accused is not None:
                accused.discard(request_id)

    def condemned(self, request_id: str) -> None:
        """The request is poison: the failed steps that it was in say nothing of the device."""
        self._steps = deque(
            (None if accused is not None and request_id in accused else accused for accused in self._steps), _WINDOW
        )

    def crashes_needed(self, request_id: str, least: int, *, steps: int = 1) -> int:
        """The number of crashes alone, with no token sampled between them, that make the request poison: ``least`` on a
        device that fails no other request. More on a device that does, where few steps are known, and where the request
        takes several ``steps`` to its next token, each of which may fail. At most `_MOST` for each of these steps."""
        others = [accused for accused in self._steps if accused is None or request_id not in accused]
        failures = sum(accused is not None for accused in others)
        rate = (failures + 0.5) / (len(others) + 1)
        attempt = min(1 - (1 - rate) ** steps, 1 - 1e-9)  # one of them fails
        return max(least, min(_MOST * steps, math.ceil(math.log(_CHANCE) / math.log(attempt))))


@define(eq=False)
class _Suspect:
    failed_steps: int = 0  # that it was in, since it last sampled a token
    crashes_alone: int = 0
    crashes_at_its_token: int = 0  # of these, in steps that would have cleared it


@define(eq=False)
class Quarantine:
    """The suspects, by request id. ``crashes_alone``: the fewest crashes alone that make a request poison."""

    crashes_alone: int
    _suspects: dict[str, _Suspect] = field(factory=dict, init=False)
    _history: StepHistory = field(factory=StepHistory, init=False)

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._suspects

    def __iter__(self) -> Iterator[str]:
        return iter(self._suspects)

    def suspect(self, request_id: str) -> None:
        """The request comes from an engine that was lost with it: it may be the cause."""
        self._suspects[request_id] = _Suspect(failed_steps=1)

    def step_done(self) -> None:
        """A step went well. The caller must `clear` each request that sampled a token in it, and no other."""
        self._history.step_done()

    def step_failed(
        self, request_ids: tuple[str, ...], *, to_clear: tuple[str, ...], replaying: frozenset[str]
    ) -> None:
        """A step with these requests failed: each of them is a suspect. ``to_clear``: those that it would have cleared
        had it gone well. ``replaying``: those whose share of it went well before, so that chance must have failed it
        unless another one did."""
        self._history.step_failed(request_id for request_id in request_ids if request_id not in replaying)
        for request_id in request_ids:
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.failed_steps += 1
            suspect.crashes_alone += len(request_ids) == 1
            suspect.crashes_at_its_token += request_ids == (request_id,) == to_clear

    def poison(self, request_id: str, error: Exception, *, steps: int) -> PoisonRequest | None:
        """The error of a suspect that is poison now; ``None``: it is not yet.

        Args:
            steps: how many steps the request takes to its next token.
        """
        if not self._is_poison(self._suspects[request_id], request_id, steps):
            return None
        crashes = self._suspects[request_id].crashes_alone
        poison = PoisonRequest(
            f"request {request_id} crashed its step {crashes} times, alone in it; the other requests go on. The last "
            f"error was {type(error).__name__}: {error}"
        )
        poison.__cause__ = error
        self._history.condemned(request_id)
        return poison

    def _is_poison(self, suspect: _Suspect, request_id: str, steps: int) -> bool:
        """Crashes in the one step that samples its next token say most: each time that step was run, it crashed. The
        steps before it went well each time, and are many where a long beam search starts anew."""
        needed = partial(self._history.crashes_needed, request_id, self.crashes_alone)
        return suspect.crashes_alone >= needed(steps=steps) or suspect.crashes_at_its_token >= needed()

    def clear(self, request_id: str) -> None:
        """The request sampled a token, or has ended: it is no suspect any more."""
        if self._suspects.pop(request_id, None) is not None:
            self._history.cleared(request_id)

    def turns(self, request_ids: Iterable[str]) -> Iterator[frozenset[str]]:
        """Groups of these suspects, each for a step of its own: the caller runs the first group that has work.

        The first group is half of the suspects with the most failed steps: if that half fails again, it is the most
        suspicious. Where the half waits for room, the other half may run, and then the less suspicious ones: their end
        makes room.
        """
        levels: dict[int, list[str]] = {}
        for request_id in request_ids:
            levels.setdefault(self._suspects[request_id].failed_steps, []).append(request_id)
        for level in sorted(levels, reverse=True):
            group = levels[level]
            half = max(1, len(group) // 2)
            yield frozenset(group[:half])
            yield frozenset(group[half:])
