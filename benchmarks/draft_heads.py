"""Times texts with a draft head beside texts without, for the shape of Qwen3.5-0.8B with random weights. The head
computes its proposals, which then are right with a given chance: a head with random weights never is.

    python benchmarks/draft_heads.py --chance 0.8 --int8
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import trio
from safetensors.torch import save_file
from shapes import SHAPES
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import triolet
from triolet.models.networks.network import Feed
from triolet.models.speculation import HeadProposer

PROMPT = tuple(range(5, 69))


def write(folder: Path, shape: str) -> None:
    """Writes the checkpoint with random weights in bfloat16."""
    config = SHAPES[shape]()
    torch.manual_seed(0)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: torch.randn(each.shape, dtype=torch.bfloat16) * 0.02 for name, each in made.state_dict().items()}
    layer = f"model.layers.{config.layer_types.index('full_attention')}."
    head = {f"mtp.layers.0.{name.removeprefix(layer)}": each.clone() for name, each in weights.items() if layer in name}
    width = config.hidden_size
    names = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    head |= {f"{name}.weight": torch.zeros(width, dtype=torch.bfloat16) for name in names}
    head["mtp.fc.weight"] = torch.randn(width, 2 * width, dtype=torch.bfloat16) * 0.02
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file({**weights, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(made).__name__]
    config.save_pretrained(folder)
    words = {f"<{index}>": index for index in range(config.vocab_size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<0>", eos_token="<1>", pad_token="<1>").save_pretrained(
        folder
    )


def make_right(chance: float, text: Sequence[int]) -> None:
    """Has each proposal be right with ``chance``, for the prompt whose ``text`` is known."""
    plain, dice = HeadProposer.propose, random.Random(0)

    def propose(proposer: HeadProposer, feeds: Sequence[Feed]) -> list[tuple[int, ...]]:
        found = list[tuple[int, ...]]()
        for feed, own in zip(feeds, plain(proposer, feeds), strict=True):
            begin = len(feed.record.tokens) - len(PROMPT)
            right = text[begin : begin + len(own)]
            found.append(tuple(token if dice.random() < chance else (token + 1) % 1000 for token in right))
        return found

    HeadProposer.propose = propose  # type: ignore[method-assign]


async def seconds(engine: triolet.Engine, tokens: int) -> tuple[float, tuple[int, ...]]:
    """Returns the seconds of one text, and its tokens."""
    sampling = triolet.SamplingParams(max_tokens=tokens, ignore_eos=True)
    begun = time.perf_counter()
    found = await engine.generate(prompt_token_ids=PROMPT, sampling=sampling)
    return time.perf_counter() - begun, tuple(found.token_ids)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3.5-0.8b", choices=[name for name in SHAPES if "lfm" not in name])
    parser.add_argument("--chance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--int8", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, asked.shape)
        common = {
            "device": "cpu",
            "quantization": "int8" if asked.int8 else None,
            "dtype": "float32",
            "max_positions": 2048,
        }
        drafts = triolet.Speculation(tokens=asked.drafts)
        async with (
            triolet.Engine(folder, config=triolet.EngineConfig(**common, speculation=None)) as without,
            triolet.Engine(folder, config=triolet.EngineConfig(**common, speculation=drafts)) as with_drafts,
        ):
            _, text = await seconds(without, asked.tokens)
            make_right(asked.chance, text)
            times: list[tuple[float, float]] = []
            for _ in range(asked.rounds):
                plain, _ = await seconds(without, asked.tokens)
                drafted, found = await seconds(with_drafts, asked.tokens)
                assert found == text, "draft tokens have changed the text"
                times.append((plain, drafted))
            requests = with_drafts.statistics().requests
        print(
            f"{asked.shape}, {asked.tokens} tokens: without {median(one for one, _ in times):.2f} s, with drafts "
            f"{median(one for _, one in times):.2f} s, {median(a / b for a, b in times):.2f} times as fast; "
            f"{requests.tokens_accepted} of {requests.tokens_drafted} draft tokens were right"
        )


if __name__ == "__main__":
    trio.run(main)
