"""Speculation changes how many steps a text takes, and nothing else."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio

import triolet
import triolet.demo
from triolet.core import events
from triolet.core.plan import StepPlan, StepResult
from triolet.models.executor import TorchExecutor
from triolet.models.networks.network import Feed, Record
from triolet.models.speculation import LookupProposer, clipped

from ..checkpoints.families import make_checkpoint
from .test_families import Ask, Reference, scarce

SECONDS = 60  # before a test that hangs fails


def propose_by(monkeypatch: pytest.MonkeyPatch, guess: Callable[[Record, int], Iterable[int]]) -> None:
    """Has ``guess`` propose the tokens after those of a record, up to a number, in place of the text itself."""

    def propose(proposer: LookupProposer, feeds: Sequence[Feed]) -> list[tuple[int, ...]]:
        asked = [(feed.record, feed.part.draft_tokens) for feed in feeds]
        return [clipped(record, tuple(guess(record, most)) if most else ()) for record, most in asked]

    monkeypatch.setattr(LookupProposer, "propose", propose)


def some_wrong(text: Sequence[int], begins: int, most: int) -> list[int]:
    """The tokens of ``text`` from ``begins`` on, of which every third is another."""
    found = list(text[begins : begins + most])
    return [token + (token < 9 or -1) * ((begins + place) % 3 == 2) for place, token in enumerate(found)]


async def ask_all(
    engine: triolet.Engine,
    prompts: list[str],
    sampling: list[triolet.SamplingParams],
    urgent: int = 0,
    after: trio.Event | None = None,
) -> list[Any]:
    """Answers in order. The last ``urgent`` prompts have a more urgent priority, and come ``after`` an event."""
    results: dict[int, triolet.Completion] = {}

    async def ask(index: int, priority: int) -> None:
        results[index] = await engine.generate(prompts[index], sampling=sampling[index], priority=priority)

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts) - urgent):
            nursery.start_soon(ask, index, 0)
        if after is not None:
            await after.wait()
        for index in range(len(prompts) - urgent, len(prompts)):
            nursery.start_soon(ask, index, -1)
    return [results[index] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def long_asks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, list[Ask], list[tuple[int, ...]]]:
    """A model, requests so long that pages run out, whichever run first, and transformers' answers."""
    reference = Reference.of("llama", tmp_path_factory.mktemp("long"))
    asks = reference.asks(8, tokens=(110, 140)) * 2
    return reference, asks, [reference.generate(ask) for ask in asks]


