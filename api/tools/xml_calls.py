"""Calls that are written as tags: ``<function=name>``, and for each argument ``<parameter=key>`` with plain text
(Qwen3-Coder).

The schema of a tool says how the text of an argument is read as a value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import regex
from attrs import frozen

from ...core.errors import InvalidRequest
from ...core.tools import Tool
from .syntax import BLANKS, CallReading, Syntax, ToolCall, Tools, Write, choice, closing, json_rule, left_out
from .text import Match, NoCall, Pattern, Text, is_value

# -- values of a schema ------------------------------------------------------------------------------------------------


Schema = Any  # a mapping, or true or false

_MOST_REFERENCES = 32  # a schema may refer to itself
_MOST_REFERENCE = 1_000  # characters
_MOST_VISITED = 1_000  # schemas, and as many parts of each: others are left out
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
    found = root if len(reference) <= _MOST_REFERENCE else None
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def types_of(schema: Schema, root: Schema, seen: set[int] | None = None) -> tuple[str, ...]:
    """The types that ``schema`` allows, in its order; empty if it names none. ``seen`` has the schemas that were
    visited on the way to this one. Each is visited once.
    """
    described = resolved(schema, root)
    seen = set() if seen is None else seen
    if id(described) in seen or len(seen) >= _MOST_VISITED:
        return ()
    seen.add(id(described))
    if "type" in described:
        named = described["type"]
        return tuple(one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str))
    if "enum" in described or "const" in described:
        values = _list(described.get("enum", [described.get("const")]))
        return tuple(dict.fromkeys(_KINDS[type(value)] for value in values))
    several = [one for key in _UNIONS for one in _list(described.get(key))[:_MOST_VISITED]]
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


# -- calls -------------------------------------------------------------------------------------------------------------


_KEY = regex.compile(r"[^<>\n]{1,1000}")
_BEGIN, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_END, _FUNCTION_END, _PARAMETER_END = "</tool_call>", "</function>", "</parameter>"
_HEAD = regex.compile(f"(?:{_BEGIN}{BLANKS})?+{_FUNCTION}(?P<name>{_KEY.pattern})>")
_NEXT = regex.compile(f"{BLANKS}(?:{_FUNCTION_END}|{_PARAMETER}(?P<key>[^<>\\n]{{0,1000}}+)>)")
_AFTER = closing(_END)
_LINE = regex.compile(r"\n?+(?=(?s:.))")
_CLOSED = regex.compile(f"{BLANKS}{_PARAMETER_END}")
_STOPS = (
    rf"(?P<closed>{_PARAMETER_END})|(?=\n{_PARAMETER}(?P<key>{_KEY.pattern})>)|(?=\n{_FUNCTION_END}{BLANKS}(?:{_END}"
)
_STOP, _LAST_STOP = regex.compile(_STOPS + "))"), regex.compile(_STOPS + r"|\Z))")
"""The end of a parameter's text: its tag, or where models omit it, the tag of another parameter or of the end."""
_SAID = frozenset({"type", "properties", "required", "additionalProperties"})
"""The keys in the schema of parameters that a grammar can follow."""
_SILENT = frozenset({"title", "description", "$defs", "definitions", "$schema", "$comment", "examples", "x-guidance"})
"""The keys that do not restrict the parameters."""
_MOST = 4_000_000  # characters of rules: parameters that refer to the same definition repeat it
_UNIONS = ("anyOf", "oneOf", "allOf")
_NEEDED = frozenset({"pattern", *_UNIONS, "not", "$ref"})
"""The keys in the schema of a text that a grammar does not follow."""
_BESIDE = _NEEDED | {"enum", "const", "minLength", "maxLength"}
"""The keys that a grammar does not follow beside the part of a schema that it follows."""


