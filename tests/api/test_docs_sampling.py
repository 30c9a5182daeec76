"""The page on sampling is true: its code runs, and prints what it says."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import attrs

from triolet import Engine, EngineConfig, SamplingParams, demo
from triolet.core.request import STRUCTURES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"


def blocks() -> list[tuple[str, str]]:
    """Code, and what it prints."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)


async def test_every_piece_of_code_prints_what_the_page_says() -> None:
    (setup, _), *pieces = blocks()
    assert len(pieces) == 8
    printed: list[str] = []

    def note(*values: object) -> None:
        printed.append(" ".join(map(str, values)) + "\n")

    names: dict[str, Any] = {"print": note}
    exec(compile(setup, str(PAGE), "exec"), names)
    config = EngineConfig(device="cpu", dtype="float32", threads=1, verify=True)
    async with Engine(demo.checkpoint(), config=config) as names["engine"]:
        for code, expected in pieces:
            printed.clear()
            running = eval(compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.iscoroutine(running):
                await running
            assert "".join(printed) == expected, code


def test_every_parameter_and_kind_is_named() -> None:
    text = PAGE.read_text(encoding="utf-8")
    names = {field.name for field in attrs.fields(SamplingParams)} | set(STRUCTURES)
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []
