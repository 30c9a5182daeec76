"""A long beginning with an image in it, which many prompts share: what is computed once, and what is not."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from attrs import frozen
from PIL.Image import Image

from triolet import Engine, EngineConfig, SamplingParams

from ..checkpoints.families import make_checkpoint
from ..models.media import Checkpoint, picture

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PAGE = 16
TOKENS = 12  # of an answer
RULES = " ".join(f"rule {number} of the cat" for number in range(100))
STORY = " ".join(f"then {number} cats sat on the mat" for number in range(80))
SIZE = (64, 48)  # of the images


@frozen(kw_only=True)
class Spent:
    """What one request has cost: ``asked``, ``hits`` and ``encoded`` of encoder outputs, ``fed`` and ``cached`` tokens
    of its prompt."""

    asked: int
    hits: int
    encoded: int
    fed: int
    cached: int


@frozen(kw_only=True, eq=False)
class Prompt:
    """Text with one image in it, as the engine reads it."""

    text: str
    image: Image
    token_ids: tuple[int, ...]
    placed: int  # where the image begins

    @property
    def prompt_tokens(self) -> int:
        return len(self.token_ids)

    def common(self, other: Prompt) -> int:
        """How many tokens they begin with in common."""
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@frozen(kw_only=True, eq=False)
class Bench:
    """One engine, asked one thing after another, and transformers' own model beside it."""

    checkpoint: Checkpoint
    engine: Engine

    def prompt(self, text: str, image: Image) -> Prompt:
        prepared = self.checkpoint.prepare(text, [image])
        (item,) = prepared.items
        return Prompt(text=text, image=image, token_ids=prepared.token_ids, placed=item.spans[0][0])

    async def ask(self, prompt: Prompt) -> Spent:
        """The answer is that of transformers' `generate`, whatever was there already."""
        before = self._counts()
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        answer = await self.engine.generate(prompt.text, images=[prompt.image], sampling=sampling)
        assert answer.token_ids == self._expected(prompt)
        after = self._counts()
        spent = {name: after[name] - before[name] for name in after}
        spent["fed"] -= TOKENS - 1  # the last one is not fed
        return Spent(**spent)

    def _expected(self, prompt: Prompt) -> tuple[int, ...]:
        inputs = self.checkpoint.process(prompt.text, [prompt.image])
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        with torch.inference_mode():
            tokens = self.checkpoint.module.generate(**inputs, **options, eos_token_id=None)
        return tuple(tokens[0, inputs["input_ids"].shape[1] :].tolist())

    def _counts(self) -> dict[str, int]:
        now = self.engine.statistics()
        assert not now.requests.running, "a request is under way"
        ledger, requests = now.encoder_cache, now.requests
        return {
            "asked": ledger.acquires,
            "hits": ledger.hits,
            "encoded": ledger.encoded,
            "fed": requests.tokens_fed,
            "cached": requests.tokens_cached,
        }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With positions for a long prompt."""
    folder = make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    file: Path = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["text_config"]["max_position_embeddings"] = 4096
    file.write_text(json.dumps(settings))
    return Checkpoint.open("qwen2_5_vl", folder)


@pytest.fixture
async def bench(checkpoint: Checkpoint) -> Any:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        max_running=2,
        page_size=PAGE,
        self_kv_bytes=1 << 26,
        speculation=None,  # draft tokens are fed, too
        verify=True,
    )
    async with Engine(checkpoint.folder, config=config) as engine:
        yield Bench(checkpoint=checkpoint, engine=engine)


def full_pages(tokens: int) -> int:
    """As many tokens as fill pages."""
    return tokens // PAGE * PAGE


async def test_behind_a_shared_beginning_only_the_tail_is_fed_and_no_image_is_encoded(bench: Bench) -> None:
    """It is not even asked for: the pages have its keys and values."""
    image = picture(*SIZE, 1)
    first, second = (bench.prompt(f"{RULES} {IMAGE} {STORY} {tail}", image) for tail in ("why", "and the dog then"))
    shared = full_pages(first.common(second))
    assert shared > 2000
    assert first.placed > 900
    assert await bench.ask(first) == Spent(asked=1, hits=0, encoded=1, fed=first.prompt_tokens, cached=0)
    left = second.prompt_tokens - shared
    assert left < 50
    assert await bench.ask(second) == Spent(asked=0, hits=0, encoded=0, fed=left, cached=shared)


async def test_another_image_in_its_place_shares_what_lies_before_it(bench: Bench) -> None:
    """The tokens are the same to the last: the images' content is what tells the pages apart."""
    text = f"{RULES} {IMAGE} {STORY}"
    first, second = (bench.prompt(text, picture(*SIZE, seed)) for seed in (1, 2))
    assert first.token_ids == second.token_ids
    await bench.ask(first)
    shared = full_pages(first.placed)
    left = second.prompt_tokens - shared
    assert await bench.ask(second) == Spent(asked=1, hits=0, encoded=1, fed=left, cached=shared)
    whole = full_pages(first.prompt_tokens - 1)  # the last token is fed again: something must tell the next one
    again = Spent(asked=0, hits=0, encoded=0, fed=first.prompt_tokens - whole, cached=whole)
    assert await bench.ask(first) == again
    assert await bench.ask(second) == again


async def test_the_same_image_behind_another_text_is_encoded_once_but_shares_no_page(bench: Bench) -> None:
    image = picture(*SIZE, 1)
    first, second = (bench.prompt(f"{begin} {RULES} {IMAGE} {STORY}", image) for begin in ("so", "but"))
    assert first.common(second) < PAGE
    await bench.ask(first)
    assert await bench.ask(second) == Spent(asked=1, hits=1, encoded=0, fed=second.prompt_tokens, cached=0)


async def test_a_beginning_that_ends_within_the_image_is_shared_up_to_there(bench: Bench) -> None:
    """A page may end in the middle of an image. The rest of the image is read from its encoding, which is there."""
    image = picture(*SIZE, 3)
    begins = [f"{'a ' * count}{RULES} {IMAGE}" for count in range(PAGE)]
    begin = next(begin for begin in begins if bench.prompt(begin, image).placed % PAGE == PAGE - 6)
    first, second = bench.prompt(f"{begin} {STORY}", image), bench.prompt(f"{begin}? {STORY}", image)
    shared = full_pages(first.common(second))
    assert shared == first.placed + 6, "six of twelve embeddings"
    await bench.ask(first)
    left = second.prompt_tokens - shared
    assert await bench.ask(second) == Spent(asked=1, hits=1, encoded=0, fed=left, cached=shared)


async def test_eight_requests_at_once_feed_a_beginning_once_when_it_is_there(bench: Bench) -> None:
    image = picture(*SIZE, 1)
    prompts = [bench.prompt(f"{RULES} {IMAGE} {STORY} {number}", image) for number in range(8)]
    await bench.ask(prompts[0])
    before = bench.engine.statistics()
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    async def ask(prompt: Prompt) -> None:
        answer = await bench.engine.generate(prompt.text, images=[image], sampling=sampling)
        assert answer.token_ids == bench._expected(prompt)

    async with trio.open_nursery() as nursery:
        for prompt in prompts[1:]:
            nursery.start_soon(ask, prompt)
    after = bench.engine.statistics()
    assert after.encoder_cache.encoded == before.encoder_cache.encoded
    fed = after.requests.tokens_fed - before.requests.tokens_fed
    tails = sum(prompt.prompt_tokens - full_pages(prompts[0].common(prompt)) + TOKENS - 1 for prompt in prompts[1:])
    assert fed == tails
