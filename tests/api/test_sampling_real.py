"""Sampling as callers see it, on the demo checkpoint, whose tokenizer has merges: a token is some characters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

import triolet.demo
from triolet import Completion, Engine, EngineConfig, FinishReason, InvalidRequest, SamplingParams, Structure

CONFIG = EngineConfig(device="cpu", dtype="float32", threads=1, max_running=8, verify=True)
PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["hall", "kitchen"]}},
    "required": ["room"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a model that has never seen JSON would write blanks for ever
}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        yield engine


async def ask(engine: Engine, **sampling: Any) -> Completion:
    sample = next(sample for sample in triolet.demo.samples() if sample.path.stem == "en-command")
    return await engine.generate(PROMPT, audio=sample.path, sampling=SamplingParams(**{"max_tokens": 60, **sampling}))


async def test_any_stop_string_of_the_text_ends_it_there(engine: Engine) -> None:
    """Wherever it lies among the tokens."""
    whole = (await ask(engine)).text
    assert len(whole) > 20
    for start in range(0, len(whole) - 3, 9):
        stop = whole[start : start + 3]
        completion = await ask(engine, stop=stop)
        assert completion.text == whole[: whole.index(stop)]
        assert completion.finish_reason is FinishReason.STOP
        decoded = engine.model.tokenizer.decode(completion.token_ids)
        assert stop in decoded
        assert stop not in engine.model.tokenizer.decode(completion.token_ids[:-1])


async def test_the_likeliest_tokens_are_told_for_every_token(engine: Engine) -> None:
    completion = await ask(engine, logprobs=3)
    assert completion.top_logprobs is not None
    assert completion.logprobs is not None
    assert len(completion.top_logprobs) == len(completion.token_ids) == len(completion.logprobs)
    for token, logprob, top in zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True):
        assert top[0] == (token, pytest.approx(logprob, abs=1e-5)), "greedy draws the likeliest"
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert len(top) == 3
    assert (await ask(engine)).top_logprobs is None


async def test_several_completions_are_those_of_their_seeds_alone(engine: Engine) -> None:
    params = {"temperature": 4.0, "seed": 11, "max_tokens": 12}
    first = await ask(engine, n=3, **params)
    together = [first, *first.alternatives]
    assert len({completion.token_ids for completion in together}) == 3
    for index, completion in enumerate(together):
        seed = SamplingParams(n=3, **params).sibling(index).seed
        alone = await ask(engine, **{**params, "seed": seed})
        assert (completion.text, completion.token_ids) == (alone.text, alone.token_ids)


async def test_the_output_follows_a_json_schema(engine: Engine) -> None:
    """Though the checkpoint has never written JSON, and lists braces among the tokens to suppress."""
    for temperature in (0.0, 2.0):
        completion = await ask(engine, structure=Structure.json_schema(SCHEMA), temperature=temperature)
        assert json.loads(completion.text)["room"] in {"hall", "kitchen"}
        assert completion.finish_reason is FinishReason.STOP


async def test_one_of_some_texts_is_chosen_by_what_is_heard(engine: Engine) -> None:
    whole = (await ask(engine)).text
    other = whole.replace("e", "o")
    assert (await ask(engine, structure=Structure.choice([other, whole]))).text == whole


async def test_a_structure_that_cannot_be_followed_is_refused_to_its_caller_alone(engine: Engine) -> None:
    """A bad one before the request exists; one that only the tokenizer finds out about, without a failed step."""
    texts: list[str] = []

    async def bystander() -> None:
        texts.append((await ask(engine)).text)

    whole = (await ask(engine)).text
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bystander)
        with pytest.raises(InvalidRequest, match="unclosed"):
            await ask(engine, structure=Structure(kind="regex", text="(["))
        with pytest.raises(InvalidRequest, match="no_such_token"):
            await ask(engine, structure=Structure(kind="lark", text='start: "a" <|no_such_token|>'))
        sample = triolet.demo.samples()[0]
        sampling = SamplingParams(structure=Structure(kind="lark", text='start: "a" <|no_such_token|>'))
        async with engine.stream(PROMPT, audio=sample.path, sampling=sampling) as deltas:
            with pytest.raises(InvalidRequest, match="no_such_token"):
                async for _ in deltas:
                    raise AssertionError("a delta")
            assert [delta async for delta in deltas] == []
    assert texts == [whole]
    assert engine.statistics().requests.failed_steps == 0


async def test_biased_tokens_come_and_unknown_ones_are_refused(engine: Engine) -> None:
    token = engine.model.tokenizer.encode(" the", add_special_tokens=False)[0]
    completion = await ask(engine, logit_bias={token: 1000.0}, max_tokens=4)
    assert completion.token_ids == (token,) * 4
    with pytest.raises(InvalidRequest, match="logit_bias"):
        await ask(engine, logit_bias={engine.model.vocabulary_size: 1.0})
