"""Tools, by OpenAI's client: a tiny model with random weights is made to call them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.real_time

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
MESSAGES: Any = [{"role": "user", "content": "Will it rain?"}]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "qwen3", "messages": MESSAGES, "tools": [WEATHER, NOW], "seed": 5, **more}
    return client.chat.completions.create(**given)


def test_a_tool_that_must_be_called_is_called_by_its_schema(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert (call.type, call.function.name) == ("function", "weather")
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9
    assert len(call.id) == 9


def test_some_tool_must_be_called(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name in ("weather", "now")


def test_a_stream_tells_the_same_call(client: openai.OpenAI) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    whole = ask(client, tool_choice=forced).choices[0].message.tool_calls[0].function
    name, arguments, reasons = "", "", []
    for chunk in ask(client, tool_choice=forced, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert (name, arguments) == (whole.name, whole.arguments)
    assert reasons[-1] == "stop"  # OpenAI's word for a call that was not the model's choice


def test_tools_that_may_not_be_called_are_not_told(client: openai.OpenAI) -> None:
    without = client.chat.completions.create(model="qwen3", messages=MESSAGES, max_tokens=4)
    answer = ask(client, tool_choice="none", max_tokens=4)
    assert answer.usage.prompt_tokens == without.usage.prompt_tokens
    assert answer.choices[0].message.tool_calls is None


def test_what_cannot_be_called_is_refused(client: openai.OpenAI) -> None:
    for more, told in (
        ({"tool_choice": {"type": "function", "function": {"name": "rain"}}}, "'rain', which is not one of the tools"),
        ({"tools": [WEATHER, WEATHER]}, "weather"),
        ({"response_format": {"type": "json_object"}}, "response_format and tools are both given"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            ask(client, **more)
