"""The table of mutants: when the interpreter's switch interval is short."""

from __future__ import annotations

from triolet.testing.faults import FaultKind

from . import test_switch_interval as switch_tests
from .mutants import SIMULATION, Mutant, simulation, swept

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="a call that fails leaves the switch interval short",
        function="actors.gpu_runner:GpuRunner._until_ended",
        fragment="""\
    try:
        return call(*args)
    finally:
        self.worker.switch_interval.end(self)
""",
        mistake="""\
    result = call(*args)
    self.worker.switch_interval.end(self)
    return result
""",
        killer=swept("plain", FaultKind.STEP_FAILS),
        reason="the switch interval was 100 microseconds",
    ),
    Mutant(
        name="a call that is abandoned leaves the switch interval short",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="            self.worker.switch_interval.leave(self)\n",
        mistake="",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="the switch interval was 100 microseconds",
    ),
    Mutant(
        name="the switch interval is short only while steps run",
        function="actors.gpu_runner:GpuRunner._submit",
        fragment="if self.shortens_switches and",
        mistake="if self.shortens_switches and job is Job.STEP and",
        killer=simulation("plain"),
        reason="while calls are in flight",
    ),
    Mutant(
        name="the second call notes our own interval as the user's",
        function="actors.switch_interval:SwitchInterval.begin",
        fragment="        if self._short:\n            return\n",
        mistake="",
        killer=SIMULATION,
        reason="the switch interval was 100 microseconds",
    ),
    Mutant(
        name="the user's interval loses a microsecond each time",
        function="actors.switch_interval:SwitchInterval._put_back",
        fragment="_exactly(self._users)",
        mistake="self._users",
        killer=switch_tests.lasts,
        reason="after end",
    ),
    Mutant(
        name="what the user has set meanwhile is overwritten",
        function="actors.switch_interval:SwitchInterval._put_back",
        fragment=" and self.read() == self._ours",
        mistake="",
        killer=switch_tests.lasts,
        reason=("after end", "after leave"),
    ),
    Mutant(
        name="an interval shorter than ours is made longer",
        function="actors.switch_interval:SwitchInterval.begin",
        fragment="if self._users > SHORT:",
        mistake="if self._users != SHORT:",
        killer=switch_tests.lasts,
        reason="after begin",
    ),
    Mutant(
        name="one engine's end is the end of all",
        function="actors.switch_interval:SwitchInterval.leave",
        fragment="self._short and not self._calls",
        mistake="self._short",
        killer=switch_tests.lasts,
        reason=("after end", "after leave"),
    ),
)
