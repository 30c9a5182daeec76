"""The part that all contenders share: each opens its model, reports that, and answers tasks until its input ends. This
module needs only Python's standard library."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any


def connect() -> IO[str]:
    """Returns the stream for answers. From now on, standard output goes to standard error, so that libraries cannot
    print into the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def say(stream: IO[str], **told: Any) -> None:
    """Writes one answer, a line of JSON."""
    stream.write(json.dumps(told) + "\n")
    stream.flush()


def serve(
    open_model: Callable[[], tuple[Any, dict[str, str]]], run: Callable[[Any, dict[str, Any]], list[dict[str, Any]]]
) -> None:
    """Opens the model, then answers each task with ``run(model, task)``, which returns an answer for each input."""
    answers = connect()
    begun = time.perf_counter()
    model, about = open_model()
    say(answers, opened=time.perf_counter() - begun, about=about)
    for line in sys.stdin:
        task = json.loads(line)
        with beside(task) as told:
            found = run(model, task)
        say(answers, **told, answers=found)


@contextmanager
def beside(task: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Measures the ``seconds`` of the block. If the task has ``thread``, a thread of this process counts in Python
    meanwhile; ``counted`` is how far it counts in a second."""
    told: dict[str, float] = {}
    ended, reached = threading.Event(), [0]

    def count() -> None:
        number = 0
        while not ended.is_set():
            number += 1
        reached[0] = number

    thread = threading.Thread(target=count, name="beside", daemon=True)
    begun = time.perf_counter()
    if task.get("thread"):
        thread.start()
    try:
        yield told
    finally:
        told["seconds"] = time.perf_counter() - begun
        ended.set()
        if task.get("thread"):
            thread.join()
            told["counted"] = reached[0] / told["seconds"]


def at_once(
    task: dict[str, Any], inputs: Sequence[str], several: Callable[[Sequence[str]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Answers ``inputs`` in one batch, or one after the other if they arrive or each is asked for by itself."""
    if task.get("arrivals") or task.get("each"):
        return in_order(task, inputs, lambda one: several([one])[0])
    return several(inputs)


def in_order(task: dict[str, Any], inputs: Sequence[str], one: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers ``inputs`` one after the other, none before its arrival, as an engine does that runs one request at a
    time."""
    begun = time.perf_counter()
    arrivals = task.get("arrivals") or [0.0] * len(inputs)
    found = []
    for arrival, item in zip(arrivals, inputs, strict=True):
        time.sleep(max(begun + arrival - time.perf_counter(), 0.0))
        found.append({**one(item), "total": time.perf_counter() - begun - arrival})
    return found
