"""A process in which trio ends a thread as soon as it is idle, instead of after ten seconds. It cuts off nothing else.

``impatient.py program``: opens a cluster, transcribes when those threads have ended, and is told to end.
``impatient.py serve ...``: the command; for a line on its standard input it waits for their end and answers with one.
"""

from __future__ import annotations

import signal
import sys
import threading
import time

import psutil
import trio
from trio._core import _thread_cache

import triolet.demo
from triolet import EngineConfig
from triolet.__main__ import main
from triolet_ray import Cluster, deployment


def await_the_end_of_idle_threads() -> None:
    """Of trio's. The kernel tells children of a thread's end before it has it no more."""
    idle = [thread for thread in threading.enumerate() if thread.name.startswith("Trio thread ")]
    for thread in idle:
        thread.join()
    gone = {thread.native_id for thread in idle}
    while gone & {thread.id for thread in psutil.Process().threads()}:
        time.sleep(0.001)


async def program() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    config = EngineConfig(device="cpu", threads=1)
    async with Cluster(triolet.demo.checkpoint(), config=config, cpus=0.5) as cluster:
        await_the_end_of_idle_threads()
        text = (await cluster.transcribe(triolet.demo.samples()[0].path)).text
        signal.raise_signal(signal.SIGTERM)
        alarm = signal.alarm(0)
    sys.stdout.write(f"{text} SIGTERM: {len(heard)}, an alarm in {alarm} s\n")


def answer() -> None:
    for _ in sys.stdin:
        await_the_end_of_idle_threads()
        sys.stdout.write("they have ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _thread_cache.IDLE_TIMEOUT = 0.01
    deployment._ASK_SECONDS = 86_400.0
    for setting in ("stage_seconds", "drain_seconds"):
        EngineConfig.__init__.__wrapped__.__kwdefaults__[setting] = 86_400.0
    if sys.argv[1:] == ["program"]:
        trio.run(program)
    else:
        threading.Thread(target=answer, daemon=True).start()
        main()
