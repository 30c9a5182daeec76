"""The quick start is true: its programs run as they stand, and print what the page says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from triolet.testing import make_checkpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quick_start.md"
MODELS = {"Qwen/Qwen3-0.6B": "qwen3", "BAAI/bge-small-en-v1.5": "bert"}  # tiny ones in their places


def programs() -> list[tuple[str, str]]:
    """Programs, and what they print, where the page says it."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)


def test_the_page_has_a_program_of_each_kind() -> None:
    calls = ("transcribe", "stream_transcription", "stream", "embed", "open_nursery", "TrioletError")
    code = "".join(code for code, _ in programs())
    assert [call for call in calls if call not in code] == []


@pytest.mark.parametrize(("code", "expected"), programs())
def test_a_program_prints_what_the_page_says(
    code: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a real model answers the page does not say."""
    for model, family in MODELS.items():
        if model in code:
            code = code.replace(f'"{model}"', repr(str(make_checkpoint(family, tmp_path / family))))
    exec(compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert printed == expected if expected else printed.strip()


def test_on_asyncio_nothing_changes_but_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, expected = programs()[0]
    assert code.endswith("\ntrio.run(main)\n")
    exec(compile(code.replace("trio.run(main)", "asyncio.run(main())"), str(PAGE), "exec"), {"asyncio": asyncio})
    assert capsys.readouterr().out == expected
