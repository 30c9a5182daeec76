"""OpenAI's own client, as it is published, over the server: conversations, prompts, vectors, models.

Each answer is held to the client's types, and is what the same engine gives without a server.
"""

from __future__ import annotations

import base64
import io
import json
from functools import partial
from typing import Any, Literal

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image
from pydantic import BaseModel, ConfigDict

from triolet import Completion, Engine, SamplingParams

from .openai_client import openai_client
from .served import Served

pytestmark = pytest.mark.real_time

QUESTION = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0.0, "max_tokens": 8}


class Verdict(BaseModel):  # so narrow that a model of random weights gives it, and short: tools tell it to the model
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green"]


def completed(service: Served, model: str = "llama", **query: Any) -> Completion:
    """What the engine gives without a server."""
    return service.engine(model, lambda engine: engine.generate(**query))


async def tokenizer_of(engine: Engine) -> Any:
    return engine.model.tokenizer


def talk(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "llama", "messages": QUESTION, **options})


def within(text: str) -> str:
    """A character of ``text`` that is not its first."""
    return next(one for one in text if text.index(one))


# -- conversations -----------------------------------------------------------------------------------------------------


def test_a_conversation_gets_the_text_of_the_engine(service, client):
    expected = completed(service, messages=QUESTION, **GREEDY)
    answer = talk(client, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected.text, "length")
    assert answer.model == "llama"
    told = answer.usage
    assert (told.prompt_tokens, told.completion_tokens) == (expected.usage.prompt_tokens, 8)
    assert told.total_tokens == told.prompt_tokens + 8


LINES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two"}]
PARTS = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
RARE = {"top_k": 3, "repetition_penalty": 1.3}  # what OpenAI does not have goes by `extra_body`


@pytest.mark.parametrize(
    ("asked", "query"),
    [
        ({"messages": [{"role": "developer", "content": "be brief"}, PARTS], **GREEDY}, {"messages": LINES, **GREEDY}),
        ({"messages": [LINES[0], PARTS], **GREEDY}, {"messages": LINES, **GREEDY}),
        ({"max_completion_tokens": 3, "temperature": 0.0}, {"messages": QUESTION, "max_tokens": 3, "temperature": 0.0}),
        (
            {"seed": 5, "max_tokens": 8, "extra_body": {**RARE, "priority": -5}},
            {"messages": QUESTION, "seed": 5, "max_tokens": 8, "temperature": 1.0, **RARE},
        ),
    ],
    ids=["developer and parts", "system and parts", "max_completion_tokens", "extra members"],
)
def test_members_reach_the_engine_by_its_names(service, client, asked, query):
    assert talk(client, **asked).choices[0].message.content == completed(service, **query).text


def test_n_answers_are_the_completion_and_its_alternatives_whole_and_as_streams(service, client):
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=7, n=3)
    found = completed(service, messages=QUESTION, sampling=sampling)
    expected = {index: one.text for index, one in enumerate((found, *found.alternatives))}
    answer = talk(client, n=3, seed=7, max_tokens=8)
    assert {choice.index: choice.message.content for choice in answer.choices} == expected
    assert len(set(expected.values())) == 3
    assert answer.usage.completion_tokens == 24
    texts = dict.fromkeys(range(3), "")
    for part in talk(client, stream=True, n=3, seed=7, max_tokens=8):
        texts[part.choices[0].index] += part.choices[0].delta.content or ""
    assert texts == expected


def test_a_stop_string_ends_the_text_before_it(service, client):
    whole = completed(service, messages=QUESTION, **GREEDY).text
    stop = within(whole)
    choice = talk(client, stop=[stop], **GREEDY).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_logprobs_are_those_of_the_engine_whole_and_as_a_stream(service, client):
    expected = completed(service, messages=QUESTION, logprobs=2, **GREEDY)
    asked = {"logprobs": True, **GREEDY}
    told = talk(client, top_logprobs=2, **asked).choices[0].logprobs.content
    assert [one.logprob for one in told] == pytest.approx(expected.logprobs)
    found = [[other.logprob for other in one.top_logprobs] for one in told]
    assert found == [pytest.approx([value for _, value in top]) for top in expected.top_logprobs]
    parts = list(talk(client, top_logprobs=2, stream=True, **asked))
    assert any(part.choices[0].logprobs for part in parts if part.choices[0].delta.content)
    streamed = [one for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
    assert [(one.token, one.logprob) for one in streamed] == [(one.token, pytest.approx(one.logprob)) for one in told]
    bare = talk(client, **asked).choices[0].logprobs.content
    assert [one.top_logprobs for one in bare] == [[]] * 8, "no other tokens are named"


def test_the_bytes_of_all_tokens_are_the_text_even_where_characters_are_cut(service, client):
    choice = talk(client, logprobs=True, seed=3, max_tokens=40).choices[0]
    told = bytes(byte for one in choice.logprobs.content for byte in one.bytes or ())
    assert told.decode("utf-8", "replace") == choice.message.content
    assert any(bytes(one.bytes or ()) >= b"\x80" for one in choice.logprobs.content)


def test_logprobs_of_tokens_that_came_before_decode_none_of_them_again(service, client, monkeypatch):
    """The endpoints share the engine's bytes of tokens, which work in the server's loop would else find anew."""

    def talks() -> int:
        talk(client, logprobs=True, top_logprobs=2, **GREEDY)
        list(talk(client, logprobs=True, top_logprobs=2, stream=True, **GREEDY))
        client.completions.create(model="llama", prompt="one", logprobs=2, **GREEDY)
        include = ["message.output_text.logprobs"]
        client.responses.create(model="llama", input="hi", include=include, temperature=0.0, max_output_tokens=16)
        return len(decoded)

    decoded: list[Any] = []
    tokenizer = service.engine("llama", tokenizer_of)
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(ids) or decode(ids, **options))
    assert talks() == talks()


