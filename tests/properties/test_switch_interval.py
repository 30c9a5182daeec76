"""The switch interval is short exactly while a device works for somebody, and the user's own before and after."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from textwrap import dedent

import hypothesis.strategies as st
import pytest
from hypothesis import given

from triolet.actors.switch_interval import SHORT, SwitchInterval
from triolet_testing.sim import SimInterpreter

pytestmark = pytest.mark.real_time

OURS = round(SHORT * 1e6)  # microseconds
USERS = st.integers(1, 20_000).filter(lambda value: value != OURS)  # which nobody could tell from ours
ENGINES = st.sampled_from("abc")
EVENTS = st.lists(st.tuples(st.sampled_from(["begin", "end", "leave"]), ENGINES) | st.tuples(st.just("user"), USERS))


@given(users=USERS, happened=EVENTS)
def test_it_is_short_exactly_while_somebody_works_and_else_the_users(users: int, happened: list[tuple[str, object]]):
    interpreter, calls, changed = SimInterpreter(users), Counter[object](), False
    interval = interpreter.owner()
    for what, who in happened:
        if what == "user":
            interpreter.write((who + 0.5) * 1e-6)
            users, changed = who, bool(calls)
        elif what == "begin":
            changed = changed and bool(calls)
            calls[who] += 1
            interval.begin(who)
        else:
            calls[who] -= calls[who] if what == "leave" else 1
            calls = +calls
            getattr(interval, what)(who)
        working = bool(calls) and not changed
        assert interpreter.microseconds == (min(users, OURS) if working else users), f"after {what} {who}"


@pytest.fixture
def users_own():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("users_own")
def test_python_reads_what_was_put_back_as_it_was():
    """Python cuts what it is given to whole microseconds: a value that is only read and written again may shrink."""
    interval = SwitchInterval()
    for microseconds in range(1, 6_000):
        sys.setswitchinterval((microseconds + 0.5) * 1e-6)
        before = sys.getswitchinterval()
        interval.begin("a")
        assert round(sys.getswitchinterval() * 1e6) == min(microseconds, OURS)
        interval.end("a")
        assert sys.getswitchinterval() == before


@pytest.mark.usefixtures("users_own")
def test_engines_in_several_threads_share_it():
    """Each in its own order: between its begin and its end it is short, and in the end it is the user's."""
    sys.setswitchinterval(2e-4)  # many switches
    users, interval, long = sys.getswitchinterval(), SwitchInterval(), []

    def work(number: int) -> None:
        dice, calls = random.Random(number), 0
        for _ in range(3_000):
            if calls and sys.getswitchinterval() >= users:
                long.append(number)
            ending = calls and dice.random() < 0.5
            (interval.end if ending else interval.begin)(number)
            calls += -1 if ending else 1
        interval.leave(number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not long, "somebody worked, and it was not short"
    assert sys.getswitchinterval() == users


def test_an_engine_that_is_collected_in_the_middle_of_a_line_of_it_may_leave():
    """As a task that nobody closed does, in the thread that happens to collect it."""
    interpreter = SimInterpreter()
    interval = SwitchInterval(lambda: interval.leave("b") or interpreter.read(), interpreter.write)
    worked = threading.Thread(target=lambda: (interval.begin("a"), interval.end("a")), daemon=True)
    worked.start()
    worked.join(60)
    assert not worked.is_alive(), "it waits for itself"
    assert interpreter.microseconds == 5000


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_process_that_is_forked_while_the_interval_is_put_back_has_the_users():
    """The last call ends in another thread, which is about to write the user's interval when the main thread forks."""
    program = dedent("""
        import os, sys, threading
        from triolet.actors.switch_interval import SWITCH_INTERVAL, outlive_forks

        users, writes, goes_on, lock = sys.getswitchinterval(), threading.Event(), threading.Event(), threading.RLock()

        class Lock:
            def acquire(self):
                if threading.current_thread() is threading.main_thread() and writes.is_set():
                    goes_on.set()
                return lock.acquire()

            def release(self):
                lock.release()

            def __enter__(self):
                self.acquire()

            def __exit__(self, *_):
                self.release()

        def write(seconds):
            writes.set()
            assert goes_on.wait(60)
            sys.setswitchinterval(seconds)

        SWITCH_INTERVAL._lock = Lock()
        outlive_forks()
        SWITCH_INTERVAL.begin("a")
        SWITCH_INTERVAL.write = write
        ending = threading.Thread(target=SWITCH_INTERVAL.end, args=("a",))
        ending.start()
        assert writes.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(int(sys.getswitchinterval() != users))
        goes_on.set()
        assert os.waitpid(child, 0)[1] == 0, "it is short in the child"
        ending.join()
        assert sys.getswitchinterval() == users
        SWITCH_INTERVAL.begin("b")  # the lock is free
        assert sys.getswitchinterval() != users
        child = os.fork()  # in the middle of a call
        if child == 0:
            os._exit(int(sys.getswitchinterval() != users))
        assert os.waitpid(child, 0)[1] == 0, "it is short in the child"
    """)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
