"""The reports of a replica to the routers: its load often, the keys that it holds seldom.

Pure. A report has plain values only, since it passes through processes that do not know Triolet. Ray Serve sends the
reports of all replicas to each router whenever one report has changed. So most reports are short, and an idle replica
repeats its last report. A router recognises a report that it has read by the report's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from attrs import define, field


class ReplicaReport(TypedDict):
    """One report of a replica."""

    number: int
    requests: int  # requests that have not ended
    encodings: int  # encodings that are to come
    keys: NotRequired[list[str]]  # all keys that the replica holds


@define(eq=False)
class Reporter:
    """Makes the reports of one replica.

    Args:
        keys_seconds: the time between two reports with keys. The keys are reported again even if nothing has changed,
            since a router may be new, or may have missed a report.
        most_keys: the largest number of keys of one report; the newest are reported.
    """

    keys_seconds: float
    most_keys: int = 1_024
    _last: ReplicaReport | None = field(default=None, init=False)
    _keys_at: float = field(default=-math.inf, init=False)

    def report(self, *, now: float, requests: int, encodings: int, keys: Sequence[str]) -> ReplicaReport:
        """Returns the report for the time ``now``. An idle replica repeats its last report once a report has had all
        keys."""
        held, last = list(keys[-self.most_keys :]), self._last
        number = 0 if last is None else last["number"]
        if last == {"number": number, "requests": 0, "encodings": 0, "keys": held} and not (requests or encodings):
            return last
        self._last = report = ReplicaReport(number=number + 1, requests=requests, encodings=encodings)
        if now - self._keys_at >= self.keys_seconds:
            self._keys_at = now
            report["keys"] = held
        return report
