"""The tools for any trio program find planted faults, say where, show the shortest schedule, and let sound ones be."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing

from triolet_testing import trio_tools
from triolet_testing.trio_tools import (
    PROMISES,
    Case,
    Fault,
    InTurn,
    Pct,
    ProgramBroken,
    Subject,
    Trial,
    TrioFault,
    Uniform,
    check_program,
    replay_program,
    run_scheduled,
    shrink,
    sweep_program,
)

RUNS = 150  # schedules that matter are found by then
FEW = 30  # every fault has happened by then


async def two(one: Callable[[], object], other: Callable[[], object]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, name="one")
        nursery.start_soon(other, name="other")


async def numbers() -> AsyncIterator[int]:
    for number in range(3):
        await trio.sleep(0.1)
        yield number


class Pool:
    """One connection, for which others wait."""

    def __init__(self) -> None:
        self.free = trio.Semaphore(1)

    async def says_goodbye(self) -> None:
        await trio.sleep(0.1)


# -- programs with a planted fault, and the promise that each breaks ---------------------------------------------------


async def swallows_in_a_task(trial: Trial) -> None:
    async def worker() -> None:
        with suppress(BaseException):
            await trio.sleep(1)

    await two(worker, worker)


async def swallows_and_goes_on(trial: Trial) -> None:
    with suppress(trio.Cancelled):
        await trio.sleep(1)


async def swallows_outside_of_a_part(trial: Trial) -> None:
    with suppress(trio.Cancelled):
        async with trial.part():
            await trio.sleep(1)


async def retries_for_ever(trial: Trial) -> None:
    async def worker() -> None:
        done = False
        while not done:
            with suppress(BaseException):
                await trio.sleep(1)
                done = True

    await two(worker, worker)


async def swallows_the_interrupt(trial: Trial) -> None:
    try:
        await trio.sleep(1)
    except KeyboardInterrupt:
        await trio.sleep(1)


async def awaits_in_a_finally_and_skips_the_release(trial: Trial) -> None:
    pool = Pool()

    async def ask() -> None:
        await pool.free.acquire()
        try:
            await trio.sleep(1)
        finally:
            await pool.says_goodbye()  # cancelled at once: what follows is skipped
            pool.free.release()

    async with trial.part():
        await ask()
    await ask()


async def never_releases_a_lock(trial: Trial) -> None:
    lock = trio.Lock()

    async def ask() -> None:
        await lock.acquire()
        await trio.sleep(1)
        lock.release()

    async with trial.part():
        await ask()
    await ask()


async def leaks_a_generator(trial: Trial) -> None:
    async for _ in numbers():
        await trio.sleep(0.1)


async def leaves_a_task(trial: Trial) -> None:
    trio.lowlevel.spawn_system_task(trio.sleep, 100, name="left")
    await trio.sleep(1)


async def raises_in_its_clean_up(trial: Trial) -> None:
    done: list[int] = []
    try:
        await trio.sleep(1)
        done.append(1)
    finally:
        assert done, "nothing to give back"


async def waits_for_nobody_after_a_failure(trial: Trial) -> None:
    ready = trio.Event()

    async def client() -> None:
        async with trial.part():
            await trio.sleep(1)
            ready.set()

    await two(client, ready.wait)


async def loses_an_update(trial: Trial) -> None:
    """Only where the second one overtakes the first in its middle."""
    total = 0

    async def add(steps: int) -> None:
        nonlocal total
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        before = total
        await trio.lowlevel.checkpoint()
        total = before + 1

    await two(lambda: add(0), lambda: add(4))
    assert total == 2


FAULTY = {
    swallows_in_a_task: "cancellation comes out",
    swallows_and_goes_on: "cancellation comes out",
    swallows_outside_of_a_part: "cancellation comes out",
    retries_for_ever: "it ends",
    swallows_the_interrupt: "^C comes out",
    awaits_in_a_finally_and_skips_the_release: "it ends",
    never_releases_a_lock: "the rest works on",
    leaks_a_generator: "generators are closed",
    leaves_a_task: "no task is left",
    raises_in_its_clean_up: "only the fault comes out",
    waits_for_nobody_after_a_failure: "it ends",
    loses_an_update: "it works undisturbed",
}


@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.__name__)
def test_a_planted_fault_is_found_and_its_case_shows_it_again(program):
    """The repr of the case is enough."""
    runs = {loses_an_update: RUNS, retries_for_ever: 4}.get(program, FEW)  # each run of the latter is long
    report = sweep_program(program, runs=runs)
    found = {failure.broken.promise: failure for failure in report.failures}
    assert FAULTY[program] in found, str(report)
    failure = found[FAULTY[program]]
    case = eval(repr(failure.case), vars(trio_tools))
    with pytest.raises(ProgramBroken) as again:
        replay_program(program, case, most_ticks=5_000)
    assert f"{failure.broken.promise}: " in str(again.value)


def test_every_promise_has_a_program_that_breaks_it():
    assert set(FAULTY.values()) == set(PROMISES)


# -- sound programs ----------------------------------------------------------------------------------------------------


async def gives_back_under_a_shield(trial: Trial) -> None:
    pool = Pool()

    async def ask() -> None:
        async with pool.free:
            try:
                await trio.sleep(1)
            finally:
                with trio.move_on_after(1, shield=True):
                    await pool.says_goodbye()

    async with trial.part():
        await ask()
    await ask()


async def closes_its_generators(trial: Trial) -> None:
    async with aclosing(numbers()) as read:
        async for _ in read:
            await trio.sleep(0.1)


async def has_timeouts_of_its_own(trial: Trial) -> None:
    async def worker() -> None:
        with trio.move_on_after(0.5):
            await trio.sleep(1)
        await trio.sleep(0.1)

    await two(worker, worker)


async def cleans_up_and_raises_again(trial: Trial) -> None:
    try:
        await trio.sleep(1)
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.1)
        raise


async def uses_threads_channels_and_start(trial: Trial) -> None:
    send, receive = trio.open_memory_channel[int](0)

    async def writer(*, task_status: trio.TaskStatus[None]) -> None:
        async with send:
            task_status.started()
            for _ in range(2):
                await send.send(await trio.to_thread.run_sync(lambda: 1))

    async with receive, trio.open_nursery() as nursery:  # the nursery within, so that nobody sends when it is closed
        await nursery.start(writer)
        assert [number async for number in receive] == [1, 1]


async def ends_while_a_task_is_about_to(trial: Trial) -> None:
    """A nursery may be cancelled when all of its tasks are done."""
    for _ in range(3):
        await two(trio.lowlevel.checkpoint, trio.lowlevel.cancel_shielded_checkpoint)


@pytest.mark.parametrize(
    "program",
    [
        gives_back_under_a_shield,
        closes_its_generators,
        has_timeouts_of_its_own,
        cleans_up_and_raises_again,
        uses_threads_channels_and_start,
        ends_while_a_task_is_about_to,
    ],
    ids=lambda program: program.__name__,
)
def test_a_sound_program_has_no_finding(program):
    report = sweep_program(program, runs=FEW)
    assert [str(failure) for failure in report.failures] == []
    assert report.faults > FEW // 2


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_a_schedule_that_fails_is_shrunk_to_the_few_steps_that_matter():
    """The one that was found departs from trio's order in many ticks; of those that are left, none can be spared."""
    (failure,) = sweep_program(loses_an_update, runs=RUNS, kinds=()).failures
    pairs = failure.case.schedule.but
    assert 0 < len(pairs) <= 6
    assert "trio's plain order, but in tick" in str(failure)
    for index in range(len(pairs)):
        replay_program(loses_an_update, Case(schedule=InTurn(pairs[:index] + pairs[index + 1 :])))


