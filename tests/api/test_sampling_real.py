"""Sampling as callers see it, on the demo checkpoint, whose tokenizer has merges: a token is some characters."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio
from attrs import evolve

import triolet.demo
from triolet import Completion, Engine, EngineConfig, FinishReason, InvalidRequest, SamplingParams, Structure
from triolet.models.sampling.structure import Grammars

CONFIG = EngineConfig(device="cpu", dtype="float32", threads=1, max_running=8, verify=True)
PROMPT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["hall", "kitchen"]}},
    "required": ["room"],
    "additionalProperties": False,
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
    """Before the request exists, also where only the tokenizer finds out about it."""
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
        with pytest.raises(InvalidRequest, match="no_such_token"):
            async with engine.stream(PROMPT, audio=sample.path, sampling=sampling):
                raise AssertionError("a stream")
    assert texts == [whole]
    assert engine.statistics().requests.failed_steps == 0


async def test_biased_tokens_come_and_unknown_ones_are_refused(engine: Engine) -> None:
    token = engine.model.tokenizer.encode(" the", add_special_tokens=False)[0]
    completion = await ask(engine, logit_bias={token: 1000.0}, max_tokens=4)
    assert completion.token_ids == (token,) * 4
    with pytest.raises(InvalidRequest, match="logit_bias"):
        await ask(engine, logit_bias={engine.model.vocabulary_size: 1.0})


async def test_without_a_seed_each_request_draws_afresh_and_tells_with_what(engine: Engine) -> None:
    found = [await ask(engine, seed=None, temperature=4.0, max_tokens=12) for _ in range(3)]
    assert len({completion.usage.seed for completion in found}) == 3
    assert len({completion.token_ids for completion in found}) == 3
    for completion in found:
        again = await ask(engine, seed=completion.usage.seed, temperature=4.0, max_tokens=12)
        assert again.token_ids == completion.token_ids
    several = await ask(engine, seed=None, n=3, temperature=4.0, max_tokens=8)
    again = await ask(engine, seed=several.usage.seed, n=3, temperature=4.0, max_tokens=8)
    for one, other in zip((several, *several.alternatives), (again, *again.alternatives), strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4), "a batch rounds its own numbers"
        assert evolve(other, logprobs=None, alternatives=()) == evolve(one, logprobs=None, alternatives=())
    assert (await ask(engine, max_tokens=1)).usage.seed == 0, "the default repeats itself"


class SlowTables:
    """Translating the tokenizer takes until somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end, self.made = threading.Event(), threading.Event(), 0
        self._translate = Grammars._translate
        monkeypatch.setattr(Grammars, "_translate", lambda grammars: self.translate(grammars))  # noqa: PLW0108  (bound to the grammars)

    def translate(self, grammars: Grammars) -> Any:
        self.made += 1
        self.begun.set()
        assert self.may_end.wait(300), "nobody let it end"
        return self._translate(grammars)

    async def have_begun(self) -> None:
        await trio.to_thread.run_sync(self.begun.wait)


@pytest.mark.real_time
async def test_others_go_on_while_the_tables_of_the_first_structure_are_made(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made once, for all who ask meanwhile, and who is cancelled does not wait for them."""
    tables, texts = SlowTables(monkeypatch), []
    given_up = trio.CancelScope()

    async def structured(scope: trio.CancelScope, title: str) -> None:
        with scope:
            texts.append((await ask(engine, structure=Structure.json_schema({**SCHEMA, "title": title}))).text)

    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(structured, given_up, "first")
            await tables.have_begun()
            nursery.start_soon(structured, trio.CancelScope(), "second")
            nursery.start_soon(structured, trio.CancelScope(), "third")
            whole = await ask(engine)
            assert whole.token_ids, "steps go on"
            given_up.cancel()
            while engine.inside._compiler._lanes[0].threads.statistics().tasks_waiting < 2:
                await trio.lowlevel.checkpoint()
            assert not texts
            tables.may_end.set()
    assert [json.loads(text)["room"] in ("hall", "kitchen") for text in texts] == [True, True]
    assert given_up.cancelled_caught
    assert tables.made == 1


@pytest.mark.real_time
async def test_tables_that_are_ready_when_the_engine_has_ended_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = SlowTables(monkeypatch)
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(partial(ask, engine, structure=Structure.json_schema(SCHEMA)))
        await tables.have_begun()
        grammars = engine.model.structures
        nursery.cancel_scope.cancel()
    tables.may_end.set()
    with pytest.raises(InvalidRequest):  # when it has its turn, the other thread has ended
        grammars.compile(Structure(kind="lark", text='start: "a" <|no such token|>'))
    assert grammars._translated is None
    assert not grammars._compiled
