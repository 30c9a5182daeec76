"""``/v1/responses`` by OpenAI's own client: each answer is held to its types, and is what the engine gives."""

from __future__ import annotations

import base64
import io
from typing import Any

import openai
import pytest
from PIL import Image

from triolet import Completion, Structure

from .served import Served

pytestmark = pytest.mark.real_time

QUESTION = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_output_tokens": 8}
SEVEN = {"enum": [777]}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"enum": [3]}},
        "required": ["days"],
        "additionalProperties": False,
    },
    "strict": True,
}


def completed(service: Served, model: str = "llama", **query: Any) -> Completion:
    """What the engine gives without a server."""
    query = {"temperature": 0.0, "max_tokens": 8, **query}
    return service.engine(model, lambda engine: engine.generate(**query))


def respond(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "llama", "input": "hi", **GREEDY, **options})


def test_a_text_gets_the_answer_of_the_engine_with_its_log_probabilities(service, client):
    expected = completed(service, messages=QUESTION, logprobs=2)
    answer = respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    assert answer.output_text == expected.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (expected.usage.prompt_tokens, 8)
    told = answer.output[0].content[0].logprobs
    assert [one.logprob for one in told] == pytest.approx(expected.logprobs)
    assert [len(one.top_logprobs) for one in told] == [2] * 8


def test_the_tokens_of_the_input_are_counted_as_they_are_read(client):
    asked = {"model": "qwen3", "instructions": "a", "input": "b", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == respond(client, max_output_tokens=1, **asked).usage.input_tokens


def test_instructions_and_items_are_the_messages_of_a_conversation(service, client):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "ho"},
        {"role": "system", "content": "Now."},
    ]
    answer = respond(
        client,
        instructions="Be short.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "message", "role": "assistant", "content": "ho"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "developer", "content": "Now."},
        ],
    )
    assert answer.output_text == completed(service, messages=messages).text


def test_the_clients_stream_has_the_same_answer_and_its_pieces_are_the_text(service, client):
    expected = completed(service, messages=QUESTION, structure=Structure.json_schema(SEVEN))
    seven = {"format": {"type": "json_schema", "name": "seven", "schema": SEVEN}}
    with client.responses.stream(model="llama", input="hi", text=seven, **GREEDY) as stream:
        events = list(stream)
        whole = stream.get_final_response()
    assert (whole.output_text, whole.status, whole.incomplete_details) == (expected.text, "completed", None)
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == expected.text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(one.type for one in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_call_is_an_item_and_its_output_goes_back(service, client):
    asked = [{"role": "user", "content": "hi"}]
    choice = {"type": "function", "name": "weather"}
    qwen = {"model": "qwen3", "max_output_tokens": 200, "tools": [WEATHER]}
    answer = respond(client, input=asked, tool_choice=choice, **qwen)
    [call] = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    again = respond(
        client,
        input=[*asked, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        tool_choice="none",
        **qwen,
    )
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        *asked,
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    assert again.output_text == completed(service, "qwen3", messages=messages, max_tokens=200).text


@pytest.mark.parametrize("given", ["", None, {"days": 3}, '{"days": 3', "[3]", "left out"])
def test_a_history_that_other_models_wrote_is_taken(service: Served, given: Any) -> None:
    """By both endpoints, and as one prompt. A call that was cut, or has no arguments, ends no conversation."""
    told = {} if given == "left out" else {"arguments": given}
    function = {"name": "weather", **told}
    calls = [{"id": "c1", "type": "function", "function": function}]
    messages = [
        *QUESTION,
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": None},
    ]
    items = [
        *QUESTION,
        {"role": "assistant", "content": None},
        {"type": "message", "role": "assistant", "content": ""},
        {"role": "user", "content": "so"},
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call_output", "call_id": "c1", "output": None},
    ]
    greedy = {"model": "qwen3", "temperature": 0}
    status, answer = service.post("/v1/chat/completions", {"messages": messages, **greedy, "max_tokens": 8})
    assert status == 200, answer
    again, responded = service.post("/v1/responses", {"input": items, **greedy, "max_output_tokens": 8})
    assert again == 200, responded
    assert responded["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"] > 0


def test_a_place_in_a_message_is_one_that_the_client_has_sent(service: Served) -> None:
    for wrong, place in (
        ({"role": "user", "content": None}, "input.1"),
        ({"type": "function_call", "call_id": "c1", "arguments": ""}, "input.1.name"),
    ):
        status, answer = service.post("/v1/responses", {"model": "qwen3", "input": [*QUESTION, wrong]})
        assert status == 400
        assert place in answer["error"]["message"]
        assert "messages" not in answer["error"]["message"]


def test_the_pieces_of_a_call_in_a_stream_are_its_arguments(client):
    choice = {"type": "function", "name": "weather"}
    options = {**GREEDY, "max_output_tokens": 200}
    with client.responses.stream(model="qwen3", input="hi", tools=[WEATHER], tool_choice=choice, **options) as stream:
        events = list(stream)
        [call] = stream.get_final_response().output
    pieces = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert [one.name for one in events if one.type == "response.function_call_arguments.done"] == ["weather"]


def test_an_image_is_seen(service, client):
    picture = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(picture, "PNG")
    content = [{"type": "image", "image": picture.getvalue()}, {"type": "text", "text": "what?"}]
    expected = completed(service, "qwen2_vl", messages=[{"role": "user", "content": content}])
    address = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    parts = [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": "what?"}]
    answer = respond(client, model="qwen2_vl", input=[{"role": "user", "content": parts}])
    assert answer.output_text == expected.text


FAR_IMAGE = {"type": "input_image", "image_url": "https://example.org/a.png"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored; .*send the whole conversation"),
        ({"background": True}, "background: nothing is stored"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: no prompts are stored"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]}, "file_id: no files are"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice is given without tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "wether"}}, "not one of the tools"),
        ({"input": []}, "input"),
        (
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input.0: this server stores no items; send the item itself",
        ),
        (
            {"instructions": "a", "input": [{"role": "user", "content": [FAR_IMAGE]}]},
            "input.0.content.0: https://example.org/a.png may not be fetched",
        ),
        ({"max_output_tokens": 10_000}, "max_output_tokens=10000 .* Leave out max_output_tokens"),
        ({"extra_body": {"max_output_token": 5}}, "did you mean max_output_tokens?"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_what_is_not_there_is_refused_by_name(client, options, told):
    with pytest.raises((openai.BadRequestError, openai.PermissionDeniedError), match=told):
        respond(client, **options)
