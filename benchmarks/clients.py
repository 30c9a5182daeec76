"""Clients that others wrote, unchanged, over a server that runs: what works with which version.

::

    triolet serve ...
    python -m venv one && one/bin/pip install litellm
    one/bin/python benchmarks/clients.py http://127.0.0.1:8000 --chat CHAT --vectors VECTORS ...

Asks with whatever of `CLIENTS` is installed, and compares each answer with what the same server says to a plain
request. Needs nothing but Python and a client, and installs nothing. Clients want different versions of the same
packages: give each a virtual environment of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import clients_of_speech as of_speech
from asked import KEY, MUST, QUESTION, RANKING, SCHEMA, TOKENS, TOOL, Asked, rounded

ENOUGH = 150  # tokens, for an answer that follows `SCHEMA`
Calls = Iterator[tuple[str, Callable[[], Any]]]  # the name of each begins with what it is to give, see `Asked.expected`


def colour(told: Any) -> str:
    """What ``told`` says by `SCHEMA`."""
    value = json.loads(told) if isinstance(told, str) else told if isinstance(told, dict) else told.model_dump()
    return value["colour"]


def verdict() -> Any:
    """A pydantic model of `SCHEMA`."""
    from pydantic import ConfigDict, create_model

    return create_model("Verdict", __config__=ConfigDict(extra="forbid"), colour=(Literal["red", "green"], ...))


def joined(parts: Any) -> str:
    """The text of a stream in OpenAI's shape."""
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def called(message: Any) -> str:
    """What a message in OpenAI's shape has the tool do."""
    return colour(message.tool_calls[0].function.arguments)


def openai(server: Asked) -> Calls:
    import openai

    client = openai.OpenAI(base_url=server.base, api_key=KEY, max_retries=0)
    asked: Any = {"model": server.chat, "messages": QUESTION, "temperature": 0, "max_tokens": TOKENS}
    free: Any = {"model": server.chat, "messages": QUESTION, "response_format": verdict(), "max_tokens": ENOUGH}
    heard: Any = {"model": server.speech, "file": server.recording}
    chat, hear = client.chat.completions, client.audio.transcriptions.create
    yield "transcription", lambda: hear(**heard).text
    yield "transcription, streamed", lambda: list(hear(**heard, stream=True))[-1].text
    yield "chat", lambda: chat.create(**asked).choices[0].message.content
    yield "chat, streamed", lambda: joined(chat.create(**asked, stream=True))
    yield "structured", lambda: colour(chat.parse(**free).choices[0].message.parsed)
    call: Any = {**asked, "model": server.tools, "tools": [TOOL], "tool_choice": MUST, "max_tokens": ENOUGH}
    yield "tool", lambda: called(chat.create(**call).choices[0].message)
    yield "vectors", lambda: rounded(client.embeddings.create(model=server.vectors, input="hi").data[0].embedding)


def litellm(server: Asked) -> Calls:
    import litellm

    litellm.suppress_debug_info = True
    place: Any = {"api_base": server.base, "api_key": KEY}
    free: Any = {"model": f"openai/{server.chat}", "messages": QUESTION, "max_tokens": ENOUGH, **place}
    asked = {**free, "temperature": 0, "max_tokens": TOKENS}
    ask = litellm.completion

    def hear() -> str:
        with server.recording.open("rb") as file:
            return litellm.transcription(model=f"openai/{server.speech}", file=file, **place).text

    def goes_back() -> str:
        ask(**{**free, "messages": [*QUESTION, ask(**asked).choices[0].message, *QUESTION]})
        return ask(**asked).choices[0].message.content

    def rank(provider: str, base: str) -> int:
        asked = {"model": f"{provider}/{server.rerank}", "api_base": base, "api_key": KEY}
        return litellm.rerank(**asked, **RANKING).results[0]["index"]

    yield "transcription", hear
    yield "chat", lambda: ask(**asked).choices[0].message.content
    yield "chat, streamed", lambda: joined(ask(**asked, stream=True))
    yield "chat, an answer sent back", goes_back
    yield "structured", lambda: colour(ask(**free, response_format=verdict()).choices[0].message.content)
    call: Any = {**asked, "model": f"openai/{server.tools}", "tools": [TOOL], "tool_choice": MUST, "max_tokens": ENOUGH}
    yield "tool", lambda: called(ask(**call).choices[0].message)
    embed: Any = {"model": f"openai/{server.vectors}", "input": "hi", **place}
    yield "vectors", lambda: rounded(litellm.embedding(**embed).data[0]["embedding"])
    yield "rerank as jina_ai", lambda: rank("jina_ai", server.base)
    yield "rerank as hosted_vllm", lambda: rank("hosted_vllm", server.base)
    yield "rerank as cohere", lambda: rank("cohere", server.url)