def test_shrinking_leaves_out_all_that_does_not_matter_and_asks_no_more_than_it_may():
    asked: list[InTurn] = []

    def fails(schedule: InTurn) -> bool:
        asked.append(schedule)
        return {(3, 2), (70, 1)} <= {(tick, min(choice, 2)) for tick, choice in schedule.but}

    long = InTurn((*((tick, 5) for tick in range(70)), (70, 1), (71, 3)))
    assert shrink(long, fails) == InTurn(((3, 2), (70, 1)))
    asked.clear()
    assert fails(shrink(long, fails, most_runs=10))
    assert len(asked) == 11


def test_in_turn_is_trios_order_and_a_recorded_run_is_the_same_run():
    async def order() -> str:
        written: list[str] = []

        async def write(name: str) -> None:
            await trio.lowlevel.checkpoint()
            written.append(name)

        async with trio.open_nursery() as nursery:
            for name in "abcd":
                nursery.start_soon(write, name)
        return "".join(written)

    assert run_scheduled(order, schedule=InTurn()) == "abcd"
    for seed in range(10):
        recorders = []
        by_chance = run_scheduled(order, schedule=Uniform(seed), recorded=recorders.append)
        assert run_scheduled(order, schedule=recorders[0].schedule) == by_chance


# -- the sweep itself --------------------------------------------------------------------------------------------------