@pytest.mark.parametrize("guesses", ["lookup", "right", "some wrong"])
async def test_greedy_tokens_are_those_of_generate_and_the_right_guesses_save_steps(
    guesses: str,
    long_asks: tuple[Reference, list[Ask], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With preemption, shared prefixes and chunks. The device waits until all requests of normal priority are queued,
    and when two run until the urgent ones are. Each takes seven pages of 21 or so before it ends, and starts with
    fewer: those that run together run out of them."""
    reference, asks, expected = long_asks
    texts: dict[tuple[int, ...], tuple[int, ...]] = {}  # the longest answer to each prompt

    def guess(record: Record, most: int) -> Sequence[int]:
        text, begins = texts[record.start.token_ids[: record.start.prompt_length]], len(record.generated)
        found = text[begins : begins + most] if guesses == "right" else some_wrong(text, begins, most)
        count["guesses"] += len(found)
        return found

    if guesses != "lookup":
        propose_by(monkeypatch, guess)
    step, count, urgent = TorchExecutor.step, Counter[Any](), 6
    two_run, normal_queued, urgent_queued = trio.Event(), threading.Event(), threading.Event()

    def observe(event: triolet.Event) -> None:
        count[type(event)] += 1
        if count[events.RequestQueued] >= len(asks) - urgent:
            normal_queued.set()
        if count[events.RequestQueued] >= len(asks):
            urgent_queued.set()
        if count[events.FirstToken] >= 2:
            two_run.set()

    def held(executor: TorchExecutor, plan: StepPlan) -> StepResult:
        queued = urgent_queued if two_run.is_set() else normal_queued
        assert queued.wait(SECONDS), "requests are not queued"
        return step(executor, plan)

    monkeypatch.setattr(TorchExecutor, "step", held)
    config = scarce(reference, asks, speculation=triolet.Speculation(tokens=3), observer=observe)
    async with triolet.Engine(reference.folder, config=config) as engine:
        for ask, text in sorted(zip(asks, expected, strict=True), key=lambda pair: len(pair[1])):
            texts[tuple(engine.model.preparer.prepare(ask.prompt).token_ids)] = text
        sampling = [triolet.SamplingParams(max_tokens=ask.tokens) for ask in asks]
        results = await ask_all(engine, [ask.prompt for ask in asks], sampling, urgent, two_run)
        statistics = engine.statistics().requests
    assert [result.token_ids for result in results] == expected
    assert statistics.preemptions
    assert statistics.tokens_cached
    assert statistics.tokens_accepted
    offered = statistics.tokens_drafted if guesses == "lookup" else count["guesses"]
    assert (statistics.tokens_accepted == offered) is (guesses == "right")


@pytest.mark.parametrize("guesses", ["lookup", "some wrong"])
async def test_sampled_texts_are_the_same_with_and_without_guesses(
    guesses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, a structure and stop strings among them: each draw sees what it would have seen."""
    folder = make_checkpoint("llama", tmp_path / "model")
    sampling = [
        triolet.SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=20),
        triolet.SamplingParams(temperature=1.0, top_k=5, seed=4, max_tokens=20, repetition_penalty=1.2),
        triolet.SamplingParams(
            temperature=0.5, seed=5, max_tokens=24, structure=triolet.Structure(kind="regex", text="[a-c]{12}")
        ),
        triolet.SamplingParams(temperature=0.9, min_p=0.1, seed=6, max_tokens=20, presence_penalty=0.5, logprobs=2),
        triolet.SamplingParams(max_tokens=20, min_tokens=20),
    ]
    results = []
    texts: dict[float, tuple[int, ...]] = {}  # the text of each temperature
    if guesses == "some wrong":
        propose_by(
            monkeypatch,
            lambda record, most: some_wrong(texts[record.start.sampling.temperature], len(record.generated), most),
        )
    for speculation in (None, triolet.Speculation(tokens=4)):
        config = triolet.EngineConfig(dtype="float32", verify=True, speculation=speculation)
        async with triolet.Engine(folder, config=config) as engine:
            results.append(await ask_all(engine, ["the cat that the cat saw"] * len(sampling), sampling))
            accepted = engine.statistics().requests.tokens_accepted
        texts = {one.temperature: result.token_ids for one, result in zip(sampling, results[0], strict=True)}
    assert accepted or guesses == "lookup"
    for plain, guessed in zip(*results, strict=True):
        assert guessed.token_ids == plain.token_ids
        assert guessed.text == plain.text
        assert guessed.finish_reason == plain.finish_reason
        np.testing.assert_allclose(guessed.logprobs, plain.logprobs, atol=1e-4)


async def test_sampling_with_guesses_keeps_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-squared of the third token over many seeds, against its exact distribution: the second token decides it, and
    both are guessed. Guesses of the likeliest token, which are often wrong, would bias them, were a guess ever
    preferred."""
    folder = make_checkpoint("llama", tmp_path / "model")
    module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    config = triolet.EngineConfig(dtype="float32", speculation=triolet.Speculation(tokens=2))
    count, kinds = 1200, 4

    @functools.cache
    def likeliest(tokens: tuple[int, ...], most: int) -> tuple[int, ...]:
        if most == 0:
            return ()
        [(token, _)] = likely(module, list(tokens), 1)
        return (token, *likeliest((*tokens, token), most - 1))

    propose_by(monkeypatch, lambda record, most: likeliest(tuple(record.tokens), most))
    async with triolet.Engine(folder, config=config) as engine:
        prompt = list(engine.model.preparer.prepare("a cat").token_ids)
        sampling = [
            triolet.SamplingParams(temperature=1.5, top_k=kinds, seed=seed, max_tokens=3, ignore_eos=True)
            for seed in range(count)
        ]
        results = await ask_all(engine, ["a cat"] * count, sampling)
        statistics = engine.statistics().requests
    expected = Counter[int]()
    for first, weight in likely(module, prompt, kinds):
        for second, then in likely(module, [*prompt, first], kinds):
            for third, last in likely(module, [*prompt, first, second], kinds):
                expected[third] += weight * then * last
    found = Counter(result.token_ids[2] for result in results)
    assert set(found) <= set(expected)
    large = [token for token in expected if expected[token] * count >= 5]
    rest = [token for token in expected if token not in large]
    bins = [(found[token], expected[token] * count) for token in large]
    if rest:
        bins.append((sum(found[token] for token in rest), sum(expected[token] for token in rest) * count))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins)
    freedom = len(bins) - 1
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 3.5, f"{statistic} for {freedom} degrees of freedom"  # Wilson and Hilferty 1931
    assert 0.2 < statistics.tokens_accepted / statistics.tokens_drafted < 0.95, "the guesses are no test"


@torch.no_grad()
def likely(module: Any, tokens: list[int], kinds: int) -> list[tuple[int, float]]:
    logits = module(torch.tensor([tokens])).logits[0, -1] / 1.5
    top = logits.topk(kinds)
    return list(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))


async def test_whisper_writes_the_same_with_guesses() -> None:
    recordings = [sample.path for sample in triolet.demo.samples()[:2]]
    texts, accepted = [], []
    for speculation in (None, triolet.Speculation(tokens=4)):
        config = triolet.EngineConfig(dtype="float32", verify=True, speculation=speculation)
        async with triolet.Engine(triolet.demo.checkpoint(), config=config) as engine:
            transcripts = [await engine.transcribe(recording, beam_size=1) for recording in recordings]
            texts.append([(part.text, part.token_ids, part.start) for one in transcripts for part in one.segments])
            accepted.append(engine.statistics().requests.tokens_accepted)
    assert texts[0] == texts[1]
    assert accepted[0] == 0 < accepted[1]


@pytest.mark.parametrize(("speculation", "drafted"), [("auto", True), (None, False)])
async def test_a_decoder_that_runs_alone_on_the_cpu_proposes_from_its_text(
    speculation: Any, drafted: bool, tmp_path: Path
) -> None:
    """By default. Beside others nothing is proposed."""
    reference = Reference.of("llama", tmp_path / "model")
    config = triolet.EngineConfig(device="cpu", dtype="float32", speculation=speculation)
    ask = triolet.SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={5: 100.0})  # it repeats itself
    async with triolet.Engine(reference.folder, config=config) as engine:
        alone = await engine.generate("again and again and again", sampling=ask)
        first, right = engine.statistics().requests.tokens_drafted, engine.statistics().requests.tokens_accepted
        both = await ask_all(engine, ["again and again and again", "and then and then and then"], [ask, ask])
        second = engine.statistics().requests.tokens_drafted
    assert (first > 0, right > 0) == (drafted, drafted)
    assert second - first <= first // 2, "but where one of them comes or has gone"
    assert both[0].token_ids == alone.token_ids
