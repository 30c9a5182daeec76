"""Random JSON schemas over every keyword, texts that their grammars allow, and another validator's judgement."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from datetime import datetime
from decimal import Context, Decimal, InvalidOperation, setcontext
from typing import Any
from urllib.parse import urlsplit

import jsonschema
from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c", "ab", "é", 'q"', "x y", "\n"])
TEXTS = st.one_of(NAMES, st.sampled_from(["", "abc", "0", "1", "true", "2024-02-29", "😀", "a/b"]))
PATTERNS = st.sampled_from(
    [
        "a",
        "^a",
        "b$",
        "^[a-c]{1,3}$",
        "^(a|bc)*$",
        "^.$",
        "é",
        "^\\d+$",
        "^[^a]{2}$",
        "^a?b?c?$",
        "x|^y",
        "^\\w+$",
        "",
        "\\.",
    ]
)
NAME_PATTERNS = st.sampled_from(["^a", "^b", "c$", "^x-", ".", "^[ab]$", "^\\d$", ""])
FORMATS = ["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
OTHER_FORMATS = ["int64", "color", "regex", "idn-email"]
NUMBERS = st.one_of(
    st.integers(-12, 12),
    st.sampled_from(
        [0, 1, -1, 100, 255, 2**31, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 10**18, 10**21]
    ),
    st.sampled_from([0.5, -0.5, 1.5, 0.1, 0.25, 1e-3, 3.75, -2.25, 1.0, 100.0, 1e2, 1e-7, 1e21, 99.99]),
)
MULTIPLES = st.sampled_from([1, 2, 3, 7, 10, 0.5, 0.1, 0.01, 0.25, 0.3, 1.5, 100, 1000, 0.07, 65537, 65539, 0, 2**32])
SMALL = st.integers(0, 4)
CONSTANTS = st.recursive(
    st.one_of(st.none(), st.booleans(), TEXTS, NUMBERS),
    lambda below: st.one_of(st.lists(below, max_size=2), st.dictionaries(NAMES, below, max_size=2)),
    max_leaves=3,
)
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
NOTES = {
    "title": st.just("T"),
    "description": st.just("D"),
    "default": CONSTANTS,
    "examples": st.lists(CONSTANTS, max_size=1),
    "$comment": st.just("C"),
    "deprecated": st.booleans(),
    "readOnly": st.booleans(),
    "nullable": st.booleans(),
    "unknownWord": CONSTANTS,
    "contentEncoding": st.just("base64"),
}
SCALARS = {
    "const": CONSTANTS,
    "enum": st.lists(CONSTANTS, min_size=1, max_size=4),
    "minimum": NUMBERS,
    "maximum": NUMBERS,
    "exclusiveMinimum": NUMBERS,
    "exclusiveMaximum": NUMBERS,
    "multipleOf": MULTIPLES,
    "minLength": SMALL,
    "maxLength": SMALL,
    "pattern": PATTERNS,
    "format": st.sampled_from(FORMATS * 3 + OTHER_FORMATS),
    "minItems": SMALL,
    "maxItems": SMALL,
    "uniqueItems": st.booleans(),
    "minProperties": SMALL,
    "maxProperties": SMALL,
    "minContains": SMALL,
    "required": st.lists(NAMES, max_size=3, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=1),
}
OF_TYPE = {
    "null": [],
    "boolean": [],
    "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"],
    "string": ["minLength", "maxLength", "pattern", "format"],
    "array": ["items", "prefixItems", "minItems", "maxItems"],
    "object": ["properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"],
}
REFUSED = [
    "uniqueItems",
    "contains",
    "propertyNames",
    "not",
    "if",
    "dependentRequired",
    "unevaluatedProperties",
    "dependentSchemas",
]
APPLIED = ["anyOf", "oneOf", "allOf", "$ref", "const", "enum"]


def _below(name: str, schema: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    if name == "propertyNames":
        return st.one_of(schema, st.fixed_dictionaries({"enum": st.lists(NAMES, max_size=3)}))
    if name in ("items", "additionalProperties", "contains", "not", "if", "unevaluatedProperties"):
        return schema
    if name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        return st.lists(schema, min_size=1, max_size=3)
    if name in ("properties", "dependentSchemas"):
        return st.dictionaries(NAMES, schema, max_size=3)
    if name == "patternProperties":
        return st.dictionaries(NAME_PATTERNS, schema, max_size=2)
    return st.sampled_from(["#", "#/$defs/a", "#/$defs/b"])


@st.composite
def _schema(draw: st.DrawFn, below: st.SearchStrategy[Any]) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True))
    names = draw(
        st.lists(
            st.sampled_from([one for kind in kinds for one in OF_TYPE[kind]] or ["const"]), max_size=4, unique=True
        )
    )
    names += draw(st.lists(st.sampled_from([*APPLIED, *APPLIED, *NOTES, draw(st.sampled_from(REFUSED))]), max_size=1))
    members: list[tuple[str, Any]] = []
    how = draw(st.integers(0, 5))
    if how:
        members.append(("type", kinds[0] if how < 5 else kinds))
    members += [
        (name, draw((SCALARS | NOTES)[name] if name in SCALARS | NOTES else _below(name, below))) for name in names
    ]
    return dict(draw(st.permutations(members)))


LEAVES = st.one_of(
    st.booleans(),
    st.sampled_from([{"type": kind} for kind in TYPES]),
    st.builds(lambda value: {"const": value}, CONSTANTS),
)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """A schema in which each keyword may occur, also in places where it has no meaning."""
    depth = st.recursive(LEAVES, _schema, max_leaves=5)
    found = draw(_schema(depth))
    if "$ref" in json.dumps(found):
        found["$defs"] = {"a": draw(_schema(depth)), "b": draw(LEAVES)}
    draft = draw(
        st.sampled_from(
            [None] * 8 + ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
        )
    )
    return found if draft is None else {"$schema": draft, **found}


# -- the judge -------------------------------------------------------------------------------------------------------


def exact_json(text: str) -> Any:
    """Reads JSON without losing a digit; NaN is no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    def read(number: str) -> Decimal | float:
        try:
            return Decimal(number)
        except InvalidOperation:  # an exponent of 19 digits
            return float(number)

    return json.loads(text, parse_float=read, parse_constant=refuse)


