"""`RateLimit`: how many requests a minute one caller may make."""

from __future__ import annotations

from attrs import define, field

_MANY = 10_000  # callers, above which those that have nothing to wait for are forgotten


@define
class RateLimit:
    """Up to ``per_minute`` requests at once, and as many in each minute after; the generic cell rate algorithm (ITU-T
    I.371): of each caller one number is kept, the time until which its requests are paid for."""

    per_minute: int
    _paid_until: dict[str, float] = field(factory=dict, init=False)

    def seconds_to_wait(self, who: str, now: float) -> float:
        """0: ``who`` may make a request at ``now``, and has made it. Else the seconds until it may."""
        interval = 60.0 / self.per_minute
        paid = max(self._paid_until.get(who, now), now)
        wait = paid + interval - now - 60.0
        if wait > 1e-9:
            return wait
        self._paid_until[who] = paid + interval
        if len(self._paid_until) > _MANY:
            self._paid_until = {one: until for one, until in self._paid_until.items() if until > now}
        return 0.0
