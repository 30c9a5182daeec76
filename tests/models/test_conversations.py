"""Conversations with tools as prompts: what the checkpoint's chat template makes of them, and what it would drop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from transformers import AutoTokenizer

from triolet.core.errors import InvalidRequest
from triolet.core.tools import read_tools
from triolet.models.architectures.prompts import TextPreparer

from ..api import tool_templates
from ..api.tool_templates import TEMPLATES, tool
from ..checkpoints.families import make_checkpoint
from .media import Checkpoint

TOOLS = read_tools([tool("weather", city={"type": "string"}), {"type": "function", "function": {"name": "now"}}])
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def preparer(tokenizer: Any) -> TextPreparer:
    return TextPreparer.of(tokenizer)


def with_template(preparer: TextPreparer, template: object) -> TextPreparer:
    preparer.tokenizer.chat_template = template
    return preparer


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>"),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Zürich"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zürich"}}]'),
        ("mistral_v11", '[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}'),
        ("granite", '<|tool_call|>[{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Zürich"}<｜tool▁call▁end｜>'),
    ],
)
def test_calls_and_results_reach_the_template_as_it_reads_them(name: str, call: str, preparer: TextPreparer) -> None:
    """OpenAI's arguments are JSON text; templates read mappings, and some the text."""
    rendered = with_template(preparer, TEMPLATES[name][0]).render(MESSAGES, tools=TOOLS)
    assert call in rendered
    assert "<|tool|>sunny<|assistant|>" in rendered
    assert '"name": "now"' in rendered
    assert "None" not in rendered
    assert MESSAGES[1]["tool_calls"] == [CALL], "what the caller gave is the caller's"


def test_arguments_may_be_mappings_and_none_at_all(preparer: TextPreparer) -> None:
    calls = [{"type": "function", "function": {"name": "now", "arguments": given}} for given in ({}, "{}", {"a": [1]})]
    messages = [{"role": "assistant", "content": "so", "tool_calls": calls}]
    rendered = with_template(preparer, tool_templates.HERMES).render(messages)
    assert rendered.count('{"name": "now", "arguments": {}}') == 2
    assert '{"name": "now", "arguments": {"a": [1]}}' in rendered


NOTHING = (None, "", " ", "null", "{}", '"{}"', {}, '""')  # what models and their clients write for no arguments
OBJECTS = ('{"city": "Zürich"}', {"city": "Zürich"}, '"{\\"city\\": \\"Zürich\\"}"')  # a text in a text, too
BROKEN = (
    '{"city": "Zür',
    '{"city": "Zürich"',
    "Zürich",
    "[1]",
    "7",
    "{'city': 'Zürich'}",
    '"\\"',
    "[" * 5_000,
    '{"a": 1}}',
)


