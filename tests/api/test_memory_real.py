"""Requests and engines on real models leave nothing and make no garbage, however they end.

As in `test_memory.py`, the garbage collector is off: what dies here dies by reference count. Here with the thread and
the tensors of the demo checkpoint, and of tiny ones for images, guesses and vectors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import trio
import trio.testing

import triolet.demo
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
    UnsupportedAudio,
    UnsupportedImage,
)
from triolet.core import events
from triolet.models.architectures.vision import QwenVision
from triolet.models.memory.resources import ResourceStack
from triolet.models.networks.causal import CausalNetwork
from triolet.models.networks.encoder import EncoderNetwork
from triolet.models.networks.whisper_model import WhisperModel
from triolet.models.speech.whisper_speech import special_tokens
from triolet_testing import live_bytes

from ..checkpoints.families import make_checkpoint
from ..heap import Births, Level, assert_none, births, expected, garbage, not_theirs
from ..models.conftest import make_model, save_checkpoint

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ROOM = 3_000  # bytes of encoder outputs: of an image of 40 by 60 pixels, or two smaller ones, but not of 64 by 64
CLIPS = sorted(triolet.demo.samples(), key=lambda clip: clip.duration)


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

    def asked(self, number: int) -> dict[str, Any]:
        """A prompt with one second of noise, or with two images, one of them twice."""
        if self.engine.model.speech is None:
            images = [self.image(number), self.image(number + 1000, 32, 16), self.image(number)]
            return {"prompt": f"the cat {IMAGE} and {IMAGE} on {IMAGE} the mat", "images": images}
        noise = (0.1 * np.random.default_rng(number).standard_normal(16_000)).astype(np.float32)
        speech = special_tokens(self.engine.model)
        begin = [speech.start_id, speech.language_ids["en"], speech.task_ids["transcribe"], speech.no_timestamps_id]
        return {"prompt_token_ids": begin, "audio": noise}

    async def ask(self, number: int, *, tokens: int = 6, **more: Any) -> Any:
        sampling = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, **more})
        return await self.engine.generate(**self.asked(number), sampling=sampling)

    async def quiet(self) -> None:
        """No request, no step and no encoding is under way."""

        def nothing() -> bool:
            now = self.engine.statistics().requests
            return not (now.waiting or now.running or now.leaving or now.steps_in_flight or self.watcher.encoding)

        await self.watcher.until(nothing)

    async def decoding(self) -> None:
        await self.watcher.until(lambda: self.engine.statistics().requests.steps_in_flight > 0)


Ending = Callable[[Client, int], Awaitable[None]]  # makes requests, the number says which, and lets them end


# -- of every generating model ---------------------------------------------------------------------------------------


async def answered(client: Client, number: int) -> None:
    await client.ask(number)


async def left_early(client: Client, number: int) -> None:
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    async with client.engine.stream(**client.asked(number), sampling=sampling) as deltas:
        async for _ in deltas:
            break


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


def crashing(use: Ending, error: type[Exception], *calls: tuple[type, str]) -> Ending:
    """``use`` while each of ``calls`` of the model raises."""

    def crash(*_: object) -> None:
        raise RuntimeError("boom")

    async def ending(client: Client, number: int) -> None:
        with pytest.MonkeyPatch.context() as patch, expected(error):
            for owner, name in calls:
                patch.setattr(owner, name, crash)
            await use(client, number)

    return ending


GENERATING: tuple[Ending, ...] = (
    answered,
    left_early,
    cancelled_while_it_is_encoded,
    cancelled_while_it_decodes,
    crashing(answered, EncodeFailed, (QwenVision, "encode"), (WhisperModel, "encode")),
)

# -- speech ----------------------------------------------------------------------------------------------------------


async def not_a_number(client: Client, number: int) -> None:
    asked = client.asked(number)
    asked["audio"][number] = math.inf
    with expected(InvalidRequest):
        await client.engine.generate(**asked)


async def transcribed(client: Client, number: int) -> None:
    """Transcribes a file, which is read in a thread, with detection of the language."""
    await client.engine.transcribe(CLIPS[number % len(CLIPS)].path, temperature=0.0)


async def transcription_left_early(client: Client, number: int) -> None:
    options = {"language": "en", "temperature": 0.0, "seed": number}
    async with client.engine.stream_transcription(CLIPS[-1].path, **options) as segments:
        async for _ in segments:
            break


async def transcription_of_what_is_no_audio(client: Client, number: int) -> None:
    """A thread reads it, and finds that out."""
    with expected(UnsupportedAudio):
        await client.engine.transcribe(b"no audio" * (1000 + number))


SPEECH = (*GENERATING, not_a_number, transcribed, transcription_left_early, transcription_of_what_is_no_audio)

# -- images ----------------------------------------------------------------------------------------------------------


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


async def cancelled_while_it_is_read(client: Client, number: int) -> None:
    """The thread cannot be stopped; its answer is nobody's."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, number)
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
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


