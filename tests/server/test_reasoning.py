"""Reasoning in conversations and responses: whole and as a stream, by OpenAI's own client, as the engine writes it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from triolet import Completion
from triolet.server.schemas.responses import InputCall, InputMessage, InputReasoning, _messages

from ..api import reasoning_templates as published
from ..api.tool_templates import HERMES, make_tool_checkpoint
from .openai_client import openai_client
from .served import Served, served

pytestmark = pytest.mark.real_time

ASK = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
BUDGET = {"extra_body": {"max_reasoning_tokens": 5}}
MARK = 6  # tokens of </think>: "th" and "in" are one each
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    templates = {"r1": published.DEEPSEEK_R1, "qwen3": published.QWEN3, "hermes": HERMES}
    made = {name: make_tool_checkpoint(tmp_path_factory.mktemp(name), one, ()) for name, one in templates.items()}
    with served({name: str(folder) for name, folder in made.items()}) as running:
        yield running


@pytest.fixture
def client(service: Served) -> Iterator[openai.OpenAI]:
    with openai_client(service, _strict_response_validation=True) as one:
        yield one


def engine_says(service: Served, model: str = "r1", **asked: Any) -> Completion:
    return service.engine(model, lambda engine: engine.generate(messages=ASK, **asked))


def chat(client: openai.OpenAI, model: str = "r1", **asked: Any) -> Any:
    return client.chat.completions.create(**{"model": model, "messages": ASK, "temperature": 0.0, **asked})


def prompt_of(service: Served, model: str, **asked: Any) -> str:
    _, told = service.post("/tokenize", {"model": model, **asked})
    return str(service.engine(model, lambda engine: _text(engine, told["tokens"])))


async def _text(engine: Any, tokens: list[int]) -> str:
    return str(engine.model.tokenizer.decode(tokens))


def test_a_conversation_has_reasoning_beside_its_content_whole_and_as_a_stream(service, client):
    asked = {"response_format": SCHEMA, "logprobs": True, "top_logprobs": 1, **BUDGET}
    answer = chat(client, **asked)
    message, usage = answer.choices[0].message, answer.usage
    assert message.content in ('"yes"', '"no"')
    assert answer.choices[0].finish_reason == "stop"
    assert usage.completion_tokens_details.reasoning_tokens == 5 + MARK
    told = answer.choices[0].logprobs.content
    assert "".join(one.token for one in told) == message.content, "they belong to the answer"
    expected = engine_says(service, max_tokens=5)
    assert (message.reasoning_content, expected.text) == (expected.reasoning, "")
    parts = list(chat(client, stream=True, stream_options={"include_usage": True}, **asked))
    deltas = [part.choices[0].delta for part in parts if part.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert ("".join(thoughts), "".join(delta.content or "" for delta in deltas)) == (
        message.reasoning_content,
        message.content,
    )
    assert parts[-1].usage == usage
    found = [
        one for part in parts if part.choices and part.choices[0].logprobs for one in part.choices[0].logprobs.content
    ]
    assert found == told


def test_an_answer_that_is_cut_within_its_reasoning_is_empty(client):
    answer = chat(client, max_tokens=3, n=2)
    for choice in answer.choices:
        assert (choice.message.content, choice.finish_reason) == ("", "length")
        assert choice.message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 6


def test_efforts_of_openai_are_read(service, client):
    breaks = service.engine("r1", partial(_bias, text="\n\n\n", bias=-100.0))  # they would be a part of the mark
    none = chat(client, reasoning_effort="none", max_tokens=12, logit_bias=breaks)
    assert none.usage.completion_tokens_details.reasoning_tokens == MARK
    assert not hasattr(none.choices[0].message, "reasoning_content")
    some = chat(client, reasoning_effort="medium", max_tokens=20, logit_bias=breaks)
    assert some.usage.completion_tokens_details.reasoning_tokens == 10 + MARK
    response = client.responses.create(model="r1", input="hi", reasoning={"effort": "none"}, max_output_tokens=12)
    assert response.usage.output_tokens_details.reasoning_tokens in (MARK, MARK + 1)
    assert [item.type for item in response.output] == ["message"]
    for path, body in (("/v1/chat/completions", {"messages": ASK}), ("/v1/responses", {"input": "hi"})):
        wrong = {"reasoning_effort": "much"} if "messages" in body else {"reasoning": {"effort": "much"}}
        assert service.post(path, {"model": "r1", **body, **wrong})[0] == 400
        status, told = service.post(path, {"model": "r1", **body, "thinking_token_budget": 3})
        assert (status, "max_reasoning_tokens" in told["error"]["message"]) == (400, True)


def test_a_forced_call_comes_behind_the_reasoning(service, client):
    bias = service.engine("hermes", lambda engine: _bias(engine, "<th"))
    asked = {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": bias, **BUDGET}
    message = chat(client, "hermes", **asked).choices[0].message
    assert message.reasoning_content
    assert (message.content, [call.function.name for call in message.tool_calls]) == (None, ["now"])
    parts = [part.choices[0].delta for part in chat(client, "hermes", stream=True, **asked)]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in parts) == message.reasoning_content
    assert [call.function.name for one in parts for call in one.tool_calls or () if call.id] == ["now"]
    assert not any(one.content for one in parts)


async def _bias(engine: Any, text: str, bias: float = 50.0) -> dict[str, float]:
    return {str(token): bias for token in engine.model.tokenizer.encode(text, add_special_tokens=False)}


def test_a_response_has_an_item_of_reasoning_before_its_message(service, client):
    asked = {"model": "r1", "input": "hi", "temperature": 0.0, **BUDGET}
    asked |= {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}}}}
    response = client.responses.create(**asked)
    thought, message = response.output
    assert (thought.type, message.type, response.status) == ("reasoning", "message", "completed")
    assert thought.content[0].text == engine_says(service, max_tokens=5).reasoning
    assert response.output_text in ('"yes"', '"no"')
    events = list(client.responses.create(**asked, stream=True))
    assert (
        "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == thought.content[0].text
    )
    kinds = [one.type.removeprefix("response.") for one in events if one.type != "response.reasoning_text.delta"]
    assert kinds[2:7] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    ended = events[-1].response
    assert [item.model_dump(exclude={"id"}) for item in ended.output] == [
        item.model_dump(exclude={"id"}) for item in response.output
    ]
    cut = client.responses.create(model="r1", input="hi", max_output_tokens=3)
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
    assert (cut.status, cut.output_text) == ("incomplete", "")
    assert cut.usage.output_tokens_details.reasoning_tokens == 3


def test_reasoning_that_comes_back_goes_to_the_template(service, client):
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": "ho"}
    items = [{"role": "user", "content": "hi"}, thought, said]
    _, counted = service.post("/v1/responses/input_tokens", {"model": "qwen3", "input": items})
    messages = [*ASK, {"role": "assistant", "content": "ho", "reasoning_content": "hm"}]
    asked = {"model": "qwen3", "messages": messages}
    status, told = service.post("/tokenize", asked)
    assert (status, counted["input_tokens"]) == (200, len(told["tokens"]))
    assert "<think>\nhm\n</think>\n\nho" in prompt_of(service, **asked)
    assert "hm" not in prompt_of(service, "qwen3", messages=[*messages, *ASK]), "Qwen3's template leaves it out here"


def test_each_item_of_reasoning_goes_with_what_follows_it():
    def thought(text):
        content = [{"type": "reasoning_text", "text": text}]
        return InputReasoning.model_validate({"type": "reasoning", "id": "rs", "summary": [], "content": content})

    call = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    calls = [InputCall.model_validate({**call, "call_id": number}) for number in "12"]
    said = InputMessage.model_validate({"type": "message", "role": "assistant", "content": "ho"})
    messages, places = _messages(None, [thought("A"), thought("B"), said, thought("C"), *calls])
    assert [(one.content, one.reasoning_content, len(one.tool_calls or ())) for one in messages] == [
        ("ho", "A\nB", 0),
        (None, "C", 2),
    ]
    assert places == ("input.2.content", "input.4")


def test_an_answer_goes_on_with_reasoning(client):
    last = {"role": "assistant", "content": "", "reasoning_content": "Well"}
    body = {"continue_final_message": True, **BUDGET["extra_body"]}
    answer = chat(client, "qwen3", messages=[*ASK, last], response_format=SCHEMA, extra_body=body)
    assert answer.choices[0].message.content in ('"yes"', '"no"')
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5 + MARK
    begun = {**last, "content": '"ye'}
    on = chat(client, "qwen3", messages=[*ASK, begun], max_tokens=4, extra_body={"continue_final_message": True})
    assert on.usage.completion_tokens_details.reasoning_tokens == 0
