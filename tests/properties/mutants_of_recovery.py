"""The table of mutants: sleep, restart in place, and the ways out of a crash."""

from __future__ import annotations

from triolet.testing.simulation import FaultKind

from ..actors import test_recovery as recovery_tests
from ..actors import test_several_faults as several_faults
from ..actors import test_sharing_the_device as share_tests
from ..actors import test_sleep as sleep_tests
from . import test_evidence, test_planner, test_recovery
from .mutants import Mutant, engine_test, machine, simulation, swept
from .test_power import RestMachine

MUTANTS: tuple[Mutant, ...] = (
    # sleep
    Mutant(
        name="work ends a sleep that was ordered",
        function="core.power:PowerState.work_came",
        fragment="if not self._ordered:",
        mistake="if True:",
        killer=machine(RestMachine),
        reason=("ends no sleep", "the_last_wish_counts"),
    ),
    Mutant(
        name="an order to wake is forgotten while it falls asleep",
        function="core.power:PowerState.slept",
        fragment="self.power = Power.ASLEEP",
        mistake="self.power, self._wants_sleep = Power.ASLEEP, True",
        killer=machine(RestMachine),
        reason=("the_last_wish_counts", "AssertionError"),
    ),
    Mutant(
        name="a wake that failed is tried again at once, for ever",
        function="core.power:PowerState.wake_failed",
        fragment="    self._wants_sleep = True\n",
        mistake="",
        killer=machine(RestMachine),
        reason="tries again at once",
    ),
    Mutant(
        name="steps are sent to a device that is given back",
        function="actors.scheduler:Scheduler._dispatch",
        fragment="and self.power.may_work ",
        mistake="",
        killer=engine_test(sleep_tests.test_from_the_order_to_sleep_on_no_step_is_begun),
        reason="StepBegun",
    ),
    Mutant(
        name="batches are encoded on a device that is given back",
        function="actors.encoder_cache:EncoderCache._dispatch",
        fragment="self._asleep or ",
        mistake="",
        killer=simulation("sleep by order"),
        reason="misused",
    ),
    Mutant(
        name="the encoder cache sleeps on",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._asleep = False\n",
        mistake="",
        killer=simulation("sleep by order"),
        reason=("wait for ever", "Deadlock"),
    ),
    Mutant(
        name="what was sent before the sleep is done after it",
        function="actors.gpu_runner:GpuRunner._step_lane",
        fragment="            self._generation += 1",
        mistake="            pass",
        killer=simulation("sleep by order"),
        reason=("encode once", "books balance", "misused", "AssertionError"),
    ),
    Mutant(
        name="batches that wait for the device survive its sleep",
        function="actors.gpu_runner:GpuRunner._begin",
        fragment="case m.Step() | m.Encode() | m.Free() if",
        mistake="case m.Step() | m.Free() if",
        killer=engine_test(share_tests.test_a_batch_that_waits_its_turn_does_not_outlive_a_sleep, fails=False),
        reason=("misused", "cannot go through 'encode failed'"),
    ),
    Mutant(
        name="who cannot be woken waits for ever",
        function="actors.scheduler:Scheduler._wake_failed",
        fragment="    self.planner.fail_waiting(partial(_cannot_wake, error))\n",
        mistake="    pass\n",
        killer=engine_test(sleep_tests.test_requests_that_cannot_wake_the_engine_hear_why_and_the_next_one_may),
        reason=("Deadlock", "wait for ever"),
    ),
    Mutant(
        name="a drain waits for a device that nobody will take again",
        function="actors.scheduler:Scheduler._handle",
        fragment="            self._give_up_what_nobody_will_run()\n",
        mistake="",
        killer=engine_test(sleep_tests.test_leaving_asleep_does_not_wait_for_a_drain_that_cannot_be),
        reason="begun < 1",
    ),
    Mutant(
        name="the end answers no order",
        function="actors.scheduler:Scheduler._wind_up",
        fragment="    _answer(self._wait_for_sleep, _stopped)\n",
        mistake="",
        killer=engine_test(sleep_tests.test_leaving_while_it_falls_asleep_or_wakes_answers_the_order),
        reason="Deadlock",
    ),
    # restart
    Mutant(
        name="messages of before the restart are obeyed",
        function="actors.gpu_runner:GpuRunner._begin",
        fragment="if message.generation != self._generation",
        mistake="if False",
        killer=engine_test(recovery_tests.test_a_free_that_fails_once_starts_the_runner_anew_and_costs_nobody_a_token),
        reason=("EngineClosed", "RunnerCrashed"),
    ),
    Mutant(
        name="a device that was not given back whole is started anew",
        function="actors.gpu_runner:_beyond_help",
        fragment="DeviceLost | _NotGivenBack",
        mistake="DeviceLost",
        killer=engine_test(sleep_tests.test_a_release_that_fails_on_the_way_to_sleep_ends_the_engine),
        reason=("DID NOT RAISE", "RESET", "Deadlock"),
    ),
    Mutant(
        name="a lost device is started anew",
        function="actors.gpu_runner:_beyond_help",
        fragment="DeviceLost | _NotGivenBack",
        mistake="_NotGivenBack",
        killer=swept("plain", FaultKind.DEVICE_LOST),
        reason="the lost device was swallowed",
    ),
    Mutant(
        name="after a sleep that failed what was dropped meanwhile is not asked again",
        function="actors.gpu_runner:GpuRunner._report_sleep",
        fragment="        self._lanes.cancel()\n",
        mistake="",
        killer=engine_test(share_tests.test_a_batch_that_waits_its_turn_does_not_outlive_a_sleep, fails=True),
        reason=("TooSlowError", "Deadlock"),
    ),
    Mutant(
        name="only the most suspicious are tried",
        function="core.quarantine:Quarantine.turns",
        fragment="        yield frozenset(group[half:])\n",
        mistake="        yield frozenset(group[half:])\n        return\n",
        killer=test_planner.test_a_suspect_that_waits_for_room_does_not_hold_up_the_one_that_has_it,
        reason="nobody runs",
    ),
    Mutant(
        name="steps that failed grow again as soon as ever",
        function="core.batch_size:BatchSize.too_large",
        fragment="min(2 * self._patience, _MOST_PATIENCE)",
        mistake="self._patience",
        killer=engine_test(
            several_faults.test_a_long_prompt_gets_through_a_device_that_fits_few_tokens, fits=1, length=60
        ),
        reason=("TooSlowError", "Deadlock"),
    ),
    Mutant(
        name="a failure that was survived is forgotten",
        function="core.quarantine:Evidence.cleared",
        fragment="accused.discard(request_id)",
        mistake="pass",
        killer=test_evidence.test_a_failure_that_the_request_survives_counts_as_chance,
        reason="AssertionError",
    ),
    Mutant(
        name="a poisonous request excuses the next one",
        function="core.quarantine:Quarantine.poison",
        fragment="    self._evidence.blamed(request_id)\n",
        mistake="",
        killer=test_recovery.test_two_poisonous_requests_in_turn_are_both_found_soon,
        reason="crashes",
    ),
    Mutant(
        name="a request holds its place until somebody reads its end",
        function="api.streams:Mailbox.end",
        fragment="    self._on_end()\n",
        mistake="",
        killer=engine_test(several_faults.test_a_request_that_has_ended_holds_no_place_though_nobody_reads_it),
        reason=("TooSlowError", "Deadlock"),
    ),
    Mutant(
        name="bytes that outlive the release are not told",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="    if kept:\n",
        mistake="    if kept is None:\n",
        killer=engine_test(several_faults.test_bytes_that_outlive_the_release_are_told),
        reason="DID NOT RAISE",
    ),
    # ways out
    Mutant(
        name="a runner that fails in closing leaves the device taken",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="            self.worker.abandon(self._close_executor)\n",
        mistake="            pass\n",
        killer=swept("plain", FaultKind.CRASH),
        reason=("the device was not released", "Deadlock"),
    ),
    Mutant(
        name="a release that fails is not told",
        function="actors.supervisor:Supervisor._child_ended",
        fragment="        self._teardown_errors.append(error)\n",
        mistake="        pass\n",
        killer=swept("plain", FaultKind.CANCEL_RELEASE_FAILS),
        reason="the release that failed was swallowed",
    ),
    Mutant(
        name="an observer that raises ends a stage",
        function="actors.emit:Emit._observe",
        fragment="    self.error, self.observer = self.error or error, None\n",
        mistake="    raise\n",
        killer=swept("plain", FaultKind.OBSERVER_FAILS),
        reason=("Deadlock", "terminal once", "was not released", "AssertionError", "Injected"),
    ),
    Mutant(
        name="a call that hangs is not told",
        function="actors.gpu_runner:GpuRunner._close",
        fragment='        if self.memory.device == "":\n',
        mistake="        if True:\n",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="a step hung, and nobody says so",
    ),
    Mutant(
        name="a crash leaves no trace behind",
        function="actors.supervisor:Supervisor._our_error",
        fragment="    fault, self._fault = self._fault, None\n",
        mistake="    fault, self._fault = None, None\n",
        killer=swept("drain", FaultKind.CRASH),
        reason="the crash was swallowed",
    ),
    Mutant(
        name="after the runner's crash requests hear that the engine was closed",
        function="core.planner:_one_more",
        fragment="failure = RunnerCrashed(str(error))",
        mistake="from .errors import EngineClosed; failure = EngineClosed(str(error))",
        killer=swept("drain", FaultKind.DEVICE_LOST),
        reason="clients ended as",
    ),
    Mutant(
        name="a failed encode batch fails all its items, in the engine too",
        function="core.ledger:EncoderLedger.encode_failed",
        fragment="elif len(entries) == 1:\n        self._failed_alone(entries[0], error)\n",
        mistake="else:\n        [self._failed_alone(entry, error) for entry in entries for _ in range(2)]\n",
        killer=swept("leaving while it is encoded", FaultKind.ENCODE_FAILS),
        reason="clients ended as",
    ),
    Mutant(
        name="a failed encode batch fails all its items",
        function="core.ledger:EncoderLedger.encode_failed",
        fragment="elif len(entries) == 1:\n        self._failed_alone(entries[0], error)\n",
        mistake="else:\n        [self._failed_alone(entry, error) for entry in entries for _ in range(2)]\n",
        killer=test_recovery.test_an_encode_failure_fails_only_its_items,
        reason="AssertionError",
    ),
)
