"""Torch's number of threads is that of the engine that came last, and in the end the program's."""

from __future__ import annotations

import subprocess
import sys
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from triolet.models.machine.threads import TorchThreads

COUNTS = st.integers(1, 9)
EVENTS = st.lists(
    st.tuples(st.just("enter"), st.sampled_from("abc"), COUNTS)
    | st.tuples(st.just("leave"), st.sampled_from("abc"), st.none())
    | st.tuples(st.just("program"), st.none(), st.integers(10, 19))  # which nobody could tell from ours
)


@given(programs=COUNTS, happened=EVENTS)
def test_it_is_the_last_ones_of_those_that_are_left_and_else_the_programs(programs, happened):
    now = [programs]
    owner = TorchThreads(read=lambda: now[0], write=lambda count: now.__setitem__(0, count))
    users, changed = dict[str, int](), False
    for what, who, count in happened:
        if what == "program":
            now[0] = programs = count
            changed = bool(users)
        elif what == "enter":
            users.pop(who, None)
            owner.enter(who, lambda told, count=count, programs=programs: count if told == programs else -1)
            users[who], changed = count, False
        else:
            users.pop(who, None)
            owner.leave(who)
            changed = changed and bool(users)
        expected = programs if changed or not users else list(users.values())[-1]
        assert now[0] == expected, f"after {what} {who} {count}"


@pytest.mark.real_time
def test_each_engines_own_thread_keeps_its_number():
    """Torch has one number for all threads that begin, and one for each that has begun."""
    owner, before, told = TorchThreads(), torch.get_num_threads(), {}
    steps = {name: [threading.Event(), threading.Event()] for name in "ab"}

    def live(name, count):
        owner.enter(name, lambda _: count)
        steps[name][0].set()
        assert steps[name][1].wait(300)
        told[name] = torch.get_num_threads()
        owner.leave(name)

    threads = [threading.Thread(target=live, args=one) for one in (("a", before + 1), ("b", before + 2))]
    for thread, name in zip(threads, "ab", strict=True):
        thread.start()
        assert steps[name][0].wait(300)
    assert owner.read() == before + 2
    for thread, name in zip(threads, "ab", strict=True):  # the first ends first: not as blocks end
        steps[name][1].set()
        thread.join()
        assert owner.read() == {"a": before + 2, "b": before}[name]
    assert told == {"a": before + 1, "b": before + 2}
    assert torch.get_num_threads() == before


LEFT_OPEN = """
import atexit
import torch
torch.set_num_threads(3)
atexit.register(lambda: print(torch.get_num_threads()))
from triolet import SyncEngine, demo
engine = SyncEngine(demo.checkpoint())
engine.open()
"""


@pytest.mark.real_time
def test_an_engine_that_is_left_open_ends_with_its_program_without_a_word():
    """While the interpreter ends, no thread begins. The number is the program's again nonetheless."""
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("3\n", "", 0)