step_crashes = crashing(answered, PoisonRequest, (CausalNetwork, "_embed"))
IMAGES = (
    *GENERATING,
    asked_in_a_conversation,
    several_completions,
    stopped_by_a_string,
    cancelled_while_it_is_read,
    damaged,
    too_narrow_for_the_processor,
    larger_than_the_cache,
    step_crashes,
)

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


VECTORS = (
    classified,
    embedded,
    one_text_too_long,
    vectors_cancelled,
    crashing(classified, PoisonRequest, (EncoderNetwork, "vectors")),
)

# -- requests --------------------------------------------------------------------------------------------------------


ENDINGS: dict[str, tuple[Ending, ...]] = {
    "speech": SPEECH,
    "images": IMAGES,
    "guesses": (*GENERATING, several_completions, stopped_by_a_string, step_crashes),
    "vectors": VECTORS,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = {"images": "qwen2_5_vl", "vectors": "bert_classifier"}
    found = {name: make_checkpoint(family, tmp_path_factory.mktemp(name)) for name, family in names.items()}
    return {**found, "speech": triolet.demo.checkpoint()}


def settings(kind: str, **more: Any) -> EngineConfig:
    """``"guesses"``: images with draft tokens and recorded steps, that is with all that holds tensors of its own."""
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_running": 8, "verify": True}
    if kind in ("images", "guesses"):
        fixed["encoder_cache_bytes"] = ROOM
    if kind == "guesses":
        fixed |= {"speculation": Speculation(tokens=3), "graphs": "eager"}
    return EngineConfig(**fixed, **more)


@asynccontextmanager
async def opened(folders: dict[str, Path], kind: str) -> AsyncIterator[Client]:
    watcher = Watcher()
    folder = folders["images" if kind == "guesses" else kind]
    async with Engine(folder, config=settings(kind, observer=watcher.observe)) as engine:
        yield Client(engine=engine, watcher=watcher)


@pytest.mark.parametrize("kind", ENDINGS)
async def test_requests_leave_nothing_and_make_no_garbage_however_they_end(folders: dict[str, Path], kind: str) -> None:
    """R1, R4, R5: neither what was given nor what the encoder takes of it, nor the request, nor what was looked
    up in it. A thread reads media, and trio's own way back from it would close a cycle around every error: the
    images of a request that is refused would wait for a collection."""
    endings = ENDINGS[kind]
    async with opened(folders, kind) as client:
        numbers = itertools.count()  # other media for each, so that nothing is in the caches already
        for ending in endings:
            await ending(client, next(numbers))
        await client.quiet()
        with garbage() as found:
            for ending in (*endings, *endings):
                with births() as born:
                    await ending(attrs.evolve(client, born=born), next(numbers))
                    await client.quiet()
                    assert not born.alive, f"{ending.__qualname__}: still alive: {born.alive}"
        assert_none(found)
        statistics = client.engine.statistics()
    assert statistics.encoder_cache.held == 0
    if kind in ("images", "guesses"):
        assert statistics.encoder_cache.evicted, "the encoder cache was never short"
        assert statistics.requests.pages_free == statistics.requests.pages
    assert (statistics.requests.tokens_accepted > 0) == (kind == "guesses"), "the draft was never right"


# -- lives of engines ------------------------------------------------------------------------------------------------

Life = Callable[[dict[str, Path], str, Ending], Awaitable[None]]


async def ended(folders: dict[str, Path], kind: str, use: Ending) -> None:
    async with opened(folders, kind) as client:
        await use(client, 1)


async def slept(folders: dict[str, Path], kind: str, use: Ending) -> None:
    async with opened(folders, kind) as client:
        await use(client, 1)
        await client.engine.sleep()
        assert set(client.engine.statistics().device.by_owner) == {"parked_weights"}
        await client.engine.wake()
        await use(client, 1)


async def ended_by_an_error(folders: dict[str, Path], kind: str, use: Ending) -> None:
    with pytest.RaisesGroup(Mine):
        async with opened(folders, kind) as client, trio.open_nursery() as nursery:
            nursery.start_soon(use, client, 1)
            await client.decoding()
            raise Mine


async def ended_by_cancellation(folders: dict[str, Path], kind: str, use: Ending) -> None:
    with trio.CancelScope() as scope:
        async with opened(folders, kind) as client, trio.open_nursery() as nursery:
            nursery.start_soon(use, client, 1)
            await client.decoding()
            scope.cancel()


async def cancelled_while_it_opens(folders: dict[str, Path], kind: str, use: Ending) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ended, folders, kind, use)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def never_opened(folders: dict[str, Path], kind: str, use: Ending) -> None:
    """The last of what is taken is refused: everything before it was there."""

    def refuse(self: ResourceStack, root: object) -> list[torch.Tensor]:
        raise RuntimeError("no")

    with pytest.MonkeyPatch.context() as patch, expected(RuntimeError):
        patch.setattr(ResourceStack, "unowned", refuse)
        await ended(folders, kind, use)


