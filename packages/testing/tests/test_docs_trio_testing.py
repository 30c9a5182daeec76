"""The page for any trio program is true: its code runs, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from triolet_testing.trio_tools import PROMISES, TrioFault

PAGE = Path(__file__).resolve().parents[3] / "docs" / "trio_testing.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_prints_what_the_page_says():
    """To the letter."""
    names: dict[str, Any] = {}
    texts = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for code, told in texts:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "program.py", "exec"), names)
        assert printed.getvalue() == told
        if "test_my_store" in names:
            names.pop("test_my_store")()
    assert len([told for _, told in texts if told]) == 5


def test_the_page_has_every_promise_and_every_fault():
    rows = re.findall(r"^\| `?(.*?)`? \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*PROMISES, *(fault.name for fault in TrioFault)} <= set(rows)
