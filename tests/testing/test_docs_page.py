"""The page for cache builders is true: its code runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import settings

from triolet.core.errors import InvariantViolation
from triolet.testing import conformance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapt_your_cache.md"
CHECK = re.compile(r"^check_encoder_cache\((lambda capacity: Adapter\((\w+)\(capacity\)\))\)\n", re.MULTILINE)
PRINTED = re.compile(r"InvariantViolation: (.*?)\n(Workload\(.*)\n", re.DOTALL)


@frozen
class Block:
    """One piece of code, the manager that it checks, and what that prints."""

    code: str
    make_cache: str
    manager: str
    printed: str


def blocks() -> list[Block]:
    found = re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return [_block(code, printed) for code, printed in found]


def _block(code: str, printed: str) -> Block:
    check = CHECK.search(code)
    make_cache, manager = check.groups() if check else ("", "")
    return Block(CHECK.sub("", code), make_cache, manager, printed)


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines; its checks are left out."""
    names: dict[str, object] = {}
    for block in blocks():
        exec(compile(block.code, str(PAGE), "exec"), names)
    return names


CHECKED = [block for block in blocks() if block.manager]
MENDED = [block.manager for block in CHECKED if not block.printed]


def test_the_page_ends_with_managers_that_pass():
    assert len(CHECKED) == 9
    assert [block.manager for block in CHECKED][-2:] == MENDED


@pytest.mark.parametrize("block", CHECKED, ids=lambda block: block.manager)
def test_every_check_of_the_page_comes_out_as_it_says(page, block):
    """Another release of Hypothesis may shrink to another workload, and meet another of the faults that the page has
    not mended yet: what it finds must be a promise that the page says is broken here or further down. The workload that
    the page shows is played again, and must print the same to the letter."""
    make_cache = eval(block.make_cache, page)
    chosen = settings(max_examples=400, print_blob=False)
    if not block.printed:
        conformance.check_encoder_cache(make_cache, settings=chosen)
        return
    told, workload = PRINTED.fullmatch(block.printed).groups()
    with pytest.raises(InvariantViolation) as shown:
        conformance.play(make_cache, eval(workload, page))
    assert str(shown.value) == told
    with pytest.raises(InvariantViolation) as found:
        conformance.check_encoder_cache(make_cache, settings=chosen)
    later = CHECKED[CHECKED.index(block) :]
    assert any(one.printed.startswith(f"InvariantViolation: {found.value.invariant}: ") for one in later)


def test_the_adapter_is_short():
    """As the page says of itself: less than 60 lines."""
    (adapter,) = [block.code for block in blocks() if "class Adapter" in block.code]
    assert len(adapter.splitlines()) < 60


def test_what_the_page_names_exists():
    text = PAGE.read_text(encoding="utf-8")
    root = PAGE.parents[1]
    named = re.findall(r"`((?:\w+/)+\w+\.\w+)`", text)
    assert named
    assert [name for name in named if not (root / name).exists()] == []
