"""Beam search: hypotheses and scores are those of transformers' own ``generate``, however requests are batched."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import settings as profile
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from triolet.core.beams import Candidate
from triolet.core.config import Speculation
from triolet.core.detokenizer import TokenBytes
from triolet.core.errors import RequestTooLarge
from triolet.core.planning.prefix import prompt_keys
from triolet.core.reasoning import Reasoning, Stage, Track
from triolet.core.request import EncoderItem, FinishReason, LogitRules, Request, SamplingParams
from triolet.models.executor import TorchExecutor
from triolet.models.sampling.beams import Search

from ..checkpoints.families import make_checkpoint
from .searches import Pump, search
from .texts import generate, noise, start_of

WHOLE = profile.get_current_profile_name() == "soak"
SEARCHES = (
    {"beam_size": 2},
    {"beam_size": 5, "n": 5},
    {"beam_size": 3, "length_penalty": 0.0, "n": 3},
    {"beam_size": 4, "length_penalty": 2.5, "n": 2},
    {"beam_size": 4, "length_penalty": -1.0, "n": 4},
    {"beam_size": 5, "patience": 1.0, "n": 5},
    {"beam_size": 8, "patience": 1.0, "length_penalty": 0.5, "min_tokens": 4},
    {"beam_size": 3, "repetition_penalty": 1.3, "n": 3},
    {"beam_size": 3, "stop_token_ids": (70, 90), "n": 3},
    {"beam_size": 4, "logit_bias": {80: 2.0, 81: -1.0}, "n": 4},
)


@pytest.fixture
def pump(config):
    """``pump(folder, config_changes, **limits)``; closed after the test."""
    opened = []

    def start(folder, settings=None, **limits):
        opened.append(TorchExecutor(folder, config(**(settings or {}))))
        return Pump.of(opened[-1], **limits)

    yield start
    for executor in opened:
        executor.close()


# -- Whisper -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper(reference):
    model = copy.deepcopy(reference)
    model.generation_config = GenerationConfig()
    return model


def heard(name, key, audio, prompt, *, rules=None, max_tokens=24, **sampling):
    item = EncoderItem(key=key, payload=audio, embeddings=100, size=100)
    return Request(
        id=name,
        prompt_token_ids=tuple(prompt),
        items=(item,),
        sampling=SamplingParams(**sampling),
        rules=rules or LogitRules(),
        max_tokens=max_tokens,
    )


@pytest.fixture
def expect(whisper, features, ids):
    """``expect(request)``: what transformers finds."""

    def find(request):
        timestamps = request.rules.timestamps
        processors = []
        if timestamps is not None:
            generation = GenerationConfig(
                no_timestamps_token_id=timestamps.no_timestamps_id,
                eos_token_id=ids.eos,
                max_initial_timestamp_index=timestamps.max_initial,
            )
            processors = [WhisperTimeStampLogitsProcessor(generation, begin_index=len(request.prompt_token_ids))]
        return search(
            whisper,
            request.prompt_token_ids,
            request,
            eos=ids.eos,
            processors=processors,
            inputs=features(request.items[0].payload),
            decoder_input_ids=torch.tensor([request.prompt_token_ids]),
        )

    return find


def check(answer, expected, request):
    assert answer.error is None
    found = answer.hypotheses[: request.sampling.n]
    assert [one.token_ids for one in found] == expected.token_ids
    assert [one.score for one in found] == pytest.approx(expected.scores, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(("number", "sampling"), list(enumerate(SEARCHES)), ids=str)
def test_hypotheses_of_whisper_equal_transformers(pump, checkpoint, audio, ids, expect, number, sampling):
    """Behind prompts that end within a page, at its end, and of one token: each in turn, or with ``make soak`` all."""
    base = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    prompts = [base, (ids.start,), (ids.previous, *range(60, 79), *base)]
    rules = LogitRules(suppress=(1, 2, 3, 250), begin_suppress=(32, ids.eos))
    requests = [
        heard(f"r{index}", f"clip{index}", audio(index, 1.5), prompt, rules=rules, **sampling)
        for index, prompt in enumerate(prompts)
        if WHOLE or index == number % 3
    ]
    answers = pump(checkpoint).run(*requests)
    for request, answer in zip(requests, answers, strict=True):
        check(answer, expect(request), request)


@pytest.mark.parametrize("sampling", [{"beam_size": 3, "n": 3}, {"beam_size": 4, "patience": 1.0, "n": 4}], ids=str)
def test_timestamps_of_beams_equal_transformers(pump, checkpoint, audio, ids, expect, timestamp_rules, sampling):
    rules = LogitRules(suppress=(1, ids.no_speech), begin_suppress=(32, ids.eos), timestamps=timestamp_rules)
    prompt = (ids.start, ids.en, ids.transcribe)
    requests = [
        heard(f"r{index}", f"clip{index}", audio(index, 1.5), prompt, rules=rules, max_tokens=40, **sampling)
        for index in range(3 if WHOLE else 2)
    ]
    answers = pump(checkpoint).run(*requests)
    for request, answer in zip(requests, answers, strict=True):
        check(answer, expect(request), request)
        assert all(one.token_ids[0] >= ids.timestamps for one in answer.hypotheses)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("patience", [None, 1.0])
def test_beams_that_end_equal_transformers(pump, checkpoint, audio, ids, expect, patience, penalty):
    """So few tokens are allowed that beams end all the time: with some tokens, after one, and at the last place. Of the
    six requests ``make test`` takes every other one: with a penalty, the even ones or the odd ones by patience."""
    odd = penalty != 0 and (patience is None) == (penalty == 1.0)
    kept = (70, 71, 72, 73, 74, 75, 76, 77, 78, ids.eos)
    rules = LogitRules(suppress=tuple(token for token in range(ids.vocabulary) if token not in kept))
    prompt = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    requests = [
        heard(
            f"r{index}",
            f"clip{index}",
            audio(index, 1.5),
            prompt,
            rules=rules,
            max_tokens=(24, 3, 1)[index % 3],
            beam_size=(2, 4)[index % 2],
            n=2,
            patience=patience,
            length_penalty=penalty,
            logit_bias={ids.eos: index / 2},
        )
        for index in range(6)
        if WHOLE or index % 2 == odd
    ]
    answers = pump(checkpoint).run(*requests)
    for request, answer in zip(requests, answers, strict=True):
        check(answer, expect(request), request)
    assert {answer.reason for answer in answers} == {FinishReason.STOP, FinishReason.LENGTH}


def test_searches_among_others_are_what_each_is_alone(pump, checkpoint, audio, ids):
    """Greedy requests, draws and searches, more than the pages hold: preempted, begun anew, cut into small steps. One
    encoding of each recording, whoever reads it."""
    base = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    prompts = [base, (ids.previous, 72, 105, *base), (ids.start,), (ids.previous, *range(60, 79), *base)]
    rules = LogitRules(suppress=(1, 2, 3, 250), begin_suppress=(32, ids.eos))
    kinds = [{}, {"beam_size": 5, "n": 5}, {"beam_size": 2}, {"temperature": 0.8, "seed": 3}, {"beam_size": 8}]
    requests = [
        heard(
            f"r{index}",
            f"clip{index % 2}",
            audio(index % 2, 1.5),
            prompts[index % 4],
            rules=rules,
            max_tokens=10 + index,
            **kinds[index % 5],
        )
        for index in range(15)
    ]
    by_one = pump(checkpoint)
    alone = [by_one.run(request)[0] for request in requests]
    together = pump(checkpoint, pages=50, max_step_tokens=12, headroom=0)
    answers = together.run(*requests)
    assert together.encodes == 2, "beams, and whoever else reads a recording, share its encoding"
    assert together.planner.statistics().preemptions > 2
    for answer, own in zip(answers, alone, strict=True):
        assert answer.error is None
        assert answer.tokens == own.tokens
        assert [one.token_ids for one in answer.hypotheses] == [one.token_ids for one in own.hypotheses]
        np.testing.assert_allclose(
            [one.score for one in answer.hypotheses], [one.score for one in own.hypotheses], atol=1e-4
        )


def test_log_probabilities_of_a_hypothesis_are_those_of_its_tokens_alone(pump, checkpoint, audio, ids):
    """After the rules, as those of any sampled token: of the tokens that a greedy request is led to."""
    rules = LogitRules(suppress=(1, 2, 3, 250), begin_suppress=(32, ids.eos))
    prompt = (ids.start, ids.en)
    ask = {"rules": rules, "max_tokens": 8}
    found = pump(checkpoint).run(heard("beams", "a", audio(1), prompt, beam_size=3, **ask))[0].hypotheses[0]
    driver = pump(checkpoint)
    for index, token in enumerate(found.token_ids):
        led = heard(
            f"r{index}",
            "a",
            audio(1),
            (*prompt, *found.token_ids[:index]),
            rules=evolve(rules, begin_suppress=rules.begin_suppress if index == 0 else ()),
            max_tokens=1,
            logprobs=20,
        )
        top = dict(driver.run(led)[0].tops[0])
        assert top[token] == pytest.approx(found.logprobs[index], abs=1e-4)


# -- decoders ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """``decoder(family)``: the folder of a tiny checkpoint, and transformers' model of it."""

    @functools.cache
    def make(family):
        folder = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return make