@frozen
class XmlCalls(Syntax):
    """The syntax of calls as tags. The schema of an argument says how its text is read, for example as a number."""

    head: Pattern = _HEAD
    markers: tuple[str, ...] = (_BEGIN, _END)

    def read(self, text: Text, head: Match, tools: Tools) -> CallReading:
        """Reads the parameters up to the end of the function. Models omit the outer tags now and then."""
        if head["name"] not in tools:
            raise NoCall
        found: dict[str, str] = {}
        tool = tools[head["name"]]
        others = frozenset(_properties(tool))
        tag = text.match(_NEXT, head.end())
        while (key := tag["key"]) is not None:
            if key in found:
                raise NoCall
            others = others - {key}
            found[key], end = _value(text, tag.end(), others)
            tag = text.match(_NEXT, end)
        return CallReading((ToolCall(head["name"], _object(found, tool)),), tag.end(), _AFTER)

    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The grammar of calls whose parameters come in the order of the schema.

        Raises:
            InvalidRequest: the schema of a tool does not describe each argument.
        """
        begin, end = write(_BEGIN + "\n"), write("\n" + _END)
        call = f"{begin} call {end}"
        start = f"{call} " + (f'("\\n" {call})*' if several else "")
        return choice(start, {f"call_{index}": "\n".join(_rules(tool, index)) for index, tool in enumerate(tools)})


def _properties(tool: Tool) -> Mapping[str, Any]:
    schema = tool.parameters or {}
    found: Mapping[str, Any] = resolved(schema, schema).get("properties", {})
    return found


def _object(texts: Mapping[str, str], tool: Tool) -> str:
    schema, properties = tool.parameters or {}, _properties(tool)
    values = {key: as_json(text, types_of(properties.get(key, {}), schema)) for key, text in texts.items()}
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items()) + "}"


def _value(text: Text, place: int, others: Collection[str]) -> tuple[str, int]:
    """A parameter's text, and the end of the tag behind it. A string within JSON may contain that tag. ``others``: the
    parameters that may follow."""
    start, found = text.match(_LINE, place).end(), None
    if text.text[start] in "{[":
        with suppress(NoCall):  # not JSON: a text that begins with a bracket
            end = text.value(start)[1]
            found = text.match(_CLOSED, end)
            return text.text[start : found.end() - len(_PARAMETER_END)].removesuffix("\n"), found.end()
    end = start
    while found is None or (found["key"] is not None and found["key"] not in others):
        found = text.whole(text.search(_LAST_STOP if text.ended else _STOP, end))
        end = found.end() + (found["key"] is not None)
    return text.text[start : found.start()].removesuffix("\n"), found.end()


# -- grammar ---------------------------------------------------------------------------------------------------------


def _rules(tool: Tool, index: int) -> list[str]:
    schema = tool.parameters or {}
    described = resolved(schema, schema)
    properties, required = _member(tool, described, "properties", {}), _member(tool, described, "required", [])
    required = set(map(str, required))
    unknown = {f"required/{key}" for key in required - properties.keys()}
    _check(tool.name, "a parameter has the name", {key for key in properties if not _KEY.fullmatch(key)})
    parts, size = [], 0
    rules = [*left_out(tool.name, (described.keys() - _SAID - _SILENT) | unknown)]
    for number, (key, value) in enumerate(properties.items()):
        name = f"value_{index}_{number}"
        part = f"{_quoted(_PARAMETER + key + '>')} {name}"
        parts.append(part if key in required else f"({part})?")
        rules.append(_value_rule(tool, name, value, schema))
        size += len(rules[-1])
        _check(tool.name, f"its rules have more than {_MOST:,} characters up to", (key,) if size > _MOST else ())
    head, end = _quoted(f"{_FUNCTION}{tool.name}>\n"), _quoted(_FUNCTION_END)
    return [f"call_{index}: {head} {' '.join(parts)} {end}", *rules]


def _as_text(value: Any, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
    """The part of the schema ``value`` that describes texts: of a union, the first part that allows them. And the keys
    that restrict them, too, but are not followed."""
    described, beside = value, set[str]()
    for _ in range(_MOST_REFERENCES):
        described = described if isinstance(described, Mapping) else {}
        parts = [(key, one) for key in _UNIONS for one in _list(described.get(key))[:_MOST_VISITED]]
        found = next(((key, one) for key, one in parts if "string" in types_of(one, schema)), None)
        if isinstance(reference := described.get("$ref"), str):
            found = "$ref", _at(schema, reference)
        if found is None or described.keys() & {"enum", "const"}:
            break
        others = [one for key, one in parts if key == found[0] == "allOf" and one is not found[1]]
        beside |= {key for one in (described, *others) if isinstance(one, Mapping) for key in one} - {found[0]}
        described = found[1]
    return described, (beside & _BESIDE) | (described.keys() & _NEEDED)


def _value_rule(tool: Tool, name: str, value: Any, schema: Mapping[str, Any]) -> str:
    """The rule for a parameter's text and the tag at its end."""
    types, end = types_of(value, schema), _quoted(_PARAMETER_END)
    if types and "string" not in types:
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        rule = json_rule(f"{name}_json", {**definitions, **value}, tool.name)
        return f'{name}: "\\n" {name}_json "\\n" {end} "\\n"\n{rule}'
    described, beside = _as_text(value, schema)
    texts = [text for text in _member(tool, described, "enum", [described.get("const")]) if isinstance(text, str)]
    if texts:
        rules = f'{name}: "\\n" ({" | ".join(map(_quoted, texts))}) "\\n" {end} "\\n"'
        return "\n".join((*left_out(tool.name, beside), rules))
    least, most = _member(tool, described, "minLength", 0), _member(tool, described, "maxLength", 0)
    most = most if "maxLength" in described else ""
    rules = f'{name}: {name}_text "\\n"\n{name}_text[suffix={end}]: /(?s:\\n.{{{least},{most}}}\\n)/'
    return "\n".join((*left_out(tool.name, beside), rules))


def _member(tool: Tool, schema: Mapping[str, Any], name: str, default: Any) -> Any:
    """The member of ``schema``, which is of the type of ``default``."""
    found = schema.get(name, default)
    _check(tool.name, "of another type than in JSON Schema is", () if type(found) is type(default) else (name,))
    return found


def _check(tool: str, what: str, names: Collection[str]) -> None:
    """Raises `InvalidRequest` for ``names``, the keys of a schema that a rule cannot follow, if there are any."""
    if names:
        raise InvalidRequest(
            f"this format cannot force a call of {tool!r}: {what} {', '.join(sorted(map(repr, names)))}; change its "
            "parameters, or leave the choice to the model"
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
