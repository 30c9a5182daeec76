"""Requests per second of a burst of clips, beside transformers and CTranslate2 on the same weights, in one run.

    python benchmarks/offline.py [--size tiny] [--requests 1 8 16] [--repeat 3] [--threads 2]

Every engine starts from samples, so feature extraction counts, and does the same work: noise of 30 s a request, 64
greedy tokens each, end-of-text suppressed, fp32, a random-weight checkpoint of Whisper's size (nothing is downloaded).
transformers and CTranslate2 get the requests as one batch, which is their best case; Triolet gets them as independent
requests. The engines take turns within each repeat, so that a change of the machine's speed hits all of them; quoted is
the median, and the ratio is the median of the ratios within a repeat.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio

import triolet
from triolet.testing.checkpoints import SIZES, random_whisper

TOKENS, RATE = 64, 16_000
PROMPT = (50258, 50259, 50359, 50363)  # <|startoftranscript|><|en|><|transcribe|><|notimestamps|>
END_OF_TEXT = 50257

Clips = list[Any]
Runner = Callable[[Clips], Awaitable[int]]  # answers every clip; how many tokens it wrote


def make_clips(count: int, seed: int) -> Clips:
    rng = np.random.default_rng(seed)
    return [(0.1 * rng.standard_normal(30 * RATE)).astype(np.float32) for _ in range(count)]


def transformers_runner(checkpoint: Path, threads: int) -> Runner:
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.generation import GenerationMixin

    torch.set_num_threads(threads)
    model: Any = WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    extract = WhisperFeatureExtractor.from_pretrained(checkpoint)

    def generate(clips: Clips) -> int:
        features = extract(clips, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.inference_mode():
            output = GenerationMixin.generate(
                model,
                features,
                decoder_input_ids=torch.tensor([PROMPT] * len(clips)),
                do_sample=False,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                max_length=None,
            )
        return (output.shape[1] - len(PROMPT)) * len(clips)

    return lambda clips: trio.to_thread.run_sync(generate, clips)


def ctranslate2_runner(checkpoint: Path, threads: int) -> Runner:
    import ctranslate2
    from transformers import WhisperFeatureExtractor

    converted = checkpoint / "ctranslate2"
    if not converted.exists():
        command = ["ct2-transformers-converter", "--model", str(checkpoint), "--output_dir", str(converted)]
        subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]], check=True, capture_output=True)
    model = ctranslate2.models.Whisper(str(converted), device="cpu", compute_type="float32", intra_threads=threads)
    extract = WhisperFeatureExtractor.from_pretrained(checkpoint)

    def generate(clips: Clips) -> int:
        features = extract(clips, sampling_rate=RATE, return_tensors="np").input_features
        encoded = model.encode(ctranslate2.StorageView.from_array(np.ascontiguousarray(features)))
        results = model.generate(
            encoded,
            [list(PROMPT)] * len(clips),
            beam_size=1,
            max_length=2 * TOKENS,
            suppress_blank=False,
            suppress_tokens=[END_OF_TEXT],
        )
        return sum(len(result.sequences_ids[0]) for result in results)

    return lambda clips: trio.to_thread.run_sync(generate, clips)


def triolet_runner(engine: triolet.Engine) -> Runner:
    sampling = triolet.SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS)

    async def generate(clips: Clips) -> int:
        written = 0

        async def ask(clip: Any) -> None:
            nonlocal written
            completion = await engine.generate(prompt_token_ids=PROMPT, audio=clip, sampling=sampling)
            written += completion.usage.completion_tokens

        async with trio.open_nursery() as nursery:
            for clip in clips:
                nursery.start_soon(ask, clip)
        return written

    return generate


async def measure(runners: dict[str, Runner], requests: int, repeat: int) -> dict[str, list[float]]:
    """Requests per second of each runner in each repeat, after one round that does not count."""
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(repeat + 1):
        clips = make_clips(requests, seed=turn)
        for name, run in runners.items():
            start = time.perf_counter()
            tokens = await run(clips)
            seconds = time.perf_counter() - start
            if tokens < requests * (TOKENS - 4):
                raise SystemExit(f"{name} wrote {tokens} tokens for {requests} requests, not {requests * TOKENS}")
            if turn:
                rates[name].append(requests / seconds)
    return rates


async def main_async(args: argparse.Namespace, checkpoint: Path) -> None:
    config = triolet.EngineConfig(device="cpu", dtype="float32", threads=args.threads)
    async with triolet.Engine(checkpoint, config=config) as engine:
        runners = {
            "triolet": triolet_runner(engine),
            "transformers": transformers_runner(checkpoint, args.threads),
            "ctranslate2": ctranslate2_runner(checkpoint, args.threads),
        }
        print(f"Whisper {args.size}, random weights, fp32, {args.threads} threads, {TOKENS} tokens a request")
        print("| requests at once | " + " | ".join(f"{name} req/s" for name in runners) + " | triolet / each, paired |")
        print("|---|" + "---|" * (len(runners) + 1))
        for requests in args.requests:
            rates = await measure(runners, requests, args.repeat)
            cells = [f"{statistics.median(values):.2f}" for values in rates.values()]
            ratios = [
                f"{statistics.median(a / b for a, b in zip(rates['triolet'], values, strict=True)):.2f}"
                for values in rates.values()
            ]
            print(f"| {requests} | {' | '.join(cells)} | {' '.join(ratios[1:])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_whisper(folder, args.size)
        trio.run(main_async, args, checkpoint)


if __name__ == "__main__":
    main()
