"""The page on what an engine tells is true: its code runs, prints and logs what it says, and every event is named."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from triolet import demo
from triolet.core import events
from triolet.core.event_lines import read_events

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"


def blocks() -> list[tuple[str, str]]:
    """Code, and what it prints or logs."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)


async def test_every_piece_of_code_says_what_the_page_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger="triolet.engine")  # the others depend on what ran before
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # pytest's handlers are the ones that listen
    monkeypatch.chdir(tmp_path)
    pieces = blocks()
    assert len(pieces) == 4
    said: list[str] = []
    names: dict[str, Any] = {"print": lambda *values: said.append(" ".join(map(str, values)))}
    for code, expected in pieces:
        said.clear()
        caplog.clear()
        running = eval(compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.iscoroutine(running):
            await running
        logged = [f"{record.levelname} {record.name}: {record.getMessage()}" for record in caplog.records]
        lines = said or (logged if expected else [])
        assert len(lines) == len(expected.splitlines()), lines
        for line, pattern in zip(lines, expected.splitlines(), strict=True):
            assert re.fullmatch(re.escape(pattern).replace(r"\.\.\.", ".*"), line)
    assert demo.samples()
    with (tmp_path / "events.jsonl").open() as log:
        assert any(isinstance(event, events.RequestEnded) for event in read_events(log))


def test_every_event_is_named() -> None:
    kinds = {name for name, value in vars(events).items() if isinstance(value, type) and not value.__subclasses__()}
    kinds = {name for name in kinds if issubclass(getattr(events, name), events.Event)}
    text = PAGE.read_text(encoding="utf-8")
    assert kinds
    assert {name for name in kinds if f"`{name}`" not in text} == set()