def read(name, prompt, *, max_tokens=16, **sampling):
    request = Request(
        id=name, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling), max_tokens=max_tokens
    )
    keys = prompt_keys(request, page_size=4, identity="test")
    return evolve(request, page_keys=keys)


def check_decoder(answer, request, model):
    tokens = torch.tensor([request.prompt_token_ids])
    expected = search(
        model,
        request.prompt_token_ids,
        request,
        eos=model.config.eos_token_id,
        inputs=tokens,
        attention_mask=torch.ones_like(tokens),
    )
    check(answer, expected, request)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("gemma4", {"speculation": Speculation(tokens=3)}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("llama", {"graphs": "eager"}),
        ("llama", {"speculation": Speculation(tokens=3)}),
    ],
    ids=str,
)
def test_hypotheses_of_decoders_equal_transformers(pump, decoder, family, settings):
    """However steps are launched, behind a prompt that is shared, and read in chunks; with draft tokens, which
    are for the others alone."""
    folder, model = decoder(family)
    shared = noise(21, 5)
    searches = SEARCHES[:6] if WHOLE and not settings else SEARCHES[:3]
    requests = [read(f"r{index}", shared[: 21 - index % 3], **one) for index, one in enumerate(searches)]
    greedy = read("greedy", shared, max_tokens=20)
    driver = pump(
        folder,
        settings,
        max_step_tokens=24,
        prefix_caching=True,
        draft_tokens=3 if "speculation" in settings else 0,
    )
    answers = driver.run(*requests, greedy)
    for request, answer in zip(requests, answers, strict=False):
        check_decoder(answer, request, model)
    assert answers[-1].tokens == generate(model, greedy.prompt_token_ids, 20)
    again = evolve(requests[0], id="again")
    check_decoder(driver.run(again)[0], again, model)
    assert driver.planner.statistics().tokens_cached, "the prompt's full pages are shared, and nobody wrote to them"


