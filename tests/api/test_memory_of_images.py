"""Requests with images, guesses and vectors leave nothing and make no garbage, however they end.

As in `test_memory.py`, the garbage collector is off: what dies here dies by reference count. Tiny checkpoints, the real
thread, real tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers
import trio

from triolet import (
    EncodeFailed,
    Engine,
    EngineConfig,
    Event,
    InvalidRequest,
    PoisonRequest,
    RequestTooLarge,
    SamplingParams,
    Speculation,
    UnsupportedImage,
)
from triolet.actors.statistics import EngineStatistics
from triolet.core import events
from triolet.models.architectures.vision import QwenVision
from triolet.models.memory.resources import ResourceStack
from triolet.models.networks.causal import CausalNetwork
from triolet.models.networks.encoder import EncoderNetwork
from triolet.testing import live_bytes
from triolet.testing.families import make_checkpoint

from ..heap import Births, Level, assert_none, births, expected, garbage, not_theirs

Ending = Callable[["Client", int], Awaitable[None]]  # makes requests, the number says which, and lets them end
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ROOM = 3_000  # bytes of encoder outputs: of an image of 40 by 60 pixels, or two smaller ones, but not of 64 by 64


class Mine(Exception):
    """The user's own."""


@attrs.define(eq=False)
class Watcher:
    """Wakes who waits for an engine, and knows whether its device encodes."""

    encoding: int = 0
    happened: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def observe(self, event: Event) -> None:
        self.encoding += isinstance(event, events.EncodeDispatched)
        self.encoding -= isinstance(event, events.EncodeDone | events.EncodeBroke)
        self.happened.unpark_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """A checkpoint first: until then trio's loop holds the last message that it woke this task with."""
        await trio.lowlevel.checkpoint()
        with trio.fail_after(300):
            while not condition():
                await self.happened.park()


@attrs.frozen(kw_only=True)
class Client:
    """Makes requests."""

    engine: Engine
    watcher: Watcher
    born: Births | None = None

    def image(self, number: int, height: int = 40, width: int = 60) -> Any:
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        if self.born is not None:
            self.born.note("image", pixels)
        return pixels

    async def ask(self, number: int, *, tokens: int = 6, **more: Any) -> Any:
        """Two images, one of them twice."""
        images = [self.image(number), self.image(number + 1000, 32, 16), self.image(number)]
        sampling = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, **more})
        prompt = f"the cat {IMAGE} and {IMAGE} on {IMAGE} the mat"
        return await self.engine.generate(prompt, images=images, sampling=sampling)

    async def quiet(self) -> None:
        """No request, no step and no encoding is under way."""

        def nothing() -> bool:
            now = self.engine.statistics().requests
            return not (now.waiting or now.running or now.leaving or now.steps_in_flight or self.watcher.encoding)

        await self.watcher.until(nothing)

    async def decoding(self) -> None:
        await self.watcher.until(lambda: self.engine.statistics().requests.steps_in_flight > 0)


async def described(client: Client, number: int) -> None:
    await client.ask(number)


async def asked_in_a_conversation(client: Client, number: int) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "image", "image": client.image(number)}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a hat"}]
    await client.engine.generate(messages=messages, sampling=SamplingParams(max_tokens=4))


async def several_completions(client: Client, number: int) -> None:
    await client.ask(number, n=3, temperature=0.8, seed=number)


async def stopped_by_a_string(client: Client, number: int) -> None:
    text = (await client.ask(number, tokens=12)).text
    stopped = await client.ask(number, tokens=12, stop=text[2:4], logprobs=2)
    assert stopped.text == text[: text.index(text[2:4])]


async def left_early(client: Client, number: int) -> None:
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    async with client.engine.stream(f"a {IMAGE}", images=[client.image(number)], sampling=sampling) as deltas:
        async for _ in deltas:
            break


async def cancelled_while_it_is_read(client: Client, number: int) -> None:
    """The thread cannot be stopped; its answer is nobody's."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, number)
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def cancelled_while_it_is_encoded(client: Client, number: int) -> None:
    await client.quiet()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, number)
        await client.watcher.until(lambda: client.watcher.encoding > 0)
        nursery.cancel_scope.cancel()


async def cancelled_while_it_decodes(client: Client, number: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(client.ask, number, tokens=100))
        await client.decoding()
        nursery.cancel_scope.cancel()


async def damaged(client: Client, number: int) -> None:
    """The second image is no image: the first has been read by then."""
    with expected(UnsupportedImage):
        await client.engine.generate(IMAGE * 2, images=[client.image(number), b"no image" * 1000])


async def too_narrow_for_the_processor(client: Client, number: int) -> None:
    """It is the checkpoint's own processor that refuses it."""
    with expected(InvalidRequest):
        await client.engine.generate(IMAGE * 2, images=[client.image(number), client.image(number, 2, 800)])


