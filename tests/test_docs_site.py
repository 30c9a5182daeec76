"""What `make docs` builds is complete: every page is in the navigation, and every public name in the reference."""

from __future__ import annotations

import re
from pathlib import Path

import triolet
import triolet_kit
import triolet_ray
import triolet_testing
from triolet import web
from triolet.core import errors, events
from triolet_testing import trio_tools

ROOT = Path(__file__).resolve().parents[1]
SAME = {"InvariantViolation", "Speculation"}  # of triolet_testing: the reference has them as triolet's


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- [^#\n]+: (\S+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)


def referenced() -> list[str]:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text(encoding="utf-8") for page in pages), re.MULTILINE)


def test_every_page_is_in_the_navigation_once_and_nothing_else_is():
    """A page that is new: one line of `nav` in mkdocs.yml."""
    pages = {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "demo").glob("*.md"),
    }
    assert {str(page.relative_to(ROOT)) for page in pages} - set(navigation()) == set()
    assert sorted(navigation()) == sorted(str(page.relative_to(ROOT)) for page in pages)


def test_the_sidebar_has_25_lines_and_one_fold():
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].splitlines()
    shown = [line for line in lines if line.startswith(("  - ", "      - ")) and (line.endswith((".md", "More:")))]
    assert len(shown) == 25
    assert [line.strip() for line in shown if line.endswith(":")] == ["- More:"]


def test_the_search_drops_words_without_a_meaning_and_finds_how_to_cancel_a_request():
    """On the page of the engine: a title that has all words of a query comes first."""
    (separator,) = re.findall(r"separator: '(.+)'$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert list(filter(None, re.split(separator, "How do I cancel a request"))) == ["cancel", "request"]
    assert list(filter(None, re.split(separator, "An engine.stream 1.5 at_once"))) == [
        "engine",
        "stream",
        "1.5",
        "at",
        "once",
    ]
    assert "\n## Cancel a request\n" in (ROOT / "docs" / "reference" / "engine.md").read_text(encoding="utf-8")


def test_make_docs_copies_every_page():
    """A folder that is new: a pattern of `PAGES` in the Makefile."""
    copied = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nPAGES = ")[2].partition("\n\n")[0]
    patterns = re.findall(r"[\w./*-]+", copied)
    assert not [page for page in navigation() if not any(Path(page).match(one) for one in patterns)]


def test_every_public_name_is_in_the_reference_once():
    """A name that is new: a line ``::: triolet.Name`` on its page in docs/reference/."""
    public = {f"triolet.{name}" for name in triolet.__all__}
    public |= {f"triolet.web.{name}" for name in web.__all__}
    public |= {f"triolet_testing.{name}" for name in triolet_testing.__all__ if name not in SAME}
    public |= {f"triolet_testing.trio_tools.{name}" for name in trio_tools.__all__}
    public |= {f"triolet_kit.{name}" for name in triolet_kit.__all__}
    public |= {f"triolet_ray.{name}" for name in triolet_ray.__all__}
    found = [name for name in referenced() if not name.startswith("triolet.core.")]
    assert public - set(found) == set()
    assert sorted(found) == sorted(public)


def test_every_error_and_event_is_in_the_reference():
    own = {f"triolet.{name}" for name, value in vars(errors).items() if isinstance(value, type)}
    own |= {f"triolet.core.events.{name}" for name, value in vars(events).items() if isinstance(value, type)}
    assert own - {"triolet.core.events.Event"} <= set(referenced())


def test_every_example_is_in_the_table_of_examples():
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", table, re.MULTILINE)
    assert sorted(found) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
