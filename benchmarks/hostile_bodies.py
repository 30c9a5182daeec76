"""The worst bodies that `benchmarks/hostile.py` knows: those that a limit refuses, and those that lie just below."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

CHAT, COMPLETIONS, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
SPEECH = "/v1/audio/transcriptions"
EDGE = "edge-of-a-part"
JSON, FORM = "application/json", f"multipart/form-data; boundary={EDGE}"
MOST = 32 * 2**20  # bytes of JSON
WIDE = 8 * 2**20  # of these in texts that are not plain
VALUES = 2**18
Made = tuple[str, str, bytes]  # path, content type, body


def chat(**members: Any) -> Made:
    """A conversation of one word, with ``members``."""
    plain = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    return CHAT, JSON, json.dumps({**plain, **members}).encode()


def texts(one: bytes, size: int, each: int = 3_900_000) -> Made:
    """A conversation of ``size`` bytes, in messages of ``one`` again and again, up to ``each`` bytes long."""
    message = b'{"role":"user","content":"' + one * (each // len(one)) + b'"}'
    count = max(1, size // len(message))
    return CHAT, JSON, b'{"model":"chat","max_tokens":1,"messages":[' + b",".join([message] * count) + b"]}"


def member(name: str, value: bytes) -> Made:
    """A conversation with a member that is written already."""
    told = b'{"model":"chat","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"%s":%s}'
    return CHAT, JSON, told % (name.encode(), value)


def numbered(count: int) -> bytes:
    """An object of ``count`` members."""
    return b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b"}"


def tool(name: str, properties: int) -> dict[str, Any]:
    """A tool with so many properties."""
    found = {f"p{number}": {"type": "string"} for number in range(properties)}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": found}}}


def called(arguments: str) -> Made:
    """A conversation in which a tool was called."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    past = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "b"}]
    return chat(messages=[{"role": "user", "content": "hi"}, *past])


def schema(properties: int) -> Made:
    """A response format with so many properties."""
    found = {f"p{number}": {"type": "string"} for number in range(properties)}
    named = {"name": "x", "schema": {"type": "object", "properties": found}}
    return chat(response_format={"type": "json_schema", "json_schema": named})


def prompts(**members: Any) -> Made:
    """Completions."""
    return COMPLETIONS, JSON, json.dumps({"model": "chat", "max_tokens": 1, **members}).encode()


def vectors(texts: Any) -> Made:
    """Embeddings."""
    return VECTORS, JSON, json.dumps({"model": "vectors", "input": texts}).encode()


def form(head: bytes, value: bytes) -> Made:
    """A form with one part."""
    return SPEECH, FORM, b"--%s\r\n%s\r\n\r\n%s\r\n--%s--\r\n" % (EDGE.encode(), head, value, EDGE.encode())


def field(name: str, value: bytes) -> Made:
    """A form with one field."""
    return form(b'content-disposition: form-data; name="%s"' % name.encode(), value)