LIVES: tuple[Life, ...] = (
    ended,
    slept,
    ended_by_an_error,
    ended_by_cancellation,
    cancelled_while_it_opens,
    never_opened,
)


@pytest.mark.parametrize(("kind", "use"), [("speech", transcribed), ("guesses", answered), ("vectors", embedded)])
async def test_engines_leave_no_byte_however_they_end(folders: dict[str, Path], kind: str, use: Ending) -> None:
    """S2, S3: no tensor of the model, the recorded steps, the head and the encoder outputs; no thread,
    no descriptor and no object of ours."""
    levels: list[Level] = []

    async def one_round() -> None:
        for live in LIVES:
            await live(folders, kind, use)
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


# -- engines side by side --------------------------------------------------------------------------------------------

Texts = dict[tuple[str, int], tuple[int, ...]]


async def decode_all(texts: Texts, name: str, client: Client) -> None:
    async def one(number: int) -> None:
        texts[name, number] = (await client.ask(number, tokens=30)).token_ids

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(one, number)


async def test_engines_side_by_side_do_not_know_of_one_another(folders: dict[str, Path], tmp_path: Path) -> None:
    """Two on one model, one on another, their steps interleaved: each writes what it writes alone, and the end of one
    changes nothing for the others."""
    folders = {"speech": folders["speech"], "other": save_checkpoint(tmp_path, make_model(seed=5))}
    alone: Texts = {}
    for kind in folders:
        async with opened(folders, kind) as client:
            await decode_all(alone, kind, client)
    together: Texts = {}
    async with opened(folders, "speech") as first, opened(folders, "other") as other:
        async with opened(folders, "speech") as second, trio.open_nursery() as nursery:
            for name, client in (("speech", first), ("second", second), ("other", other)):
                nursery.start_soon(decode_all, together, name, client)
        assert together == alone | {("second", number): alone["speech", number] for number in range(4)}
        before = [client.engine.statistics().device.by_owner for client in (first, other)]
        again: Texts = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode_all, again, "speech", first)
            nursery.start_soon(ended_by_an_error, folders, "speech", answered)
            nursery.start_soon(decode_all, again, "other", other)
        assert again == alone
        assert [client.engine.statistics().device.by_owner for client in (first, other)] == before
