"""The page on programs without an event loop is true: its code runs, and prints what it says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from triolet import SyncEngine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "without_a_loop.md"


def blocks() -> list[tuple[str, str]]:
    """Code, and what it prints."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)


def test_every_piece_of_code_prints_what_the_page_says() -> None:
    pieces = blocks()
    assert len(pieces) == 7
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda *values: printed.append(" ".join(map(str, values)) + "\n")}
    for code, said in pieces:
        printed.clear()
        exec(compile(code, str(PAGE), "exec"), names)
        assert "".join(printed) == said, code


def test_every_method_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    methods = {name for name, _ in inspect.getmembers(SyncEngine, callable) if not name.startswith("_")}
    assert {name for name in methods - {"from_parts"} if not re.search(rf"\b{name}\b", text)} == set()