async def larger_than_the_cache(client: Client, number: int) -> None:
    """The encoder cache refuses it, when the request is in the engine."""
    try:
        await client.engine.generate(IMAGE, images=[client.image(number, 64, 64)])
        raise AssertionError("it was accepted")
    except RequestTooLarge as error:
        assert "output of 3072 bytes" in str(error)  # noqa: PT017  (what pytest.raises keeps would be garbage)
        assert f"up to {ROOM} bytes" in str(error)  # noqa: PT017


async def encode_crashes(client: Client, number: int) -> None:
    def crash(self: QwenVision, module: object, payloads: object) -> None:
        raise RuntimeError("boom")

    with pytest.MonkeyPatch.context() as patch, expected(EncodeFailed):
        patch.setattr(QwenVision, "encode", crash)
        await client.ask(number)


async def every_step_crashes(client: Client, number: int) -> None:
    def crash(self: CausalNetwork, feeds: object, layout: object, outputs: object) -> None:
        raise RuntimeError("boom")

    with pytest.MonkeyPatch.context() as patch, expected(PoisonRequest):
        patch.setattr(CausalNetwork, "_embed", crash)
        await client.ask(number)


IMAGE_ENDINGS: tuple[Ending, ...] = (
    described,
    asked_in_a_conversation,
    several_completions,
    stopped_by_a_string,
    left_early,
    cancelled_while_it_is_read,
    cancelled_while_it_is_encoded,
    cancelled_while_it_decodes,
    damaged,
    too_narrow_for_the_processor,
    larger_than_the_cache,
    encode_crashes,
    every_step_crashes,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's own language model: where there is no image, its guesses are right."""
    folder = tmp_path_factory.mktemp("draft")
    module = transformers.AutoModelForImageTextToText.from_pretrained(model)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    text = transformers.Qwen2Config(**{**module.config.text_config.to_dict(), "rope_parameters": rope})
    made = transformers.Qwen2ForCausalLM(text)
    made.model.load_state_dict(module.model.language_model.state_dict())
    made.lm_head.load_state_dict(module.lm_head.state_dict())
    made.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("bert_classifier", tmp_path_factory.mktemp("classifier"))


def settings(**more: Any) -> EngineConfig:
    fixed = {"device": "cpu", "dtype": "float32", "threads": 1, "max_running": 8, "encoder_cache_bytes": ROOM}
    return EngineConfig(**{**fixed, "verify": True, **more})


def fast(draft: Path) -> dict[str, Any]:
    """The settings with all that holds tensors of its own."""
    return {"speculation": Speculation(tokens=3, draft=str(draft)), "graphs": "eager"}


async def check(model: Path, endings: tuple[Ending, ...], **more: Any) -> EngineStatistics:
    """Checks that the requests of ``endings`` leave nothing and make no garbage."""
    watcher = Watcher()
    async with Engine(model, config=settings(observer=watcher.observe, **more)) as engine:
        client = Client(engine=engine, watcher=watcher)
        numbers = itertools.count()  # other pixels for each, so that nothing is in the caches already
        for ending in endings:
            await ending(client, next(numbers))
        await client.quiet()
        with garbage() as found:
            for ending in (*endings, *endings):
                with births() as born:
                    await ending(attrs.evolve(client, born=born), next(numbers))
                    await client.quiet()
                    assert not born.alive, f"{ending.__name__}: still alive: {born.alive}"
        assert_none(found)
        return engine.statistics()


async def test_requests_with_images_make_no_garbage_and_leave_nothing_however_they_end(model: Path) -> None:
    """R1, R4, R5: neither the pixels as they were given nor as the encoder takes them, nor the request. A thread reads
    images, and trio's own way back from it would close a cycle around every error: the images of a request that is
    refused would wait for a collection."""
    statistics = await check(model, IMAGE_ENDINGS)
    assert statistics.encoder_cache.evicted, "the encoder cache was never short"
    assert statistics.encoder_cache.held == 0
    assert statistics.requests.pages_free == statistics.requests.pages


async def test_with_guesses_and_graphs_they_leave_nothing_either(model: Path, draft: Path) -> None:
    """The draft model's record of a sequence dies with the sequence."""
    endings = (
        described,
        several_completions,
        stopped_by_a_string,
        left_early,
        cancelled_while_it_decodes,
        encode_crashes,
        every_step_crashes,
    )
    statistics = await check(model, endings, **fast(draft))
    assert statistics.requests.tokens_accepted, "the draft was never right"


# -- vectors ---------------------------------------------------------------------------------------------------------


async def classified(client: Client, number: int) -> None:
    await client.engine.classify(["a cat", "the mat" * (1 + number % 5)])


async def embedded(client: Client, number: int) -> None:
    await client.engine.embed(["the cat " * length for length in range(1 + number % 5, 40)], pooling="mean")


async def one_text_too_long(client: Client, number: int) -> None:
    """So many texts that a thread tokenizes them."""
    with expected(RequestTooLarge):
        await client.engine.classify(["a cat"] * (40 + number) + ["a cat " * 1000])


async def vectors_cancelled(client: Client, number: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(embedded, client, number)
        await client.decoding()
        nursery.cancel_scope.cancel()


async def pooling_crashes(client: Client, number: int) -> None:
    def crash(self: EncoderNetwork, feeds: object, outputs: object) -> None:
        raise RuntimeError("boom")

    with pytest.MonkeyPatch.context() as patch, expected(PoisonRequest):
        patch.setattr(EncoderNetwork, "vectors", crash)
        await client.engine.classify("a cat" * (1 + number))


async def test_texts_that_become_vectors_make_no_garbage_and_leave_nothing(classifier: Path) -> None:
    await check(classifier, (classified, embedded, one_text_too_long, vectors_cancelled, pooling_crashes))


# -- lives of engines ------------------------------------------------------------------------------------------------


async def ended(model: Path, use: Ending, **more: Any) -> None:
    async with Engine(model, config=settings(**more)) as engine:
        await use(Client(engine=engine, watcher=Watcher()), 1)


async def slept(model: Path, use: Ending, **more: Any) -> None:
    async with Engine(model, config=settings(**more)) as engine:
        client = Client(engine=engine, watcher=Watcher())
        await use(client, 1)
        await engine.sleep()
        assert set(engine.statistics().device.by_owner) == {"parked_weights"}
        await engine.wake()
        await use(client, 1)


async def ended_by_an_error(model: Path, use: Ending, **more: Any) -> None:
    watcher = Watcher()
    with pytest.RaisesGroup(Mine):
        async with (
            Engine(model, config=settings(observer=watcher.observe, **more)) as engine,
            trio.open_nursery() as nursery,
        ):
            client = Client(engine=engine, watcher=watcher)
            nursery.start_soon(use, client, 1)
            await client.decoding()
            raise Mine


async def ended_by_cancellation(model: Path, use: Ending, **more: Any) -> None:
    watcher = Watcher()
    with trio.CancelScope() as scope:
        async with (
            Engine(model, config=settings(observer=watcher.observe, **more)) as engine,
            trio.open_nursery() as nursery,
        ):
            client = Client(engine=engine, watcher=watcher)
            nursery.start_soon(use, client, 1)
            await client.decoding()
            scope.cancel()


async def never_opened(model: Path, use: Ending, **more: Any) -> None:
    """The last of what is taken is refused: everything before it was there."""

    def refuse(self: ResourceStack, root: object) -> list[torch.Tensor]:
        raise RuntimeError("no")

    with pytest.MonkeyPatch.context() as patch, expected(RuntimeError):
        patch.setattr(ResourceStack, "unowned", refuse)
        await ended(model, use, **more)


@pytest.mark.parametrize("kind", ["guesses and graphs", "a classification head"])
async def test_engines_with_guesses_graphs_and_pooling_heads_leave_no_byte_however_they_end(
    model: Path, draft: Path, classifier: Path, kind: str
) -> None:
    """S2, S3: no tensor of the model, the draft model, the recorded steps, the head and the encoder outputs; no thread,
    no descriptor and no object of ours."""
    lives = (ended, slept, ended_by_an_error, ended_by_cancellation, never_opened)
    if kind == "guesses and graphs":
        run = [partial(live, model, described, **fast(draft)) for live in lives]
    else:
        run = [partial(live, classifier, embedded) for live in lives]
    levels: list[Level] = []

    async def one_round() -> None:
        for live in run:
            await live()
        levels.append(Level.now())

    await one_round()  # torch and transformers are set up
    levels.clear()
    with garbage() as found:
        before = live_bytes()
        for _ in range(2):
            await one_round()
    assert levels == levels[:1] * 2
    assert levels[0].tensor_bytes == before
    assert_none(not_theirs(found))
