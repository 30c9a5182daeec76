"""``/tokenize``, ``/detokenize`` and ``/version``, as vLLM's clients ask for them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import httpx2
import openai
import pytest
import trio

from triolet.models.checkpoints.gguf_tokenizer import GgufTokenizer

from ..checkpoints.gguf_files import tiny, write_gguf
from .openai_client import openai_client
from .served import served

pytestmark = pytest.mark.real_time


@pytest.fixture
def http(service):
    with httpx2.Client(base_url=service.url, timeout=None) as one:
        yield one


def test_the_tokens_of_a_prompt_are_those_that_the_model_reads(service, http):
    told = http.post("/tokenize", json={"model": "llama", "prompt": "Once upon a time"}).json()
    read = service.engine("llama", lambda engine: engine.generate("Once upon a time", max_tokens=1)).usage
    assert (told["count"], len(told["tokens"])) == (read.prompt_tokens,) * 2
    assert told["max_model_len"] == 512
    back = http.post("/detokenize", json={"model": "llama", "tokens": told["tokens"]}).json()
    assert back["prompt"].endswith("Once upon a time")


def test_the_tokens_of_a_conversation_have_its_template_and_its_tools(service, http):
    messages = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    read = service.engine("qwen3", lambda engine: engine.generate(messages=messages, max_tokens=1)).usage
    plain = http.post("/tokenize", json={"model": "qwen3", "messages": messages}).json()
    with_tools = http.post("/tokenize", json={"model": "qwen3", "messages": messages, "tools": [tool]}).json()
    assert plain["count"] == read.prompt_tokens
    assert with_tools["count"] > plain["count"]


def test_the_text_of_a_prompt_is_tokenized_alone_where_vllms_clients_want_that(http):
    whole = http.post("/tokenize", json={"model": "llama", "prompt": "hi"}).json()
    asked = {"model": "llama", "prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    alone = http.post("/tokenize", json=asked).json()
    assert whole["tokens"] == [263, *alone["tokens"]]
    assert "token_strs" not in whole
    assert alone["token_strs"] == ["h", "i"]


def test_the_only_model_needs_no_name(models):
    with served({"llama": models["llama"]}) as alone, httpx2.Client(base_url=alone.url, timeout=None) as http:
        assert http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()["count"] > 2
        tokens = http.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith("hi")


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "give one of prompt and messages",
        ),
        ("/tokenize", {}, "give one of prompt and messages"),
        ("/tokenize", {"prompt": "hi " * 2_000}, "allowed: up to"),
        ("/tokenize", {"prompt": "hi " * 2_000, "add_special_tokens": False}, "allowed: up to"),
        ("/tokenize", {"prompt": "hi", "model": None}, "model is missing; allowed: whisper, "),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "whose template"),
        ("/detokenize", {"tokens": [2**30]}, "1073741824 is not in the vocabulary; allowed: 0 to"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ],
)
def test_what_cannot_be_read_is_refused(http, path, body, told):
    answer = http.post(path, json={"model": "llama", **body})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_the_version_is_the_packages(http):
    assert http.get("/version").json() == {"version": version("triolet")}


def test_the_event_loop_does_not_make_the_tokenizer_for_tools(tmp_path, monkeypatch):
    """All other requests would wait for it. That of a GGUF file is made when a request first needs it."""
    model = tiny("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    in_loop, make = list[bool](), GgufTokenizer._whole

    def seen_making(tokenizer: GgufTokenizer) -> Any:
        in_loop.append(trio.lowlevel.in_trio_run())
        return make(tokenizer)

    monkeypatch.setattr(GgufTokenizer, "_whole", seen_making)
    tools = [{"type": "function", "function": {"name": "now"}}]
    with (
        served({"m": str(write_gguf(tmp_path / "m.gguf", "llama", model))}) as running,
        openai_client(running) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="tool"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], tools=tools)
    assert in_loop == [False]