def langchain(server: Asked) -> Calls:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    place: Any = {"base_url": server.base, "api_key": KEY, "max_retries": 0}
    model = ChatOpenAI(model=server.chat, temperature=0, max_tokens=TOKENS, **place)
    free = ChatOpenAI(model=server.chat, max_tokens=ENOUGH, **place)
    tools = ChatOpenAI(model=server.tools, max_tokens=ENOUGH, **place)
    called = tools.with_structured_output(verdict(), method="function_calling")
    texts = OpenAIEmbeddings(model=server.vectors, check_embedding_ctx_length=False, **place)
    yield "chat", lambda: model.invoke("hi").content
    yield "chat, streamed", lambda: "".join(part.content for part in model.stream("hi"))
    yield "structured", lambda: colour(free.with_structured_output(verdict()).invoke("hi"))
    yield "tool", lambda: colour(called.invoke("hi"))
    yield "vectors, check_embedding_ctx_length=False", lambda: rounded(texts.embed_query("hi"))


def llm(server: Asked) -> Calls:
    folder = tempfile.mkdtemp()
    entry = [{"model_id": "it", "model_name": server.chat, "api_base": server.base, "supports_schema": True}]
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps(entry), encoding="utf-8")  # JSON is YAML
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": KEY}
    greedy = ("-o", "temperature", "0", "-o", "max_tokens", str(TOKENS))

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "it", *options, "hi"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.removesuffix("\n")

    yield "chat", lambda: run("--no-stream", *greedy)
    yield "chat, streamed", lambda: run(*greedy)
    yield "structured", lambda: colour(run("--schema", json.dumps(SCHEMA), "-o", "max_tokens", str(ENOUGH)))


def instructor(server: Asked) -> Calls:
    import instructor
    from openai import OpenAI

    def ask(model: str, mode: str) -> str:
        client = instructor.from_openai(OpenAI(base_url=server.base, api_key=KEY), mode=instructor.Mode[mode])
        asked: Any = {"model": model, "messages": QUESTION, "max_tokens": ENOUGH, "max_retries": 1}
        return colour(client.chat.completions.create(**asked, response_model=verdict()))

    yield "structured", lambda: ask(server.chat, "JSON_SCHEMA")
    yield "tool", lambda: ask(server.tools, "TOOLS")


def pydantic_ai(server: Asked) -> Calls:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=server.base, api_key=KEY)
    agent = Agent(
        OpenAIChatModel(server.chat, provider=provider), model_settings={"temperature": 0, "max_tokens": TOKENS}
    )

    def structured(model: str, kind: Any) -> str:
        named = OpenAIChatModel(model, provider=provider)
        return colour(Agent(named, output_type=kind, model_settings={"max_tokens": ENOUGH}).run_sync("hi").output)

    async def streamed() -> str:
        async with agent.run_stream("hi") as run:
            return "".join([part async for part in run.stream_text(delta=True)])

    yield "chat", lambda: agent.run_sync("hi").output
    yield "chat, streamed", lambda: asyncio.run(streamed())
    yield "structured", lambda: structured(server.chat, NativeOutput(verdict()))
    yield "tool", lambda: structured(server.tools, verdict())


def agents(server: Asked) -> Calls:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    greedy = {"model_settings": ModelSettings(temperature=0, max_tokens=TOKENS)}
    free = {"model_settings": ModelSettings(max_tokens=ENOUGH), "output_type": verdict()}

    async def run(*, streamed: bool = False, **options: Any) -> Any:
        async with AsyncOpenAI(base_url=server.base, api_key=KEY) as client:
            agent: Any = Agent(name="it", model=OpenAIChatCompletionsModel(server.chat, client), **options)
            if not streamed:
                return (await Runner.run(agent, "hi")).final_output
            result = Runner.run_streamed(agent, "hi")
            async for _ in result.stream_events():
                pass
            return result.final_output

    yield "chat", lambda: asyncio.run(run(**greedy))
    yield "chat, streamed", lambda: asyncio.run(run(**greedy, streamed=True))
    yield "structured", lambda: colour(asyncio.run(run(**free)))