def test_a_stream_has_the_same_text_and_its_usage_at_the_end(service, client):
    expected = completed(service, messages=QUESTION, **GREEDY)
    *parts, last = talk(client, stream=True, stream_options={"include_usage": True}, **GREEDY)
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert {part.usage for part in parts} == {None}
    assert all("finish_reason" in part.choices[0].model_fields_set for part in parts)  # null is said, as OpenAI says it
    assert (last.choices, last.usage.completion_tokens) == ([], 8)
    assert len({part.id for part in (*parts, last)}) == 1


def test_a_json_object_is_one(service, client):
    end = str(service.engine("llama", tokenizer_of).convert_tokens_to_ids("}"))
    answer = talk(client, response_format={"type": "json_object"}, seed=1, logit_bias={end: 9}, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's, where it sends its own answer back
def test_parse_gives_the_object_of_a_pydantic_model(client):
    ask = partial(client.chat.completions.parse, model="llama", seed=1, max_tokens=200, response_format=Verdict)
    answer = ask(messages=QUESTION).choices[0].message
    assert isinstance(answer.parsed, Verdict)
    again = ask(messages=[*QUESTION, answer, *QUESTION])  # an answer goes back as it came
    assert isinstance(again.choices[0].message.parsed, Verdict)


def encoded(kind: str) -> bytes:
    """Noise, as an image or as audio."""
    buffer, random = io.BytesIO(), np.random.default_rng(0)
    if kind == "image":
        Image.fromarray(random.integers(0, 255, (32, 48, 3), dtype=np.uint8)).save(buffer, "PNG")
    else:
        soundfile.write(buffer, random.normal(0, 0.1, 8_000), 16_000, format="WAV")
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "model"), [("image", "qwen2_vl"), ("audio", "qwen2_audio")])
def test_an_image_is_seen_and_audio_is_heard(service, client, kind, model):
    text = {"type": "text", "text": "What is it?"}
    messages = [{"role": "user", "content": [{"type": kind, kind: encoded(kind)}, text]}]
    expected = completed(service, model, messages=messages, **GREEDY)
    data = base64.b64encode(encoded(kind)).decode()
    told = {
        "image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "high"}},
        "audio": {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    }
    answer = talk(client, model=model, messages=[{"role": "user", "content": [told[kind], text]}], **GREEDY)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


# -- tools -------------------------------------------------------------------------------------------------------------


TOOL = openai.pydantic_function_tool(Verdict, name="Verdict", description="")
CALL = {"model": "qwen3", "seed": 5, "tools": [TOOL, {"type": "function", "function": {"name": "now"}}]}
MUST = {"tool_choice": {"type": "function", "function": {"name": "Verdict"}}}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # as above
def test_parse_gives_the_arguments_of_a_call_and_the_result_goes_back_with_it(client):
    answer = client.chat.completions.parse(messages=QUESTION, **{**CALL, "tools": [TOOL]}, **MUST).choices[0]
    (call,) = answer.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Verdict)
    assert (answer.finish_reason, answer.message.content) == ("stop", None)  # OpenAI's word for a call that was forced
    assert (call.type, call.function.name, len(call.id)) == ("function", "Verdict", 9)
    result = {"role": "tool", "tool_call_id": call.id, "content": "it is"}
    again = talk(client, messages=[*QUESTION, answer.message, result], **CALL, max_tokens=4)
    assert again.usage.prompt_tokens > talk(client, **CALL, max_tokens=4).usage.prompt_tokens


def test_a_stream_tells_the_same_call_piece_by_piece(client):
    whole = talk(client, **CALL, **MUST).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(messages=QUESTION, **CALL, **MUST) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert (call.function.name, call.function.arguments) == (whole.name, whole.arguments)
    assert (choice.finish_reason, choice.message.content) == ("stop", "")


