"""Time to first token behind a beginning that is there already: 2,000 tokens with an image in them.

    python benchmarks/prefix.py [--repeats 7] [--layers 6] [--tokens 2000]

A model of Qwen2.5-VL's architecture with random weights (hidden size 256, six layers) is made in a temporary folder.
Each repeat has a text and an image of its own; it is asked twice, with another question behind it, and the time from
the call of `Engine.stream` to the first token is taken. What the second call still has to do: read and hash the image
again, find the pages, feed the question. The claim: at most a fifth of the time of the first, as medians.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import trio
from attrs import frozen

from triolet import Engine, EngineConfig, SamplingParams
from triolet.testing.families import make_checkpoint

MOST = 0.2  # of the first time
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
HEIGHT, WIDTH = 476, 644  # of the image: 17 by 23 embeddings
PATCH = 14


@frozen(kw_only=True)
class Asked:
    """One call."""

    seconds: float  # to the first token
    prompt: int  # tokens
    fed: int  # of them
    encoded: int  # images


@contextmanager
def checkpoint(hidden: int, layers: int, positions: int) -> Iterator[Path]:
    """A folder with the model."""
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    with TemporaryDirectory() as name:
        folder = make_checkpoint("qwen2_5_vl", name)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text, vision = settings["text_config"], settings["vision_config"]
        text |= {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
        text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": positions}
        text |= {"layer_types": ["full_attention"] * layers, "max_window_layers": layers}
        half = hidden // 8 // 2  # of a head: the axes of a position share it
        text["rope_parameters"]["mrope_section"] = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
        vision |= {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "depth": 4, "patch_size": PATCH}
        vision |= {"out_hidden_size": hidden, "window_size": 8 * PATCH, "fullatt_block_indexes": [1, 3]}
        Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**settings)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        side = 2 * PATCH
        limits = {"shortest_edge": side * side, "longest_edge": 1280 * side * side}
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", patch_size=PATCH, size=limits)
        processor.save_pretrained(folder)
        yield folder


def beginning(tokenizer: Any, tokens: int, seed: int) -> tuple[str, Any]:
    """About ``tokens`` tokens of text around the place of an image, and the image: others for each seed."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    left = tokens - HEIGHT * WIDTH // (2 * PATCH) ** 2
    words: list[str] = []
    count = 0
    while count < left:
        word = f" {rng.integers(10**6)}"
        count += len(tokenizer(word)["input_ids"])
        words.append(word)
    return "".join([*words[: len(words) // 2], IMAGE, *words[len(words) // 2 :]]), image


async def ask(engine: Engine, prompt: str, image: Any) -> Asked:
    before = engine.statistics()
    begun = time.perf_counter()
    async with engine.stream(prompt, images=[image], sampling=SamplingParams(max_tokens=1)) as deltas:
        await anext(deltas)
        seconds = time.perf_counter() - begun
    while (now := engine.statistics()).requests.running or now.requests.steps_in_flight:  # noqa: ASYNC110
        await trio.sleep(0.001)
    fed = now.requests.tokens_fed - before.requests.tokens_fed
    cached = now.requests.tokens_cached - before.requests.tokens_cached
    encoded = now.encoder_cache.encoded - before.encoder_cache.encoded
    return Asked(seconds=seconds, prompt=fed + cached, fed=fed, encoded=encoded)


async def run(folder: Path, repeats: int, tokens: int, threads: int) -> bool:
    config = EngineConfig(device="cpu", threads=threads, max_running=4)
    pairs: list[tuple[Asked, Asked]] = []
    print("| repeat | prompt tokens | first: fed | encoded | ms | second: fed | encoded | ms | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    async with Engine(folder, config=config) as engine:
        for number in range(repeats + 1):
            prompt, image = beginning(engine.model.tokenizer, tokens, number)
            first = await ask(engine, prompt + " what is it?", image)
            second = await ask(engine, prompt + " and why so?", image)
            if number == 0:
                continue  # libraries are set up
            pairs.append((first, second))
            cells = [f"{one.fed} | {one.encoded} | {1e3 * one.seconds:.1f}" for one in (first, second)]
            print(f"| {number} | {first.prompt} | {' | '.join(cells)} | {second.seconds / first.seconds:.3f} |")
    times = [median(one.seconds for one in column) for column in zip(*pairs, strict=True)]
    ratio = times[1] / times[0]
    print(
        f"\n{'holds' if ratio <= MOST else 'FAILS'}: time to first token, medians of {repeats}: "
        f"{1e3 * times[0]:.1f} ms and then {1e3 * times[1]:.1f} ms, {ratio:.3f} of it; claimed: at most {MOST}"
    )
    return ratio <= MOST


@click.command()
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1), help="Each with a new beginning.")
@click.option("--tokens", default=2000, show_default=True, type=click.IntRange(500), help="Of the beginning.")
@click.option("--hidden", default=256, show_default=True, help="Hidden size.")
@click.option("--layers", default=6, show_default=True, help="Layers of the language model.")
@click.option("--threads", default=1, show_default=True, help="CPU threads of torch.")
def main(repeats: int, tokens: int, hidden: int, layers: int, threads: int) -> None:
    """Print the time to first token of the first and second question about a beginning, and their ratio."""
    with checkpoint(hidden, layers, 2 * tokens) as folder:
        holds = trio.run(run, folder, repeats, tokens, threads)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