async def sound(trial: Trial) -> None:
    async with trial.part():
        await trio.sleep(1)
    await trio.sleep(1)


async def recovers_in_many_steps(trial: Trial) -> None:
    """More than those after which the sweep first takes a run for one that never ends."""
    try:
        await trio.sleep(1)
    except BaseException:
        with trio.CancelScope(shield=True):
            for _ in range(3000):
                await trio.lowlevel.checkpoint()
        raise


def test_a_run_that_takes_long_is_no_run_that_never_ends():
    assert sweep_program(recovers_in_many_steps, runs=8).failures == []


def test_every_fault_happens_at_every_step_of_every_task():
    cases: list[Case] = []

    async def program(trial: Trial) -> None:
        cases.append(trial.case)
        await sound(trial)

    report = sweep_program(program, runs=RUNS)
    assert report.left_out == 0
    steps = {kind: {case.fault.step for case in cases if case.fault and case.fault.kind is kind} for kind in TrioFault}
    assert steps[TrioFault.CANCEL] == steps[TrioFault.INTERRUPT] == {1, 2, 3, 4}
    assert steps[TrioFault.CANCEL_PART] == {2, 3}


def test_faults_for_which_there_are_too_few_runs_are_counted_and_the_rest_are_spread():
    report = sweep_program(sound, runs=6)
    assert (report.runs, report.left_out) == (6, 6)
    assert "6 places of a fault left out" in str(report)


def test_a_finding_says_what_why_where_and_how_to_see_it_again():
    with pytest.raises(ProgramBroken) as broken:
        check_program(swallows_in_a_task, runs=RUNS)
    for told in (
        "1. cancellation comes out: task 'one' was cancelled in swallows_in_a_task.<locals>.worker at test_trio",
        "Why it matters: Timeouts and shutdowns do not stop",
        "fault: the whole program is cancelled, just before step 1 of task 'main'",
        "schedule: trio's plain order",
        "case: Case(schedule=InTurn(but=()), fault=Fault(kind=TrioFault.CANCEL, task='main', step=1))",
    ):
        assert told in str(broken.value)


async def fails_when_overtaken_and_cancelled(trial: Trial) -> None:
    """And leaves a generator open in every run."""
    order: list[int] = []

    async def write(number: int) -> None:
        await trio.lowlevel.checkpoint()
        order.append(number)

    async for _ in numbers():
        break
    try:
        await two(lambda: write(1), lambda: write(2))
        await trio.sleep(1)
    except trio.Cancelled:
        assert order != [2, 1]
        raise


def test_a_promise_that_is_ignored_hides_no_other_one():
    report = sweep_program(
        fails_when_overtaken_and_cancelled, runs=RUNS, kinds=[TrioFault.CANCEL], ignore=["generators are closed"]
    )
    assert [failure.broken.promise for failure in report.failures] == ["only the fault comes out"]


def test_what_a_schedule_breaks_alone_spares_no_fault():
    """Else a fault that was there a few times while the schedule failed would not be tried any more."""
    tried: list[Fault[Any]] = []

    async def fails_when_overtaken(trial: Trial) -> None:
        order: list[int] = []

        async def write(number: int) -> None:
            await trio.lowlevel.checkpoint()
            order.append(number)

        try:
            await two(lambda: write(1), lambda: write(2))
            await trio.sleep(1)
        finally:
            tried.extend([trial.case.fault] if trial.case.fault is not None else [])
            assert order[:1] != [2]

    sweep_program(fails_when_overtaken, runs=RUNS, kinds=[TrioFault.CANCEL])
    assert "main" in [fault.task for fault in tried[-20:]]


