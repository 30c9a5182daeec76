"""A request that the native library computes has the same bits alone and among others, however the engine cuts it into
chunks and pages, with and without draft tokens, preempted or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import triolet
from triolet import EngineConfig, SamplingParams, Speculation, demo
from triolet.models.native.library import Library

from ..checkpoints.families import make_checkpoint

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

PROMPTS = [
    "the cat saw",
    "a dog and a cat that the dog saw " * 4,
    "one two one two one two",
    "mice " * 30,
    "x",
    "on mats",
]
SAMPLING = [
    SamplingParams(max_tokens=24, min_tokens=24, logprobs=2),
    SamplingParams(max_tokens=24, min_tokens=24, temperature=0.9, top_p=0.9, seed=7, logprobs=2),
    SamplingParams(max_tokens=24, ignore_eos=True),  # chosen where the logits are
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.9, seed=7),
]
BEAMS = SamplingParams(max_tokens=16, beam_size=3)
Bits = tuple[tuple[int, ...], tuple[float, ...], float | None]


async def answers(folder: Path, together: bool, **changes: object) -> list[Bits]:
    found: dict[int, Bits] = {}
    asks = [(prompt, sampling) for prompt in PROMPTS for sampling in (*SAMPLING, BEAMS)]

    async def ask(engine: triolet.Engine, number: int) -> None:
        prompt, sampling = asks[number]
        completion = await engine.generate(prompt, sampling=sampling, priority=-number)
        found[number] = completion.token_ids, tuple(completion.logprobs), completion.score

    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "verify": True, **changes})
    async with triolet.Engine(folder, config=config) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(len(asks)):
                if together:
                    nursery.start_soon(ask, engine, number)
                else:
                    await ask(engine, number)
    return [found[number] for number in range(len(asks))]


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        pytest.param("llama", {"quantization": "int8"}, marks=pytest.mark.thorough),
        pytest.param("gemma3", {}, marks=pytest.mark.thorough),
        ("gemma3", {"quantization": "int8", "kv_dtype": "float16"}),
        ("gemma4", {"kv_dtype": "float16"}),
        pytest.param("gpt_oss", {}, marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", {"quantization": "int8"}, marks=pytest.mark.thorough),
        ("bart", {"dtype": "bfloat16"}),
        pytest.param("bart", {"kv_dtype": "bfloat16"}, marks=pytest.mark.thorough),
        ("t5", {}),
        ("lfm2", {}),
        ("qwen3_next", {"quantization": "int8"}),
        pytest.param("qwen3_next", {}, marks=pytest.mark.thorough),
        pytest.param("mamba2", {}, marks=pytest.mark.thorough),
    ],
)
async def test_a_text_has_the_same_bits_in_every_engine(family: str, how: dict[str, str], tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    alone = await answers(folder, together=False, speculation=None, prefix_caching=False, **how)
    for changes in (
        {"max_step_tokens": 5, "page_size": 4, "speculation": None},
        {"max_running": 3, "page_size": 8, "threads": 3, "speculation": Speculation(tokens=3)},
        {
            "max_positions": 256,
            "self_kv_bytes": 1 << 20,
            "max_step_tokens": 64,
            "speculation": None,
        },  # pages are scarce
    ):
        assert await answers(folder, together=True, **how, **changes) == alone


@pytest.mark.parametrize("beam_size", [1, 3])
async def test_speech_has_the_same_bits_beside_other_speech(beam_size: int) -> None:
    clips = [sample.path for sample in demo.samples()[:3]]
    found: dict[tuple[bool, int], list[object]] = {}

    async def transcribe(engine: triolet.Engine, number: int, together: bool) -> None:
        told = await engine.transcribe(clips[number], beam_size=beam_size)
        found[together, number] = [(one.text, one.avg_logprob, one.no_speech_prob) for one in told.segments]

    for together in (False, True):
        async with triolet.Engine(demo.checkpoint(), config=EngineConfig(device="cpu", dtype="float32")) as engine:
            async with trio.open_nursery() as nursery:
                for number in range(len(clips)):
                    if together:
                        nursery.start_soon(transcribe, engine, number, together)
                    else:
                        await transcribe(engine, number, together)
    for number in range(len(clips)):
        assert found[False, number] == found[True, number]
        assert found[True, number], "no text"
