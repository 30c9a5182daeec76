"""Processes that a test starts, and what it asks them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

import triolet.demo

SECONDS = 300  # no test waits for long, unless something hangs
SAMPLE = triolet.demo.samples()[0]


@contextmanager
def started(*arguments: str, ray: str | None) -> Iterator[subprocess.Popen[str]]:
    """A process of Python, for the block. ``ray``: an address; ``None``: it starts its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    if ray is not None:
        environment["RAY_ADDRESS"] = ray
    command, pipe = [sys.executable, *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as one:
        try:
            yield one
        finally:
            one.kill()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def deployments(ray: psutil.Process) -> set[str]:
    """Those that have replicas on the Ray that ``ray`` has started. Ray names a process by what it does, and anew when
    that changes."""
    found = set()
    for process in ray.children(recursive=True):
        try:
            words = process.cmdline() or [""]
        except psutil.NoSuchProcess:
            continue
        if words[0].startswith("ray::ServeReplica:triolet-checkpoint-"):
            found.add(words[0].split(":")[3])
    return found


def url_of(server: subprocess.Popen[str], models: str) -> str:
    """Its address, when it serves. What it says until then is told where it does not come so far."""
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if f" serving {models} at " in line:
            return line.rpartition(" ")[2].strip()
    raise AssertionError("".join(said))


def transcription(url: str, model: str) -> str:
    form = b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    body = form % (b"model", b"", model.encode())
    body += form % (b"file", b'; filename="a.flac"', SAMPLE.path.read_bytes()) + b"--x--\r\n"
    request = urllib.request.Request(
        f"{url}/v1/audio/transcriptions", body, {"content-type": "multipart/form-data; boundary=x"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text: str = json.loads(answer.read())["text"]
    return text