def haystack(server: Asked) -> Calls:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    place: Any = {"api_key": Secret.from_token(KEY), "api_base_url": server.base}
    greedy = {"temperature": 0, "max_tokens": TOKENS}

    def ask(**more: Any) -> str:
        generator = OpenAIChatGenerator(model=server.chat, generation_kwargs=greedy, **place, **more)
        return str(generator.run([ChatMessage.from_user("hi")])["replies"][0].text)

    yield "chat", ask
    yield "chat, streamed", lambda: ask(streaming_callback=lambda _: None)
    yield "vectors", lambda: rounded(OpenAITextEmbedder(model=server.vectors, **place).run("hi")["embedding"])


def llama_index(server: Asked) -> Calls:
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    place: Any = {"api_base": server.base, "api_key": KEY}
    model = OpenAILike(model=server.chat, is_chat_model=True, temperature=0, max_tokens=TOKENS, **place)
    messages = [ChatMessage(role="user", content="hi")]
    texts = OpenAILikeEmbedding(model_name=server.vectors, **place)
    yield "chat", lambda: model.chat(messages).message.content
    yield "chat, streamed", lambda: "".join(part.delta or "" for part in model.stream_chat(messages))
    yield "vectors", lambda: rounded(texts.get_text_embedding("hi"))


def cohere(server: Asked) -> Calls:
    import cohere

    old, new = (kind(api_key=KEY, base_url=server.url) for kind in (cohere.Client, cohere.ClientV2))
    yield "rerank, v2", lambda: new.rerank(model=server.rerank, **RANKING).results[0].index
    yield "rerank, v1", lambda: old.rerank(model=server.rerank, **RANKING).results[0].index


CLIENTS: dict[str, Callable[[Asked], Calls]] = {  # by the name of the package to install
    "openai": openai,
    "litellm": litellm,
    "langchain-openai": langchain,
    "llm": llm,
    "instructor": instructor,
    "pydantic-ai-slim": pydantic_ai,  # with [openai]
    "openai-agents": agents,
    "haystack-ai": haystack,
    "llama-index-llms-openai-like": llama_index,  # and llama-index-embeddings-openai-like
    "cohere": cohere,
    "SpeechRecognition": of_speech.speech_recognition,  # with [openai]
    "chunkscribe": of_speech.chunkscribe,
    "livekit-plugins-openai": of_speech.livekit,
    "pipecat-ai": of_speech.pipecat,  # with [openai]
    "wyoming-openai": of_speech.wyoming,
}


def installed() -> dict[str, str]:
    """The clients that are here, with their versions. OpenAI's own is told where it is alone: many bring it along."""
    found = {}
    for package in CLIENTS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {name: version for name, version in found.items() if name != "openai" or len(found) == 1}


def what_came(call: Callable[[], Any], expected: Callable[[Any], bool]) -> str:
    """In words."""
    try:
        told = call()
    except Exception as error:  # noqa: BLE001  (whatever the client raises is what is to be told)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "works" if expected(told) else f"another answer: {str(told)[:100]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, without /v1")
    for kind in ("speech", "chat", "tools", "vectors", "rerank"):
        parser.add_argument(f"--{kind}", required=True, help="the name of the server's model")
    default = Path(__file__).parents[1] / "demo" / "samples" / "de-command.wav"
    parser.add_argument("--recording", type=Path, default=default, help="speech, as a mono WAV of 16 bits")
    parser.add_argument("--language", default="de", help="that is spoken there")
    server = Asked(**vars(parser.parse_args()))
    logging.disable()
    here = installed()
    if not here:
        print(f"no client is installed here; there are {', '.join(CLIENTS)}")
        return 2
    print("| client | version | call | |\n| --- | --- | --- | --- |")
    failed = 0
    for name, version in here.items():
        for call, made in CLIENTS[name](server):
            came = what_came(made, lambda told, call=call: server.expected(call, told))
            failed += came != "works"
            print(f"| {name} | {version} | {call} | {came} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
