"""Tool calls in texts: of every format, over texts that Hypothesis makes of calls, of pieces of calls and of all else,
cut anyhow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from triolet import ArgumentsPiece, CallBegin, ContentPiece, ToolCall, ToolFormat, ToolReader
from triolet.api.tools.formats import SYNTAXES
from triolet.api.tools.templated import TemplatedCalls
from triolet.api.tools.text import is_value

from .test_stops import pieces_of

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "text": {"type": "string"}, "more": {"type": "object"}},
            },
        },
    },
]
NOISE = "§"  # no part of any syntax: wherever it stands, it must come out
RESPONSE = {  # a response template, as transformers reads it
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def written_as_json(key: str, calls: Sequence[ToolCall], between: str) -> str:
    return between.join(f'{{"name": "{call.name}", "{key}": {call.arguments}}}' for call in calls)


def written_as_xml(call: ToolCall) -> str:
    arguments = json.loads(call.arguments)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def written_by_deepseek(calls: Sequence[ToolCall]) -> str:
    each = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>" for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def written_by_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{written_as_json('arguments', [call], '')}\n</tool_call>" for call in calls)


WRITTEN = {  # how calls that belong together are written
    "hermes": written_by_hermes,
    "qwen3_coder": lambda calls: "\n".join(map(written_as_xml, calls)),
    "llama3_json": lambda calls: "<|python_tag|>" + written_as_json("parameters", calls, "; "),
    "mistral": lambda calls: f"[TOOL_CALLS] [{written_as_json('arguments', calls, ', ')}]",
    "mistral_v11": lambda calls: "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls),
    "granite": lambda calls: f"<|tool_call|>[{written_as_json('arguments', calls, ', ')}]",
    "deepseek_v31": written_by_deepseek,
    "response_template": written_by_hermes,
}
FORMATS = {name: ToolFormat.named(name) for name in SYNTAXES}
FORMATS["response_template"] = ToolFormat(name="response_template", syntax=TemplatedCalls.of(RESPONSE, None))


def noise(text: str) -> int:
    """How much there is of it, as it is or as JSON spells it."""
    return text.count(NOISE) + text.count("\\u00a7")


@frozen
class Parsed:
    content: str | None
    calls: tuple[ToolCall, ...]


def parsed(form: ToolFormat, text: str) -> Parsed:
    return Parsed(*form.parse(text, TOOLS))


def read(form: ToolFormat, pieces: Sequence[str]) -> Parsed:
    """By a reader, piece by piece; parts that make no sense are told."""
    reader = form.reader(TOOLS)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    parts += reader.end()
    content: list[str] = []
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case ContentPiece(text):
                assert text
                content.append(text)
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append(ToolCall(name, ""))
            case ArgumentsPiece(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index] = evolve(calls[index], arguments=calls[index].arguments + text)
    return Parsed("".join(content) if content or not calls else None, tuple(calls))


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(-99, 99),
        "text": st.text('a "\\{}[]<>/\n\t,:é§', max_size=12),
        "more": st.dictionaries(st.text("ab", max_size=2), st.booleans() | st.none() | st.floats(0, 1), max_size=2),
    },
)
CALLS = st.one_of(
    st.builds(ToolCall, st.just("now"), st.just("{}")),
    st.builds(ToolCall, st.just("get"), VALUES.map(json.dumps)),
)
GROUPS = st.lists(CALLS, min_size=1, max_size=2)
CUTS = st.lists(st.integers(0, 400), max_size=12)
SYNTAX = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<function=get>", "<function=", "</function>", "<parameter=n>", "<parameter=", "</parameter>", "<think>"),
    *('{"name": "get", "arguments": {', '{"name": "now", "parameters": {}}', '"name"', '"arguments"', "now", "get"),
    *("{", "}", "[", "]", '"', ":", ",", ";", "\\", "\\u00", "1", "-1.5e", "true", "nul", "<", ">", "\n", " ", NOISE),
)
SCRAPS = st.lists(st.sampled_from(SYNTAX) | st.text("a§ \n", max_size=3), max_size=10).map("".join)


@st.composite
def texts(draw: st.DrawFn, name: str) -> str:
    """Calls, and beginnings of calls, among scraps."""
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        written = WRITTEN[name](draw(GROUPS))
        parts += [draw(SCRAPS), written[: draw(st.integers(0, len(written)))] if draw(st.booleans()) else written]
    return "".join((*parts, draw(SCRAPS)))


each_format = pytest.mark.parametrize("name", FORMATS)
few = settings(max_examples=settings.default.max_examples // 8)  # of each format


@each_format
@few
@given(st.data(), CUTS)
def test_however_a_text_is_cut_the_parts_are_those_of_the_whole(
    name: str, data: st.DataObject, cuts: list[int]
) -> None:
    text = data.draw(texts(name))
    whole = parsed(FORMATS[name], text)
    assert read(FORMATS[name], pieces_of(text, cuts)) == whole
    assert read(FORMATS[name], list(text)) == whole


@each_format
@few
@given(st.data())
def test_what_is_fed_comes_out_and_arguments_are_objects(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    found = parsed(FORMATS[name], text)
    assert all(isinstance(json.loads(call.arguments), dict) for call in found.calls)
    if not found.calls:
        assert found.content == text
    out = "".join((found.content or "", *(call.arguments for call in found.calls)))
    assert noise(out) == noise(text)


@each_format
@few
@given(st.data(), st.lists(st.tuples(st.text("ab §\n", max_size=6), GROUPS), max_size=3), st.text("ab §\n", max_size=6))
def test_calls_are_found_as_they_were_written_and_the_rest_is_content(
    name: str, data: st.DataObject, groups: list[tuple[str, list[ToolCall]]], last: str
) -> None:
    """The content is the text without the calls, and without the blanks around them that stand for nothing."""
    assume(name != "qwen3_coder" or not any("</parameter>" in call.arguments for _, calls in groups for call in calls))
    text = "".join(before + WRITTEN[name](calls) for before, calls in groups) + last
    found = parsed(FORMATS[name], text)
    calls = [call for _, group in groups for call in group]
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]
    if calls:
        assert "".join((found.content or "").split()) == "".join("".join((*(b for b, _ in groups), last)).split())
        assert found.content is None or found.content.rstrip() == found.content != ""
    else:
        assert found.content == last


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUE = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4)
JSON_PIECES = (*'{}[]":,1-\\n \n', "01", ".5", "e+1", "null", "NaN", "u12aF")

PIECED = st.lists(st.sampled_from((*JSON_PIECES, "\x01", "é")), max_size=9).map("".join)


@few
@given(VALUE)
def test_json_is_read_as_it_is_written(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert is_value(text)
        assert not is_value(text[:-1]) or isinstance(value, int | float)
        assert not is_value(f"{text}x")


def _refused(constant: str) -> None:
    raise ValueError(constant)


@given(PIECED)
def test_what_is_json_is_what_json_says(text: str) -> None:
    try:
        json.loads(text, parse_constant=_refused)
        expected = True
    except ValueError:
        expected = False
    assert is_value(text) is expected


@pytest.mark.parametrize(
    ("opening", "closing", "levels"),
    [("[", "]", 1), ('{"a":', "}", 1), ("[1,", "]", 1), ('{"a":1,"b":', "}", 1), ('[{"a":', "}]", 2)],
)
def test_a_value_that_is_nested_too_deep_is_none(opening: str, closing: str, levels: int) -> None:
    """However it is nested: a model may write brackets without end, and whoever follows them needs stack."""
    deepest = 100 // levels
    assert is_value(opening * deepest + "1" + closing * deepest)
    for times in (deepest + 1, 9_999):
        assert not is_value(opening * times + "1" + closing * times)


def test_json_escapes_what_it_may_and_nothing_else() -> None:
    escaped = [chr(code) for code in range(32, 127) if is_value(f'"\\{chr(code)}"')]
    assert escaped == sorted('"/\\bfnrt')
    assert is_value('"\\u00E9"')
    assert not is_value('"\\u00E"')
    assert not is_value('"\\u00Eg"')


def test_a_reader_ends_once() -> None:
    reader: ToolReader = FORMATS["hermes"].reader(TOOLS)
    reader.feed("a")
    reader.end()
    assert reader.end() == ()
    with pytest.raises(ValueError, match="after the end"):
        reader.feed("b")
