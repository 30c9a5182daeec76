"""Tool formats: which one a checkpoint has, what models really write, and what cannot be forced or read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from triolet import ArgumentsPiece, CallBegin, ContentPiece, InvalidRequest, ToolCall, ToolFormat
from triolet.api.tools.formats import SYNTAXES, find_format
from triolet.api.tools.text import Text
from triolet.core.model import ModelDescription
from triolet.models.sampling.structure import fault_of
from triolet_testing.sim_model import SimModel

from ..properties.test_tool_calls import RESPONSE, WRITTEN
from . import tool_templates
from .tool_templates import TEMPLATES, tool

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
GET = tool("get", n={"type": "integer"})
GET_1 = ToolCall("get", '{"n": 1}')
GET_TEXT = '{"name": "get", "arguments": {"n": 1}}'
NOW_CALL, PUT = ToolCall("now", "{}"), ToolCall("put", '{"a": "1\\n\\t2"}')
PUT_TWO = ToolCall("put", '{"a": "1\\n\\t2", "b": "<parameter=c>"}')


def model(template: str, **tokenizer: Any) -> ModelDescription:
    """A model whose checkpoint has this chat template."""
    described = SimpleNamespace(name="paper", tokenizer=SimpleNamespace(added_tokens_decoder={}, **tokenizer))
    described.preparer = SimpleNamespace(template=lambda *, tools: template)
    found: Any = described
    return found


# -- which one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_found_in_the_chat_template(name: str) -> None:
    assert find_format(TEMPLATES[name][0]) == name
    assert ToolFormat.of(model(TEMPLATES[name][0])).name == name


def test_other_templates_that_look_alike_have_no_known_format() -> None:
    """GLM 4 writes the tag of Hermes around tags of its own, DeepSeek R1 fences around the arguments."""
    assert find_format(tool_templates.LLAMA3_2) == "llama3_json"
    assert find_format(tool_templates.PLAIN) is None
    assert find_format("<tool_call>name <arg_key>arguments") is None
    assert find_format(tool_templates.DEEPSEEK_V31 + "```json") is None


def test_a_caller_may_choose_and_must_where_nothing_is_known() -> None:
    assert ToolFormat.of(model(""), "hermes").name == ToolFormat.named("hermes").name == "hermes"
    with pytest.raises(InvalidRequest, match=r"chat template does not write tool calls in a known format; .*: hermes,"):
        ToolFormat.of(model(tool_templates.DEEPSEEK_V31 + "```json"))
    with pytest.raises(InvalidRequest, match="the tool format 'herms' is not known; allowed: hermes, qwen3_coder"):
        ToolFormat.of(model(""), "herms")


@pytest.mark.parametrize("described", [model(tool_templates.PLAIN), model(""), SimModel().describe()])
def test_a_template_that_reads_no_tools_is_told_at_once(described: ModelDescription) -> None:
    """In the words in which it would be told with a format, by rendering; and no word is of a folder."""
    with pytest.raises(
        InvalidRequest, match=r"^tools are given, but the checkpoint's chat template does not read them; leave"
    ):
        ToolFormat.of(described)


def test_a_response_template_of_the_checkpoint_goes_first() -> None:
    text = (
        'so<think>§</think>\n<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call><tool_call>{"name": "now"'
    )
    own = ToolFormat.of(model(tool_templates.HERMES, response_template=RESPONSE))
    assert own.name == "response_template"
    assert own.parse(text, [NOW]) == (text, ())
    assert own.parse('a\n<tool_call>{"name": "now", "arguments": {}}', [NOW]) == ("a", (ToolCall("now", "{}"),))
    forced = own.structure([NOW], "now")
    assert forced == ToolFormat.named("hermes").structure([NOW], "now")
    assert ToolFormat.of(model(tool_templates.HERMES, response_template=RESPONSE), "hermes").name == "hermes"
    silent = {"start_anchor": "x", "fields": {"content": {"content": "text"}}}
    assert ToolFormat.of(model(tool_templates.HERMES, response_template=silent)).name == "hermes"
    with pytest.raises(InvalidRequest, match=r"response_template cannot be read: .*name a tool format"):
        ToolFormat.of(model(tool_templates.HERMES, response_template={"fields": 3}))
    with pytest.raises(InvalidRequest, match="this checkpoint's response template cannot force a call"):
        ToolFormat.of(model("", response_template=RESPONSE)).structure([NOW], "now")


def test_a_response_template_may_cast_and_give_several_calls_at_once() -> None:
    """As those of Qwen 3.5, whose arguments are tags, and of models that write an array."""
    fields = {
        "tool_calls": {
            "open": "[CALLS]",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{with}"}},
        },
        "content": {"content": "text"},
    }
    own = ToolFormat.of(model("", response_template={"start_anchor": "x", "fields": fields}))
    text = '[CALLS][{"name": "get", "with": {"n": "1"}}, {"name": "now", "with": {}}]'
    assert own.parse(text, [GET, NOW]) == (None, (GET_1, ToolCall("now", "{}")))
    parts = {**fields, "content": {"content": "text", "optional": False}}  # which a message must have, a call not
    strict = ToolFormat.of(model("", response_template={"start_anchor": "x", "fields": parts}))
    assert strict.parse(f"a{text}", [GET, NOW]) == ("a", (GET_1, ToolCall("now", "{}")))
    for broken in (text[:-1], text.replace("now", "later"), text.replace("{}", "3"), "[CALLS][]", "[CALLS]{}"):
        assert own.parse(f"a{broken}", [GET, NOW]) == (f"a{broken}", ())


# -- what models write -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", '<tool_call>{"name":"get","arguments":{"n": 1}}</tool_call>', None),
        ("hermes", '<tool_call>\n{"arguments": {"n": 1}, "name": "get"}', None),  # the first Hermes, and no end
        ("hermes", '<tool_call>\n{"name": "get", "arguments": "{\\"n\\": 1}"}\n</tool_call>', None),
        ("hermes", 'Let me see.\n<tool_call>\n[{"name": "get", "arguments": {"n": 1}}]\n</tool_call>\n', "Let me see."),
        ("hermes", '\n<tool_call>{"name": "get", "arguments": {"n": 1}}</tool_call>\n Done. ', "Done."),
        ("llama3_json", '{"name": "get", "parameters": {"n": 1}}', None),
        ("llama3_json", ' {"type": "function", "name": "get", "parameters": {"n": 1}}', None),
        ("llama3_json", '<|python_tag|>{"name": "get", "arguments": {"n": 1}}', None),
        ("llama3_json", 'I call <|python_tag|>{"name": "get", "parameters": {"n": 1}}', "I call"),
        ("mistral", '[TOOL_CALLS][{"name": "get", "arguments": {"n": 1}, "id": "abc123456"}]', None),
        ("mistral", '[TOOL_CALLS] [{"arguments": {"n": 1}, "name": "get"}', None),
        ("mistral_v11", '[TOOL_CALLS]get[CALL_ID]abc123456[ARGS]{"n": 1}', None),
        ("mistral_v11", '[TOOL_CALLS]get{"n": 1}', None),
        ("granite", '<|tool_call|> [{"name": "get", "arguments": {"n": 1}}]', None),
        (
            "deepseek_v31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>',
            None,
        ),
        ("qwen3_coder", "<function=get>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", None),
        ("qwen3_coder", "<tool_call><function=get><parameter=n>1</parameter></function>", None),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=n>\n1\n</function>\n</tool_call>", None),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=n>\n1\n</function>", None),
        ("hermes", f'<tool_call>{{"type": "function", "function": {GET_TEXT}}}</tool_call>', None),
        ("hermes", f"<tool_call>\n{GET_TEXT}}}\n</tool_call>", None),
    ],
)
def test_what_models_write_is_read(name: str, text: str, content: str | None) -> None:
    assert ToolFormat.named(name).parse(text, [GET, NOW]) == (content, (GET_1,))


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", f'<tool_call>\n{GET_TEXT}\n{{"name": "now", "arguments": ""}}\n</tool_call>', [GET_1, NOW_CALL]),
        ("hermes", '<tool_call>{"name": "put", "arguments": {"a": "1\n\t2"}}</tool_call>', [PUT]),
        ("mistral_v11", '[TOOL_CALLS]put[ARGS]{"a": "1\n\t2"}', [PUT]),
        ("qwen3_coder", "<function=put>\n<parameter=a>\n1\n\t2\n<parameter=b>\n<parameter=c>\n</function>", [PUT_TWO]),
    ],
)
def test_what_models_forget_is_read_however_it_comes(name: str, text: str, calls: list[ToolCall]) -> None:
    """A line end in a string, a tag at the end of a parameter, and the mark between two calls."""
    given = [GET, NOW, tool("put", a={"type": "string"}, b={"type": "string"})]
    assert ToolFormat.named(name).parse(text, given) == (None, tuple(calls))
    reader = ToolFormat.named(name).reader(given)
    parts = [part for one in text for part in reader.feed(one)] + [*reader.end()]
    assert [part.text for part in parts if isinstance(part, ArgumentsPiece)] == [call.arguments for call in calls]
    assert reader.unread == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"n": 1}'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"n": 1,}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "got", "arguments": {"n": 1}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 1e999, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": "n = 1"}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {}, "parameters": {}}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "name": "get", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "get", "why": "§", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + '{"a":' * 200),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", 'so {"name": "get", "parameters": {"n": 1}}'),
        ("llama3_json", "<|python_tag|>get.call(n=1)"),
        ("mistral_v11", "[TOOL_CALLS]get[ARGS]n=1"),
        ("qwen3_coder", "<function=get>\n<parameter=n>\n1\n</parameter>"),
        ("qwen3_coder", "<function=get><parameter=n>1</parameter><parameter=n>2</parameter></function>"),
    ],
)
def test_what_only_looks_like_a_call_is_content_and_counted(name: str, text: str) -> None:
    assert ToolFormat.named(name).parse(text, [GET, NOW]) == (text, ())
    reader = ToolFormat.named(name).reader([GET, NOW])
    assert [*reader.feed(text), *reader.end()]
    assert reader.unread == text.count(*SYNTAXES[name].markers[:1])


@pytest.mark.parametrize("name", SYNTAXES)
def test_blanks_beside_a_call_are_content_where_there_is_content(name: str) -> None:
    call = WRITTEN[name]([GET_1])
    form = ToolFormat.named(name)
    for text, content in (
        (f"a\n{call}\n b\n", "a\n\n b"),
        (f"\n{call} b ", "b"),
        (f" a {call} ", " a"),
        (f" {call} ", None),
    ):
        assert form.parse(text, [GET]) == (content, (GET_1,))
    for text in ("", " ", "\n a \n"):
        assert form.parse(text, [GET]) == (text, ())


def test_what_was_read_before_a_broken_call_stays_read() -> None:
    text = '[TOOL_CALLS] [{"name": "get", "arguments": {"n": 1}}, {"name": "get", "argum'
    assert ToolFormat.named("mistral").parse(text, [GET]) == (', {"name": "get", "argum', (GET_1,))
    inner = '<tool_call>{"name": <tool_call>{"name": "get", "arguments": {"n": 1}}</tool_call>'
    assert ToolFormat.named("hermes").parse(inner, [GET]) == ('<tool_call>{"name":', (GET_1,))


def test_content_comes_at_once_and_a_call_when_it_is_whole() -> None:
    reader = ToolFormat.named("hermes").reader([GET])
    assert reader.feed("Let me <b>see</b>") == (ContentPiece("Let me <b>see</b>"),)
    assert reader.feed(".\n<to") == (ContentPiece("."),)
    assert reader.feed('ol_call>{"name": "get", "argu') == ()
    assert reader.feed('ments": {"n": 1}}') == (CallBegin(0, "get"), ArgumentsPiece(0, '{"n": 1}'))
    assert reader.feed("</tool_call>") == ()
    assert reader.end() == ()


def test_text_that_cannot_become_a_call_any_more_is_told_at_once() -> None:
    reader = ToolFormat.named("llama3_json").reader([GET])
    assert reader.feed('{"answer') == ()
    assert reader.feed('": ') == (ContentPiece('{"answer":'),)
    assert reader.feed('{"name": "get", "parameters": {"n": 1}}}')[0] == ContentPiece(
        ' {"name": "get", "parameters": {"n": 1}}}'
    )


@pytest.mark.parametrize("broken", ['{"n": nulll', '{"n": 1,}', '{"n": NaN', '{"n": "\\x"', '{"n" 1', '{"n": 1.x'])
def test_a_value_that_is_no_json_is_told_within_a_few_characters(broken: str) -> None:
    reader = ToolFormat.named("hermes").reader([GET])
    assert reader.feed('<tool_call>{"name": "get", "arguments": ') == ()
    reader.feed(broken)
    assert reader.feed(" or not, ")


def test_a_long_call_comes_soon_after_its_last_character() -> None:
    """Long text is not read again for every piece."""
    for name in SYNTAXES:
        reader = ToolFormat.named(name).reader([tool("get", text={"type": "string"})])
        text = WRITTEN[name]([ToolCall("get", json.dumps({"text": "a long line\n" * 400}))])
        parts = [reader.feed(each) for each in text + " and so on" * 20]
        place = next(index for index, each in enumerate(parts) if each)
        last = "}" if "}" in text else "</function>"
        assert 0 <= place + 1 - text.rindex(last) - len(last) <= len(text) // 64 + 1, name


@pytest.mark.parametrize("name", ["llama3_json", "mistral", "deepseek_v31"])
def test_calls_that_belong_together_are_read_once_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each call, all calls before it were read again: a thousand of them took a minute."""
    places: list[int] = []
    value = Text.value
    monkeypatch.setattr(Text, "value", lambda text, place: places.append(place) or value(text, place))
    reader = ToolFormat.named(name).reader([GET])
    parts = [part for each in WRITTEN[name]([GET_1] * 50) for part in reader.feed(each)]
    assert parts.count(ArgumentsPiece(49, '{"n": 1}')) == 1
    assert max(places) < 2 * len(WRITTEN[name]([GET_1]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "{x: x > 1}\n" * 4_000),
        ("qwen3_coder", "\n<parameter=no>" * 3_000),
        ("qwen3_coder", "".join(f"1\n</parameter>\n<parameter={key}>\n" for key in range(1_000))),
        ("hermes", "[1]," * 10_000 + "1"),
    ],
    ids=["code", "tags", "parameters", "values"],
)
def test_all_readings_of_a_call_take_time_in_proportion_to_it(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 kB of code took 13 s of the event loop, and 40 kB of numbers 33 s."""
    read, search, match, value = list[int](), Text.search, Text.match, Text.value

    def counted(text: Text, pattern: Any, place: int) -> Any:
        found = search(text, pattern, place)
        read.append((len(text.text) if found is None else found.end()) - place)
        return found

    def decoded(text: Text, place: int, *, raw: bool = True) -> Any:
        end = len(text.text)
        try:
            found, end = value(text, place, raw=raw)
        finally:
            read.append(end - place)
        return found, end

    monkeypatch.setattr(Text, "search", counted)
    monkeypatch.setattr(Text, "match", lambda *given: read.append(1) or match(*given))
    monkeypatch.setattr(Text, "value", decoded)
    whole = "<tool_call>\n" + '{"name": "get", "arguments": {"text": [' + text + "]}}\n</tool_call>"
    if name == "qwen3_coder":
        whole = "<function=get>\n<parameter=text>\n" + text + "\n</parameter>\n</function>"
    reader = ToolFormat.named(name).reader([tool("get", text={"type": "string"})])
    parts = [part for each in whole for part in reader.feed(each)] + [*reader.end()]
    assert parts[0] == CallBegin(0, "get")
    assert sum(read) < 400 * len(whole)


# -- arguments that are tags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, "  two\nlines\n", "  two\nlines\n"),
        ({"type": "string"}, '{"a": "</parameter>"}', '{"a": "</parameter>"}'),
        ({"type": "string"}, "[not JSON", "[not JSON"),
        ({"type": "integer"}, "-7", -7),
        ({"type": "integer"}, "7.5", "7.5"),
        ({"type": "integer"}, "007", "007"),
        ({"type": "number"}, "7.5e1", 75.0),
        ({"type": "number"}, "true", "true"),
        ({"type": "boolean"}, "True", True),
        ({"type": "null"}, "None", None),
        ({"type": "object"}, ' {"a": [1]} ', {"a": [1]}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, '["</parameter>"]', ["</parameter>"]),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": {"a": 1}}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/size"}, "12", 12),
        ({"$ref": "#/$defs/loop"}, "12", "12"),
        ({"$ref": "#/nowhere/else"}, "12", "12"),
        ({"type": "rhyme"}, "12", "12"),
        ({"anyOf": 3}, "12", "12"),
        ({"anyOf": [{"type": [{"type": "integer"}]}, 7]}, "12", "12"),
        ({"enum": [["a"], [1]]}, "[1]", [1]),
        ({"$ref": "#/$defs/many"}, "12", 12),
        (True, "12", "12"),
    ],
)
def test_the_text_of_a_tag_is_what_its_schema_says(schema: Any, text: str, value: object) -> None:
    one = tool("one", value=schema)
    many = [*({"$ref": "#/$defs/many"} for _ in range(9)), {"type": "integer"}]  # which is not to be read 9^n times
    definitions = {"size": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "many": {"anyOf": many}}
    one["function"]["parameters"]["$defs"] = definitions
    written = f"<function=one>\n<parameter=value>\n{text}\n</parameter>\n</function>"
    content, calls = ToolFormat.named("qwen3_coder").parse(written, [one])
    assert content is None
    assert json.loads(calls[0].arguments) == {"value": value}
    assert type(json.loads(calls[0].arguments)["value"]) is type(value)


def test_what_tags_can_force_can_be_followed() -> None:
    """Parameters of every kind, some of them optional; the schema's definitions are known in each."""
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {"size": {"type": "integer"}},
        "properties": {
            "a": {"$ref": "#/$defs/size"},
            "b": {"type": "array", "items": {"$ref": "#/$defs/size"}},
            "c": {"enum": ["x", 'y"']},
            "d": True,
            "e": {"type": "string", "minLength": 2},
        },
        "required": ["a"],
    }
    one = {"type": "function", "function": {"name": "one", "parameters": parameters}}
    structure = ToolFormat.named("qwen3_coder").structure([one], "one", parallel=True)
    assert structure is not None
    assert fault_of(structure) == ""


# -- force -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_choice_is_a_structure_or_free_text(name: str) -> None:
    form = ToolFormat.named(name)
    assert form.structure([GET], "auto") is form.structure([GET], "none") is form.structure([GET]) is None
    for parallel in (False, True):
        for choice in ("required", "now"):
            structure = form.structure([GET, NOW], choice, parallel=parallel)
            assert structure is not None
            assert fault_of(structure) == ""
            assert ("get" in structure.text) is (choice == "required")
    with pytest.raises(InvalidRequest, match=r"choice='got'; allowed: 'none', .* or the name of a tool: 'get'"):
        form.structure([GET], "got")
    with pytest.raises(InvalidRequest, match=r"choice='required'; allowed: .*: none is given"):
        form.structure([], "required")


def test_a_marker_that_is_a_special_token_is_named_by_its_id() -> None:
    token = SimpleNamespace(content="[TOOL_CALLS]", special=True)
    plain = SimpleNamespace(content="[ARGS]", special=False)
    tokenizer = SimpleNamespace(added_tokens_decoder={7: token, 8: plain})
    structure = ToolFormat.named("mistral_v11", tokenizer).structure([NOW], "now")
    assert structure is not None
    assert '<[7]> "now[ARGS]"' in structure.text
