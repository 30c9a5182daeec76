"""The scripts in `benchmarks/` run, each at its smallest size. Their figures are not asserted here."""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
import torch

from triolet import demo

from .checkpoints.families import make_checkpoint

pytestmark = pytest.mark.real_time

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PROGRAMS = ("flite", "festival", "sox", "Rscript")
OF_THE_PROCESS = ("memory.py speech", "memory.py images", "memory.py engines", "memory.py exits", "server.py")
SECONDS = 600  # only a fault takes so long; less than `faulthandler_timeout`, which would end all tests
CLAIM = r"(?:holds|FAILS): "  # of a size or of a time, which says little at this size

PRINTED = {
    "verify.py --pairs 2": [r"in 2 pairs: -?\d+ us a step, quartiles "],
    "load.py": [CLAIM + r"8 streams run, 0 wait: a step takes \d", CLAIM + "256 streams run, 1000 wait"],
    "memory.py exits --count 1": [
        r"holds: idle: nothing is left \d+ ms after the end",
        CLAIM + "step: median ",
        "holds: encode: nothing is left ",
    ],
    "memory.py engines --count 6": [CLAIM + "grown by ", CLAIM + r"tensor bytes, threads, descriptors left: \[0, "],
    "memory.py speech --count 3": [
        "round 3: ",
        CLAIM + "growth a round: ",
        r"holds: the books and the walk over live tensors differ by \[0\] bytes",
        "holds: bytes of tensors left after the block: 0",
    ],
    "memory.py images --count 3": [
        r"holds: the books and the walk over live tensors differ by \[0\] bytes",
        "holds: bytes of tensors left after the block: 0",
        "holds: encoder outputs evicted: ",
    ],
    "memory.py hours --count 1": ["holds: the recording was read to its end", CLAIM + "grown by "],
    "adapters.py --hidden 256 --layers 1 --rank 4 --tokens 4 --rounds 1": [
        CLAIM + r"8 adapters in a batch of 8 rows: \d+\.\d\d times as long as without"
    ],
    "draft_heads.py --shape tiny --rounds 1 --tokens 12": [
        r"tiny, 12 tokens: without [\d.]+ s, with drafts [\d.]+ s, "
    ],
    "draft_heads.py --shape tiny-gemma --rounds 1 --tokens 12": [
        r"tiny-gemma, 12 tokens: without [\d.]+ s, with drafts [\d.]+ s, "
    ],
    "shapes.py tiny --rounds 1 --prompt 20": [
        r"tiny, 1 row: the library \d+\.\d+ ms, transformers \d+\.\d+ ms, ",
        r"tiny, 8 rows: ",
        r"tiny, prompt of 20: ",
    ],
    "fleet.py --replicas 4": [
        r"\| steady \| by load \| \d+ \| ",
        r"\| high load \| by content \| ",
        CLAIM + "steady: ",
    ],
    "fleet.py --replicas 1 --only sweeps": [r"\| 64 ingresses \| ", r"\| catalogue of 200 x all caches \| "],
    "recordings.py spoken --only empty --minutes 0.1": ["empty: 6.0 seconds, 0 words"],
    "server.py streams --count 5": ["5 streams of 100 tokens in ", "holds: 5 of 5 streams came to their end"],
    "server.py sigterm --count 1": ["holds: 1 of 1 times each request was answered"],
    "server.py hostile --count 1": [
        "round 1: ",
        "holds: no answer was 500 or above",
        "holds: every good request was answered",
    ],
    "files.py --files 3": [
        r"\d files of formats that do not say",
        CLAIM + "[0-3] of 3 files differ",
        CLAIM + "[0-3] of 3 files lose",
    ],
    "server.py storm --count 16": [
        "16 clients, ",
        "holds: /health was always answered with 200",
        CLAIM + "the slowest /health took ",
        CLAIM + "the size grew by ",
        CLAIM + "0 bytes were held ",
    ],
}
COMMANDS = [
    pytest.param(command, marks=[pytest.mark.thorough] * command.startswith((*OF_THE_PROCESS, "load.py", "files.py")))
    for command in PRINTED
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_ends_with_its_figures_and_its_claims(command, tmp_path, monkeypatch, capfd):
    """With 0, or with 1 where a claim fails that needs the full size."""
    name, *arguments = command.split(" ")
    if name == "files.py" and shutil.which("ffmpeg") is None:
        pytest.skip("the files are made and judged by ffmpeg, which is not here")
    monkeypatch.chdir(tmp_path)
    if command.startswith(OF_THE_PROCESS):
        status, printed = in_a_process_of_its_own(name, arguments)
    else:
        status, printed = here(monkeypatch, name, *arguments), capfd.readouterr().out
    assert status == (1 if re.search("^FAILS: ", printed, re.MULTILINE) else 0)
    lines = iter(printed.splitlines())
    for expected in PRINTED[command]:  # in this order
        assert any(re.match(expected, line) for line in lines), f"{expected!r} is missing:\n{printed}"


def test_drafts_answers_each_prompt_with_and_without_draft_tokens(tmp_path, monkeypatch, capfd):
    folder = make_checkpoint("llama", tmp_path)
    here(monkeypatch, "drafts.py", str(folder), "--rounds", "1", "--tokens", "4")
    assert re.search(CLAIM + r"10 ordinary chats take \d.*\n" + CLAIM + "3 texts that repeat", capfd.readouterr().out)


def test_speakers_measures_the_recordings_of_a_folder(said, monkeypatch, capfd):
    pytest.importorskip("pyannote.metrics", reason="a benchmark of speakers needs it; nothing else does")
    for path in said.glob("*.json"):
        path.write_text(json.dumps([[0.3, 3.9, "Ada"]] if path.stem == "en-command" else []))
    status = here(monkeypatch, "speakers.py", "--folder", str(said), "--hours", "0")
    printed = capfd.readouterr().out
    assert re.search(
        r"holds: en-command: error \d+\.\d %, 1 voices of 1\n" + CLAIM + "en-command: 0 minutes in ", printed
    )
    assert status == (1 if "FAILS" in printed else 0)


def in_a_process_of_its_own(name: str, arguments: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name, *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=SECONDS,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # threads that compete for a busy machine's cores spin
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def here(monkeypatch, name: str, *arguments: str) -> int:
    """Runs a script without another import of torch, and puts back what it changes of the process."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / name), *arguments])
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "0")  # so that no script replaces this process
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    before = torch.get_num_threads()
    try:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        torch.set_num_threads(before)
        gc.enable()
    return 0


@pytest.fixture
def said(tmp_path):
    """A folder with a recording that the demo checkpoint understands, and one in which nobody speaks."""
    for sample in demo.samples():
        if sample.path.stem in ("en-command", "silence"):
            samples, rate = soundfile.read(sample.path)
            soundfile.write(tmp_path / f"{sample.path.stem}.wav", samples, rate)
            words = [{"word": word, "start": 0.5, "end": 1.0} for word in sample.text.split()]
            (tmp_path / f"{sample.path.stem}.json").write_text(json.dumps({"words": words}))
            (tmp_path / f"{sample.path.stem}.txt").write_text(sample.text)
    return tmp_path


def test_live_plays_a_recording_on_virtual_time(said, monkeypatch, capfd):
    options = ("--model-seconds", "0.2", "--only", "en-command")
    assert here(monkeypatch, "live.py", str(said), str(demo.checkpoint()), *options) == 0
    assert re.search(r"en-command: 10 words, WER 0.0%; stable after \d+\.\d\d s, p90 ", capfd.readouterr().out)


def test_speech_counts_wrong_words_and_words_where_nobody_speaks(said, monkeypatch, capfd):
    (said / "en-command.txt").write_text("Please set the temperature in the garden to eighteen degrees.")
    assert here(monkeypatch, "speech.py", str(said), str(demo.checkpoint()), "--show") == 0
    printed = capfd.readouterr().out
    assert re.search(r"en-command: triolet WER 10.00% of 10 words", printed)
    assert re.search(r"garden.*\n.*cellar", printed)
    assert "holds: silence: triolet hears 0 words" in printed
    (said / "silence.wav").write_bytes((said / "en-command.wav").read_bytes())
    assert here(monkeypatch, "speech.py", str(said), str(demo.checkpoint()), "--only", "silence") == 1


@pytest.mark.parametrize(
    ("heard", "right", "errors"),
    [
        ("We asked Ardwick about Brenora.", [True, True], 0),
        ("We asked art wick about Brenora.", [False, True], 0),
        ("He asked Ardwick about it.", [True, False], 1),
        ("We asked Ardwick a lot about Brenora and us.", [True, True], 4),
        ("We Ardwick Brenora.", [True, True], 2),
    ],
)
def test_errors_in_the_place_of_a_name_are_none_of_other_words(heard, right, errors, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    judged = runpy.run_path(str(BENCHMARKS / "hotwords.py"))["judged"]
    found, others = judged("We asked Ardwick about Brenora.", heard, {"ardwick", "brenora"})
    assert (found.tolist(), others) == (right, errors)


@pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=f"speaks by {', '.join(PROGRAMS)}; see recordings.py")
def test_the_same_seed_speaks_the_same_recording_and_words_lie_in_it_in_order(tmp_path, monkeypatch):
    for name in ("first", "again"):
        assert here(monkeypatch, "recordings.py", str(tmp_path / name), "--only", "dialogue", "--minutes", "0.1") == 0
    files = [sorted((tmp_path / name).iterdir()) for name in ("first", "again")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    table = json.loads((tmp_path / "first" / "dialogue.json").read_text(encoding="utf-8"))
    assert " ".join(word["word"] for word in table["words"]) == files[0][1].read_text(encoding="utf-8").strip()
    times = [time for word in table["words"] for time in (word["start"], word["end"])]
    assert 0 < times[0] < times[-1] < table["seconds"] == soundfile.info(files[0][2]).duration
    assert times == sorted(times)
