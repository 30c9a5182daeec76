"""The part of JSON schemas that is needed to read a text as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .scanner import is_value

Schema = Any  # a mapping, or true or false

_MOST_REFERENCES = 32  # a schema may refer to itself
_KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}
_SPELLED = {"true": "true", "false": "false", "null": "null", "none": "null"}  # models write Python's words, too


def resolved(schema: Schema, root: Schema) -> Mapping[str, Any]:
    """``schema``, or the schema in ``root`` to which its ``$ref`` refers; an empty schema if there is no such
    schema."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at(root, reference)
    return {}


def _at(root: Schema, reference: str) -> Schema:
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def types_of(schema: Schema, root: Schema, seen: set[int] | None = None) -> tuple[str, ...]:
    """The types that ``schema`` allows, in its order; empty if it names none. ``seen`` has the schemas that were
    visited on the way to this one. Each is visited once.
    """
    described = resolved(schema, root)
    seen = set() if seen is None else seen
    if id(described) in seen:
        return ()
    seen.add(id(described))
    if "type" in described:
        named = described["type"]
        return tuple(one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str))
    if "enum" in described or "const" in described:
        values = _list(described.get("enum", [described.get("const")]))
        return tuple(dict.fromkeys(_KINDS[type(value)] for value in values))
    several = [one for key in ("anyOf", "oneOf", "allOf") for one in _list(described.get(key))]
    return tuple(dict.fromkeys(kind for one in several for kind in types_of(one, root, seen)))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_json(text: str, types: tuple[str, ...]) -> str:
    """``text`` as JSON: a value of the first of ``types`` as which it can be read, or else a string."""
    bare = text.strip()
    spelled = _SPELLED.get(bare.lower(), bare)
    is_one = is_value(spelled)
    found = _KINDS[type(json.loads(spelled, parse_int=len))] if is_one else "string"  # numbers may have any length
    for kind in types:
        if kind == "string":
            break
        if is_one and found in (kind, "integer" if kind == "number" else kind):
            return spelled
    return json.dumps(text, ensure_ascii=False)
