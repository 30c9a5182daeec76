"""Images whose rows see each other, as those of Gemma 3 and, in windows, Gemma 4, or enter several layers and have
positions in three axes, as those of Qwen3-VL: a chunk, a prefix or a failed step may end within an image, and no token
or bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from attrs import evolve
from PIL import Image
from transformers import Gemma4ForConditionalGeneration

from triolet import Engine, EngineConfig, SamplingParams, Speculation, UnsupportedModel
from triolet.models.blueprints.blueprint import NATIVE_ROWS
from triolet.models.blueprints.read import read_blueprint
from triolet.models.executor import TorchExecutor
from triolet.models.native.library import Library
from triolet.models.networks.network import Feed
from triolet.models.sampler import Sampler

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import make_checkpoint
from ..models.media import Checkpoint, picture
from ..models.texts import Driver, Job, generate, noise
from .scarcity import ROUNDS

TOKENS = 8
ASKS = (  # prompts with placeholders, and numbers of images
    ("see {0} and {0}: which is larger?", (1, 2)),
    ("the cat {0}", (1,)),
    ("{0}{0} and the dog", (2, 2)),
    ("see {0} and {0}: why?", (1, 2)),
    ("mice on mats", ()),
)
Bits = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module", params=["gemma3_vision", "gemma4_vision", "gemma4_unified", "qwen3_vl"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(request.param, make_checkpoint(request.param, tmp_path_factory.mktemp("model")))


def images(numbers: Sequence[int]) -> list[Image.Image]:
    return [picture(30 + number, 50, number) for number in numbers]


def expected(checkpoint: Checkpoint, asked: str, numbers: Sequence[int], **more: Any) -> tuple[int, ...]:
    prompt = asked.format(checkpoint.placeholder)
    inputs: Any = checkpoint.tokenizer(prompt, return_tensors="pt")
    if numbers:
        inputs = checkpoint.process(prompt, images(numbers))
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, **more}
    with torch.inference_mode():
        tokens = checkpoint.reference.generate(**inputs, **options, eos_token_id=None)
    return tuple(tokens[0, inputs["input_ids"].shape[1] :].tolist())


async def answers(checkpoint: Checkpoint, *, together: bool, **changes: Any) -> list[Bits]:
    found: dict[int, Bits] = {}
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=1)

    async def ask(engine: Engine, number: int) -> None:
        prompt, numbers = ASKS[number]
        given = {"images": images(numbers)} if numbers else {}
        told = await engine.generate(prompt.format(checkpoint.placeholder), sampling=sampling, **given)
        found[number] = told.token_ids, tuple(told.logprobs)

    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "verify": True, **changes})
    async with Engine(checkpoint.folder, config=config) as engine, trio.open_nursery() as nursery:
        for number in range(len(ASKS)):
            if together:
                nursery.start_soon(ask, engine, number)
            else:
                await ask(engine, number)
    return [found[number] for number in range(len(ASKS))]


@pytest.mark.parametrize("native", [True, False])
async def test_chunks_that_end_within_an_image_change_no_token(
    native: bool, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor, where the library computes, a bit: chunks of few rows, of which an image has more, and pages of 4."""
    if not native:
        monkeypatch.setattr(Library, "load", classmethod(lambda _: None))
    tokens = [expected(checkpoint, *ask) for ask in ASKS]
    alone = await answers(checkpoint, together=False, prefix_caching=False)
    assert [found for found, _ in alone] == tokens
    few = {"max_step_tokens": 29 if checkpoint.name.startswith("gemma4") else 5, "page_size": 4}
    for changes in (few, {"max_step_tokens": 23, "page_size": 8, "max_running": 3}):
        cut = await answers(checkpoint, together=True, **changes)
        assert [found for found, _ in cut] == tokens
        assert cut == alone or not (native and Library.load())


