"""The glossary is true, and its words are those of the code: what `docs/glossary.md` says is held here."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest
from attrs import frozen

from .test_docs import code_spans, definitions, is_path, read

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "core",
    "models",
    "actors",
    "api",
    "server",
    "src",
    "packages/ray/triolet_ray",
    "packages/testing/triolet_testing",
)
FINE = {
    ("drawn", "api/command_line"),  # of a picture in the terminal
    ("asks", "packages/testing/triolet_testing/trio_tools/hooks.py"),  # of the system, by trio's I/O manager
    ("block_table", "packages/kit/adapters/transformers_scheduler.py"),  # its name in transformers
}


@frozen
class Row:
    """One term of the glossary."""

    term: str
    meaning: str
    lives_in: str
    words: str  # not to be used

    @property
    def checked(self) -> set[str]:
        """The words that are looked for in names."""
        return set(code_spans(self.words))


@cache
def rows() -> tuple[Row, ...]:
    found = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.*)\|$", read("docs/glossary.md"), re.MULTILINE)
    return tuple(Row(*map(str.strip, cells)) for cells in found if cells[0] != "term")


def not_words() -> set[str]:
    return {word for row in rows() for word in row.checked}


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
def sources() -> tuple[tuple[str, tuple[tokenize.TokenInfo, ...]], ...]:
    """Every file of the product: its path, and its tokens."""
    paths = [path for room in PRODUCT for path in sorted((ROOT / room).rglob("*.py"))]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    read_all = (tuple(tokenize.generate_tokens(io.StringIO(text).readline)) for text in texts)
    return tuple(zip([str(path.relative_to(ROOT)) for path in paths], read_all, strict=True))


@cache
def names() -> dict[str, tuple[str, ...]]:
    """Every name in the code, and the lines (``path:line``) where it stands. Names of modules too."""
    found: dict[str, list[str]] = {}
    for path, tokens in sources():
        for part in Path(path).with_suffix("").parts:
            found.setdefault(part, []).append(path)
        for token in tokens:
            if token.type == tokenize.NAME:
                found.setdefault(token.string, []).append(f"{path}:{token.start[0]}")
    return {name: tuple(dict.fromkeys(places)) for name, places in found.items()}


def is_fine(word: str, path: str) -> bool:
    return any(word == known and path.startswith(place) for known, place in FINE)


def test_the_glossary_has_terms_and_each_has_its_place():
    assert len(rows()) >= 40
    assert len({row.term for row in rows()}) == len(rows())
    assert [row.term for row in rows() if not any(map(is_path, code_spans(row.lives_in)))] == []


def test_every_path_of_the_glossary_exists():
    paths = {span for row in rows() for span in code_spans(row.lives_in) if is_path(span)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_name_of_the_glossary_is_defined_in_the_file_beside_it():
    """`Class`, `Class.member` or `function`, followed by "in" and the path."""
    pairs = {pair for row in rows() for pair in re.findall(r"`([\w.]+)` in `([\w/.]+)`", row.lives_in)}
    named = {span for row in rows() for span in code_spans(row.lives_in) if not is_path(span)}
    assert named == {name for name, _ in pairs}
    assert [pair for pair in sorted(pairs) if pair[0] not in definitions(pair[1])] == []


@pytest.mark.parametrize("word", sorted(not_words()))
def test_a_word_that_the_glossary_rules_out_is_part_of_no_name(word):
    found = [
        f"{place}: {name}"
        for name, places in names().items()
        if occurs(word, name)
        for place in places
        if not is_fine(word, place)
    ]
    assert found == []


def test_the_search_finds_what_is_there():
    """The checks above would pass on an empty list."""
    assert occurs("guess", "_guess_one")
    assert occurs("block_table", "the_block_table_of")
    assert occurs("Rest", "RestMachine")
    assert not occurs("Rest", "rest")
    assert not occurs("pen", "open_pending")
    assert {"StepPlan", "page_table", "Sampler", "acquirer"} <= names().keys()
    assert len(sources()) > 100
