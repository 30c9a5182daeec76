"""Times a step of one row, a step of eight rows and a prompt, for the shapes of real models with random weights: the
native library beside transformers, in one process and on the same threads. No weights are read.

    python benchmarks/shapes.py lfm2-350m --int8
    python benchmarks/shapes.py qwen3.5-0.8b --threads 2
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Lfm2Config, Qwen3_5TextConfig

from triolet.models.memory.rows import Rows
from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner

PAGE, BEFORE = 16, 64  # positions of a page; those that each sequence has read before a step
_LFM2_LAYERS = ["full_attention" if index in {2, 5, 8, 10, 12, 14} else "conv" for index in range(16)]
SHAPES: dict[str, Callable[[], Any]] = {
    "lfm2-350m": lambda: Lfm2Config(
        hidden_size=1024,
        intermediate_size=6656,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_hidden_layers=16,
        layer_types=_LFM2_LAYERS,
    ),
    "qwen3.5-0.8b": lambda: Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_hidden_layers=24,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    "tiny": lambda: Qwen3_5TextConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
}


def seconds_of(call: Callable[[], object], rounds: int) -> float:
    """Returns the median time of a call, after one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[1:])


class Theirs:
    """transformers, with its own cache."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def step(self, rows: int) -> Callable[[], object]:
        """Returns a call that computes one token of each of ``rows`` sequences."""
        cache = DynamicCache(config=self.module.config)
        self.module(torch.full((rows, BEFORE), 5), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return lambda: self.module(torch.full((rows, 1), 7), past_key_values=cache, use_cache=True).logits

    def prompt(self, length: int) -> Callable[[], object]:
        """Returns a call that reads a prompt."""
        tokens = torch.full((1, length), 5)
        return lambda: self.module(tokens, use_cache=True, logits_to_keep=1).logits


class Ours:
    """The native library, with pages and states."""

    def __init__(self, module: Any, length: int, threads: int, *, int8: bool) -> None:
        decoder = CausalDecoder(module, module, [None] * module.config.num_hidden_layers)
        assert (reason := decoder.unknown()) is None, reason
        decoder.pack(int8=int8)
        config = module.config
        width = (
            2
            * config.num_key_value_heads
            * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        )
        self.blocks = -(-max(length, 4 * BEFORE) // PAGE)
        pages = [torch.zeros(8 * self.blocks, PAGE, 0 if one.attention is None else width) for one in decoder.layers]
        self.program, library = decoder.program(self.blocks * PAGE), Library.load()
        assert library is not None, "installed without a compiler"
        options: dict[str, int] = {"rows": 256, "positions": self.blocks * PAGE, "threads": threads}
        self.runner = Runner.open(library, self.program, pages, **options)

    def _fed(self, lengths: list[int], start: int, states: list[torch.Tensor]) -> torch.Tensor:
        tables = list(range(len(lengths) * self.blocks))
        chunks = [(length, index * self.blocks, 0, self.program.kept) for index, length in enumerate(lengths)]
        positions = [position for length in lengths for position in range(start, start + length)]
        ends = [sum(lengths[: index + 1]) - 1 for index in range(len(lengths))]
        rows = Rows(positions=positions, chunks=chunks, tables=tables, wanted=ends, states=states)
        return self.runner.step([5] * len(positions), rows)

    def step(self, rows: int) -> Callable[[], object]:
        """Returns a call that computes one token of each of ``rows`` sequences."""
        states = [torch.zeros(self.program.state) for _ in range(rows)]
        self._fed([BEFORE] * rows, 0, states)
        return lambda: self._fed([1] * rows, BEFORE, states)

    def prompt(self, length: int) -> Callable[[], object]:
        """Returns a call that reads a prompt."""
        return lambda: self._fed([length], 0, [torch.zeros(self.program.state)])


def main() -> None:
    """Prints a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--int8", action="store_true", help="quantize the library's matrices")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ours", action="store_true", help="leave transformers out")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        module = AutoModelForCausalLM.from_config(SHAPES[given.shape]()).eval()
        theirs = None if given.ours else Theirs(module)
        ours = Ours(copy.deepcopy(module), given.prompt, given.threads, int8=given.int8)
        loads = {"1 row": ("step", 1), "8 rows": ("step", 8), f"prompt of {given.prompt}": ("prompt", given.prompt)}
        for name, (kind, size) in loads.items():
            own = seconds_of(getattr(ours, kind)(size), given.rounds)
            line = f"{given.shape}, {name}: the library {1e3 * own:.2f} ms"
            if theirs is not None:
                other = seconds_of(getattr(theirs, kind)(size), given.rounds)
                line += f", transformers {1e3 * other:.2f} ms, {other / own:.2f} times as fast"
            print(line, flush=True)
        ours.runner.release()


if __name__ == "__main__":
    main()
