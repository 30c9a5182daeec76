"""The examples and the README's example run as a user would run them: in a process of their own, from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from triolet import demo

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300


@pytest.fixture
def run(tmp_path):
    """Runs python with some arguments and returns the lines of standard output and of standard error."""

    def run(*arguments: str | Path) -> tuple[list[str], list[str]]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            capture_output=True,
            encoding="utf-8",
            timeout=SECONDS,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # threads that compete for a busy machine's cores spin
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), done.stderr.splitlines()

    return run


def test_transcribe_many_gives_a_line_for_each_sample(run):
    lines, errors = run(ROOT / "examples" / "transcribe_many.py")
    assert not errors
    found = [re.fullmatch(r"(\S+) \[([a-z]{2}), (\d+\.\d) s\]: .*", line) for line in lines]
    assert all(found), lines
    assert sorted((match[1], match[3]) for match in found) == sorted(
        (sample.path.name, f"{sample.duration:.1f}") for sample in demo.samples()
    )


def test_transcribe_many_goes_on_after_a_file_that_fails(run):
    good = demo.samples()[0].path
    lines, errors = run(ROOT / "examples" / "transcribe_many.py", ROOT / "README.md", good)
    assert [line.split(" ")[0] for line in lines] == [good.name]
    assert len(errors) == 1
    assert errors[0].startswith("README.md: ")


def test_stream_tokens_writes_the_text_and_what_was_held(run):
    lines, errors = run(ROOT / "examples" / "stream_tokens.py")
    assert not errors
    *text, summary = lines
    assert "".join(text).strip()
    counts = re.fullmatch(r"(\d+) tokens; the engine held (\d+\.\d) MiB on \S+", summary)
    assert counts, summary
    assert int(counts[1]) > 1
    assert float(counts[2]) > 1


def test_the_example_of_the_readme_runs(run):
    """One line for each sample: its language, then its text."""
    (example,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    lines, errors = run("-c", example)
    assert not errors
    assert len(lines) == len(demo.samples())
    assert all(re.match(r"[a-z]{2} ", line) for line in lines), lines
