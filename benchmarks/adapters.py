"""Times a batch whose rows have an adapter each beside the same rows without adapters, for a model with random weights
in the shapes of Llama.

    python benchmarks/adapters.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers
import trio
from claims import Claims
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

import triolet

MOST = 1.25
"""The time with adapters over that without."""
ROWS = 8


def write(folder: Path, hidden: int, layers: int) -> dict[str, tuple[int, int]]:
    """Writes the checkpoint; returns the outputs and inputs of the linear layers of its layers."""
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=2048,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{index}>": index for index in range(2048)}, unk_token="<0>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<0>").save_pretrained(folder)
    linears = {name: each for name, each in made.model.named_modules() if isinstance(each, torch.nn.Linear)}
    return {f"model.{name}": (each.out_features, each.in_features) for name, each in linears.items()}


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int) -> Path:
    """Writes an adapter of all these layers."""
    folder.mkdir()
    weights = {}
    for name, (outputs, inputs) in shapes.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs) / inputs**0.5
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


async def seconds(engine: triolet.Engine, names: list[str | None], tokens: int) -> float:
    """Returns the seconds of one batch, of a request for each name of an adapter."""
    begun = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for index, name in enumerate(names):
            prompt = range(5 + 16 * index, 21 + 16 * index)
            asked = {"prompt_token_ids": prompt, "adapter": name, "max_tokens": tokens, "ignore_eos": True}
            nursery.start_soon(partial(engine.generate, **asked))
    return time.perf_counter() - begun


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    asked, claims = parser.parse_args(), Claims()
    with tempfile.TemporaryDirectory() as made:
        folder, ratios = Path(made), list[float]()
        shapes = write(folder / "model", asked.hidden, asked.layers)
        config = triolet.EngineConfig(device="cpu", adapters=ROWS, adapter_rank=asked.rank, prefix_caching=False)
        async with triolet.Engine(folder / "model", config=config) as engine:
            names = [str(index) for index in range(ROWS)]
            for name in names:
                await engine.load_adapter(name, write_adapter(folder / name, shapes, asked.rank))
            for number in range(asked.rounds + 1):
                plain = await seconds(engine, [None] * ROWS, asked.tokens)
                adapted = await seconds(engine, list(names), asked.tokens)
                if number:  # the first round fills the slots
                    ratios.append(adapted / plain)
    found = median(ratios)
    claims(found <= MOST, f"{ROWS} adapters in a batch of {ROWS} rows: {found:.2f} times as long as without")
    claims.exit()


if __name__ == "__main__":
    trio.run(main)
