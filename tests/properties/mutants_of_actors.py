"""The table of mutants: the actors, their supervisor and what a request waits for."""

from __future__ import annotations

from triolet.testing.faults import FaultKind
from triolet.testing.trio_tools.schedules import Batches, run_scheduled

from ..actors import test_encoder_cache, test_promises
from ..actors import test_engine_sim as engine_tests
from ..actors import test_recovery as recovery_tests
from ..actors import test_sharing_the_device as share_tests
from ..api import test_memory as memory_tests
from .mutants import SIMULATION, Mutant, engine_test, simulation, swept


def lives() -> None:
    run_scheduled(lambda: memory_tests.test_engines_come_and_go_without_garbage(None), schedule=Batches())


MUTANTS: tuple[Mutant, ...] = (
    # the scheduler
    Mutant(
        name="the scheduler ends while requests are still running",
        function="actors.scheduler:Scheduler._finished",
        fragment="(self._draining and self.planner.idle)",
        mistake="self._draining",
        killer=engine_test(engine_tests.test_requests_of_outside_tasks_are_drained_when_the_block_ends),
        reason="EngineClosed",
    ),
    Mutant(
        name="messages behind the one that breaks the scheduler are lost",
        function="actors.scheduler:Scheduler._take_messages",
        fragment="""\
    while self._unread:
        self._handle(self._unread.popleft())
""",
        mistake="""\
    unread, self._unread = self._unread, deque()
    for message in unread:
        self._handle(message)
""",
        killer=test_promises.test_messages_behind_the_one_that_breaks_the_scheduler_are_answered,
        reason="behind waits for ever",
    ),
    Mutant(
        name="a broken scheduler does not wind up",
        function="actors.scheduler:Scheduler.run",
        fragment="    finally:\n",
        mistake="    except ZeroDivisionError:\n        raise\n    else:\n",
        killer=test_promises.test_messages_behind_the_one_that_breaks_the_scheduler_are_answered,
        reason="terminal once",
    ),
    Mutant(
        name="requests are not told that the runner is gone",
        function="actors.scheduler:Scheduler._handle",
        fragment="            self.planner.fail_all(error)\n",
        mistake="",
        killer=engine_test(recovery_tests.test_requests_of_a_crashed_runner_hear_of_it),
        reason="EngineClosed",
    ),
    Mutant(
        name="one step for each batch of messages",
        function="actors.scheduler:Scheduler._dispatch",
        fragment="while not self._runner_gone",
        mistake="if not self._runner_gone",
        killer=test_promises.test_two_steps_are_in_flight_while_requests_decode,
        reason="steps at once",
    ),
    Mutant(
        name="a skipped step counts as a failed one",
        function="actors.scheduler:Scheduler._handle",
        fragment="skipped=skipped",
        mistake="skipped=False",
        killer=engine_test(recovery_tests.test_one_failure_with_a_step_in_flight_behind_it_accuses_once),
        reason="PoisonRequest",
    ),
    Mutant(
        name="a later order to drain puts the deadline off",
        function="actors.scheduler:Scheduler._handle",
        fragment="min(self._deadline, deadline)",
        mistake="deadline",
        killer=test_promises.test_a_more_patient_stop_does_not_prolong_an_impatient_one,
        reason="DID NOT RAISE",
    ),
    Mutant(
        name="an ended request's stream is kept",
        function="actors.scheduler:Scheduler._end",
        fragment="self._clients.pop(request_id)",
        mistake="self._clients[request_id]",
        killer=SIMULATION,
        reason=("terminal once", "a place is given back twice"),
    ),
    # the encoder cache
    Mutant(
        name="the encode lane stays busy after a batch",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._encoding = False\n            self.emit(events.EncodeDone(keys))\n",
        mistake="            self.emit(events.EncodeDone(keys))\n",
        killer=SIMULATION,
        reason="wait for ever",
    ),
    Mutant(
        name="the encode lane stays busy after a failed batch",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._encoding = False\n            self.emit(events.EncodeBroke(",
        mistake="            self.emit(events.EncodeBroke(",
        killer=swept("plain", FaultKind.ENCODE_FAILS),
        reason="wait for ever",
    ),
    Mutant(
        name="an output that comes after the close is kept",
        function="core.ledger:EncoderLedger._make_room",
        fragment="self._closed or ",
        mistake="",
        killer=swept("shutdown while busy", FaultKind.CANCEL),
        reason=("encoder cache cut off", "encoder outputs are left"),
    ),
    Mutant(
        name="the ledger is not closed with the scheduler",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._decide(self.ledger.close(now=trio.current_time()))\n",
        mistake="",
        killer=SIMULATION,
        reason=("encoder cache cut off", "encoder outputs are left"),
    ),
    Mutant(
        name="a withdrawal that crosses a refusal is taken for a mistake of ours",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="case m.Release(holder, key) if not self.ledger.holds(holder, key):",
        mistake="case m.Release(holder, key) if False:",
        killer=test_encoder_cache.crosses,
        reason="which is absent",
    ),
    Mutant(
        name="every item is a batch of its own",
        function="actors.encoder_cache:EncoderCache._dispatch",
        fragment="self._encoding or ",
        mistake="",
        killer=test_promises.test_one_encode_batch_is_in_flight_at_a_time,
        reason="encode batches at once",
    ),
    Mutant(
        name="a loan that is given back before its copy is never answered",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            if lent := self._loans.pop(holder, None):\n",
        mistake="            if self._loans.pop(holder, None) and False:\n",
        killer=test_encoder_cache.copies_first,
        reason="every loan is answered",
    ),
    Mutant(
        name="loans are forgotten at the close",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._closing = True\n            self._end_loans()\n",
        mistake="            self._closing = True\n",
        killer=test_encoder_cache.refuses,
        reason="EngineClosed",
    ),
    Mutant(
        name="borrows go on when the runner has lost what they are for",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._withdraw_borrows()\n            self.emit(events.OutputsLost(generation))\n",
        mistake="            self.emit(events.OutputsLost(generation))\n",
        killer=test_encoder_cache.drops_late,
        reason="lenders.withdrawn == [1]",
    ),
    Mutant(
        name="what a lender gives is put in, whatever its size",
        function="actors.encoder_cache:EncoderCache._handle_borrow",
        fragment="if (output.key, output.size) == (key, size):",
        mistake="if output.key == key:",
        killer=test_encoder_cache.checks_size,
        reason="jobs",
    ),
    Mutant(
        name="reserved before dropped",
        function="actors.encoder_cache:EncoderCache._decide",
        fragment="""    for key in decisions.dropped:  # first: what is reserved now may take their room
        self.emit(events.EntryDropped(key))
    for key, size in decisions.reserved:
        self.emit(events.EntryReserved(key, size))
""",
        mistake="""    for key, size in decisions.reserved:
        self.emit(events.EntryReserved(key, size))
    for key in decisions.dropped:
        self.emit(events.EntryDropped(key))
""",
        killer=test_encoder_cache.drops_first,
        reason="books balance",
    ),
    Mutant(
        name="entries are idle since the start of time",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="self.ledger.release(holder, key, now=trio.current_time())",
        mistake="self.ledger.release(holder, key, now=0.0)",
        killer=test_promises.test_an_idle_output_is_kept_for_its_idle_time,
        reason="freed before its time",
    ),
    Mutant(
        name="nobody wakes up for an idle entry",
        function="actors.encoder_cache:EncoderCache._next_deadline",
        fragment="math.inf if idle is None else idle + self.idle_seconds",
        mistake="math.inf",
        killer=test_promises.test_an_idle_output_is_kept_for_its_idle_time,
        reason="outlives its time",
    ),
    Mutant(
        name="every free is a message of its own",
        function="actors.encoder_cache:EncoderCache._decide",
        fragment="    self._to_free += decisions.free\n",
        mistake="    for key in decisions.free:\n        self._to_free.append(key)\n        self._send_frees()\n",
        killer=test_encoder_cache.merges,
        reason="too many values to unpack",
    ),
    Mutant(
        name="frees wait behind the encode batch",
        function="actors.encoder_cache:EncoderCache.run",
        fragment="self._send_frees()  # first: they should not wait behind the batch\n",
        mistake="self._dispatch()\n        self._send_frees()\n",
        killer=test_encoder_cache.frees_first,
        reason="AssertionError",
    ),
    # the runner and its worker
    Mutant(
        name="the device's release can be cancelled",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="trio.move_on_after(self.close_seconds, shield=True)",
        mistake="trio.move_on_after(self.close_seconds)",
        killer=swept("plain", FaultKind.CANCEL),
        reason="did not wait for it",
    ),
    Mutant(
        name="a hung call is waited for",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="trio.move_on_after(self.close_seconds, shield=True)",
        mistake="trio.CancelScope(shield=True)",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="Deadlock",
    ),
    Mutant(
        name="a hung worker is not abandoned",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="            self.worker.abandon(self._close_executor)\n",
        mistake="            pass\n",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="Deadlock",
    ),
    Mutant(
        name="the worker is not stopped",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="    self.worker.stop()\n",
        mistake="",
        killer=simulation("plain"),
        reason="Deadlock",
    ),
    Mutant(
        name="the encode lane forgets what comes behind its first call",
        function="actors.gpu_runner:GpuRunner._encode_lane",
        fragment="        self._begin(message)\n",
        mistake="        self._begin(message)\n        break\n",
        killer=SIMULATION,
        reason="wait for ever",
    ),
    Mutant(
        name="a failed encode is not told",
        function="actors.gpu_runner:GpuRunner._report",
        fragment="            keys = tuple(job.key for job in jobs)\n",
        mistake="            keys = tuple(job.key for job in jobs)\n            if error is not None: return\n",
        killer=swept("plain", FaultKind.ENCODE_FAILS),
        reason="wait for ever",
    ),
    Mutant(
        name="a step planned before a failure was known is run",
        function="actors.gpu_runner:GpuRunner._step",
        fragment="plan.epoch == self._broken_epoch",
        mistake="plan.epoch < self._broken_epoch",
        killer=swept("plain", FaultKind.STEP_FAILS),
        reason="is fed, and was not started",
    ),
    Mutant(
        name="the encode lane ends with the step lane",
        function="actors.gpu_runner:GpuRunner._run_lanes",
        fragment='nursery.start_soon(self._step_lane, name="triolet step lane")\n'
        "            await self._encode_lane()\n",
        mistake="nursery.start_soon(self._encode_lane)\n            await self._step_lane()\n"
        "            nursery.cancel_scope.cancel()\n",
        killer=SIMULATION,
        reason=("the teardown went through", "encoder outputs are left"),
    ),
    Mutant(
        name="the device is never told to free",
        function="actors.gpu_runner:GpuRunner._call",
        fragment="    getattr(executor, job.value)(*args)\n",
        mistake="    if job is not Job.FREE: getattr(executor, job.value)(*args)\n",
        killer=simulation("idle time"),
        reason="books balance",
    ),
    Mutant(
        name="the books do not hear of what was freed",
        function="actors.gpu_runner:GpuRunner._call",
        fragment="    self.memory = executor.memory()\n",
        mistake="    if job is not Job.FREE: self.memory = executor.memory()\n",
        killer=test_promises.test_the_device_holds_what_the_ledger_says,
        reason="books balance",
    ),
    Mutant(
        name="an error keeps the frames that it came through",
        function="core.frames:clear_frames",
        fragment="traceback.clear_frames(current.__traceback__)",
        mistake="pass",
        killer=engine_test(recovery_tests.test_a_kept_encode_error_keeps_no_payload),
        reason="payload() is None",
    ),
    Mutant(
        name="the encode lane keeps the payloads of its last batch",
        function="actors.gpu_runner:GpuRunner._encode_lane",
        fragment="        del message",
        mistake="        pass",
        killer=engine_test(engine_tests.test_a_request_dies_with_its_last_user_and_no_collector, ending="finished"),
        reason="payload() is None",
    ),
    Mutant(
        name="encode launches take turns with steps, however long they are",
        function="core.share:TimeShare.encode_ended",
        fragment="self.weight * (now - max(self._encode_sent, self._last_end))",
        mistake="0.0",
        killer=engine_test(share_tests.test_a_stream_decodes_between_two_encode_launches),
        reason="AssertionError",
    ),
    Mutant(
        name="time that was spent in the queue counts as an encode launch's",
        function="core.share:TimeShare.encode_ended",
        fragment="max(self._encode_sent, self._last_end)",
        mistake="self._encode_sent",
        killer=share_tests.test_a_launch_is_counted_from_the_end_of_the_call_before_it,
        reason="AssertionError",
    ),
    Mutant(
        name="an encode launch waits though there is no step",
        function="actors.gpu_runner:GpuRunner._steps_come",
        fragment="return False",
        mistake="return True",
        killer=engine_test(share_tests.test_encodes_wait_for_nobody_where_nothing_decodes),
        reason=("Deadlock", "TooSlowError"),
    ),
    # a request's way
    Mutant(
        name="a cancelled request keeps the frames of its nursery",
        function="api.outputs.streams:Mailbox.wait_end",
        fragment="        cancelled.__traceback__ = None",
        mistake="        pass",
        killer=engine_test(
            memory_tests.test_a_request_makes_no_garbage_however_it_ends,
            ending=memory_tests.cancelled_with_its_nursery,
        ),
        reason="frame of TrioEngine._complete",
    ),
    # the supervisor
    Mutant(
        name="an actor's error keeps what the actor held",
        function="actors.supervisor:Supervisor._run_child",
        fragment="        frames.clear_frames(error)",
        mistake="        pass",
        killer=lives,
        reason="frame of GpuRunner._open",
    ),
    Mutant(
        name="an actor's error is kept by a frame that it came through",
        function="actors.supervisor:Supervisor._child_ended",
        fragment="    error, child.error = child.error, None",
        mistake="    error = child.error",
        killer=lives,
        reason="_Child",
    ),
    Mutant(
        name="actors are not shielded from the surroundings",
        function="actors.supervisor:_Status.started",
        fragment="        self.child.scope.shield = True\n",
        mistake="",
        killer=swept("plain", FaultKind.CANCEL),
        reason="a part of the engine failed (BaseExceptionGroup",
    ),
    Mutant(
        name="a start that was cancelled counts as started",
        function="actors.supervisor:_Status.started",
        fragment="if not cancelled:",
        mistake="if self.child is not None:",
        killer=swept("plain", FaultKind.CANCEL),
        reason="Deadlock",
    ),
    Mutant(
        name="an actor that breaks is never done",
        function="actors.supervisor:Supervisor._run_child",
        fragment="    finally:\n",
        mistake="    else:\n",
        killer=swept("plain", FaultKind.CANCEL),
        reason="Deadlock",
    ),
    Mutant(
        name="the teardown can be cancelled",
        function="actors.supervisor:Supervisor._supervise",
        fragment="shield=True",
        mistake="shield=False",
        killer=swept("plain", FaultKind.CANCEL),
        reason="Deadlock",
    ),
    Mutant(
        name="a stage of the teardown has no bound",
        function="actors.supervisor:Supervisor._stop_child",
        fragment="trio.move_on_after(seconds)",
        mistake="trio.CancelScope()",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="Deadlock",
    ),
    Mutant(
        name="the body goes on after an actor's crash",
        function="actors.supervisor:Supervisor._child_ended",
        fragment="    self._body.cancel()\n",
        mistake="",
        killer=engine_test(recovery_tests.test_after_an_actors_crash_nobody_waits_for_the_drain),
        reason="current_time() < 10",
    ),
    Mutant(
        name="the encoder cache is not told that the runner is gone",
        function="actors.supervisor:Supervisor._child_ended",
        fragment="        self._to_encoder_cache.send_nowait(m.RunnerLost())\n",
        mistake="",
        killer=test_promises.test_no_stage_of_a_teardown_is_cut_off_after_the_runners_crash,
        reason="cut off",
    ),
    Mutant(
        name="the runner is stopped before the encoder cache",
        function="actors.supervisor:Supervisor._supervise",
        fragment="""        await self._stop_child("encoder cache", self.config.stage_seconds)
        self._to_encode_lane.close()
        await self._stop_child("runner", self.config.stage_seconds)
""",
        mistake="""        self._to_encode_lane.close()
        await self._stop_child("runner", self.config.stage_seconds)
        await self._stop_child("encoder cache", self.config.stage_seconds)
""",
        killer=SIMULATION,
        reason="ordered teardown",
    ),
    Mutant(
        name="after a crash the drain is waited for",
        function="actors.supervisor:Supervisor.running",
        fragment="if not (self._stop.is_set() or self._hurried):",
        mistake="if not self._hurried:",
        killer=engine_test(recovery_tests.test_after_an_actors_crash_nobody_waits_for_the_drain, seeds=8),
        reason="DID NOT RAISE",
    ),
    Mutant(
        name="a drain does not notice that its surroundings were cancelled",
        function="actors.supervisor:Supervisor._hasten",
        fragment="            self._drain_within(0.0)\n",
        mistake="            pass\n",
        killer=engine_test(engine_tests.test_a_drain_ends_when_the_surroundings_are_cancelled),
        reason="DID NOT RAISE",
    ),
    Mutant(
        name="an abort after the end raises",
        function="actors.supervisor:Supervisor.abort",
        fragment="if not self._stopped.is_set():",
        mistake="if self._stopped is not None:",
        killer=test_promises.test_an_abort_after_the_end_is_no_error,
        reason="ClosedResourceError",
    ),
    Mutant(
        name="an error of the teardown hides behind a cancellation",
        function="actors.supervisor:leaving",
        fragment="is_cancellation(body_error, cancelled) or ",
        mistake="",
        killer=engine_test(recovery_tests.test_an_error_of_the_teardown_is_not_lost_behind_a_cancellation),
        reason="DID NOT RAISE",
    ),
)
