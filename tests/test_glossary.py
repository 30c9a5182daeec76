"""The words of `docs/glossary.md` are those of the code."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

from .test_docs import code_spans, is_path, read

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    *("core", "models", "actors", "api", "server", "src"),
    *("packages/ray/triolet_ray", "packages/testing/triolet_testing"),
)
FINE = {
    ("drawn", "api/command_line"),  # of a picture in the terminal
    ("asks", "packages/testing/triolet_testing/trio_tools/hooks.py"),  # of the system, by trio's I/O manager
}


@cache
def rows() -> tuple[tuple[str, ...], ...]:
    """The cells of each term: the term, its meaning, where it lives, and the words not to be used."""
    found = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.*)\|$", read("docs/glossary.md"), re.MULTILINE)
    return tuple(tuple(map(str.strip, cells)) for cells in found if cells[0] != "term")


def parts(name: str) -> list[str]:
    """`_InFlightStep` as In, Flight, Step; `block_tables` as block, tables."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)


def occurs(word: str, name: str) -> bool:
    """Whether ``word``, or words joined by underscores, are parts of ``name``. With a capital it is one of a type."""
    wanted, had = parts(word), parts(name)
    if word.islower():
        had = [part.lower() for part in had]
    return any(had[start : start + len(wanted)] == wanted for start in range(len(had)))


@cache
def names() -> dict[str, set[str]]:
    """Every name in the code, those of modules too, and the files where it stands."""
    found: dict[str, set[str]] = {}
    for path in [path for room in PRODUCT for path in sorted((ROOT / room).rglob("*.py"))]:
        place = str(path.relative_to(ROOT))
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        here = {token.string for token in tokens if token.type == tokenize.NAME}
        for name in here | set(Path(place).with_suffix("").parts):
            found.setdefault(name, set()).add(place)
    return found


def test_the_glossary_has_terms_and_each_has_its_place():
    """`tests/test_docs.py` finds what it names."""
    assert len({term for term, *_ in rows()}) == len(rows()) >= 40
    assert [term for term, _, lives_in, _ in rows() if not any(map(is_path, code_spans(lives_in)))] == []


@pytest.mark.parametrize("word", sorted({word for row in rows() for word in code_spans(row[-1])}))
def test_a_word_that_the_glossary_rules_out_is_part_of_no_name(word):
    found = [
        f"{place}: {name}"
        for name, places in names().items()
        if occurs(word, name)
        for place in places
        if not any(word == known and place.startswith(fine) for known, fine in FINE)
    ]
    assert found == []


def test_the_search_finds_what_is_there():
    """The check above would pass on an empty list."""
    assert occurs("guess", "_guess_one")
    assert occurs("block_table", "the_block_table_of")
    assert occurs("Rest", "RestMachine")
    assert not occurs("Rest", "rest")
    assert not occurs("pen", "open_pending")
    assert {"StepPlan", "page_table", "Sampler", "acquirer"} <= names().keys()
