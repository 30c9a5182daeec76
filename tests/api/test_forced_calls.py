"""Forced calls: which schemas of tools their grammars follow, leave out in words, or refuse by name."""

from __future__ import annotations

import enum
import ipaddress
import pathlib
import re
from typing import Any

import pydantic
import pytest

from triolet import InvalidRequest, Structure, ToolFormat
from triolet.api.tools import xml_calls
from triolet.api.tools.formats import SYNTAXES
from triolet.api.tools.xml_calls import resolved
from triolet.models.sampling import grammar
from triolet.models.sampling.structure import fault_of

from .tool_templates import tool

GET: dict[str, Any] = tool("get", n={"type": "integer"})


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "qwen3_coder"])
def test_a_forced_call_keeps_the_digits_of_numbers_or_is_refused_by_name(name):
    """A call of `ban` was forced to name user 1234567890123456768 in place of 1234567890123456789."""

    def forced(user: int) -> str:
        parameters = {"type": "object", "properties": {"user": {"const": user}}, "required": ["user"]}
        ban = {"type": "function", "function": {"name": "ban", "parameters": parameters}}
        return fault_of(ToolFormat.named(name).structure([ban], "required"))

    assert forced(2**53) == ""
    assert re.search(r"a call of 'ban' .*/?const=1234567890123456789; allowed: ", forced(1234567890123456789))


def test_the_schema_of_an_answer_beside_calls_may_be_a_text_of_several_lines():
    """It was cut at its first line."""

    def fault(schema: str) -> str:
        answer = Structure.json_schema(schema)
        return fault_of(ToolFormat.named("hermes").structure([GET], "auto", answer=answer))

    assert fault('{"type":\n "object"}') == ""
    assert "const=1234567890123456789; allowed: " in fault('{"const":\n1234567890123456789}')
    assert "control character" in fault('{"const": "a\nb"}')


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_tools_schema_is_checked_where_its_grammar_is_made(name, monkeypatch):
    """Its checks ran in the server itself, before anything limited them."""
    checked: list[object] = []
    exact = grammar.exact

    def watch(schema: object, **options: object) -> object:
        checked.append(schema)
        return exact(schema, **options)

    monkeypatch.setattr(grammar, "exact", watch)
    parameters = {"properties": {"x": {"type": "integer", "minimum": -3}}, "required": ["x"]}
    structure = ToolFormat.named(name).structure(
        [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required"
    )
    assert not checked
    assert grammar.grammar_of(structure.kind, structure.text).count("-3")
    assert checked


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"properties": {"a>b": {}}}, "a parameter has the name 'a>b'"),
        ({"properties": {"x": {"type": "string", "enum": 5}}}, "of another type than in JSON Schema is 'enum'"),
        ({"properties": {"x": {"minLength": "0}"}}}, "of another type than in JSON Schema is 'minLength'"),
        ({"properties": {"x": {"maxLength": 2.5}}}, "of another type than in JSON Schema is 'maxLength'"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": []}}}, "is 'properties'"),
        (
            {
                "properties": {str(index): {"$ref": "#/$defs/a"} for index in range(1_000)},
                "$defs": {"a": {"type": "integer", "description": "a" * 100_000}},
            },
            "have more than 4,000,000 characters up to '39'",
        ),
        (
            {
                "properties": {str(index): {"$ref": "#/$defs/a"} for index in range(1_000)},
                "$defs": {"a": {"enum": ["a" * 100_000]}},
            },
            "have more than 4,000,000 characters up to '39'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_that_tags_cannot_take_are_refused_by_name(parameters, told):
    """Some raised a TypeError; copies of definitions had no bound."""
    one = {"type": "function", "function": {"name": "one", "parameters": parameters}}
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        ToolFormat.named("qwen3_coder").structure([one], "one")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (str | None, ""),
        (Colour | None, ""),
        (pathlib.Path, ""),
        (pydantic.SecretStr, ""),
        (bytes, ""),
        (ipaddress.IPv4Network, ""),
        (dict[Colour, int], ""),
        (dict[str, int], ""),
        (set[str], "uniqueItems"),
        (frozenset[int], "uniqueItems"),
        (dict[pydantic.UUID4, int], "propertyNames"),
    ],
    ids=str,
)
def test_what_pydantic_writes_can_be_forced_and_what_is_left_out_is_told(name, kind, told):
    """One tool with a set barred all tools of a request, with a message that named none."""
    parameters = pydantic.create_model("Put", x=(kind, ...)).model_json_schema()
    given = [GET, {"type": "function", "function": {"name": "put", "parameters": parameters}}]
    notes: list[Any] = []
    written = grammar.grammar_of("lark", ToolFormat.named(name).structure(given, "required").text, notes)
    assert grammar.judged(written)[0] == ""
    assert [name for name, _ in notes] == ["put"] * bool(told)
    assert told in str(notes)


def of_a(schema: dict[str, Any]) -> dict[str, Any]:
    """Parameters of which ``a`` has the schema, with definitions."""
    text = {"type": "string"}
    return {"properties": {"a": schema}, "$defs": {"b": text, "c": {"$ref": "#/$defs/b", "pattern": "^x"}}}


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"anyOf": [{"required": ["a"]}]}, '"anyOf"'),
        ({"properties": {}, "required": ["a"]}, '"required/a"'),
        ({"required": [{}]}, '"required/{}"'),
        ({"properties": {"a": {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]}}}, '"pattern"'),
        (of_a({"allOf": [{"type": "string"}, {"enum": ["a", "b"]}]}), '"enum"'),
        (of_a({"anyOf": [{"type": "string"}], "pattern": "^x"}), '"pattern"'),
        (of_a({"anyOf": [{"type": "string"}], "enum": ["a"]}), '"anyOf"'),
        (of_a({"enum": ["a", "b"], "not": {"const": "a"}}), '"not"'),
        (of_a({"$ref": "#/$defs/b", "pattern": "^x"}), '"pattern"'),
        (of_a({"$ref": "#/$defs/b", "enum": ["a"]}), '"$ref"'),
        (of_a({"$ref": "#/$defs/c", "minLength": 2}), '"minLength", "pattern"'),
    ],
)
def test_what_tags_leave_out_is_told(parameters, told):
    structure = ToolFormat.named("qwen3_coder").structure(
        [{"type": "function", "function": {"name": "one", "parameters": parameters}}], "one"
    )
    notes: list[Any] = []
    grammar.grammar_of(structure.kind, structure.text, notes)
    assert notes == [("one", told)]
    assert fault_of(structure) == ""


def test_of_the_schemas_that_parameters_refer_to_a_bounded_number_is_read(monkeypatch):
    read: list[Any] = []
    monkeypatch.setattr(xml_calls, "resolved", lambda *schemas: read.append(schemas) or resolved(*schemas))
    parameters = {
        "properties": {str(index): {"anyOf": [{"$ref": "#/$defs/a"}]} for index in range(40)},
        "$defs": {"a": {"anyOf": [{"a": 0} for _ in range(20_000)]}},
    }
    one = {"type": "function", "function": {"name": "one", "parameters": parameters}}
    ToolFormat.named("qwen3_coder").structure([one], "one")
    text = "".join(f"<parameter={index}>\n1\n</parameter>\n" for index in range(40))
    ToolFormat.named("qwen3_coder").parse(f"<function=one>\n{text}</function>", [one])
    assert 40 < len(read) < 150 * 1_000, "40 parameters of 20,000 schemas each"
