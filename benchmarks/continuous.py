"""Requests per second of continuous batching, beside transformers' own on the same weights, in one run.

    python benchmarks/continuous.py [--size small] [--requests 32] [--running 16] [--tokens 32] [--repeat 5]

The same work for all: prompts of mixed lengths, as many greedy tokens each, end-of-text ignored, fp32 on the CPU, a
Llama with random weights (nothing is downloaded). `generate_batch` is transformers' continuous batching with its paged
attention; its manager is started, and warm, before the clock is. `generate` gets all prompts as one padded batch, which
is no continuous batching (nobody can join or leave) but shows what the modules alone cost. Triolet is the whole engine,
asked by one task for each request, with the same limits; prefix caching is off. They take turns within each repeat, so
that a change of the machine's speed hits all of them; quoted is the median, and the ratio is the median of the ratios
within a repeat. Tokens are compared, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import trio
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import ContinuousBatchingConfig

from triolet import Engine, EngineConfig, SamplingParams

SIZES = {"tiny": (128, 2, 4), "small": (512, 8, 8), "base": (1024, 12, 16)}  # width, layers, heads
LENGTHS = (8, 24, 64, 150, 400)
POSITIONS, VOCABULARY, PAGE, BUDGET = 1024, 8000, 16, 512

Prompts = list[list[int]]
Runner = Callable[[Prompts, int], list[list[int]]]  # the tokens of every prompt
AsyncRunner = Callable[[Prompts, int], Awaitable[list[list[int]]]]


def make_checkpoint(folder: Path, size: str) -> None:
    from tokenizers import Tokenizer, models

    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=POSITIONS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))).save_pretrained(folder)


def make_prompts(count: int, seed: int) -> Prompts:
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY) for _ in range(LENGTHS[index % len(LENGTHS)])] for index in range(count)]


def engine_runner(engine: Engine) -> AsyncRunner:
    """Triolet, as its users ask it."""

    async def run(prompts: Prompts, tokens: int) -> list[list[int]]:
        answers: dict[int, list[int]] = {}
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

        async def ask(index: int) -> None:
            completion = await engine.generate(prompt_token_ids=prompts[index], sampling=sampling)
            answers[index] = list(completion.token_ids)

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(ask, index)
        return [answers[index] for index in range(len(prompts))]

    return run


def blocking(run: Runner) -> AsyncRunner:
    """The others have loops of their own, or none; ours has nothing to do meanwhile."""

    async def ask(prompts: Prompts, tokens: int) -> list[list[int]]:
        return run(prompts, tokens)

    return ask


def batch_manager(model: Any, running: int) -> Any:
    """transformers' continuous batching, started: a thread that lives until it is stopped."""
    config = GenerationConfig(max_new_tokens=64, eos_token_id=-1, pad_token_id=0, do_sample=False)
    batching = ContinuousBatchingConfig(max_batch_tokens=BUDGET, num_blocks=POSITIONS * running // 256)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()
    return manager


def batch_runner(manager: Any) -> Runner:
    def run(prompts: Prompts, tokens: int) -> list[list[int]]:
        names = [manager.add_request(prompt, max_new_tokens=tokens) for prompt in prompts]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise SystemExit("generate_batch has stopped; see its log")
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        return [found[name] for name in names]

    return run


def padded_runner(model: Any) -> Runner:
    """One padded batch."""

    def run(prompts: Prompts, tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        filled = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = model.generate(
                filled, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return [row[longest:] for row in output.tolist()]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.size)
        trio.run(measure, args, Path(folder))


async def measure(args: argparse.Namespace, folder: Path) -> None:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        page_size=PAGE,
        max_running=args.running,
        max_step_tokens=BUDGET,
        prefix_caching=False,
    )

    def load(**options: Any) -> Any:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()

    manager = batch_manager(load(attn_implementation="sdpa"), args.running)
    try:
        async with Engine(folder, config=config) as engine:
            runners = {
                "triolet": engine_runner(engine),
                "generate_batch": blocking(batch_runner(manager)),
                "generate (padded)": blocking(padded_runner(load())),
            }
            await compare(args, runners)
    finally:
        manager.stop(block=True)


async def compare(args: argparse.Namespace, runners: dict[str, AsyncRunner]) -> None:
    rates: dict[str, list[float]] = {name: [] for name in runners}
    same = 0
    for turn in range(args.repeat + 1):
        prompts = make_prompts(args.requests, seed=turn)
        answers = {}
        for name, run in runners.items():
            start = time.perf_counter()
            answers[name] = await run(prompts, args.tokens)
            if turn:  # the first warms up
                rates[name].append(args.requests / (time.perf_counter() - start))
        same += sum(ours == theirs for ours, theirs in zip(*list(answers.values())[::2], strict=True))
    print(
        f"Llama {args.size}, random weights, fp32, {args.threads} threads, {args.requests} requests, {args.running} at"
    )
    print(f"once, prompts of {min(LENGTHS)} to {max(LENGTHS)} tokens, {args.tokens} tokens each")
    print(f"{same} of {args.requests * (args.repeat + 1)} answers are those of `generate`, token for token")
    print("| | requests/s | triolet / it, paired |")
    print("|---|---|---|")
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates["triolet"], values, strict=True))
        print(f"| {name} | {statistics.median(values):.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
