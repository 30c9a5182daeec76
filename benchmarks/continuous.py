"""Requests per second of continuous batching, beside transformers' own on the same weights, in one run.

    python benchmarks/continuous.py [--size small] [--requests 32] [--running 16] [--tokens 32] [--repeat 5]

The same work for all: prompts of mixed lengths, as many greedy tokens each, end-of-text ignored, fp32 on the CPU, a
Llama with random weights (nothing is downloaded). `generate_batch` is transformers' continuous batching with its paged
attention; its manager is started, and warm, before the clock is. `generate` gets all prompts as one padded batch, which
is no continuous batching (nobody can join or leave) but shows what the modules alone cost. Triolet is its executor,
fed by a loop with the same limits. They take turns within each repeat, so that a change of the machine's speed hits all
of them; quoted is the median, and the ratio is the median of the ratios within a repeat. Tokens are compared, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import ContinuousBatchingConfig

from triolet.core.config import EngineConfig
from triolet.core.plan import SequenceStart, Slice, StepPlan
from triolet.core.request import LogitRules, SamplingParams
from triolet.models.executor import TorchExecutor

SIZES = {"tiny": (128, 2, 4), "small": (512, 8, 8), "base": (1024, 12, 16)}  # width, layers, heads
LENGTHS = (8, 24, 64, 150, 400)
POSITIONS, VOCABULARY, PAGE, BUDGET = 1024, 8000, 16, 512

Prompts = list[list[int]]
Runner = Callable[[Prompts, int], list[list[int]]]  # the tokens of every prompt


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


class Triolet:
    """The executor and a loop that admits, feeds in chunks within a token budget, and retires."""

    def __init__(self, folder: Path, running: int) -> None:
        self.executor = TorchExecutor(
            folder, EngineConfig(device="cpu", dtype="float32", page_size=PAGE, max_running=running)
        )
        self.pages = self.executor.open().pages
        self.running = running
        self.sequences = 0

    def __call__(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        free = list(range(self.pages))
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = list(range(len(prompts)))[::-1]
        active: dict[int, tuple[int, list[int], int]] = {}  # sequence: prompt, pages, fed
        ended: list[int] = []
        while waiting or active:
            started = []
            while waiting and len(active) < self.running:
                index = waiting.pop()
                self.sequences += 1
                active[self.sequences] = (index, [], 0)
                started.append(self._start(prompts[index]))
            slices = list(self._slices(active, prompts, answers, free))
            plan = StepPlan(
                step_id=0, epoch=0, started=tuple(started), ended=tuple(ended), cross_writes=(), slices=tuple(slices)
            )
            ended = []
            for part, drawn in zip(slices, self.executor.step(plan).drawn, strict=True):
                index, pages, fed = active[part.sequence_id]
                active[part.sequence_id] = (index, pages, fed + part.length)
                if drawn.token_id is not None:
                    answers[index].append(drawn.token_id)
                if len(answers[index]) == tokens:
                    del active[part.sequence_id]
                    ended.append(part.sequence_id)
                    free += pages
        return answers

    def _start(self, prompt: list[int]) -> SequenceStart:
        return SequenceStart(
            sequence_id=self.sequences,
            token_ids=tuple(prompt),
            prompt_length=len(prompt),
            sampling=SamplingParams(ignore_eos=True),
            rules=LogitRules(),
            probe=None,
        )

    @staticmethod
    def _slices(
        active: dict[int, tuple[int, list[int], int]], prompts: Prompts, answers: list[list[int]], free: list[int]
    ) -> Any:
        budget = BUDGET
        for sequence, (index, pages, fed) in active.items():
            known = len(prompts[index]) + len(answers[index])
            length = min(known - fed, budget)
            if not length:
                continue
            budget -= length
            while len(pages) * PAGE < fed + length:
                pages.append(free.pop())
            yield Slice(
                sequence_id=sequence,
                start=fed,
                length=length,
                block_table=tuple(pages),
                cross_slot=None,
                draw=fed + length == known,
            )


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
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    def load(**options: Any) -> Any:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()

    triolet = Triolet(folder, args.running)
    manager = batch_manager(load(attn_implementation="sdpa"), args.running)
    runners: dict[str, Runner] = {
        "triolet": triolet,
        "generate_batch": batch_runner(manager),
        "generate (padded)": padded_runner(load()),
    }
    try:
        take_turns(args, runners)
    finally:
        manager.stop(block=True)
        triolet.executor.close()


def take_turns(args: argparse.Namespace, runners: dict[str, Runner]) -> None:
    rates: dict[str, list[float]] = {name: [] for name in runners}
    same = 0
    for turn in range(args.repeat + 1):
        prompts = make_prompts(args.requests, seed=turn)
        answers = {}
        for name, run in runners.items():
            start = time.perf_counter()
            answers[name] = run(prompts, args.tokens)
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
