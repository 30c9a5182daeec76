"""Members that clients of other servers send: each does what it does there, or changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triolet import Structure

from .served import Served, served

pytestmark = pytest.mark.real_time

CHAT, PROMPTS = "/v1/chat/completions", "/v1/completions"
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
NOW = {"type": "function", "function": {"name": "now"}}
GET = {"type": "function", "function": {"name": "get"}}
SCHEMA = {"enum": ["red", "green"]}


def ask(service: Served, path: str = CHAT, **members: Any) -> Any:
    body: dict[str, Any] = {"model": "qwen3", **GREEDY, **members}
    body |= {"prompt": body.get("prompt", "hi")} if path == PROMPTS else {"messages": body.get("messages", QUESTION)}
    status, told = service.post(path, body)
    assert status == 200, told
    return told


def events(service: Served, path: str = CHAT, **members: Any) -> list[Any]:
    body: dict[str, Any] = {"model": "qwen3", "stream": True, **GREEDY, **members}
    body |= {"prompt": body.get("prompt", "hi")} if path == PROMPTS else {"messages": QUESTION}
    lines = service.get(path, body)[1].split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def refusal(service: Served, path: str = CHAT, **members: Any) -> str:
    body: dict[str, Any] = {"model": "qwen3", "messages": QUESTION, **members}
    status, told = service.post(path, body)
    assert status == 400
    return str(told["error"]["message"])


def tokens(service: Served, **members: Any) -> list[int]:
    """The prompt as the model reads it."""
    status, told = service.post("/tokenize", {"model": "qwen3", "messages": QUESTION, **members})
    assert status == 200, told
    found: list[int] = told["tokens"]
    return found


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, ('"red"', '"green"')),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ('"red"', '"green"')),
        ({"guided_json": SCHEMA}, ('"red"', '"green"')),
        ({"structured_outputs": {"choice": ["on", "off"]}}, ("on", "off")),
        ({"structured_outputs": {"regex": "a|b"}}, ("a", "b")),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, ("a", "b")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ('"red"', '"green"')),
    ],
    ids=str,
)
def test_a_text_has_the_form_that_is_asked_for_by_any_name(
    service: Served, members: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert ask(service, max_tokens=60, **members)["choices"][0]["message"]["content"] in expected
    assert ask(service, PROMPTS, max_tokens=60, **members)["choices"][0]["text"] in expected


def test_one_text_has_one_form(service: Served) -> None:
    several = {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}
    told = refusal(service, **several)
    assert told == "several forms are given for the answer: structured_outputs.choice, response_format; give one"
    told = refusal(service, structured_outputs={"regex": "a"}, tools=[NOW])
    assert "structured_outputs.regex and tools are both given" in told
    assert ask(service, structured_outputs={"json_object": True}, max_tokens=1)["choices"]
    large = {"enum": list(range(5_001))}
    for schema in (large, json.dumps(large)):
        body = {"model": "qwen3", "messages": QUESTION, "structured_outputs": {"json": schema}}
        status, found = service.post(CHAT, body)
        assert (status, found["error"]["message"].partition(",")[0]) == (413, "structured_outputs.json has more than 5")


def test_an_answer_beside_tools_is_a_call_or_has_its_form(service: Served) -> None:
    """Neither is lost: 400 said to leave one of them out."""
    asked = {
        "tools": [NOW],
        "response_format": {"type": "json_object", "schema": SCHEMA},
        "temperature": 1.0,
        "parallel_tool_calls": False,
    }
    found = [ask(service, **asked, seed=seed, max_tokens=200)["choices"][0] for seed in range(4)]
    for choice in found:
        called = [call["function"]["name"] for call in choice["message"].get("tool_calls", ())]
        assert called in ([], ["now"])
        assert choice["message"]["content"] in (None, '"red"', '"green"')
        assert bool(called) is (choice["message"]["content"] is None)
    forced = ask(service, **asked, tool_choice="required", max_tokens=200)["choices"][0]["message"]
    assert {call["function"]["name"] for call in forced["tool_calls"]} == {"now"}
    told = refusal(service, **{**asked, "response_format": {"type": "json_object", "schema": {"uniqueItems": True}}})
    assert "uniqueItems" in told


@pytest.mark.parametrize("path", [CHAT, PROMPTS])
def test_the_tokens_are_told_whole_and_as_a_stream(service: Served, path: str) -> None:
    whole = ask(service, path, return_token_ids=True)
    choice = whole["choices"][0]
    query = {"messages": QUESTION} if path == CHAT else {"prompt": "hi"}
    expected = service.engine("qwen3", lambda engine: engine.generate(**query, **GREEDY))
    assert choice["token_ids"] == list(expected.token_ids)
    prompt = (whole if path == CHAT else choice)["prompt_token_ids"]
    assert len(prompt) == expected.usage.prompt_tokens
    parts = events(service, path, return_token_ids=True)
    assert [token for part in parts for token in part["choices"][0].get("token_ids", ())] == choice["token_ids"]
    first, *others = [part if path == CHAT else part["choices"][0] for part in parts]
    assert first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in other for other in others)
    several = ask(service, path, return_token_ids=True, n=2)
    assert [one["token_ids"] for one in several["choices"]] == [choice["token_ids"]] * 2
    assert {tuple(one["prompt_token_ids"]) for one in (several["choices"] if path == PROMPTS else [several])} == {
        tuple(prompt)
    }
    counted = events(service, path, return_token_ids=True, n=2)
    assert {part["choices"][0]["index"] for part in counted} == {0, 1}
    if path == PROMPTS:
        parts = events(service, path, return_token_ids=True, max_tokens=0)
        assert [part["choices"][0].get("prompt_token_ids") for part in parts] == [prompt, None][: len(parts)]


@pytest.mark.parametrize("path", [CHAT, PROMPTS])
def test_each_event_has_the_usage_so_far(service: Served, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = events(service, path, stream_options=options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert {part["usage"]["prompt_tokens"] for part in parts} == {last["usage"]["prompt_tokens"]}
    assert (counts[-1], last["usage"]["completion_tokens"], last["choices"]) == (6, 6, [])
    assert all("usage" not in part for part in events(service, path, stream_options={"continuous_usage_stats": True}))


def test_a_stop_string_may_stay_in_the_text(service: Served) -> None:
    text = ask(service)["choices"][0]["message"]["content"]
    stop = text[2:4]
    end = text.index(stop) + len(stop)
    assert ask(service, stop=stop)["choices"][0]["message"]["content"] == text[: text.index(stop)]
    kept = {"stop": stop, "include_stop_str_in_output": True}
    assert ask(service, **kept)["choices"][0]["message"]["content"] == text[:end]
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in events(service, **kept)) == text[:end]


def test_the_last_message_may_be_continued(service: Served) -> None:
    begun = {"messages": [*QUESTION, {"role": "assistant", "content": "well then"}]}
    for members in ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        found = tokens(service, **begun, **members)
        assert found == tokens(service, **begun)[: len(found)] != tokens(service, **begun)
    plain, turn = tokens(service, add_generation_prompt=False), tokens(service)
    assert turn[: len(plain)] == plain != turn
    asked = ask(service, **begun, continue_final_message=True, return_token_ids=True)
    assert asked["prompt_token_ids"] == found
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert "continue_final_message and add_generation_prompt are both true" in refusal(service, **both)


def test_some_of_the_tools_may_be_called(service: Served) -> None:
    def allowed(mode: str, name: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}

    asked = {"tools": [NOW, GET], "temperature": 1.0, "max_tokens": 200, "parallel_tool_calls": False}
    for name in ("now", "get"):
        message = ask(service, **asked, **allowed("required", name), seed=2)["choices"][0]["message"]
        assert {call["function"]["name"] for call in message["tool_calls"]} == {name}
    both = ask(service, tools=[NOW, GET])["usage"]["prompt_tokens"]
    assert ask(service, tools=[NOW, GET], **allowed("auto", "now"))["usage"]["prompt_tokens"] == both
    assert "names 'rain', which is not one of the tools" in refusal(service, **asked, **allowed("auto", "rain"))
    tools = [{"type": "function", "name": name} for name in ("now", "get")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools[:1]}
    body = {"model": "qwen3", "input": "a", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    status, told = service.post("/v1/responses", body)
    assert (status, {item["name"] for item in told["output"]}) == (200, {"now"})


def test_scores_of_prompts_take_memory_for_each_answer(models: dict[str, str]) -> None:
    with served({"qwen3": models["qwen3"]}, request_memory=50 << 20) as small:
        asked = {"model": "qwen3", "prompt": [5] * 50, "echo": True, "logprobs": 5, "max_tokens": 1}
        assert small.post("/v1/completions", asked)[0] == 200
        status, told = small.post("/v1/completions", {**asked, "prompt": [5] * 1000, "n": 128})
    assert (status, told["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("prompts", [["one two", "three"], [[5, 6, 7, 8], [9, 10]]], ids=["texts", "tokens"])
def test_prompts_are_scored_by_the_model(service: Served, most: int, prompts: list[Any]) -> None:
    """As harnesses of benchmarks ask: whole and as a stream, by text and by tokens."""
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": most, "temperature": 0.0, "ignore_eos": True}
    for prompt, choice in zip(prompts, ask(service, PROMPTS, prompt=prompts, **asked)["choices"], strict=True):
        given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        sampling = {"temperature": 0.0, "max_tokens": 2, "prompt_logprobs": 2, "logprobs": 2, "ignore_eos": True}
        expected = service.engine("qwen3", lambda engine, asked={**given, **sampling}: engine.generate(**asked))
        told, values = choice["logprobs"], [value for value, _ in expected.prompt_logprobs]
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["token_logprobs"][1:] == pytest.approx([*values, *expected.logprobs[:most]])
        for token, value, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[
            1:
        ]:
            assert top[token] == value
            assert len(top) in (2, 3)
        begun = choice["text"].removesuffix(expected.text) if most else choice["text"]
        assert not isinstance(prompt, str) or begun == prompt
        assert told["text_offset"][0] == 0
        assert [place for place in told["text_offset"] if place >= len(begun)] == [len(begun)] * bool(most) + [
            place for place in told["text_offset"][-1:] if most
        ]
        parts = [part["choices"][0] for part in events(service, PROMPTS, **asked, prompt=prompt)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for part in parts for one in part["logprobs"][name]] == told[name]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert (parts[-1]["finish_reason"], choice["finish_reason"]) == ("length", "length")
    several = ask(service, PROMPTS, prompt=prompts[0], n=2, **asked)
    assert [{**one, "index": 0} for one in several["choices"]] == [
        ask(service, PROMPTS, prompt=prompts[0], **asked)["choices"][0]
    ] * 2
    assert several["usage"]["completion_tokens"] == 2 * most


@pytest.mark.parametrize("model", ["qwen3", "llama"])
def test_a_special_token_that_a_prompt_spells_has_its_place(service: Served, model: str) -> None:
    """One that the tokenizer adds has none."""
    mark = "<|im_end|>" if model == "qwen3" else "</s>"
    asked: dict[str, Any] = {"model": model, "echo": True, "logprobs": 0, "max_tokens": 0}
    plain, marked = (
        ask(service, PROMPTS, prompt=text, **asked)["choices"][0]["logprobs"] for text in ("hi", f"{mark}hi")
    )
    assert marked["text_offset"][-1] == plain["text_offset"][-1] + len(mark)


THOUGHT = {"role": "assistant", "content": "ho", "reasoning_content": "hm"}
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "hi", **MARK}], "id": "m1", **MARK}, QUESTION[0]),
        ({"role": "assistant", "content": "ho", "reasoning": "hm", "reasoning_details": [{"a": 1}]}, THOUGHT),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ho"}]},
            THOUGHT,
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
            {**THOUGHT, "content": ""},
        ),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
    ],
    ids=str,
)
def test_messages_of_other_clients_are_read(service: Served, sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert tokens(service, messages=[*QUESTION, sent]) == tokens(service, messages=[*QUESTION, read])


def test_what_a_template_does_not_read_may_be_off(service: Served) -> None:
    assert ask(service, model="llama", chat_template_kwargs={"enable_thinking": False})["choices"]
    told = refusal(service, model="llama", chat_template_kwargs={"enable_thinking": True})
    assert "'enable_thinking', which the checkpoint's chat template does not read" in told


def test_an_unknown_member_is_told_with_the_most_similar_ones(service: Served) -> None:
    told = refusal(service, min_pixels=1)
    assert told == (
        "min_pixels is not a member of this request; leave it out; similar ones are min_p, min_tokens, "
        "repetition_penalty; GET /openapi.json has all"
    )
    told = refusal(service, guided_regex="a")
    assert told == "guided_regex is not a member of this request; give structured_outputs"
    told = refusal(service, guided_whitespace_pattern=" ")
    assert told.startswith("guided_whitespace_pattern is not a member of this request; leave it out;")


def test_a_structure_and_its_plain_form_are_the_same(service: Served) -> None:
    """A structure by another name gives the tokens of the engine's."""
    expected = service.engine(
        "qwen3", lambda engine: engine.generate(messages=QUESTION, structure=Structure.choice(["on", "off"]), **GREEDY)
    )
    assert (
        ask(service, structured_outputs={"choice": ["on", "off"]})["choices"][0]["message"]["content"] == expected.text
    )


@pytest.mark.parametrize(
    ("path", "sent", "instead"),
    [
        (CHAT, "functions", "tools"),
        (CHAT, "function_call", "tool_choice"),
        (CHAT, "enable_thinking", "chat_template_kwargs"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "response_format", "text"),
    ],
)
def test_a_member_of_an_older_or_another_api_is_refused_with_what_to_give_instead(service, path, sent, instead):
    """`max_tokens` of a response was answered with "did you mean min_tokens?", `functions` with "prediction"."""
    given = {"messages": QUESTION} if path == CHAT else {"input": "hi"}
    status, told = service.post(path, {"model": "qwen3", **given, sent: 1})
    assert (status, told["error"]["message"]) == (400, f"{sent} is not a member of this request; give {instead}")


def test_a_schema_with_a_keyword_that_cannot_be_followed_is_refused_with_what_to_do(service):
    form = {"name": "some", "schema": {"type": "array", "uniqueItems": True}}
    told = refusal(service, response_format={"type": "json_schema", "json_schema": form})
    assert told.endswith('it has keywords that cannot be forced: "uniqueItems"; leave them out')