def test_some_tool_must_be_called_or_none_is_told(client):
    (call,) = talk(client, **CALL, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name in ("Verdict", "now")
    answer = talk(client, **CALL, tool_choice="none", max_tokens=4)
    assert answer.usage.prompt_tokens == talk(client, model="qwen3", max_tokens=4).usage.prompt_tokens
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "rain"}}}, "'rain', which is not one of the tools"),
        ({"tools": [TOOL, TOOL]}, "Verdict"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ],
)
def test_what_cannot_be_called_is_refused(client, more, told):
    with pytest.raises(openai.BadRequestError, match=told):
        talk(client, **{**CALL, **more})


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts_of_tokens_are_completed(service, client):
    expected = [completed(service, prompt_token_ids=tokens, **GREEDY).text for tokens in ([70, 71], [72])]
    answer = client.completions.create(model="llama", prompt=[[70, 71], [72]], **GREEDY)
    assert [choice.text for choice in answer.choices] == expected
    assert client.completions.create(model="llama", prompt=[70, 71], **GREEDY).choices[0].text == expected[0]
    short = client.completions.create(model="llama", prompt="one", temperature=0.0)
    assert short.usage.completion_tokens <= 16, "by default"


def test_n_completions_of_each_prompt_follow_one_another_and_its_echo_whole_and_as_streams(service, monkeypatch):
    """Where the first token is a part of a character, the echo is there, too. A prompt is read once for all of them."""
    found = [completed(service, prompt=one, n=4, temperature=1.0, max_tokens=8, seed=7) for one in ("one", "two")]
    expected = [text for first in found for text in (first.text, *(one.text for one in first.alternatives))]
    read, kind = list[Any](), type(service.engine("llama", tokenizer_of))
    original = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda one, *given, **more: read.extend(given) or original(one, *given, **more)
    )
    with openai_client(service) as client:  # its types do not know that a reason comes last
        ask = partial(client.completions.create, model="llama", prompt=["one", "two"], n=4, seed=7, max_tokens=8)
        assert [choice.text for choice in ask().choices] == expected
        echoed = [prompt + text for prompt, text in zip(["one"] * 4 + ["two"] * 4, expected, strict=True)]
        assert [choice.text for choice in ask(echo=True).choices] == echoed
        read.clear()
        parts = [part.choices[0] for part in ask(echo=True, stream=True)]
    assert sorted(read) == ["one", "two"]
    assert ["".join(part.text for part in parts if part.index == index) for index in range(8)] == echoed
    assert all(part.text or part.finish_reason for part in parts), "a part of a character is no event"


def test_logprobs_of_a_completion_have_the_sampled_token_among_the_likeliest(service, client):
    """OpenAI's have it, too: "there may be up to logprobs+1 elements"."""
    ask = partial(client.completions.create, model="llama", prompt="one", max_tokens=8, seed=3)
    expected = completed(service, prompt="one", logprobs=2, max_tokens=8, seed=3, temperature=1.0)
    told = ask(logprobs=2).choices[0].logprobs
    assert told.token_logprobs == pytest.approx(expected.logprobs)
    for token, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == value
    assert told.text_offset[0] == 0
    bare = ask(logprobs=0).choices[0].logprobs
    assert [list(top) for top in bare.top_logprobs] == [[token] for token in bare.tokens]


def test_completions_are_streamed(service):
    with openai_client(service) as client:
        ask = partial(client.completions.create, model="llama", prompt=["one", "two"], logprobs=1, **GREEDY)
        whole = ask()
        *parts, last = ask(stream=True, stream_options={"include_usage": True})
    for index in (0, 1):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert "".join(part.text for part in own) == whole.choices[index].text
        told = whole.choices[index].logprobs
        assert [value for part in own for value in part.logprobs.token_logprobs] == pytest.approx(told.token_logprobs)
        assert [place for part in own for place in part.logprobs.text_offset] == told.text_offset
        assert own[-1].finish_reason == "length"
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all("usage" in part.model_fields_set and part.usage is None for part in parts)  # null, as OpenAI says it


# -- vectors -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vectors(service: Served) -> Any:
    return service.engine("bert", lambda engine: engine.embed(["one", "two"]))


def test_vectors_are_those_of_the_engine(client, vectors):
    answer = client.embeddings.create(model="bert", input=["one", "two"], encoding_format="float")
    assert [one.index for one in answer.data] == [0, 1]
    assert np.allclose([one.embedding for one in answer.data], vectors, atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_vectors_come_as_base64_by_the_clients_default(service, vectors):
    with openai_client(service) as client:  # a strict one does not know its own default
        answer = client.embeddings.create(model="bert", input="one")
    assert np.allclose(answer.data[0].embedding, vectors[0], atol=1e-6)


def test_dimensions_are_the_first_ones_at_length_one(client, vectors):
    answer = client.embeddings.create(model="bert", input=["one"], encoding_format="float", dimensions=8)
    short = vectors[0][:8]
    assert np.allclose(answer.data[0].embedding, short / np.linalg.norm(short), atol=1e-6)
    whole = client.embeddings.create(model="bert", input=["one"], encoding_format="float", dimensions=vectors.shape[1])
    assert np.linalg.norm(whole.data[0].embedding) == pytest.approx(1.0)


def test_tokens_of_another_vocabulary_are_no_input(client):
    """LangChain sends those of OpenAI's models by default, which mean nothing to another one."""
    with pytest.raises(openai.BadRequestError, match="token ids") as caught:
        client.embeddings.create(model="bert", input=[[1, 2, 3]])
    assert "check_embedding_ctx_length=False" in caught.value.message
    assert caught.value.param == "input"