def test_tasks_of_others_may_leave_generators_open():
    """The hooks of generators are of the thread; a server around the program has its own."""
    kept: list[object] = []

    @asynccontextmanager
    async def server(trial: Trial) -> AsyncIterator[trio.Event]:
        asked = trio.Event()

        async def serve() -> None:
            await asked.wait()
            reading = numbers()
            await anext(reading)
            kept.append(reading)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await trio.testing.wait_all_tasks_blocked()
            yield asked

    async def ask(trial: Trial) -> None:
        trial.given.set()
        await trio.sleep(1)

    assert sweep_program(Subject(program=ask, around=server), runs=20).failures == []


@pytest.mark.parametrize("schedule", [InTurn(), Pct(1)])
def test_the_tasks_of_a_run_that_never_ends_end_with_it(schedule):
    """Rather than in the middle of another run."""
    held: list[weakref.ref[Pool]] = []

    async def waits_for_ever(trial: Trial) -> None:
        pool = Pool()
        held.append(weakref.ref(pool))
        async with trial.part():
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()

    before = sys.get_asyncgen_hooks()
    with pytest.raises(ProgramBroken, match="it ends"):
        replay_program(waits_for_ever, Case(schedule=schedule))
    assert [pool() for pool in held] == [None]
    assert sys.get_asyncgen_hooks() == before


@pytest.mark.parametrize("abandons", [True, False])
def test_the_result_of_an_abandoned_thread_is_lost_and_no_other_one(abandons):
    ends: set[tuple[int, int]] = set()

    async def program(trial: Trial) -> None:
        opened: list[int] = []
        got: list[None] = []
        try:
            got.append(await trio.to_thread.run_sync(opened.append, 1, abandon_on_cancel=abandons))
            await trio.sleep(1)
        finally:
            ends.add((len(opened), len(got)))

    check_program(program, runs=20)
    assert ((1, 0) in ends) == abandons
    assert {(0, 0), (1, 1)} <= ends


def test_tasks_of_others_may_swallow_what_they_like():
    subject = Subject(program=swallows_in_a_task, foreign=lambda name: name in {"one", "other"})
    assert sweep_program(subject, runs=RUNS).failures == []


def test_a_control_c_of_the_user_ends_the_sweep():
    async def interrupted(trial: Trial) -> None:
        signal.raise_signal(signal.SIGINT)
        await trio.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        sweep_program(interrupted, kinds=[TrioFault.CANCEL])


def test_an_error_in_a_group_is_no_control_c():
    async def fails() -> None:
        raise ValueError("mine")

    (failure,) = sweep_program(lambda trial: two(fails, trio.lowlevel.checkpoint)).failures
    assert "ValueError: mine at test_trio_tools.py:" in failure.broken.what


def test_a_fault_that_the_schedule_shows_without_it_is_told_without_it():
    report = sweep_program(loses_an_update, runs=RUNS)
    assert [failure.case.fault for failure in report.failures] == [None]


@pytest.mark.real_time
def test_outside_of_the_main_thread_no_control_c_is_injected():
    errors: list[BaseException] = []

    def sweep() -> None:
        try:
            sweep_program(sound)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=sweep)
    thread.start()
    thread.join()
    assert "main thread" in str(errors)


def test_a_sweep_without_runs_is_refused():
    with pytest.raises(ValueError, match="runs=0; allowed: at least 1"):
        sweep_program(sound, runs=0)


def test_a_fault_that_never_happens_is_no_finding():
    trial = replay_program(sound, Case(fault=Fault(TrioFault.CANCEL, "main", 99)))
    assert not trial.met


class Diary:
    async def note(self) -> None:
        await trio.sleep(1)

    @asynccontextmanager
    async def page(self) -> AsyncIterator[None]:
        await self.note()
        yield


async def writes_and_fails_if_cancelled(trial: Trial) -> None:
    try:
        async with trial.part(), Diary().page():
            await trio.sleep(1)
    except trio.Cancelled as cancelled:
        raise LookupError from cancelled


@pytest.mark.parametrize(
    ("step", "place"),
    [(2, "writes_and_fails_if_cancelled"), (3, "Diary.note"), (4, "writes_and_fails_if_cancelled")],
)
def test_a_fault_is_placed_where_the_program_stands(step: int, place: str) -> None:
    """Not in the standard library, through which a program enters a block."""
    with pytest.raises(ProgramBroken, match=rf"which stands in {place} at test_trio_tools\.py:\d+"):
        replay_program(writes_and_fails_if_cancelled, Case(fault=Fault(TrioFault.CANCEL, "main", step)))