ALLOWED: dict[str, Callable[[], Made]] = {
    "one word": chat,
    "ASCII, 31 MB": lambda: texts(b"ab ", MOST - 10_000),
    "blanks, 31 MB": lambda: texts(b" ", MOST - 10_000),
    "of four bytes each, 8 MB": lambda: texts("😀".encode(), WIDE - 10_000, 3_900_000),
    "one of four bytes in each text, 8 MB": lambda: texts("😀".encode() + b"a" * 3_899_990, WIDE - 10_000),
    "escapes, 8 MB": lambda: texts(b"\\u00e9", WIDE - 10_000),
    "line ends, 8 MB": lambda: texts(b"\\n", WIDE - 10_000),
    "a prompt as long as its length may be": lambda: texts(b"ab ", 8_191 * 81 - 1_000, 8_191 * 81 - 1_000),
    "an image of 31 MB": lambda: chat(
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 31_000_000}}],
            }
        ]
    ),
    "parts": lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 2_000}] * 5),
    "messages": lambda: chat(messages=[{"role": "user", "content": "a"}] * 4_096),
    "tools": lambda: chat(tools=[tool(f"f{number}", 48) for number in range(128)], tool_choice="required"),
    "tools, 128 streams": lambda: chat(
        tools=[tool(f"f{number}", 48) for number in range(128)], tool_choice="none", n=128, stream=True
    ),
    "a schema": lambda: schema(2_400),
    "logit_bias, 128 answers": lambda: chat(logit_bias=dict.fromkeys(range(1_024), 1), n=128),
    "logit_bias, 128 streams": lambda: chat(logit_bias=dict.fromkeys(range(1_024), 1), n=128, stream=True),
    "stop": lambda: chat(stop=["a" * 1_000 + str(number) for number in range(64)], n=128),
    "metadata": lambda: member("metadata", numbered(29_000)),
    "chat_template_kwargs": lambda: member("chat_template_kwargs", numbered(19_000)),
    "members that do not exist": lambda: (
        CHAT,
        JSON,
        b'{"model":"chat","messages":[],' + numbered(29_000)[1:],
    ),
    "a member again and again": lambda: (CHAT, JSON, b"{" + b",".join([b'"model":"chat"'] * 29_000) + b"}"),
    "numbers of 4,200 digits": lambda: member("metadata", b'{"a":[' + b",".join([b"1" * 4_200] * 990) + b"]}"),
    "a number of 4 MB": lambda: member("metadata", b"1" * 4_100_000),
    "a fraction of 4 MB": lambda: member("temperature", b"0." + b"1" * 4_100_000),
    "wrong messages": lambda: member("messages ", b"[" + b",".join([b"1"] * 260_000) + b"]"),
    "nested 150 times": lambda: member("metadata", b'{"a":' * 150 + b"1" + b"}" * 150),
    "nested 25,000 times": lambda: member("metadata", b'{"a":' * 15_000 + b"1" + b"}" * 15_000),
    "arguments of numbers": lambda: called('{"a":[' + "1," * 260_000 + "1]}"),
    "arguments of members": lambda: called(numbered(28_000).decode()),
    "tokens": lambda: prompts(prompt=[1_234] * 262_000),
    "lists of tokens": lambda: prompts(prompt=[[12_345] * 1_000] * 250),
    "256 prompts of 31,000 characters": lambda: prompts(prompt=["ab " * 10_300] * 256),
    "256 prompts of 1,900 characters": lambda: prompts(prompt=["ab " * 630] * 256),
    "a prompt that fits, 128 streams": lambda: prompts(prompt="ab " * 2_000, n=128, stream=True),
    "texts to embed": lambda: vectors(["a " * 200] * 2_048),
    "long texts to embed": lambda: vectors(["a " * 1_950] * 2_048),
    "a long text to embed": lambda: vectors("a " * 1_950_000),
    "a quoted image": lambda: chat(
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png," + "%41" * 10_000_000}}],
            }
        ]
    ),
    "a field of 256 KB": lambda: field("prompt", b"a " * 2**17),
    "a field of objects": lambda: field("chunking_strategy", numbered(20_000)),
}
REFUSED: dict[str, Callable[[], Made]] = {
    "16 messages of 3.9 million characters": lambda: texts(b"ab ", 62_400_000),
    "a million biases": lambda: member("logit_bias", numbered(1_000_000)),
    "60 MB of metadata": lambda: member("metadata", numbered(4_500_000)),
    "a million messages": lambda: texts(b"x", 30_000_000, 1),
    "30 MB of brackets": lambda: (CHAT, JSON, b"[" * 30_000_000),
    "31 MB of blanks": lambda: member("metadata", b" " * 31_000_000 + b"1"),
    "31 MB of four bytes each": lambda: texts("😀".encode(), 31_000_000),
    "31 MB of backslashes": lambda: texts(b"\\\\", 31_000_000),
    "31 MB of arguments": lambda: called('{"a":[' + "1," * 1_900_000 + "1]}"),
    "100 MB of a part's header": lambda: form(b"content-disposition: " + b"a" * 100_000_000, b"a"),
    "100 MB of a field": lambda: field("prompt", b"a" * 100_000_000),
    "100,000 fields": lambda: (
        SPEECH,
        FORM,
        b"".join(
            b'--%s\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\r\n' % EDGE.encode() for _ in range(100_000)
        )
        + b"--%s--\r\n" % EDGE.encode(),
    ),
}


def bodies(only: str) -> Iterator[tuple[str, Made]]:
    """Each body with ``only`` in its name."""
    for name, make in {**ALLOWED, **REFUSED}.items():
        if only in name:
            yield name, make()
