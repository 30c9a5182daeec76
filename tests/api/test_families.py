"""Every family through the whole engine: the tokens are those of transformers' `generate`, one after another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attrs import field, frozen

import triolet
from triolet.models.architectures.layer_sizes import layer_sizes
from triolet.models.blueprints.estimate import state_numbers, stored_shapes
from triolet.models.blueprints.read import read_blueprint
from triolet.models.checkpoints.loading import read_tokenizer
from triolet.models.memory.recurrent_states import RecurrentStates

from ..checkpoints.families import make_checkpoint
from ..models.media import HEARING, PLACEHOLDERS, Checkpoint
from .scarcity import ask_until_preempted, settled

TEXT = ("llama", "qwen3", "gemma2", "gemma3", "mistral", "granite", "cohere2", "gpt2")
WIDE = ("gemma4", "gpt_oss", "deepseek_v3")  # shared keys and values, sinks, values of another width
RECURRENT = ("lfm2", "qwen3_next", "qwen3_5_text", "mamba2")  # states beside pages, or alone
STATES = (*RECURRENT, "qwen3_5", "lfm2_vl")  # the last two read images
WORDS = "a cat on the mat and the dog in the hat saw this thing then that one "


@frozen(kw_only=True)
class Ask:
    """What one client asks: ``items`` are numbers of images or sounds, which repeat among the clients."""

    prompt: str
    items: tuple[int, ...]
    tokens: int
    priority: int


@frozen(kw_only=True, eq=False)
class Reference:
    """transformers' own model and processor of a checkpoint."""

    name: str
    folder: Path
    module: Any
    tokenizer: Any
    checkpoint: Checkpoint | None = None
    known: dict[Ask, tuple[int, ...]] = field(factory=dict)

    @classmethod
    def of(cls, name: str, folder: Path) -> Reference:
        make_checkpoint(name, folder)
        tokenizer = read_tokenizer(folder)
        if name in PLACEHOLDERS:
            checkpoint = Checkpoint.open(name, folder)
            return cls(
                name=name, folder=folder, module=checkpoint.reference, tokenizer=tokenizer, checkpoint=checkpoint
            )
        module = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        return cls(name=name, folder=folder, module=module, tokenizer=tokenizer)

    def asks(self, count: int, *, tokens: tuple[int, int] = (6, 16)) -> list[Ask]:
        """``tokens``: how many each wants, at least, and fewer than."""
        numbers = np.random.default_rng(72)  # the first eight have all items, long prompts and short ones
        asks = []
        fewest = int(self.name in ("granite_speech", "phi4_multimodal"))  # adapters for prompts with audio
        for index in range(count):
            length = int(numbers.integers(5, 130))
            held = numbers.integers(fewest, 3)
            items = tuple(int(n) for n in numbers.integers(0, 4, held)) if self.checkpoint else ()
            begin = "Look at this. " * 3 if index % 3 else ""
            shown = " ".join(PLACEHOLDERS[self.name] for _ in items) if items else ""
            text = (WORDS * 3)[length // 2 : length + length // 2]
            wanted, priority = int(numbers.integers(*tokens)), int(numbers.integers(0, 3))
            asks.append(Ask(prompt=begin + shown + text, items=items, tokens=wanted, priority=priority))
        return asks

    def items(self, ask: Ask) -> list[Any]:
        return self.checkpoint.items(*ask.items) if self.checkpoint is not None else []

    def generate(self, ask: Ask) -> tuple[int, ...]:
        """Greedy tokens, end-of-text and what may follow it left out."""
        if ask not in self.known:
            self.known[ask] = self._generated(ask)
        return self.known[ask]

    def _generated(self, ask: Ask) -> tuple[int, ...]:
        if ask.items:
            inputs = self.checkpoint.process(ask.prompt, self.items(ask))
        else:
            inputs = dict(self.tokenizer(ask.prompt, return_tensors="pt"))
        given = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            tokens = self.module.generate(**inputs, max_new_tokens=ask.tokens, do_sample=False)[0, given:].tolist()
        ends = self.module.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        return tuple(tokens[: next((place for place, token in enumerate(tokens) if token in stops), len(tokens))])

    async def ask(self, engine: triolet.Engine, ask: Ask) -> triolet.Completion:
        given = {"audio" if self.name in HEARING else "images": self.items(ask)} if ask.items else {}
        sampling = triolet.SamplingParams(max_tokens=ask.tokens)
        return await engine.generate(ask.prompt, **given, sampling=sampling, priority=ask.priority)


@pytest.fixture(params=[*TEXT, *WIDE, *RECURRENT, *PLACEHOLDERS])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    return Reference.of(request.param, tmp_path)


def scarce(reference: Reference, asks: list[Ask], **more: Any) -> triolet.EngineConfig:
    """Too little of everything: pages for one long sequence and a half, five recurrent states, room for the encodings
    of one request, steps shorter than prompts."""
    config = reference.module.config.get_text_config()
    page = sum(layer.numbers for layer in layer_sizes(reference.folder, config)) * 4 * 16
    longest, largest = 0, 1
    for ask in asks:
        tokens = reference.tokenizer(ask.prompt)["input_ids"]
        if ask.items:
            prepared = reference.checkpoint.prepare(ask.prompt, reference.items(ask))
            largest = max(largest, sum({item.key: item.size for item in prepared.items}.values()))
            tokens = prepared.token_ids
        longest = max(longest, len(tokens) + ask.tokens)
    if reference.name in STATES:
        blueprint = read_blueprint(reference.folder, triolet.EngineConfig(dtype="float32"))
        numbers = state_numbers(blueprint, stored_shapes(blueprint))
        more["state_bytes"] = 5 * RecurrentStates.bytes_of(numbers)
    return triolet.EngineConfig(
        dtype="float32",
        self_kv_bytes=-(-longest // 16) * 3 // 2 * page,
        encoder_cache_bytes=largest,
        max_positions=longest,
        max_step_tokens=48,
        max_running=12,
        verify=True,
        **more,
    )


@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.thorough)])
async def test_requests_with_room_for_few_get_the_tokens_of_generate(reference: Reference, count: int) -> None:
    """Mixed lengths, images and whole requests that repeat, arrivals one after another, preemption and eviction. A
    thorough run asks three times as many."""
    asks = sorted(reference.asks(count) * 2, key=lambda ask: -ask.priority)
    async with triolet.Engine(reference.folder, config=scarce(reference, asks)) as engine:
        await ask_until_preempted(engine, asks, partial(reference.ask, engine), reference.generate, at_once=6)
        for _ in range(2 if reference.name in STATES else 0):  # beside others all states may be those of sequences
            longest = max(asks, key=lambda ask: len(ask.prompt))
            assert (await reference.ask(engine, longest)).token_ids == reference.generate(longest)
        statistics = await settled(engine)
    assert statistics.requests.states_free == statistics.requests.states
    assert statistics.requests.preemptions, "pages were never short"
    assert statistics.requests.tokens_cached, "no prefix was shared"
    assert statistics.requests.pages_free == statistics.requests.pages
    if reference.checkpoint is not None:
        assert statistics.encoder_cache.evicted, "the encoder cache was never short"
        assert statistics.encoder_cache.hits, "no encoding was shared"
        assert statistics.encoder_cache.held == 0


async def test_a_smaller_length_needs_fewer_pages_and_is_told(tmp_path: Path) -> None:
    reference = Reference.of("llama", tmp_path)
    config = triolet.EngineConfig(dtype="float32", max_positions=40, self_kv_bytes=4 * 6144, verify=True)
    async with triolet.Engine(reference.folder, config=config) as engine:
        assert engine.model.max_positions == 40
        assert engine.model.pages == 3
        completion = await engine.generate("a cat")
        prompt = completion.usage.prompt_tokens
        assert completion.finish_reason.value == "stop" or len(completion.token_ids) == 40 - prompt
        with pytest.raises(triolet.RequestTooLarge, match="40 positions"):
            await engine.generate("a cat", sampling=triolet.SamplingParams(max_tokens=40))