def replayed(preparer: TextPreparer, given: Any, **others: Any) -> str:
    """The prompt of a history with a call that has the arguments ``given``."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": given}}
    history = [*MESSAGES[:1], {"role": "assistant", "content": None, "tool_calls": [call], **others}, MESSAGES[2]]
    return preparer.render(history, tools=TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_history_that_other_models_wrote_is_taken(name: str, preparer: TextPreparer) -> None:
    """A conversation with one bad call goes on. What is no object stands in the prompt as it was written: as text, as a
    JSON string, or as the value of an argument, as the template can read it."""
    with_template(preparer, TEMPLATES[name][0])
    assert len({replayed(preparer, given) for given in NOTHING}) == 1
    assert len({replayed(preparer, given) for given in OBJECTS}) == 1
    for given in BROKEN:
        rendered = replayed(preparer, given)
        assert given in rendered or json.dumps(given, ensure_ascii=False)[1:-1] in rendered
        assert "None" not in rendered
    assert "[1, null]" in replayed(preparer, [1, None]).replace("None", "null")
    whole = {"function": {"name": "now"}, "id": "c2", "type": "function"}
    both = preparer.render([*MESSAGES[:1], {"role": "assistant", "tool_calls": [CALL, whole]}], tools=TOOLS)
    assert both.index("Zürich") < both.rindex("now")


def test_a_template_that_reads_a_text_and_a_mapping_gets_each_as_it_was_written(preparer: TextPreparer) -> None:
    """Most published templates ask whether the arguments are a string, and write such as they are."""
    asks = "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    loops = "{% for key in call.function.arguments %}{{ key }}={{ call.function.arguments[key] }};{% endfor %}"
    for write, broken in ((asks, '<{"city": "Zür>'), (loops, '<arguments={"city": "Zür;>')):
        with_template(preparer, tool_templates._template(f"<{write}>"))
        assert broken in replayed(preparer, '{"city": "Zür')
        assert "<" + ("city=Zürich;" if write is loops else '{"city": "Zürich"}') + ">" in replayed(
            preparer, OBJECTS[0]
        )


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("weather", "messages\\[0\\] has tool_calls='weather'; allowed: a list of calls"),
        ([{"type": "function"}], 'messages\\[0\\].tool_calls\\[0\\]=.*allowed: {"type": "function"'),
        ([{"function": {"name": "now", "arguments": {1, 2}}}], "has the arguments {1, 2}; allowed: a mapping"),
    ],
)
def test_calls_that_are_none_are_told_with_their_place(calls: Any, message: str, preparer: TextPreparer) -> None:
    with pytest.raises(InvalidRequest, match=message):
        with_template(preparer, tool_templates.HERMES).render([{"role": "assistant", "tool_calls": calls}])


def test_a_template_that_would_drop_tools_or_calls_is_told(preparer: TextPreparer) -> None:
    """The words in its comment and its own text are not what it reads."""
    plain = with_template(preparer, "you have no tools or tool_calls" + tool_templates.PLAIN)
    with pytest.raises(InvalidRequest, match="tools are given, but the checkpoint's chat template does not read them"):
        plain.render(MESSAGES[:1], tools=TOOLS)
    with pytest.raises(InvalidRequest, match="messages have tool_calls, but the checkpoint's chat template"):
        plain.render(MESSAGES)
    with pytest.raises(InvalidRequest, match="tools are given, but"):
        with_template(preparer, "{{ messages[0].tools }}").render(MESSAGES[:1], tools=TOOLS)
    assert (
        with_template(preparer, "{% if not tools is defined %}{% set tools = none %}{% endif %}").render(
            MESSAGES[:1], tools=TOOLS
        )
        == ""
    )


def test_a_checkpoint_may_have_a_template_for_tools_alone(preparer: TextPreparer) -> None:
    both = with_template(preparer, {"default": tool_templates.PLAIN, "tool_use": tool_templates.HERMES})
    assert both.template(tools=True) == tool_templates.HERMES
    assert both.render(MESSAGES[:1], tools=TOOLS).startswith("<tools>")
    assert both.render(MESSAGES[:1]) == "<|user|>hi<|assistant|>"
    assert with_template(preparer, {"other": tool_templates.HERMES}).template(tools=True) == ""
    assert with_template(preparer, None).template(tools=True) == ""


def test_options_are_variables_of_the_template(preparer: TextPreparer) -> None:
    hermes = with_template(preparer, tool_templates.HERMES)
    assert hermes.render(MESSAGES[:1], options={"enable_thinking": False}).endswith("<think>\n\n</think>")
    assert hermes.render(MESSAGES[:1], options={"enable_thinking": True}).endswith("<|assistant|>")
    documents = with_template(preparer, "{{ documents[0].text }}")
    assert documents.render(MESSAGES[:1], options={"documents": [{"text": "it rains"}]}) == "it rains"


@pytest.mark.parametrize("name", ["tools", "messages", "conversation", "chat_template", "tokenize", "max_length"])
def test_options_do_not_take_the_place_of_our_own(name: str, preparer: TextPreparer) -> None:
    template = with_template(preparer, tool_templates.HERMES + f"{{{{ {name} }}}}")
    with pytest.raises(InvalidRequest, match=f"template_options has '{name}', which the engine sets itself"):
        template.render(MESSAGES[:1], options={name: "x"})


def test_a_turn_begins_or_the_last_one_goes_on(preparer: TextPreparer) -> None:
    """Whatever the template knows of it."""
    said = [*MESSAGES[:1], {"role": "assistant", "content": "well then"}]
    hermes = with_template(preparer, tool_templates.HERMES)
    turn, begun = hermes.render(said), hermes.render(said, options={"continue_final_message": True})
    assert (begun[-9:], turn[: len(begun)]) == ("well then", begun)
    without = hermes.render(said, options={"add_generation_prompt": False})
    assert without == turn[: len(without)] != turn
    assert hermes.render(said, options={"continue_final_message": False}) == turn
    with pytest.raises(InvalidRequest, match="template_options has continue_final_message=1; allowed: True or False"):
        hermes.render(said, options={"continue_final_message": 1})


def test_what_the_template_does_not_read_may_be_off(preparer: TextPreparer) -> None:
    plain = with_template(preparer, tool_templates.PLAIN)
    assert plain.render(MESSAGES[:1], options={"enable_thinking": False, "x": None}) == plain.render(MESSAGES[:1])
    with pytest.raises(InvalidRequest, match="'x', which the checkpoint's chat template does not read"):
        plain.render(MESSAGES[:1], options={"x": 0})


def test_an_option_that_the_template_does_not_read_is_told(preparer: TextPreparer) -> None:
    with pytest.raises(InvalidRequest, match="'enable_thinkin', which the checkpoint's chat template does not read"):
        with_template(preparer, tool_templates.HERMES).render(MESSAGES[:1], options={"enable_thinkin": True})


def test_a_template_that_is_no_program_is_told_as_ever(preparer: TextPreparer) -> None:
    with pytest.raises(InvalidRequest, match="refuses the messages: TemplateSyntaxError"):
        with_template(preparer, "{{ ` }}").render(MESSAGES, tools=TOOLS)


def test_models_with_media_read_tools_too(tmp_path: Path) -> None:
    opened = Checkpoint.open("qwen2_vl", make_checkpoint("qwen2_vl", tmp_path)).preparer
    rendered = opened.render(MESSAGES, tools=TOOLS)
    assert '"name": "now"' in rendered
    assert '{"name": "weather", "arguments": {"city": "Zürich"}}' in rendered
    assert opened.template(tools=True) == opened.tokenizer.chat_template
    own = attrs.evolve(opened, chat_template=tool_templates.HERMES)
    assert own.template(tools=True) == tool_templates.HERMES
    with pytest.raises(InvalidRequest, match="does not read"):
        own.render(MESSAGES[:1], options={"nobody": 1})
