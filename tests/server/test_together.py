"""Answers to one prompt that are streamed at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import triolet
from triolet.api.inputs.prompts import Query
from triolet.server.endpoints.together import streams_together

from ..checkpoints.families import make_checkpoint

pytestmark = pytest.mark.real_time


async def test_a_prompt_is_read_once_for_all_answers_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = triolet.SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=4)
    texts = [""] * 8
    read: list[Any] = []

    async def tell(index: int, delta: triolet.Delta) -> None:
        texts[index] += delta.text

    async with triolet.Engine(
        make_checkpoint("llama", tmp_path), config=triolet.EngineConfig(dtype="float32")
    ) as engine:
        expected = []
        for prompt in ("a cat", "a dog"):
            found = await engine.generate(prompt, sampling=sampling)
            expected += [one.text for one in (found, *found.alternatives)]
        kind = type(engine.model.tokenizer)
        original = kind.__call__
        monkeypatch.setattr(
            kind, "__call__", lambda one, *given, **more: read.extend(given) or original(one, *given, **more)
        )
        queries = [Query(prompt=prompt, sampling=sampling) for prompt in ("a cat", "a dog")]
        usages, timings = await streams_together(engine, queries, tell)
    assert sorted(read) == ["a cat", "a dog"]
    assert texts == expected
    assert len(set(texts)) > 1
    assert [one.completion_tokens for one in usages] == [4] * 8
    assert timings is not None
