"""The search for the request that crashes steps: which requests are suspects, how they are tried, and when one is
poison.

Each request of a failed step is a suspect until it samples a token. Suspects run in halves, so that bisection finds the
request that crashes the steps. A device that fails now and then crashes innocent requests too. So a suspect is poison
only when it has crashed alone in its step more often than chance explains. `StepHistory` estimates the chance from the
latest steps, except the failed steps that the suspect was part of. Failed steps whose requests were cleared since do
count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

from attrs import define, field

from ..errors import PoisonRequest, caused

_WINDOW = 64  # steps that are remembered
_CHANCE = 1e-4  # a request is poison if an innocent one would crash as often with a lower probability than this
_MOST = 8


@define(eq=False)
class StepHistory:
    """The latest steps, and which requests were part of the failed ones."""

    _steps: deque[set[str] | None] = field(factory=lambda: deque(maxlen=_WINDOW), init=False)

    def step_done(self) -> None:
        """Notes that a step went well."""
        self._steps.append(None)

    def step_failed(self, request_ids: Iterable[str]) -> None:
        """Notes that a step with these requests failed."""
        self._steps.append(set(request_ids))

    def cleared(self, request_id: str) -> None:
        """Notes that the request has run well since, or is gone. Its failed steps no longer count against it."""
        for accused in self._steps:
            if accused is not None:
                accused.discard(request_id)

    def condemned(self, request_id: str) -> None:
        """Notes that the request is poison. Its failed steps then say nothing about the device."""
        self._steps = deque(
            (None if accused is not None and request_id in accused else accused for accused in self._steps), _WINDOW
        )

    def crashes_needed(self, request_id: str, least: int, *, steps: int = 1) -> int:
        """Returns the number of crashes alone, with no token sampled between them, that make the request poison. It is
        ``least`` on a device on which no other request fails. Otherwise it grows with the rate of other failures, and
        with the ``steps`` that the request needs to its next token, since each step may fail by chance. It is also
        larger while few steps are known. It is at most `_MOST` for each of the ``steps``.
        """
        others = [accused for accused in self._steps if accused is None or request_id not in accused]
        failures = sum(accused is not None for accused in others)
        rate = (failures + 0.5) / (len(others) + 1)
        attempt = min(1 - (1 - rate) ** steps, 1 - 1e-9)  # one of them fails
        return max(least, min(_MOST * steps, math.ceil(math.log(_CHANCE) / math.log(attempt))))


@define(eq=False)
class _Suspect:
    failed_steps: int = 0  # since the request last sampled a token
    crashes_alone: int = 0
    crashes_at_its_token: int = 0  # the crashes alone in steps that would have cleared the request


@define(eq=False)
class Quarantine:
    """The suspects, by request id. ``crashes_alone`` is the smallest number of crashes alone that makes a request
    poison."""

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
        """Notes a suspect from a lost engine: the request was running there, and may be the cause of the loss."""
        self._suspects[request_id] = _Suspect(failed_steps=1)

    def step_done(self) -> None:
        """Notes that a step went well. The caller must `clear` each request that sampled a token in the step, and no
        other."""
        self._history.step_done()

    def step_failed(
        self, request_ids: tuple[str, ...], *, to_clear: tuple[str, ...], replaying: frozenset[str]
    ) -> None:
        """Notes that a step with these requests failed, and makes each of them a suspect. ``to_clear`` has the requests
        that the step would have cleared if it had gone well. ``replaying`` has the requests that repeat a part that
        went well before. These are not accused. A failed step without other requests counts as failed by chance.
        """
        self._history.step_failed(request_id for request_id in request_ids if request_id not in replaying)
        for request_id in request_ids:
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.failed_steps += 1
            suspect.crashes_alone += len(request_ids) == 1
            suspect.crashes_at_its_token += request_ids == (request_id,) == to_clear

    def poison(self, request_id: str, error: Exception, *, steps: int) -> PoisonRequest | None:
        """Returns the error of a suspect that is poison now; ``None``: the suspect is not poison yet.

        Args:
            steps: the number of steps that the request needs to its next token.
        """
        if not self._is_poison(self._suspects[request_id], request_id, steps):
            return None
        self._history.condemned(request_id)
        crashes = self._suspects[request_id].crashes_alone
        poison = PoisonRequest(
            f"request {request_id} crashed its step {crashes} times, also when it ran alone; the other requests go "
            f"on. The last error was {type(error).__name__}: {error}"
        )
        return caused(poison, error)

    def _is_poison(self, suspect: _Suspect, request_id: str, steps: int) -> bool:
        """True if the suspect is poison. Crashes in the step that samples its next token prove most, since that step
        crashed each time. The steps before it went well each time. A long beam search that starts anew has many of
        those.
        """
        needed = partial(self._history.crashes_needed, request_id, self.crashes_alone)
        return suspect.crashes_alone >= needed(steps=steps) or suspect.crashes_at_its_token >= needed()

    def clear(self, request_id: str) -> None:
        """Removes a suspect that has sampled a token, or has ended."""
        if self._suspects.pop(request_id, None) is not None:
            self._history.cleared(request_id)

    def turns(self, request_ids: Iterable[str]) -> Iterator[frozenset[str]]:
        """Yields groups of these suspects, each for a step of its own. The caller runs the first group that has work.

        The first group is half of the suspects with the most failed steps. If it fails again, it has more failed steps
        than all others. If the first half waits for room, the other half may run, and after it the less suspicious
        requests. When these end, there is room.
        """
        levels: dict[int, list[str]] = {}
        for request_id in request_ids:
            levels.setdefault(self._suspects[request_id].failed_steps, []).append(request_id)
        for level in sorted(levels, reverse=True):
            group = levels[level]
            half = max(1, len(group) // 2)
            yield frozenset(group[:half])
            yield frozenset(group[half:])
