"""Log-probabilities of prompts: they are transformers' own, however the prompt is divided and whatever runs beside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from triolet import Completion, Delta, Engine, EngineConfig, InvalidRequest
from triolet.core import events
from triolet.models.native.library import Library

PROMPT = [5 + (7 * place) % 200 for place in range(90)]  # longer than what a step reads of it


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
async def test_log_probabilities_of_a_prompt_are_those_of_the_model(
    made: Callable[[str], Path], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(Library, "load", classmethod(lambda _: None))
    folder = made("llama")
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    expected = logits.log_softmax(-1)[:-1]
    likeliest = expected.topk(3)

    def check(completion: Completion | Delta) -> None:
        found = completion.prompt_logprobs
        assert found is not None
        own = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        assert [one for one, _ in found] == pytest.approx(own.tolist(), abs=1e-4)
        for (_, top), tokens, values in zip(found, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
            assert [token for token, _ in top] == tokens
            assert [value for _, value in top] == pytest.approx(values, abs=1e-4)

    seen: list[events.Event] = []
    drafts: Any = "auto" if native else None
    config = EngineConfig(
        device="cpu", dtype="float32", max_step_tokens=48, speculation=drafts, verify=True, observer=seen.append
    )
    async with Engine(folder, config=config) as engine:
        ask: Any = partial(engine.generate, prompt_token_ids=PROMPT, max_tokens=4, temperature=0.0)
        plain = await ask()  # its pages are shared by those that follow
        seen.clear()
        found: list[Completion] = []

        async def add(**sampling: Any) -> None:
            found.append(await ask(prompt_logprobs=3, **sampling))

        async with trio.open_nursery() as nursery:
            for sampling in ({}, {"stop": "never"}, {"logit_bias": {7: 5.0}, "repetition_penalty": 1.3}):
                nursery.start_soon(partial(add, **sampling))
        for completion in found:
            check(completion)
        read = [one.tokens for one in seen if isinstance(one, events.StepBegun)]
        assert native or max(read) <= 32 + 2, "few logits at once, of all requests together"
        assert [one.token_ids for one in found].count(plain.token_ids) >= 2
        async with engine.stream(prompt_token_ids=PROMPT, max_tokens=4, prompt_logprobs=3) as deltas:
            first, *others = [delta async for delta in deltas]
        check(first)
        assert first.prompt_logprobs == found[0].prompt_logprobs or not native, "the same bits, whatever runs beside"
        assert not any(delta.prompt_logprobs for delta in others)
        seen.clear()
        bare = (await ask(prompt_logprobs=0)).prompt_logprobs
        assert [one for one, _ in bare] == pytest.approx([one for one, _ in first.prompt_logprobs], abs=1e-4)
        assert not any(top for _, top in bare)
        assert [one.tokens for one in seen if isinstance(one, events.StepBegun)][:2] == [32, 32], "few logits at once"
        assert (await engine.generate(prompt_token_ids=[5], max_tokens=1, prompt_logprobs=1)).prompt_logprobs == ()
        assert plain.prompt_logprobs is None
        with pytest.raises(InvalidRequest, match="prompt_logprobs=1 with beam_size=2"):
            await engine.generate(prompt_token_ids=[5], beam_size=2, prompt_logprobs=1)
