"""What an engine holds: resident size before, open, at work, asleep and after close, and the peak of loading.

::

    python benchmarks/footprint.py [MODEL] [--dtype float32]

It runs twice, each time in a process of its own: the first learns which modules an engine imports, the second imports
them before the first reading. ``before`` is the process with these imports, and no engine yet. All sizes are resident
ones: what is committed, and the pages of libraries' files that were touched (``of files``), which are the system's to
take back.

- Peak of loading: the most while the engine opens, less before, over the bytes of the weights as they are kept. Nothing
  is subtracted but pages of keys and values, which are not resident before something is written to them.
- Asleep: over before and the weights, which are parked.
- Closed: over before.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click
import psutil
import trio

from triolet import Engine, EngineConfig, SamplingParams, demo

PEAK, LEFT = 1.3, 1.15


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """The most bytes since `forget_peak`."""
    return _status("VmHWM")


def of_files() -> int:
    """Resident bytes that are pages of files."""
    return _status("RssFile")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


async def work(engine: Engine) -> None:
    if engine.model.whisper is not None:
        await engine.transcribe(demo.samples()[0].path)
        return
    for number in range(3):
        await engine.generate(f"{number} Once upon a time " * 20, sampling=SamplingParams(max_tokens=8))


async def live(model: str, dtype: str) -> bool:
    config = EngineConfig(device="cpu", dtype=dtype)
    before, files = resident(), of_files()
    forget_peak()
    async with Engine(model, config=config) as engine:
        highest, opened = peak(), resident()
        owners = dict(engine.statistics().device.by_owner)
        await work(engine)
        worked = resident()
        await engine.sleep()
        asleep = resident()
    closed = resident()
    weights = owners["weights"]
    rows = {"before": before, "open": opened, "peak of loading": highest, "at work": worked, "asleep": asleep}
    print("| moment | resident, MB |\n|---|---|")
    for moment, count in {**rows, "closed": closed}.items():
        print(f"| {moment} | {count / 1e6:.0f} |")
    print(f"of files, MB: before {files / 1e6:.0f}, closed {of_files() / 1e6:.0f}")
    print("owned, MB: " + ", ".join(f"{owner} {count / 1e6:.1f}" for owner, count in owners.items()))
    return all(
        [
            _claim("peak of loading, of the weights", (highest - before) / weights, PEAK),
            _claim("asleep, of before and the weights", asleep / (before + weights), LEFT),
            _claim("closed, of before", closed / before, LEFT),
        ]
    )


def _claim(what: str, ratio: float, most: float) -> bool:
    print(f"{'holds' if ratio <= most else 'FAILS'}: {what}: {ratio:.2f}; claimed: at most {most}")
    return ratio <= most


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.argument("model", default=str(demo.checkpoint()))
@click.option("--dtype", default="float32", show_default=True)
@click.option("--imports", help="Modules to import first, as JSON; what the script runs itself with.")
def main(model: str, dtype: str, imports: str | None) -> None:
    command = [sys.executable, __file__, model, "--dtype", dtype, "--imports"]
    if imports is None:
        print(f"load: {os.getloadavg()}")
        first = subprocess.run([*command, "[]"], check=False, stdout=subprocess.PIPE, encoding="utf-8")
        if not (names := first.stdout.splitlines()):
            sys.exit(first.returncode)
        sys.exit(subprocess.run([*command, "-"], check=False, input=names[-1], encoding="utf-8").returncode)
    for name in json.loads(sys.stdin.read() if imports == "-" else imports):
        with suppress(Exception):  # some cannot be imported by name: they come with others
            importlib.import_module(name)
    holds = trio.run(live, model, dtype)
    if imports != "-":
        print(json.dumps(sorted(sys.modules)))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
