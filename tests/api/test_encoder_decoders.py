"""Encoder-decoders besides Whisper through the whole engine: the tokens are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio
import trio.testing
from attrs import field, frozen

import triolet

from ..checkpoints.families import make_checkpoint
from ..heap import assert_none, garbage
from .scarcity import ask_until_preempted, settled

CLASSES = {
    "moonshine": transformers.MoonshineForConditionalGeneration,
    "moonshine_streaming": transformers.MoonshineStreamingForConditionalGeneration,
    "cohere_asr": transformers.CohereAsrForConditionalGeneration,
    "canary": transformers.CanaryForConditionalGeneration,
    "bart": transformers.BartForConditionalGeneration,
    "t5": transformers.T5ForConditionalGeneration,
}
TEXTS = (
    "a cat on the mat",
    "the dog in the hat saw this thing",
    "then that one and this one, on and on " * 3,
    "hat",
    "the thin thing that the cat in the hat saw on the mat " * 2,
    "a dog and a cat in a hat",
)
SECONDS = (0.3, 0.31, 1.7, 0.06, 0.9, 2.4)


@frozen(kw_only=True)
class Ask:
    """What one client asks: the number of an item, which repeats among the clients, and how the text begins."""

    item: int
    begin: str
    tokens: int
    priority: int


@frozen(kw_only=True, eq=False)
class Reference:
    """transformers' own model, tokenizer and feature extractor of a checkpoint."""

    name: str
    folder: Path
    module: Any
    tokenizer: Any
    known: dict[Any, tuple[int, ...]] = field(factory=dict)

    @classmethod
    def of(cls, name: str, folder: Path) -> Reference:
        make_checkpoint(name, folder)
        return cls(
            name=name,
            folder=folder,
            module=CLASSES[name].from_pretrained(folder).eval(),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        )

    @property
    def hears(self) -> bool:
        return self.name not in ("bart", "t5")

    def item(self, number: int) -> Any:
        if not self.hears:
            return TEXTS[number]
        samples = np.random.default_rng(number).standard_normal(int(SECONDS[number] * 16_000))
        return (samples * 0.3).astype(np.float32)

    def asks(self, count: int) -> list[Ask]:
        numbers = np.random.default_rng(3)
        begin = "the thing on the mat and the cat in it "
        return [
            Ask(
                item=int(numbers.integers(0, len(TEXTS))),
                begin=begin[: int(numbers.integers(0, 40))] if self.hears and index % 2 else "",
                tokens=int(numbers.integers(8, 44)),
                priority=int(numbers.integers(0, 3)),
            )
            for index in range(count)
        ]

    def inputs(self, ask: Ask) -> dict[str, Any]:
        if not self.hears:
            encoded = self.tokenizer(self.item(ask.item), return_tensors="pt")
            return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        extractor = transformers.AutoFeatureExtractor.from_pretrained(self.folder)
        filled = {"padding": True, "pad_to_multiple_of": 80} if self.name == "moonshine_streaming" else {}
        read = extractor(self.item(ask.item), sampling_rate=16_000, return_tensors="pt", **filled)
        inputs = {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}
        begin = self.tokenizer(ask.begin, add_special_tokens=False)["input_ids"]
        start = self.module.config.decoder_start_token_id
        return {**inputs, "decoder_input_ids": torch.tensor([[start, *begin]])}

    def generate(self, ask: Ask, **options: Any) -> tuple[int, ...]:
        """Greedy tokens, end-of-text and what may follow it left out."""
        key = (ask, *options.items())
        if key not in self.known:
            self.known[key] = self._generated(ask, options)
        return self.known[key]

    def _generated(self, ask: Ask, options: dict[str, Any]) -> tuple[int, ...]:
        inputs = self.inputs(ask)
        given = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
        with torch.inference_mode():
            tokens = self.module.generate(**inputs, max_new_tokens=ask.tokens, do_sample=False, **options)
        found: list[int] = tokens[0, given:].tolist()
        ends = self.module.generation_config.eos_token_id
        return tuple(found[: found.index(ends)] if ends in found else found)

    async def ask(self, engine: triolet.Engine, ask: Ask, **options: Any) -> triolet.Completion:
        sampling = triolet.SamplingParams(max_tokens=ask.tokens, **options)
        if not self.hears:
            return await engine.generate(self.item(ask.item), sampling=sampling, priority=ask.priority)
        prompt = {"prompt": ask.begin} if ask.begin else {}
        return await engine.generate(audio=self.item(ask.item), sampling=sampling, priority=ask.priority, **prompt)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """References by name. Nobody changes their folders."""
    return cache(lambda name: Reference.of(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=CLASSES)
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


def two_of(first: str, second: str) -> pytest.MarkDecorator:
    """Two models show what does not depend on the model; a thorough run has all."""
    names = [pytest.param(name, marks=[] if name in (first, second) else pytest.mark.thorough) for name in CLASSES]
    return pytest.mark.parametrize("reference", names, indirect=True)


def scarce(reference: Reference, **changes: Any) -> triolet.EngineConfig:
    """Pages for one full sequence and little more, three slots for six items, room for the largest encoding and little
    more, steps shorter than prompts."""
    width, most, largest = {
        "moonshine": (4 * 16, 1_248, 160 * 48),
        "moonshine_streaming": (4 * 16, 256, 160 * 32),
        "cohere_asr": (4 * 12, 375, 40 * 32),
        "canary": (4 * 12, 375, 40 * 48),
        "bart": (4 * 12, 256, 160 * 48),
        "t5": (4 * 16, 256, 160 * 48),
    }[reference.name]
    position = 2 * 2 * width * 4  # keys and values of two layers
    settings = {
        "dtype": "float32",
        "self_kv_bytes": (256 // 16 + 1) * 16 * position,
        "cross_kv_bytes": 3 * most * position,
        "encoder_cache_bytes": largest * 4,
        "max_step_tokens": 24,
        "max_running": 12,
        "verify": True,
    }
    return triolet.EngineConfig(**{**settings, **changes})


async def test_requests_with_room_for_few_get_the_tokens_of_generate(reference: Reference) -> None:
    """Items of all lengths that repeat, arrivals one after another, preemption, and eviction of slots and outputs."""
    asks = sorted(reference.asks(24), key=lambda ask: -ask.priority)
    async with triolet.Engine(reference.folder, config=scarce(reference)) as engine:
        assert engine.model.cross_slots == 3
        completions = await ask_until_preempted(
            engine, asks, partial(reference.ask, engine), reference.generate, at_once=12
        )
        statistics = await settled(engine)
    assert len({token for one in completions for token in one.token_ids}) > 11, "they prove too little"
    assert statistics.requests.preemptions, "pages were never short"
    assert statistics.requests.cross_written > len(TEXTS), "slots were never short"
    assert statistics.requests.cross_shared, "no slot was shared"
    assert statistics.encoder_cache.evicted, "the encoder cache was never short"
    assert statistics.encoder_cache.held == 0
    assert statistics.requests.pages_free == statistics.requests.pages


async def test_a_beginning_that_was_read_is_not_read_again(references: Callable[[str], Reference]) -> None:
    """Of the same item: that of another one has other keys and values."""
    reference = references("moonshine")
    begin = "the thing on the mat and the cat in it " * 2
    asks = [Ask(item=item, begin=begin, tokens=8, priority=0) for item in (2, 4, 2)]
    cached = []
    async with triolet.Engine(reference.folder, config=triolet.EngineConfig(dtype="float32", verify=True)) as engine:
        for ask in asks:
            assert (await reference.ask(engine, ask)).token_ids == reference.generate(ask)
            cached.append(engine.statistics().requests.tokens_cached)
    assert cached[0] == cached[1] == 0
    assert cached[2] >= 16, "less than a page was shared"


@two_of("canary", "t5")
@pytest.mark.parametrize("keeps", [True, False])
async def test_sleep_and_wake_change_no_token(reference: Reference, keeps: bool) -> None:
    asks = reference.asks(3)
    config = scarce(reference, sleep_keeps_weights=keeps)
    async with triolet.Engine(reference.folder, config=config) as engine:
        before = [(await reference.ask(engine, ask)).token_ids for ask in asks]
        await engine.sleep()
        await engine.wake()
        after = [(await reference.ask(engine, ask)).token_ids for ask in asks]
    assert before == after == [reference.generate(ask) for ask in asks]


@two_of("moonshine_streaming", "bart")
async def test_draft_tokens_of_the_text_itself_change_no_token(reference: Reference) -> None:
    asks = reference.asks(3)
    config = scarce(reference, speculation=triolet.Speculation())
    async with triolet.Engine(reference.folder, config=config) as engine:
        found = [(await reference.ask(engine, ask)).token_ids for ask in asks]
    assert found == [reference.generate(ask) for ask in asks]


async def test_beams_are_those_of_generate(reference: Reference) -> None:
    asks = reference.asks(3)
    async with triolet.Engine(reference.folder, config=scarce(reference)) as engine:
        found = [(await reference.ask(engine, ask, beam_size=3)).token_ids for ask in asks]
    assert found == [reference.generate(ask, num_beams=3) for ask in asks]


async def test_a_request_makes_no_garbage(reference: Reference) -> None:
    asks = [Ask(item=item, begin="", tokens=5, priority=0) for item in range(4)]
    async with triolet.Engine(reference.folder, config=scarce(reference)) as engine:
        await reference.ask(engine, asks[0])
        await trio.testing.wait_all_tasks_blocked()
        with garbage() as found:
            for ask in asks:
                await reference.ask(engine, ask)
            await trio.testing.wait_all_tasks_blocked()
    assert_none(found)


async def test_the_last_token_that_the_checkpoint_forces_ends_the_text(references: Callable[[str], Reference]) -> None:
    """BART's forced end comes where ``max_tokens`` is reached, as in `generate`; its forced beginning comes first."""
    reference = references("bart")
    async with triolet.Engine(reference.folder, config=scarce(reference)) as engine:
        completion = await engine.generate(TEXTS[0], sampling=triolet.SamplingParams(max_tokens=7))
    assert completion.finish_reason is triolet.FinishReason.STOP
    assert len(completion.token_ids) == 6
    assert completion.token_ids[0] == reference.tokenizer.bos_token_id


async def test_what_a_model_does_not_read_is_refused(references: Callable[[str], Reference]) -> None:
    noise = np.zeros(4_000, np.float32)
    writer, listener = references("t5"), references("moonshine")
    async with triolet.Engine(writer.folder, config=scarce(writer)) as engine:
        with pytest.raises(triolet.InvalidRequest, match="the request has audio, but T5ForConditionalGeneration reads"):
            await engine.generate("a cat", audio=noise)
        with pytest.raises(triolet.InvalidRequest, match="exactly one of prompt"):
            await engine.generate(audio=noise)
        with pytest.raises(triolet.RequestTooLarge, match="up to 256"):
            await engine.generate("cat " * 300)
        with pytest.raises(triolet.InvalidRequest, match="no chat template"):
            await engine.generate(messages=[{"role": "user", "content": "a cat"}])
    async with triolet.Engine(listener.folder, config=scarce(listener)) as engine:
        with pytest.raises(triolet.InvalidRequest, match=r"Give audio=\.\.\."):
            await engine.generate("a cat")
        with pytest.raises(triolet.RequestTooLarge, match="up to 30 s"):
            await engine.generate(audio=np.zeros(500_000, np.float32))
        with pytest.raises(triolet.InvalidRequest, match="too short for one embedding"):
            await engine.generate(audio=np.full(500, 0.1, np.float32))


async def test_the_prompt_of_a_models_own_processor_gets_the_tokens_of_generate(
    references: Callable[[str], Reference],
) -> None:
    reference = references("cohere_asr")
    processor = transformers.CohereAsrProcessor.from_pretrained(reference.folder)
    inputs = processor(reference.item(5), language="de", punctuation=False, sampling_rate=16_000)
    prompt = inputs["decoder_input_ids"][0].tolist()
    with torch.inference_mode():
        expected = reference.module.generate(**inputs, max_new_tokens=30, do_sample=False)[0, len(prompt) :].tolist()
    async with triolet.Engine(reference.folder, config=scarce(reference)) as engine:
        found = await engine.generate(audio=reference.item(5), prompt_token_ids=prompt, max_tokens=30)
    assert found.usage.prompt_tokens == len(prompt)
    assert list(found.token_ids) == expected
