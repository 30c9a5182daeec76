"""Real tokens: what the executor draws is what transformers' own ``generate`` draws, however it is batched."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from attrs import evolve

from triolet.core.request import LogitRules, Probe, SamplingParams, Structure

SECONDS = {"a": 2.0, "b": 0.7, "c": 1.3, "d": 2.0, "e": 0.05}


@pytest.fixture
def clips(audio):
    return {key: audio(index, seconds) for index, (key, seconds) in enumerate(SECONDS.items())}


@pytest.fixture
def prompts(ids):
    """Plain, with text before it, the shortest, one over several pages."""
    base = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    return [base, (ids.previous, 72, 105, *base), (ids.start,), (ids.previous, *range(60, 79), *base), base]


def jobs_for(job, clips, prompts, **settings):
    return [job(key=key, prompt=prompt, **settings) for key, prompt in zip(clips, prompts, strict=True)]


def test_greedy_tokens_equal_transformers(driver, job, clips, prompts, generate, ids):
    """Five windows and prompts of different lengths in one batch give transformers' tokens, one by one."""
    driver.encode(**clips)
    rules = LogitRules(suppress=(1, 2, 3, 250), begin_suppress=(32, ids.eos))
    jobs = jobs_for(job, clips, prompts, rules=rules)
    outcomes = driver.run(*jobs)
    assert [one.tokens for one in outcomes] == [generate(clips[one.key], one) for one in jobs]
    assert len({token for one in outcomes for token in one.tokens}) > 15, "the model says too little to prove anything"


def test_timestamps_equal_transformers(driver, job, clips, ids, generate, timestamp_rules):
    """With the timestamp rules, tokens are those of `WhisperTimeStampLogitsProcessor`."""
    driver.encode(**clips)
    prompt = (ids.start, ids.en, ids.transcribe)
    rules = LogitRules(suppress=(1, ids.no_speech), begin_suppress=(32, ids.eos), timestamps=timestamp_rules)
    jobs = [job(key=key, prompt=prompt, rules=rules, max_tokens=40) for key in clips]
    outcomes = driver.run(*jobs)
    assert [one.tokens for one in outcomes] == [generate(clips[one.key], one) for one in jobs]
    assert all(one.tokens[0] >= ids.timestamps for one in outcomes)


@pytest.mark.parametrize("least", [0, 3, 9])
def test_min_tokens_and_the_end_equal_transformers(driver, job, clips, prompts, generate, ids, least):
    """Sequences end where transformers ends them, and ``min_tokens`` holds the end back as ``min_new_tokens`` does."""
    driver.encode(**clips)
    kept = (70, 71, ids.eos)
    rules = LogitRules(suppress=tuple(token for token in range(ids.vocabulary) if token not in kept))
    jobs = jobs_for(job, clips, prompts, rules=rules, sampling=SamplingParams(min_tokens=least))
    outcomes = driver.run(*jobs)
    assert [one.tokens for one in outcomes] == [generate(clips[one.key], one) for one in jobs]
    assert any(one.tokens[-1] == ids.eos for one in outcomes)
    assert all(one.tokens.index(ids.eos) >= least for one in outcomes if ids.eos in one.tokens)


def test_repetitions_of_the_text_alone_are_those_of_transformers(driver, job, clips, prompts, generate, ids):
    """The prompt does not count, though it has the very tokens that the model writes without it."""
    driver.encode(**clips)
    plain = driver.run(*jobs_for(job, clips, prompts))
    prompts = [(ids.previous, *one.tokens[:8], *prompt[-4:]) for one, prompt in zip(plain, prompts, strict=True)]
    sampling = SamplingParams(repetition_penalty=1.4)
    rules = LogitRules(no_repeat_ngram=1, counts_prompt=False)
    banned = jobs_for(job, clips, prompts, rules=rules)
    penalised = jobs_for(job, clips, prompts, rules=evolve(rules, no_repeat_ngram=0), sampling=sampling)
    counted = jobs_for(job, clips, prompts, sampling=sampling)
    told = [[one.tokens for one in driver.run(*jobs)] for jobs in (banned, penalised, counted)]
    assert told[:2] == [[generate(clips[one.key], one) for one in jobs] for jobs in (banned, penalised)]
    assert all(len(set(tokens)) == len(tokens) for tokens in told[0])
    assert told[1] != told[2]


@pytest.mark.parametrize("penalty", [0.6, 1.4])
def test_penalised_and_biased_tokens_equal_transformers(driver, job, clips, prompts, generate, ids, penalty):
    """In one batch with rows that ask for nothing; the penalty counts the prompt, too."""
    driver.encode(**clips)
    sampling = SamplingParams(repetition_penalty=penalty, logit_bias={72: 1.5, 80: -2.0, 100: 0.75})
    plain = jobs_for(job, clips, prompts)[:3]
    jobs = [*jobs_for(job, clips, prompts, sampling=sampling), *plain]
    outcomes = driver.run(*jobs)
    assert [one.tokens for one in outcomes] == [generate(clips[one.key], one) for one in jobs]
    assert outcomes[0].tokens != outcomes[5].tokens