def test_a_search_that_cannot_run_is_refused_when_it_is_made(pump, decoder):
    driver = pump(decoder("llama")[0], pages=12, max_step_tokens=6)
    wide, long, well = driver.run(
        read("wide", noise(4, 1), beam_size=7),
        read("long", noise(9, 1), beam_size=4, max_tokens=12),
        read("well", noise(9, 1), beam_size=4, max_tokens=8),
    )
    assert isinstance(wide.error, RequestTooLarge)
    assert "beam_size=7 needs a token of each beam in one step; allowed: up to 6" in str(wide.error)
    assert isinstance(long.error, RequestTooLarge)
    assert "take 14 pages of KV; allowed: up to 12" in str(long.error)
    assert well.hypotheses


def test_each_beam_goes_on_from_its_parents_place_among_the_marks_of_reasoning():
    class Letters:
        def decode(self, tokens, **_):
            return "".join(map(chr, tokens))

    marks = Reasoning("<", ">", stage=Stage.REASONS, budget=9)
    start = start_of(1, (1, 2), sampling=SamplingParams(beam_size=2), max_tokens=9)
    one = Search.of(start, 16, Track.of(marks, TokenBytes(Letters())))

    def answers():
        return [track.at(beam.token_ids).answer for track, beam in zip(one.tracks, one.state.beams, strict=True)]

    closed, a, b = map(ord, ">ab")
    one.advance([Candidate(0, a, -1.0, -1.0), Candidate(0, closed, -2.0, -2.0)])
    assert answers() == [None, 1]
    one.advance([Candidate(1, a, -3.0, -1.0), Candidate(0, b, -4.0, -3.0)])
    assert [beam.token_ids for beam in one.state.beams] == [(closed, a), (a, b)]
    assert answers() == [1, None]
