"""Texts that are too long: refused without the tokenizer, or given up while they are counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

import triolet
from triolet import demo
from triolet.api.inputs import lengths, prompts, vectors
from triolet.api.inputs.lengths import Pause, read_texts
from triolet.models.architectures import vision

Made = Callable[[str], Path]

CONFIG = triolet.EngineConfig(dtype="float32")
LONG = "and then the cat saw that one " * 20_000
PATIENCE = 60.0  # seconds, for what happens at once


class Calls:
    """The texts that a tokenizer was given. ``held``: it waits, in each call, until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch, tokenizer: Any) -> None:
        self.texts: list[str] = []
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()
        kind, original = type(tokenizer), type(tokenizer).__call__

        def call(one: Any, *texts: Any, **options: Any) -> Any:
            self.texts += texts
            self.begun.set()
            assert self.let_go.wait(PATIENCE)
            return original(one, *texts, **options)

        patch.setattr(kind, "__call__", call)

    def hold(self) -> None:
        self.begun.clear()
        self.let_go.clear()


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": content, **more}]}


@pytest.mark.parametrize(
    "query",
    [
        {"prompt": LONG},
        said(LONG),
        {"messages": said([{"type": "text", "text": LONG}])["messages"] * 3},
        said("a", reasoning_content=LONG),
        said(None, tool_calls=[{"function": {"name": "f", "arguments": LONG}}]),
        said(None, tool_calls=[{"function": {"name": "f", "arguments": {"a": LONG}}}]),
    ],
    ids=["a prompt", "content", "parts", "thoughts", "arguments as text", "arguments"],
)
async def test_what_is_surely_too_long_is_refused_without_the_tokenizer_and_the_template(
    made: Made, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any]
) -> None:
    async with triolet.Engine(made("llama"), config=CONFIG) as engine:
        calls, rendered = Calls(monkeypatch, engine.model.tokenizer), list[object]()
        kind = type(engine.model.tokenizer)
        monkeypatch.setattr(kind, "apply_chat_template", lambda *given, **_: rendered.append(given))
        told = r"of [\d,]+ characters has [\d,]+ tokens or more; allowed: up to [\d,]+ tokens"
        with pytest.raises(triolet.ContextLengthExceeded, match=told):
            await engine.generate(**query)
        assert (calls.texts, rendered) == ([], [])
        assert (await engine.generate("a cat", max_tokens=1)).text is not None
        assert calls.texts