def test_a_structure_is_followed_by_whatever_the_model_says_also_when_replayed(driver, job, clips, ids):
    """In one batch with rows without one, at a temperature; and replayed from any token on."""
    driver.encode(**clips)
    structure = Structure(kind="regex", text=r"[0-9]{4}-[a-f]{2,9}\.")
    sampling = SamplingParams(structure=structure, temperature=1.5, seed=3)
    prompt = (ids.start, ids.en)
    jobs = [job(key="a", prompt=prompt, sampling=sampling), job(key="b", prompt=prompt), job(key="c", prompt=prompt)]
    guided, *plain = driver.run(*jobs)
    end = guided.tokens.index(ids.eos)
    assert re.fullmatch(structure.text, bytes(guided.tokens[:end]).decode())
    assert [one.tokens for one in driver.run(*jobs[1:])] == [one.tokens for one in plain]
    for length in range(1, end):
        replayed = driver.run(evolve(jobs[0], committed=tuple(guided.tokens[:length])))[0]
        assert replayed.tokens[: end + 1] == guided.tokens[: end + 1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replay_continues_identically(driver, job, clips, ids, temperature, timestamp_rules):
    """Started again with its prompt and the tokens committed so far, a sequence draws the rest of its tokens."""
    driver.encode(a=clips["a"])
    settings = {
        "key": "a",
        "prompt": (ids.start, ids.en, ids.transcribe),
        "sampling": SamplingParams(temperature=temperature, seed=5, min_tokens=20),
        "rules": LogitRules(timestamps=timestamp_rules, begin_suppress=(ids.eos,)),
    }
    whole = driver.run(job(**settings))[0].tokens
    for cut in (1, 2, 9):
        assert driver.run(job(**settings, committed=tuple(whole[:cut])))[0].tokens == whole


def test_sampling_is_independent_of_the_batch(driver, job, clips, prompts):
    """With one seed, a sequence draws the same tokens alone, beside others and in chunks; another seed draws others."""
    driver.encode(**clips)
    sampling = [SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=seed) for seed in range(5)]
    jobs = [
        job(key=key, prompt=prompt, sampling=one) for key, prompt, one in zip(clips, prompts, sampling, strict=True)
    ]
    alone = [driver.run(one)[0].tokens for one in jobs]
    assert [one.tokens for one in driver.run(*jobs)] == alone
    chunked = [job(key=one.key, prompt=one.prompt, sampling=one.sampling, chunk=2) for one in jobs]
    assert [one.tokens for one in driver.run(*reversed(chunked))] == alone[::-1]
    other = job(key="a", prompt=prompts[0], sampling=SamplingParams(temperature=0.9, seed=77))
    assert driver.run(other)[0].tokens != alone[0]


def test_logprobs_and_probe_equal_transformers(driver, job, clips, prompts, reference, features, ids):
    """Log-probabilities are those of the ruled distribution, the probe's those of the raw one."""
    driver.encode(b=clips["b"])
    asked = (ids.no_speech, ids.en, 5)
    rules = LogitRules(suppress=tuple(range(100, 140)))
    for chunk in (64, 2, 1):
        one = job(
            key="b", prompt=prompts[1], rules=rules, probe=Probe(position=2, token_ids=asked), chunk=chunk, max_tokens=8
        )
        outcome = driver.run(one)[0]
        tokens = torch.tensor([[*one.prompt, *outcome.tokens]])
        with torch.inference_mode():
            logits = reference(features(clips["b"]), decoder_input_ids=tokens).logits[0]
        expected = logits[2].log_softmax(-1)[list(asked)].tolist()
        assert outcome.probes == [pytest.approx(expected, abs=1e-4)]
        ruled = logits[len(one.prompt) - 1 : -1].clone()
        ruled[:, 100:140] = -torch.inf
        sampled = ruled.log_softmax(-1).gather(1, torch.tensor(outcome.tokens)[:, None])[:, 0]
        assert outcome.logprobs == pytest.approx(sampled.tolist(), abs=1e-4)


def test_garbage_in_pages_reaches_nobody(driver, job, clips, prompts):
    """Memory that holds NaN, as fresh or poisoned pages may, changes no token (``0 * NaN`` is NaN)."""
    driver.encode(**clips)
    jobs = [
        job(key=key, prompt=prompt, joins=index, chunk=3, max_tokens=12 + index)
        for index, (key, prompt) in enumerate(zip(clips, prompts, strict=True))
    ]
    clean = driver.run(*jobs)
    (pool,) = driver.executor._open.parts.paged._groups  # all layers are of one width
    with torch.inference_mode():
        pool[:, :-1] = torch.nan
        driver.executor._open.parts.cross._pool.fill_(torch.nan)
    dirty = driver.run(*jobs)
    assert [one.tokens for one in dirty] == [one.tokens for one in clean]
    assert not pool[:, -1].any(), "the page of zeros was written to"


def test_allowed_tokens_are_the_only_ones_drawn(driver, job, clips, ids):
    """``allowed`` restricts the draw: language detection needs it."""
    driver.encode(a=clips["a"])
    languages = (ids.en, ids.en + 1, ids.en + 2)
    one = job(key="a", prompt=(ids.start,), rules=LogitRules(allowed=languages), max_tokens=3)
    outcome = driver.run(one)[0]
    assert set(outcome.tokens) <= set(languages)
    assert all(np.exp(outcome.logprobs) > 1 / 3), "the likeliest of three has more than a third"


def test_random_schedules_agree_with_one_by_one(driver, job, clips, prompts, ids):
    """Whatever the joining times, chunks and lengths: the tokens are those of each sequence alone."""
    driver.encode(**clips)
    keys, chance = list(clips), random.Random(3)
    for _ in range(6):
        jobs = [
            job(
                key=chance.choice(keys),
                prompt=chance.choice(prompts),
                joins=chance.randrange(6),
                chunk=chance.randint(1, 12),
                max_tokens=chance.randint(1, 20),
            )
            for _ in range(6)
        ]
        driver.share_slots = chance.random() < 0.5
        together = driver.run(*jobs)
        assert [one.tokens for one in together] == [driver.run(one)[0].tokens for one in jobs]
