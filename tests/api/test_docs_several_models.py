"""The page on several models is true: its code runs, and prints or logs what it says."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "several_models.md"


def blocks() -> list[tuple[str, str]]:
    """Code, and what it prints or logs."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)


async def test_every_piece_of_code_says_what_the_page_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="triolet")
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # pytest's handlers are the ones that listen
    (setup, _), *pieces = blocks()
    assert len(pieces) == 6
    said: list[str] = []
    names: dict[str, Any] = {"print": lambda *values: said.append(" ".join(map(str, values)))}
    exec(compile(setup, str(PAGE), "exec"), names)
    async with names["engines"]:
        for code, expected in pieces:
            said.clear()
            caplog.clear()
            running = eval(compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.iscoroutine(running):
                await running
            records = [
                record for record in caplog.records if record.name != "triolet"
            ]  # that of OpenMP, in a test's process
            logged = [f"{record.levelname} {record.name}: {record.getMessage()}" for record in records]
            lines = said or (logged if expected else [])
            assert len(lines) == len(expected.splitlines()), lines
            for line, pattern in zip(lines, expected.splitlines(), strict=True):
                assert re.fullmatch(re.escape(pattern).replace(r"\.\.\.", ".*"), line)


async def test_the_simulated_engines_of_the_page_work(autojump_clock: object) -> None:
    *_, (code, _) = blocks()
    names: dict[str, Any] = {}
    exec(compile("from triolet import Engines, ModelSpec\n" + code, str(PAGE), "exec"), names)
    async with names["simulated"] as engines:
        for name in engines.models:
            async with engines.use(name):
                pass
        assert sum(found.bytes for found in engines.statistics().values()) > 0
