"""The reports of a replica to the routers: its load often, what it holds seldom.

Pure. A report is of plain values, since it goes through processes that know nothing of us. Serve hands on the reports
of all replicas to each router whenever one of them has changed. So most reports are short, an idle replica repeats its
report, and a number says which reports a router has read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from attrs import define, field


class ReplicaReport(TypedDict):
    """One report of a replica."""

    number: int
    requests: int  # that have not ended
    encodings: int  # that are to come
    keys: NotRequired[list[str]]  # of all that it holds


@define(eq=False)
class Reporter:
    """Makes the reports of one replica.

    Args:
        keys_seconds: between two reports with keys. The keys are reported again though nothing has changed: a router
            may be new, or have missed a report.
        most_keys: the most keys of one report; the newest are reported.
    """

    keys_seconds: float
    most_keys: int = 1_024
    _last: ReplicaReport | None = field(default=None, init=False)
    _keys_at: float = field(default=-math.inf, init=False)

    def report(self, *, now: float, requests: int, encodings: int, keys: Sequence[str]) -> ReplicaReport:
        """Returns the report of ``now``. An idle replica repeats its last report, once that has had all keys."""
        held, last = list(keys[-self.most_keys :]), self._last
        number = 0 if last is None else last["number"]
        if last == {"number": number, "requests": 0, "encodings": 0, "keys": held} and not (requests or encodings):
            return last
        self._last = report = ReplicaReport(number=number + 1, requests=requests, encodings=encodings)
        if now - self._keys_at >= self.keys_seconds:
            self._keys_at = now
            report["keys"] = held
        return report