FORMAT_CHECKER = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


def _checks(name: str) -> Callable[[Callable[[str], Any]], None]:
    def add(check: Callable[[str], Any]) -> None:
        FORMAT_CHECKER.checks(name, raises=ValueError)(lambda value: not isinstance(value, str) or bool(check(value)))

    return add


_checks("date-time")(lambda text: datetime.fromisoformat(text.upper()) and "T" in text.upper())
_checks("time")(lambda text: datetime.fromisoformat(f"2024-01-01T{text.upper()}").tzinfo is not None)
_checks("hostname")(
    lambda text: (
        len(text) <= 253 and all(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", one) for one in text.split("."))
    )
)
_checks("duration")(
    lambda text: re.fullmatch(r"P(?!$)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?|P\d+W", text)
)
_checks("uri")(lambda text: urlsplit(text).scheme and not re.search(r'[\s<>"{}|\\^`]', text))


def judge(schema: Any) -> Any:
    """Returns jsonschema's validator for ``schema``, with exact numbers and formats."""
    base = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = base.TYPE_CHECKER.redefine(
        "integer",
        lambda _, value: (
            not isinstance(value, bool) and isinstance(value, int | Decimal) and value == value.__floor__()
        ),
    )
    setcontext(Context(prec=2_000, Emax=10**9, Emin=-(10**9)))  # remainders of long numbers
    return jsonschema.validators.extend(base, type_checker=checker)(schema, format_checker=FORMAT_CHECKER)


# -- texts -----------------------------------------------------------------------------------------------------------


def walk(
    allowed: Callable[[list[int]], set[int] | None], ends: set[int], seed: int, most: int = 220
) -> list[int] | None:
    """Returns the tokens of a random text that a grammar allows, or ``None`` if it does not end in time. ``allowed``:
    the tokens that may follow others."""
    chance, tokens = random.Random(seed), list[int]()
    eager = chance.choice((0.2, 0.8))
    while len(tokens) < most:
        found = allowed(tokens)
        if not found:
            return None
        rest = sorted(found - ends)
        if found & ends and (not rest or chance.random() < eager):
            return tokens
        closing = [one for one in rest if one in b'"}]']
        likely = closing if closing and chance.random() < eager + len(tokens) / most else rest
        plain = [one for one in likely if 32 < one < 127]
        tokens.append(chance.choice(plain if plain and chance.random() < 0.8 else likely))
    return None


def bits(mask: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1}
