"""A draft head proposes what transformers' layer proposes. It changes how many steps a text takes, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio

import triolet
from triolet import EngineConfig, SamplingParams, Speculation
from triolet.models.blueprints.text_blueprint import TextBlueprint
from triolet.models.checkpoints.draft_weights import read_draft_weights
from triolet.models.checkpoints.loading import read_tokenizer
from triolet.models.native import draft_head
from triolet.models.native.draft_head import DraftHead, make_draft_head
from triolet.models.native.library import Library

from ..checkpoints.drafting import make_drafting
from .scarcity import ask_until_preempted, settled
from .test_families import Reference, scarce

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

FEW = 192  # tokens that a head chooses from, of 266
DRAFTS, LONG = 3, SamplingParams(max_tokens=60, ignore_eos=True)


def proposals(head: DraftHead, module: transformers.PreTrainedModel, tokens: Sequence[int], most: int) -> list[int]:
    """The tokens that the head proposes behind ``tokens``, by transformers."""
    known, found = torch.tensor(tokens), list[int]()
    hidden = module.model(known[None]).last_hidden_state[0][:-1]  # of the last token there is none yet
    while len(found) < most:
        positions = torch.arange(len(hidden))
        own = head(hidden, known[1:], positions)[-1:]
        found.append(int(module.lm_head(own)[0, :FEW].argmax()))
        hidden, known = torch.cat([hidden, own]), torch.cat([known, torch.tensor(found[-1:])])
    return found


async def test_a_head_proposes_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposed: list[Any]
) -> None:
    folder = make_drafting(tmp_path)
    monkeypatch.setattr(draft_head, "FREQUENT", FEW)
    config = EngineConfig(device="cpu", dtype="float32", max_step_tokens=20, speculation=Speculation(tokens=DRAFTS))
    async with triolet.Engine(folder, config=config) as engine:  # a prompt takes several steps
        answer = await engine.generate("a cat on the mat and the dog in the hat", sampling=LONG)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    head = make_draft_head(module, module, read_draft_weights(folder, torch.float32))
    assert isinstance(head, DraftHead)
    assert len(proposed[0][0]) == answer.usage.prompt_tokens + 1, "the first token is followed by draft tokens"
    assert len(proposed) > 3, "a head whose tokens are wrong pauses, but not for ever"
    with torch.inference_mode():
        for tokens, own in proposed:
            assert own == tuple(proposals(head, module, tokens, len(own)))


async def test_a_head_that_is_right_saves_steps(tmp_path: Path) -> None:
    steps, texts = list[int](), list[tuple[int, ...]]()
    for speculation in (None, Speculation(tokens=DRAFTS)):
        config = EngineConfig(device="cpu", dtype="float32", speculation=speculation, verify=True)
        async with triolet.Engine(make_drafting(tmp_path, right=True), config=config) as engine:
            texts.append((await engine.generate("a cat", sampling=LONG)).token_ids)
            requests = (await settled(engine)).requests
            steps.append(requests.steps)
            assert (requests.tokens_accepted > 40) == (speculation is not None)
            assert requests.tokens_accepted >= requests.tokens_drafted - DRAFTS  # the last ones may be cut
    assert texts[0] == texts[1]
    assert steps[1] < steps[0] / 3


@pytest.mark.parametrize("most", [1, 12])
@pytest.mark.parametrize("right", [False, True])
async def test_drafts_change_no_token(right: bool, most: int, tmp_path: Path) -> None:
    """Among others, with too few pages and states, in steps shorter than prompts."""
    make_drafting(tmp_path, right=right)
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    reference = Reference(name="qwen3_5_text", folder=tmp_path, module=module, tokenizer=read_tokenizer(tmp_path))
    asks = sorted(reference.asks(5) * 2, key=lambda ask: -ask.priority)
    drafts = Speculation(tokens=DRAFTS, most_running=most)
    async with triolet.Engine(tmp_path, config=scarce(reference, asks, speculation=drafts)) as engine:
        await ask_until_preempted(engine, asks, partial(reference.ask, engine), reference.generate, at_once=4)
        await reference.ask(engine, asks[0])
        statistics = await settled(engine)
    assert statistics.requests.tokens_drafted
    assert statistics.requests.states_free == statistics.requests.states


async def test_bytes_of_a_head_have_owners(tmp_path: Path) -> None:
    folder = make_drafting(tmp_path)
    held = dict[bool, dict[str, int]]()
    for drafts in (False, True):
        config = EngineConfig(device="cpu", dtype="float32", speculation=Speculation() if drafts else None)
        async with triolet.Engine(folder, config=config) as engine:
            held[drafts] = engine.statistics().device.by_owner
    assert held[True]["weights"] > held[False]["weights"]
    assert held[True]["draft_kv"] > 0
    assert "draft_kv" not in held[False]


async def test_a_step_may_have_more_sequences_than_a_call_has_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TextBlueprint.open_runner
    monkeypatch.setattr(TextBlueprint, "open_runner", partialmethod(plain, rows=2))
    texts = list[list[tuple[int, ...]]]()
    make_drafting(tmp_path, right=True)
    for speculation in (None, Speculation(tokens=DRAFTS)):
        config = EngineConfig(device="cpu", dtype="float32", max_positions=64, speculation=speculation)
        found = dict[str, tuple[int, ...]]()

        async def ask(prompt: str, engine: triolet.Engine, found: dict[str, tuple[int, ...]] = found) -> None:
            sampling = SamplingParams(max_tokens=12, ignore_eos=True)
            found[prompt] = (await engine.generate(prompt, sampling=sampling)).token_ids

        async with triolet.Engine(tmp_path, config=config) as engine:
            async with trio.open_nursery() as nursery:
                for prompt in ("a cat", "the mat", "a dog", "the hat", "on that"):
                    nursery.start_soon(ask, prompt, engine)
            requests = (await settled(engine)).requests
        assert not requests.failed_steps
        assert (requests.tokens_accepted > 20) == (speculation is not None)
        texts.append([found[prompt] for prompt in sorted(found)])
    assert texts[0] == texts[1]
