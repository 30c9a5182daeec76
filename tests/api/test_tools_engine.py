"""Tools through the whole engine: a tiny decoder with random weights is made to call them, in the syntax of each
format, and what it writes is found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from triolet import (
    ArgumentsPiece,
    CallBegin,
    ContentPiece,
    Engine,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    ToolCall,
    ToolFormat,
)
from triolet_testing.sim import sim_engine

from .tool_templates import TEMPLATES, make_tool_checkpoint, tool

CONFIG = EngineConfig(device="cpu", dtype="float32", threads=1, verify=True)
WEATHER = tool(
    "weather",
    days={"type": "integer", "minimum": 0, "maximum": 99},
    unit={"enum": ["°C", "°F"]},
    note={"type": "string", "minLength": 1, "maxLength": 5},
    exact={"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    hours={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 2},
)
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
MESSAGES = [{"role": "user", "content": "hi"}]
AT_ONCE: dict[str, Any] = {"reasoning_effort": "none"}  # a template of them has marks of reasoning
HISTORY = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]},
    {"role": "tool", "content": "noon"},
]


def check(calls: Sequence[ToolCall]) -> None:
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name == "now":
            assert arguments == {}
            continue
        assert call.name == "weather"
        assert arguments.keys() == {"days", "unit", "note", "exact", "hours"}
        assert all(type(number) is int for number in (arguments["days"], *arguments["hours"]))
        assert arguments["days"] in range(100)
        assert arguments["unit"] in ("°C", "°F")
        assert 1 <= len(arguments["note"]) <= 5
        assert arguments["exact"] is None or isinstance(arguments["exact"], bool)
        assert len(arguments["hours"]) <= 2
        assert all(hour in range(24) for hour in arguments["hours"])


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_forced_call_always_parses_and_its_arguments_follow_the_schema(name: str, tmp_path: Path) -> None:
    template, special = TEMPLATES[name]
    async with Engine(make_tool_checkpoint(tmp_path, template, special), config=CONFIG) as engine:
        form = ToolFormat.of(engine.model)
        assert form.name == name
        assert set(form.special) == set(special)
        async with trio.open_nursery() as nursery:
            for seed in range(2):
                for choice in ("required", "weather", "now"):
                    nursery.start_soon(check_one, engine, form, choice, seed)
                nursery.start_soon(check_several, engine, form, seed)
            nursery.start_soon(check_stream, engine, form)


async def check_one(engine: Engine, form: ToolFormat, choice: str, seed: int) -> None:
    """The text is one call of a tool that was chosen."""
    structure = form.structure(TOOLS, choice)
    asked: dict[str, Any] = {"messages": HISTORY, "tools": [NOW], "temperature": 1.0, "seed": seed, **AT_ONCE}
    completion = await engine.generate(structure=structure, **asked)
    assert completion.finish_reason is FinishReason.STOP
    content, calls = form.parse(completion.text, TOOLS)
    assert content is None
    assert [call.name for call in calls] in ([[choice]] if choice != "required" else [["weather"], ["now"]])
    check(calls)


async def check_several(engine: Engine, form: ToolFormat, seed: int) -> None:
    """The text is one call or more; the last one may be cut off."""
    sampling = SamplingParams(
        structure=form.structure(TOOLS, "required", parallel=True),
        temperature=1.0,
        seed=seed,
        max_tokens=200,
        skip_special_tokens=False,
        **AT_ONCE,
    )
    completion = await engine.generate(messages=MESSAGES, sampling=sampling)
    content, calls = form.parse(completion.text, TOOLS)
    assert calls
    assert completion.finish_reason is FinishReason.LENGTH or content is None
    check(calls)


async def check_stream(engine: Engine, form: ToolFormat) -> None:
    """The deltas of a stream, read as they come, give the call of the whole."""
    structure, reader = form.structure(TOOLS, "weather"), form.reader(TOOLS)
    text, parts = "", []
    async with engine.stream(messages=MESSAGES, tools=[NOW], structure=structure, **AT_ONCE) as deltas:
        async for delta in deltas:
            text += delta.text
            parts += reader.feed(delta.text)
    parts += reader.end()
    (call,) = form.parse(text, TOOLS)[1]
    assert parts[0] == CallBegin(0, "weather")
    assert "".join(part.text for part in parts[1:] if isinstance(part, ArgumentsPiece)) == call.arguments


async def test_special_tokens_are_in_the_text_of_a_request_with_tools_and_of_one_that_wants_them(
    tmp_path: Path,
) -> None:
    """Else nobody would see where a call begins."""
    template, special = TEMPLATES["mistral_v11"]
    async with Engine(make_tool_checkpoint(tmp_path, template, special), config=CONFIG) as engine:
        form = ToolFormat.of(engine.model)
        asked: dict[str, Any] = {"messages": MESSAGES, "structure": form.structure([NOW], "now")}
        shown, plain = "[TOOL_CALLS]now[ARGS]{}", "now{}"
        for text, options in (
            (shown, {"tools": [NOW]}),
            (plain, {}),
            (shown, {"skip_special_tokens": False}),
            (plain, {"skip_special_tokens": True, "tools": [NOW]}),
            (shown, {"skip_special_tokens": False, "stop": "never"}),
            (plain, {"stop": "never"}),
            ("[TOOL_CALLS]now[ARGS", {"tools": [NOW], "stop": "]{}"}),
        ):
            completion = await engine.generate(**asked, **options)
            assert completion.text == text
            async with engine.stream(**asked, **options) as deltas:
                assert "".join([delta.text async for delta in deltas]) == text
        tokenizer = engine.model.tokenizer  # of all special tokens, those alone that mark calls
        bias = {tokenizer.bos_token_id: 1e6}
        for options, text in (({"tools": [NOW]}, ""), ({"skip_special_tokens": False}, tokenizer.bos_token * 2)):
            told = await engine.generate(messages=MESSAGES, logit_bias=bias, max_tokens=2, **options)
            assert (told.text, told.token_ids) == (text, (tokenizer.bos_token_id,) * 2)
        both = await engine.generate(messages=MESSAGES, beam_size=2, max_tokens=4, skip_special_tokens=False)
        assert both.text == engine.model.tokenizer.decode(both.token_ids, skip_special_tokens=False)


async def test_without_force_a_text_is_free_and_tools_are_in_the_prompt(tmp_path: Path) -> None:
    template, special = TEMPLATES["hermes"]
    async with Engine(make_tool_checkpoint(tmp_path, template, special), config=CONFIG) as engine:
        form = ToolFormat.of(engine.model)
        assert form.structure(TOOLS) is form.structure(TOOLS, "none") is None
        with_tools, alone = [
            await engine.generate(messages=MESSAGES, tools=tools, max_tokens=8) for tools in ([NOW], ())
        ]
        prompt = engine.model.tokenizer.apply_chat_template(
            MESSAGES, tools=[NOW], add_generation_prompt=True, return_dict=False
        )
        assert with_tools.usage.prompt_tokens == len(prompt) > alone.usage.prompt_tokens
        assert form.parse(alone.text, [NOW]) == (alone.text, ())
        for seed in range(3):
            text = (await engine.generate(messages=MESSAGES, max_tokens=30, temperature=2.0, seed=seed)).text
            reader = form.reader(TOOLS)
            parts = [*(part for piece in text for part in reader.feed(piece)), *reader.end()]
            assert "".join(part.text for part in parts if isinstance(part, ContentPiece)) == text
        with pytest.raises(InvalidRequest, match="cannot be followed"):
            broken = tool("broken", a={"type": "string", "pattern": "(?=lookahead)"})
            await engine.generate(messages=MESSAGES, structure=form.structure([broken], "broken"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": "hi", "tools": [NOW]}, "tools or template_options are given without messages"),
        ({"prompt": "hi", "template_options": {"a": 1}}, "tools or template_options are given without messages"),
        ({"messages": MESSAGES, "template_options": [1]}, "template_options=\\[1\\]; allowed: a mapping"),
        ({"messages": MESSAGES, "tools": "now"}, "tools='now'; allowed: a list"),
        ({"messages": MESSAGES, "tool_choice": "auto"}, "did you mean structure"),
        ({"messages": MESSAGES, "chat_template_kwargs": {}}, "did you mean template_options"),
        ({"messages": MESSAGES, "skip_special_tokens": 1}, "skip_special_tokens=1; allowed: True or False"),
    ],
)
async def test_what_cannot_work_is_told_at_once(asked: dict[str, Any], message: str, autojump_clock: object) -> None:
    async with sim_engine() as engine:
        with pytest.raises(InvalidRequest, match=message):
            await engine.generate(**asked)
        with pytest.raises(InvalidRequest, match=message):
            async with engine.stream(**asked):
                pass
