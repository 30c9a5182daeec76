"""The page at ``/docs``: the OpenAPI document as one file of HTML without scripts. It names no model, so that everybody
may read it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from .page import HtmlPage, policy_of

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: auto; padding: 1rem }
summary { padding: .3rem 0 } table { border-collapse: collapse; width: 100%; font-size: 90% }
td { border-top: 1px solid #8884; padding: .2rem .6rem .2rem 0; vertical-align: top }
b, td:first-child { font-family: monospace }
"""
_BOUNDS = ("default", "minimum", "maximum", "exclusiveMinimum", "maxLength", "maxItems")


def docs_page(document: Mapping[str, Any]) -> HtmlPage:
    """Makes the page of an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>']
    parts += [f'<h1>{title}</h1><p>From <a href="/openapi.json">/openapi.json</a>. /v1/realtime is a WebSocket.</p>']
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            head = f"<summary><b>{method.upper()} {escape(path)}</b> {escape(one['summary'])}</summary>"
            told = [_contents("body", one.get("requestBody", {})), _contents("answer", one["responses"]["200"])]
            told.append(_table((status, "", escape(each["description"])) for status, each in one["responses"].items()))
            parts.append(f"<details>{head}{''.join(told)}</details>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3>{_members(schema)}')
    return HtmlPage("".join(parts), policy_of(_STYLE))


def _contents(what: str, told: Mapping[str, Any]) -> str:
    """The kinds of a body or an answer, each with its schema; a form with its members."""
    schemas = {
        kind: one.get("schema") or one.get("x-event-schema", {}) for kind, one in told.get("content", {}).items()
    }
    kinds = _table((f"{what} {kind}", _type(schema), "") for kind, schema in schemas.items())
    return kinds + "".join(_members(schema) for schema in schemas.values() if "properties" in schema)


def _members(schema: Mapping[str, Any]) -> str:
    """The members of an object, with their types, defaults and bounds. Needed ones have a star."""
    needed, rows = schema.get("required", ()), []
    for name, one in schema.get("properties", {"": schema}).items():
        bounds = {
            key: each[key] for each in (one, *one.get("anyOf", ())) for key in _BOUNDS if each.get(key) is not None
        }
        told = f"{one.get('description', '')} {json.dumps(bounds)[1:-1]}"
        rows.append((f"{escape(name)}{' *' * (name in needed)}", _type(one), escape(told)))
    return _table(rows)


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(map(_type, schema.get("anyOf") or schema["oneOf"]))
    if choices := schema.get("enum") or [schema[name] for name in ("const",) if name in schema]:
        return escape(" or ".join(map(json.dumps, choices)))
    return f"list of {_type(schema['items'])}" if "items" in schema else escape(str(schema.get("type", "anything")))


def _table(rows: Iterable[Iterable[str]]) -> str:
    return f"<table>{''.join('<tr><td>' + '<td>'.join(row) for row in rows)}</table>"
