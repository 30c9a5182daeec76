"""The benchmarks run, each at its smallest size, and those that look at their process in one of their own. What they
measure is not asserted here."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
import torch

from triolet import demo

pytestmark = pytest.mark.real_time

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NEEDS = {  # packages of the extra "bench"
    "memory.py": "psutil",
    "open_close.py": "psutil",
    "hours.py": "psutil",
    "fleet.py": "matplotlib",
}
OF_THE_PROCESS = {"memory.py", "open_close.py", "teardown.py"}
SECONDS = 600  # only a fault takes so long; less than `faulthandler_timeout`, which would end all tests
CLAIM = r"(?:holds|FAILS): "  # of a size or of a time, which says little at this size

PRINTED = {
    "continuous.py --size tiny --requests 5 --running 5 --tokens 4 --repeat 1": [
        "10 of 10 answers are those of `generate`",
        r"\| generate_batch \| \d",
    ],
    "verify.py --clients 1 --rounds 1 --repeats 1": [r"\d+ steps of ", r"the checker, median share: \d"],
    "teardown.py --requests 1 --repeats 1": [
        r"\| idle \| ",
        r"\| an encoding runs, cancelled \| ",
        CLAIM + r"the way out took .* Nothing was left behind in 12 exits",
    ],
    "open_close.py --engines 10": [
        r"\| 1 \| ",
        r"\| 10 \| ",
        CLAIM + "grown by ",
        CLAIM + r"tensor bytes, threads, descriptors left: \(0, -?\d+, 0\)",  # idle threads of trio come and go
    ],
    "memory.py --rounds 3 --requests 1": [
        r"\| 3 \| ",
        r"\| closed \| ",
        CLAIM + "growth in the 1 rounds after round 2",
        "holds: the books and the walk over live tensors differ by ",
        "holds: tensors alive: ",
    ],
    "memory.py --load images --rounds 3 --requests 2": [
        r"\| 3 \| ",
        r"encodings: \d+ computed, \d+ found, [1-9]",
        r"\| closed \| ",
        CLAIM + "growth in the 1 rounds after round 2",
        "holds: the books and the walk over live tensors differ by ",
        "holds: tensors alive: ",
    ],
    "divergence.py tiny --tokens 50": [
        r"\| 50 \| \d+\.\d\d \| \d+\.\d\d \| \d\.\d{4} \| ",
        CLAIM + "perplexity ",
        CLAIM + "divergence ",
    ],
    "fleet.py --replicas 4 --workers 1 --images .": [
        r"\| steady \| by load \| \d+ \| ",
        r"\| high load \| by content \| ",
        "wrote fleet-policies.svg",
        CLAIM + "steady: the hit rate is ",
        CLAIM + "high load: the longest device time is ",
    ],
    "fleet.py --replicas 1 --workers 1 --only sweeps": [
        r"\| 64 ingresses \| ",
        r"\| catalogue of 200 x all caches \| ",
    ],
    "fleet.py --replicas 2 --only routers": [r"\| 2 \| 64 \| \d", r"\| 20 \| 64 \| \d"],
    "hours.py --minutes 1 --kind flac --voice": [
        r"\d+ MB of flac, 1 minutes",
        r"\| 1 \| ",
        CLAIM + "grown by ",
        r"most samples at once: [34]\d\.",
    ],
    "prefix.py --repeats 1 --layers 2 --tokens 500": [
        r"\| 1 \| 51\d \| 51\d \| 1 \| .* \| [12]\d \| 0 \| ",
        CLAIM + "time to first token",
    ],
    "recordings.py spoken --only empty --minutes 0.1": [
        r"\| recording \| seconds \| words \|",
        r"\| empty \| 6.0 \| 0 \|",
    ],
    "speech.py --only en-command --only silence --show": [
        r"\| en-command \| triolet \| 0.00 \| 10 \| 0 \| 0 \| 0 \| - \| \d",
        r"\| silence \| triolet \| - \| 0 \| 0 \| 0 \| 0 \| 0 \| \d",
        r"\| sum \| triolet \| 0.00 \| 10 \| ",
        "triolet, en-command:",
        "holds: triolet hears 0 words where nobody speaks",
    ],
}
COMMANDS = [
    pytest.param(command, marks=[pytest.mark.thorough] * (command.split(" ")[0] in OF_THE_PROCESS))
    for command in PRINTED
]


@pytest.mark.real_time
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split(" ")[0])
def test_a_benchmark_ends_with_its_table_and_its_claims(command, tmp_path, monkeypatch, capfd):
    """With 0, or with 1 where a claim fails that needs the full size."""
    name, *arguments = command.split(" ")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{name} needs {NEEDS[name]}; pip install 'triolet[bench]'")
    monkeypatch.chdir(tmp_path)
    if name in OF_THE_PROCESS:
        status, printed = in_a_process_of_its_own(BENCHMARKS / name, arguments)
    else:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
        status, printed = here(BENCHMARKS / name), capfd.readouterr().out
    assert status == (1 if re.search("^FAILS: ", printed, re.MULTILINE) else 0)
    lines = iter(printed.splitlines())
    for expected in PRINTED[command]:  # in this order
        assert any(re.match(expected, line) for line in lines), f"{expected!r} is missing:\n{printed}"


def in_a_process_of_its_own(path: Path, arguments: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, path, *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # threads that compete for a busy machine's cores spin
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def here(path: Path) -> int:
    """Without another import of torch; as many threads as before afterwards."""
    before = torch.get_num_threads()
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        torch.set_num_threads(before)
    return 0


def test_live_plays_a_folder_of_recordings_on_virtual_time(tmp_path, monkeypatch, capfd):
    """The demo checkpoint understands its own sample."""
    sample = next(sample for sample in demo.samples() if sample.path.stem == "en-command")
    samples, rate = soundfile.read(sample.path)
    soundfile.write(tmp_path / "one.wav", samples, rate)
    times = [{"word": word, "start": 0.5, "end": 1.0} for word in sample.text.split()]
    (tmp_path / "one.json").write_text(json.dumps({"words": times}))
    command = ["live.py", str(tmp_path), str(demo.checkpoint()), "--model-seconds", "0.2", "--show"]
    monkeypatch.setattr(sys, "argv", command)
    assert here(BENCHMARKS / "live.py") == 0
    printed = capfd.readouterr().out
    assert re.search(rf"\| one \| \d+ \| {len(times)} \| 0.0 % \| \d+\.\d\d s \| \d+\.\d\d s \| ", printed), printed
    assert printed.splitlines()[-1].strip() == sample.text