async def test_texts_that_are_surely_too_long_are_refused_without_the_tokenizer(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with triolet.Engine(made("bert_classifier"), config=CONFIG) as engine:
        calls = Calls(monkeypatch, engine.model.tokenizer)
        with pytest.raises(triolet.ContextLengthExceeded, match="cut it into pieces"):
            await engine.classify(["a cat", LONG])
        assert calls.texts == []


async def test_too_many_tokens_are_refused_before_any_is_looked_at(made: Made) -> None:
    async with triolet.Engine(made("llama"), config=CONFIG) as engine:
        most = engine.model.max_positions
        for given in ([-1] * most, np.full(most, -1), torch.full((most,), -1)):
            with pytest.raises(triolet.ContextLengthExceeded, match=f"a prompt of {most} tokens leaves no room"):
                await engine.generate(prompt_token_ids=given)
        with pytest.raises(triolet.ContextLengthExceeded, match=f"a prompt of {most} tokens leaves no room"):
            await engine.generate(prompt_token_ids=itertools.repeat(5))
        for wrong in (-1, engine.model.vocabulary_size, True):
            with pytest.raises(triolet.InvalidRequest, match=f"prompt_token_ids holds {wrong}; allowed: integers from"):
                await engine.generate(prompt_token_ids=[5, wrong, 5])


async def test_a_long_prompt_before_speech_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    async with triolet.Engine(demo.checkpoint(), config=CONFIG) as engine:
        kind = type(engine.model.tokenizer)
        original = kind.encode
        monkeypatch.setattr(
            kind, "encode", lambda one, text, **given: read.append(text) or original(one, text, **given)
        )
        with pytest.raises(triolet.InvalidRequest, match=r"initial_prompt='and then"):  # the demo takes none
            await engine.transcribe(next(iter(demo.samples())).path, initial_prompt=LONG)
        transcript = await engine.transcribe(next(iter(demo.samples())).path, prefix=LONG)
    assert [len(text) for text in read] == [10_001]
    assert any(told.startswith("prefix has 599,999 characters") for told in transcript.warnings)


@pytest.mark.parametrize(
    ("family", "ask", "read"),
    [
        ("llama", lambda engine: engine.generate(LONG), [1_000]),
        ("bert", lambda engine: engine.embed(["a cat"] * 50), [len("a cat")]),
    ],
)
async def test_whoever_gives_up_waits_for_one_piece_or_one_text(
    family: str, ask: Any, read: list[int], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of which nothing is sure is counted in pieces; between two of them the thread hears of the end."""
    monkeypatch.setattr(lengths, "PIECE", 1_000)
    async with triolet.Engine(made(family), config=CONFIG) as engine:
        monkeypatch.setattr(type(engine.model), "lengths", None)
        calls = Calls(monkeypatch, engine.model.tokenizer)
        calls.hold()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine)
                assert await trio.to_thread.run_sync(calls.begun.wait, PATIENCE)
                scope.cancel()
                calls.let_go.set()
        assert scope.cancelled_caught
        assert [len(text) for text in calls.texts] == read


async def test_counting_ends_when_there_are_too_many_for_sure(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "PIECE", 1_000)
    async with triolet.Engine(made("llama"), config=CONFIG) as engine:
        monkeypatch.setattr(type(engine.model), "lengths", None)
        calls = Calls(monkeypatch, engine.model.tokenizer)
        with pytest.raises(triolet.ContextLengthExceeded, match="tokens in its first"):
            await engine.generate(LONG)
    assert all(len(text) == 1_000 for text in calls.texts), "it was never tokenized whole"
    assert len(calls.texts) < 100


async def test_others_have_their_turn_between_two_texts_of_many(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "PIECE", 1)
    async with triolet.Engine(made("bert"), config=CONFIG) as engine:
        calls = Calls(monkeypatch, engine.model.tokenizer)
        calls.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.embed, ["a cat"] * 50)
            assert await trio.to_thread.run_sync(calls.begun.wait, PATIENCE)
            nursery.start_soon(engine.embed, "a dog")
            await wait_all_tasks_blocked()
            calls.let_go.set()
        assert calls.texts == ["a cat", "a dog", *["a cat"] * 49]


async def test_media_are_read_before_the_turn_and_their_prompt_in_it(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts beside a picture are no way around the turns."""
    image = np.zeros((32, 32, 3), np.uint8)
    query = {"messages": [{"role": "user", "content": [{"type": "image", "image": image}]}], "max_tokens": 1}
    async with triolet.Engine(made("llava"), config=CONFIG) as engine:
        turns: dict[str, set[int]] = {"load": set(), "read": set(), "tokenize": set()}
        kind = type(engine.model.tokenizer)

        def watch(owner: Any, name: str, told: str) -> None:
            original = getattr(owner, name)

            def call(*given: Any, **more: Any) -> Any:
                turns[told].add(engine.inside._reading.borrowed_tokens)
                return original(*given, **more)

            monkeypatch.setattr(owner, name, call)

        watch(prompts, "load_image", "load")
        watch(vision, "process", "read")
        watch(kind, "__call__", "tokenize")
        await engine.generate(**query)
    assert turns == {"load": {0}, "read": {0}, "tokenize": {1}}


class Turns(trio.abc.Instrument):
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


async def test_short_texts_are_read_in_a_turn_each() -> None:
    """A hundred of them in one turn would hold up all others."""
    turns, seen = Turns(), list[int]()
    reading = trio.CapacityLimiter(1)

    def work(_: Pause) -> None:
        seen.append(turns.count)

    trio.lowlevel.add_instrument(turns)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(lambda: read_texts(work, short=True, reading=reading))
    trio.lowlevel.remove_instrument(turns)
    assert len(set(seen)) == 20
