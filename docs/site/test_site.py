"""The site as it was built: `make docs` runs this on its result."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(__file__).resolve().parents[2] / "site"
PAGES = sorted(SITE.rglob("*.html"))
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("object", "data")}
NAMED = {"canonical", "next", "prev"}  # of a link in the head: says where, and loads nothing


class Page(HTMLParser):
    """What a page links, what it loads, and the places on it that can be linked."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get("rel") not in NAMED:
            self.loads += [found[name] for kind, name in LOADED if kind == tag and name in found]


@cache
def page(path: Path) -> Page:
    return Page(path)


def leads_somewhere(link: str, origin: Path) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (origin.parent / unquote(parts.path)).resolve() if parts.path else origin
    return target.is_file() and (target.suffix != ".html" or unquote(parts.fragment) in page(target).places)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(SITE)))
def test_every_link_leads_to_a_file_and_a_place_in_it(path: Path) -> None:
    links = page(path).links + page(path).loads
    assert links
    if path.name != "404.html":  # its links begin at the root of the host
        assert [link for link in links if not leads_somewhere(link, path)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(SITE)))
def test_a_page_loads_nothing_from_another_host(path: Path) -> None:
    assert [load for load in page(path).loads if urlsplit(load).netloc] == []


def test_a_style_sheet_loads_nothing_from_another_host() -> None:
    sheets = list(SITE.rglob("*.css"))
    assert sheets
    found = [url for sheet in sheets for url in re.findall(r"""(?:url\(|@import )["']?(\w+:)?//""", sheet.read_text())]
    assert found == []


def test_the_search_needs_no_server() -> None:
    """Its index is a script, and the worker has a stand-in for pages that are read from a folder."""
    assert (SITE / "search.js").is_file() or (SITE / "search" / "search_index.js").is_file()
    assert [path for path in PAGES if not any("iframe-worker" in load for load in page(path).loads)] == []