async def test_steps_that_fail_within_an_image_change_no_token(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second step of several requests that reads some of an image raises after its work."""
    answer, seen = Sampler._choose, list[int]()

    def flaky(sampler: Sampler, feeds: Sequence[Feed], *rest: Any) -> Any:
        found = answer(sampler, feeds, *rest)
        reads = [
            one.touches(feed.part.start, feed.part.start + feed.part.length)
            for feed in feeds
            for one in feed.record.start.placeholders
        ]
        if any(reads) and len(feeds) > 1:  # one that fails alone is told so
            seen.append(len(feeds))
            if len(seen) % 2:
                raise RuntimeError("a cosmic ray")
        return found

    monkeypatch.setattr(Sampler, "_choose", flaky)
    for _ in range(ROUNDS):  # threads decide who meets whom
        cut = await answers(checkpoint, together=True, max_step_tokens=16, page_size=4)
        assert [found for found, _ in cut] == [expected(checkpoint, *ask) for ask in ASKS]
        if seen:
            break
    assert seen, "no two requests met while one read an image"


async def test_a_prefix_that_ends_within_an_image_is_shared_up_to_there(checkpoint: Checkpoint) -> None:
    """What is cached of an image was computed with all of it."""
    config = EngineConfig(device="cpu", dtype="float32", page_size=8, verify=True, speculation=None)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    async with Engine(checkpoint.folder, config=config) as engine:
        begins = [f"{'a ' * count}{checkpoint.placeholder}" for count in range(8)]
        begin = next(one for one in begins if (_placed(checkpoint, one) + 3) % 8 == 0)
        for tail, cached in ((" saw this", 0), ("? no", 1)):
            before = engine.statistics().requests.tokens_cached
            told = await engine.generate(begin + tail, images=images([1]), sampling=sampling)
            assert told.token_ids == expected(checkpoint, begin + tail, [1])
            prepared = checkpoint.prepare(begin + tail, images([1]))
            (span,) = prepared.items[0].spans
            stop = engine.statistics().requests.tokens_cached - before
            assert (span[0] < stop < span[1]) == bool(cached), (stop, span)


@pytest.mark.parametrize("settings", [{"graphs": "eager"}, {"speculation": Speculation(tokens=3)}], ids=str)
async def test_images_of_a_smaller_gemma4_see_what_is_before_them(settings: dict[str, Any], tmp_path: Path) -> None:
    """Its embeddings see each other in no layer. Also in beams, with draft tokens, and where graphs are recorded."""
    folder = make_checkpoint("gemma4_vision", tmp_path)
    rewrite(folder / "config.json", text_config=lambda text: {**text, "use_bidirectional_attention": None})
    checkpoint, (asked, numbers) = Checkpoint.open("gemma4_vision", folder), ASKS[0]
    assert not hasattr(checkpoint.module.model, "audio_tower")
    config = EngineConfig(device="cpu", dtype="float32", max_step_tokens=48, page_size=8, verify=True, **settings)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    async with Engine(folder, config=config) as engine:
        prompt, given = asked.format(checkpoint.placeholder), images(numbers)
        told = await engine.generate(prompt, images=given, sampling=sampling)
        searched = await engine.generate(prompt, images=given, sampling=evolve(sampling, beam_size=2))
    assert told.token_ids == expected(checkpoint, asked, numbers)
    assert searched.token_ids == expected(checkpoint, asked, numbers, num_beams=2)


def test_a_token_of_an_image_is_padding_where_no_image_stands(tmp_path: Path) -> None:
    """A text may have been sampled that has one."""
    folder = make_checkpoint("gemma4_vision", tmp_path)
    model = Gemma4ForConditionalGeneration.from_pretrained(folder)
    prompt = (*noise(9, 1), model.config.image_token_id, *noise(3, 2))
    executor = TorchExecutor(folder, EngineConfig(device="cpu", dtype="float32", max_positions=64))
    try:
        (told,) = Driver(executor, executor.open()).run(Job(prompt=prompt, max_tokens=TOKENS, chunk=11))
    finally:
        executor.close()
    assert told.tokens == generate(model, prompt, TOKENS)


def test_images_of_more_rows_than_a_call_of_the_library_has_are_read_by_torch(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma3_vision", tmp_path)
    rewrite(folder / "config.json", mm_tokens_per_image=1156)
    told = read_blueprint(folder, EngineConfig(device="cpu", dtype="float32")).not_native()
    assert told == "1156 rows of an image see each other; known: up to 1120"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_soft_tokens": 140}, "140 rows of an image, which see each other beyond windows of 72 positions"),
        ({"do_normalize": True}, "do_normalize=True; allowed: {'do_resize': True"),
    ],
)
def test_images_of_a_gemma4_without_encoders_are_within_a_window_and_as_usual(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("gemma4_unified", tmp_path)
    rewrite(folder / "preprocessor_config.json", **changes)
    with pytest.raises(UnsupportedModel, match=told):
        read_blueprint(folder, EngineConfig(device="cpu", dtype="float32"))


async def test_a_call_of_the_library_has_the_rows_of_the_largest_image(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma4_vision", tmp_path)
    rewrite(folder / "preprocessor_config.json", max_soft_tokens=280)
    checkpoint, (asked, numbers) = Checkpoint.open("gemma4_vision", folder), ASKS[1]
    config = EngineConfig(device="cpu", dtype="float32", max_step_tokens=100)
    async with Engine(folder, config=config) as engine:
        prompt, sampling = asked.format(checkpoint.placeholder), SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        told = await engine.generate(prompt, images=images(numbers), sampling=sampling)
    assert told.usage.prompt_tokens > NATIVE_ROWS
    assert told.token_ids == expected(checkpoint, asked, numbers)


def _placed(checkpoint: Checkpoint, prompt: str) -> int:
    return int(checkpoint.prepare(prompt, images([1])).items[0].spans[0][0])
