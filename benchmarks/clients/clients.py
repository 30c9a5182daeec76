"""60 requests of six official clients to `triolet serve`. Each is to be answered rightly, or refused by a message that
says what to send instead.

An environment of its own has the clients: ``openai[realtime] langchain-openai litellm pydantic-ai-slim[openai]``. A
folder outside of the repository has those of ``clients.mjs``: ``npm install openai ai @ai-sdk/openai
@ai-sdk/openai-compatible zod``. The server runs in the repository's own environment::

    CLIENTS/bin/python benchmarks/clients/clients.py WHISPER CHAT VECTORS RECORDING.wav "ITS WORDS" NPM_FOLDER

The recording has 16 bits a sample and one channel. The models of images and of
ranks are tiny and random, so their answers are compared with each other.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field
from world import Outcome, World, judged, node

Ask = tuple[str, Callable[[], Any], Callable[[Any], object] | str]
"""A request in words, what sends it, and what holds for the answer, or what the refusal says."""

SKY: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
CATS = ["The cat sleeps.", "A kitten naps.", "Taxes are due in May."]
DAYS = {"days": {"type": "integer", "minimum": 1, "maximum": 9}}
WEATHER = {"type": "object", "properties": DAYS, "required": ["days"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
LARGE = 2**53 + 1  # the least number that no double is
PATIENCE = {"max_retries": 0, "timeout": 300}


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Paint(BaseModel, extra="forbid"):
    """A form whose types JSON has, too."""

    colour: Colour
    coats: Annotated[int, Field(ge=1, le=3)]
    name: Annotated[str, Field(max_length=12)] | None


class Ship(BaseModel):
    """A form whose types JSON does not have."""

    colours: Annotated[set[Colour], Field(json_schema_extra={"maxItems": 2})]
    folder: Annotated[Path, Field(json_schema_extra={"maxLength": 12})] | None
    when: Annotated[str, Field(max_length=8, json_schema_extra={"format": "week"})]


def alike(vectors: Any) -> bool:
    """True if the vectors of the cats are nearer to each other than to that of the taxes."""
    first, near, far = vectors
    near, far = (sum(a * b for a, b in zip(first, other, strict=True)) for other in (near, far))
    return near > far + 0.2 and abs(sum(a * a for a in first) - 1) < 1e-4


def openai_python(world: World) -> Iterator[Ask]:
    client = OpenAI(base_url=world.url, api_key="none", **PATIENCE)

    def hear(name: str = "speech.wav", **more: Any) -> Any:
        return client.audio.transcriptions.create(model="speech", file=world.folder / name, **more)

    def chat(**more: Any) -> Any:
        given = {"model": "chat", "temperature": 0, "max_tokens": 100, "messages": SKY}
        return client.chat.completions.create(**{**given, **more})

    def see(name: str) -> list[float]:
        shown = [{"type": "image_url", "image_url": {"url": world.data(name)}}]
        got = chat(model="vision", messages=[{"role": "user", "content": shown}], logprobs=True, max_tokens=8)
        return [round(one.logprob, 3) for one in got.choices[0].logprobs.content]

    def live() -> list[Any]:
        with client.realtime.connect(model="speech", extra_query={"intent": "transcription"}) as session:
            session.input_audio_buffer.append(audio=base64.b64encode(bytes(48_000)).decode())
            session.input_audio_buffer.commit()
            ends = ("conversation.item.input_audio_transcription.completed", "error")
            return next(event for event in session if event.type in ends)

    def times(got: Any) -> list[float]:
        return [time for word in got.words for time in (word.start, word.end)]

    both = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
    yield (
        "times of words, language is an empty text",
        lambda: hear(**both, language="", prompt=""),
        lambda got: world.heard(got.text) and times(got) == sorted(times(got)) != [] and got.language == "english",
    )
    yield (
        "srt, a word a cue, language is auto",
        lambda: hear(response_format="srt", language="auto", extra_body={"max_words_per_line": 1}),
        lambda got: (
            (cues := re.findall(r"(\S+) --> (\S+)\n(.+)", got))
            and world.heard(" ".join(cue[2] for cue in cues))
            and all(begin < end for begin, end, _ in cues)
        ),
    )
    yield (
        "a streamed transcription with times",
        lambda: list(hear(stream=True, timestamp_granularities=["segment"])),
        lambda got: world.heard(got[-1].text) and "".join(one.delta for one in got[:-1]) == got[-1].text,
    )
    yield (
        "5 s of silence",
        lambda: hear("silence.wav", response_format="verbose_json"),
        lambda got: got.text == "" and not got.segments and got.duration == 5,
    )
    yield (
        "a sample that is no number",
        lambda: hear("nan.wav"),
        lambda got: world.heard(got.text) and got.warnings,
    )
    yield (
        "channels that cancel each other",
        lambda: hear("antiphase.wav"),
        lambda got: world.heard(got.text) and "cancel" in got.warnings[0],
    )
    yield (
        "diarized_json with a known speaker",
        lambda: hear(
            response_format="diarized_json",
            chunking_strategy="auto",
            known_speaker_names=["Ada"],
            known_speaker_references=[world.data("speech.wav")],
        ),
        lambda got: world.heard(got.text) and {one.speaker for one in got.segments} == {"Ada"},
    )
    yield (
        "a prompt of 5,000 equal words, and hotwords",
        lambda: hear(prompt="Ada " * 5000, extra_body={"hotwords": ["Ada"]}),
        lambda got: world.heard(got.text),
    )
    yield (
        "a live commit of silence",
        live,
        lambda got: got.type.endswith("completed") and not got.transcript,
    )
    row = {"type": "object", "properties": {"id": {"const": LARGE}}, "required": ["id"], "additionalProperties": False}
    yield (
        "response_format with a const beyond 2^53",
        lambda: chat(
            response_format={"type": "json_schema", "json_schema": {"name": "row", "schema": row, "strict": True}}
        ),
        "const=9007199254740993; allowed: numbers that a double holds to their last digit",
    )
    yield (
        "a forced call with a set and a path",
        lambda: chat(
            tools=[TOOL, pydantic_function_tool(Ship)], tool_choice={"type": "function", "function": {"name": "Ship"}}
        ),
        lambda got: Ship.model_validate_json(got.choices[0].message.tool_calls[0].function.arguments),
    )
    yield (
        "a required call, parallel_tool_calls is false",
        lambda: chat(tools=[TOOL, pydantic_function_tool(Paint)], tool_choice="required", parallel_tool_calls=False),
        lambda got: len(got.choices[0].message.tool_calls) == 1 and got.choices[0].finish_reason == "tool_calls",
    )
    yield (
        "an image of 16 bits",
        lambda: [see("deep.png"), see("usual.png"), see("white.png")],
        lambda got: got[0] == got[1] != got[2],
    )
    yield (
        "n=2 with a seed and logprobs, twice",
        lambda: [chat(temperature=1, seed=7, n=2, logprobs=True, top_logprobs=2, max_tokens=12).choices for _ in "ab"],
        lambda got: all(
            one.message == other.message
            and b"".join(bytes(token.bytes) for token in one.logprobs.content).decode() == one.message.content
            for one, other in zip(*got, strict=True)
        ),
    )
    begun = [{"role": "user", "content": "What is the capital of France?"}]
    begun += [{"role": "assistant", "content": "The capital of France is"}]
    on = {"continue_final_message": True, "add_generation_prompt": False}
    yield (
        "continue_final_message",
        lambda: chat(messages=begun, extra_body=on).choices[0].message.content,
        lambda got: got.lstrip().startswith("Paris"),
    )
    usage = {"include_usage": True, "continuous_usage_stats": True}
    yield (
        "a stream with continuous_usage_stats",
        lambda: [one.usage.completion_tokens for one in chat(stream=True, stream_options=usage)],
        lambda got: got == sorted(got) and 0 < got[-1] <= 100,
    )
    yield (
        "a misspelt member",
        lambda: chat(extra_body={"temprature": 1}),
        "temprature is not a member of this request; did you mean temperature?",
    )
    yield (
        "echo, max_tokens=0 and logprobs",
        lambda: client.completions.create(model="chat", prompt="Hi 😀!", max_tokens=0, echo=True, logprobs=1).choices[
            0
        ],
        lambda got: (
            got.text == "Hi 😀!"
            and got.logprobs.text_offset == sorted(got.logprobs.text_offset)
            and got.logprobs.text_offset[-1] < 5
            and all(one < 0 for one in got.logprobs.token_logprobs[1:])
        ),
    )
    yield (
        "a response parsed by pydantic",
        lambda: client.responses.parse(model="chat", input="Paint a door", text_format=Paint, max_output_tokens=100),
        lambda got: isinstance(got.output_parsed, Paint),
    )
    yield (
        "a response after one that is stored",
        lambda: client.responses.create(model="chat", input="And then?", previous_response_id="resp_1"),
        "previous_response_id: nothing is stored; leave it out, and send the whole conversation as input",
    )
    yield (
        "vectors of 383 dimensions, in base64",
        lambda: client.embeddings.create(model="vectors", input=CATS, dimensions=383).data,
        lambda got: len(got[0].embedding) == 383 and alike(one.embedding for one in got),
    )
    yield (
        "a vector of token ids, as LangChain's default",
        lambda: client.embeddings.create(model="vectors", input=[[1, 2]]),
        "token ids, usually of another model's vocabulary; allowed: texts (LangChain sends them with OpenAIEmbeddings(",
    )


def langchain(world: World) -> Iterator[Ask]:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    more: dict[str, Any] = {"base_url": world.url, "api_key": "none", **PATIENCE}
    model = ChatOpenAI(model="chat", temperature=0, max_tokens=100, **more)
    broken = [{"type": "invalid_tool_call", "id": "a1", "name": "weather", "args": '{"days": ', "error": None}]
    said = [HumanMessage("Will it rain?"), AIMessage("", invalid_tool_calls=broken, id="run-1")]
    said += [ToolMessage("no", tool_call_id="a1")]
    image = {"type": "image_url", "image_url": {"url": world.data("usual.png")}}
    vision = ChatOpenAI(model="vision", use_responses_api=True, max_tokens=8, **more)
    vectors = OpenAIEmbeddings(model="vectors", check_embedding_ctx_length=False, **more)
    wanted = {"type": "json_object", "schema": Paint.model_json_schema()}
    yield (
        "with_structured_output",
        lambda: model.with_structured_output(Paint).invoke("Paint a door"),
        lambda got: isinstance(got, Paint),
    )
    yield (
        "with_structured_output by a function, with a set and a path",
        lambda: model.with_structured_output(Ship, method="function_calling").invoke("Ship a door"),
        lambda got: isinstance(got, Ship),
    )
    yield (
        "json_object with a schema, at temperature 1",
        lambda: model.bind(temperature=1, seed=3, response_format=wanted).invoke("Paint a door, in JSON").text,
        lambda got: Paint.model_validate_json(got) and "  " not in got,
    )
    yield (
        "a history with a call that is cut",
        lambda: model.bind_tools([TOOL]).invoke(said),
        lambda got: got.content or got.tool_calls,
    )
    yield (
        "a stream with its usage",
        lambda: list(model.stream(SKY, stream_usage=True)),
        lambda got: "".join(one.text for one in got) and any(one.usage_metadata for one in got),
    )
    yield (
        "an image, as a response",
        lambda: vision.invoke([HumanMessage([image])]),
        lambda got: got.usage_metadata["input_tokens"] > 16,
    )
    yield "vectors of texts", lambda: vectors.embed_documents(CATS), alike


def lite_llm(world: World) -> Iterator[Ask]:
    import litellm

    more: dict[str, Any] = {"api_base": world.url, "api_key": "none", **PATIENCE}

    def chat(**given: Any) -> Any:
        asked = {"model": "hosted_vllm/chat", "messages": SKY, "temperature": 0, "max_tokens": 100, **given}
        return litellm.completion(**asked, **more).choices[0].message

    def sent_back() -> Any:
        first = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "It will."}
        return chat(messages=[*SKY, first, result], tools=[TOOL])

    thought = [{"type": "thinking", "thinking": "Light.", "signature": "x"}, {"type": "text", "text": "Air."}]
    marked = [{"type": "text", "text": "Why?", "cache_control": {"type": "ephemeral"}}]
    said = [*SKY, {"role": "assistant", "content": thought}, {"role": "user", "content": marked}]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    titled = [{"text": text, "title": "a title", "id": str(index)} for index, text in enumerate(CATS)]
    yield (
        "a transcription in verbose_json",
        lambda: litellm.transcription(
            "openai/speech", (world.folder / "speech.wav").open("rb"), response_format="verbose_json", **more
        ),
        lambda got: world.heard(got.text),
    )
    yield "cache_control, and thinking in the history", lambda: chat(messages=said), lambda got: got.content
    yield (
        "enable_thinking for a template without it",
        lambda: chat(extra_body=off, reasoning_effort="low", model="openai/chat"),
        lambda got: got.content,
    )
    yield (
        "tools beside response_format",
        lambda: chat(tools=[TOOL], response_format=Paint),
        lambda got: got.tool_calls or Paint.model_validate_json(got.content),
    )
    yield "a call that is sent back with its result", sent_back, lambda got: got.content or got.tool_calls
    yield (
        "ranks of documents with titles",
        lambda: litellm.rerank("hosted_vllm/ranks", "a cat", titled, top_n=2, **more).results,
        lambda got: (
            len(got) == 2
            and got[0]["relevance_score"] >= got[1]["relevance_score"]
            and got[0]["document"]["text"] == CATS[got[0]["index"]]
        ),
    )


def pydantic_ai(world: World) -> Iterator[Ask]:
    from pydantic_ai import Agent, Embedder, NativeOutput
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=world.url, api_key="none")

    def run(output: Any, said: Any, name: str = "chat", kind: Any = OpenAIChatModel) -> Any:
        model = kind(name, provider=provider)
        return Agent(model, output_type=output, model_settings={"temperature": 0, "max_tokens": 100}).run_sync(said)

    vectors = Embedder(OpenAIEmbeddingModel("vectors", provider=provider))
    yield "output by a tool", lambda: run(Paint, "Paint a door").output, lambda got: isinstance(got, Paint)
    yield (
        "output by a form, with a set and a path",
        lambda: run(NativeOutput(Ship), "Ship a door").output,
        'it has keywords that cannot be forced: "uniqueItems"; leave them out',
    )
    yield (
        "output by a tool, as a response",
        lambda: run(Paint, "Paint a door", kind=OpenAIResponsesModel).output,
        lambda got: isinstance(got, Paint),
    )
    yield "vectors of documents", lambda: vectors.embed_documents_sync(CATS).embeddings, alike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("whisper", "chat", "vectors", "recording", "words", "packages"):
        parser.add_argument(name)
    given, rows = parser.parse_args(), list[Outcome]()
    with (
        TemporaryDirectory() as folder,
        World.serving(
            Path(folder), given.whisper, given.chat, given.vectors, Path(given.recording), given.words
        ) as world,
    ):
        for client in (openai_python, langchain, lite_llm, pydantic_ai):
            rows += [judged(client.__name__, *ask) for ask in client(world)]
        rows += node(world, given.packages)
    print("| client | request | outcome |\n|---|---|---|")
    for row in rows:
        print(f"| {row.client} | {row.request} | {row.became} |")
    wrong = sum(not row.right for row in rows)
    print(f"{len(rows)} requests, {wrong} neither answered rightly nor refused by a message that says what to send")
    sys.exit(1 if wrong or len(rows) != 60 else 0)


if __name__ == "__main__":
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    main()
