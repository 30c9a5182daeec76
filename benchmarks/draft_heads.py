"""Times texts with a draft head beside texts without, for the shapes of Qwen3.5-0.8B and of Gemma 4 E2B with its
assistant, with random weights. The head computes its proposals, which then are right with a given chance: a head with
random weights never is.

    python benchmarks/draft_heads.py --chance 0.8 --int8
    python benchmarks/draft_heads.py --shape gemma-4-e2b --int8
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trio
from safetensors.torch import save_file
from shapes import SHAPES
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4TextConfig, PreTrainedTokenizerFast

import triolet
from triolet.models.networks.network import Feed
from triolet.models.speculation import HeadProposer

PROMPT = tuple(range(5, 69))
BY_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_NEAR = ["sliding_attention"] * 4 + ["full_attention"]
ASSISTED: dict[str, tuple[Callable[[], Any], dict[str, int], dict[str, int]]] = {
    "gemma-4-e2b": (
        lambda: Gemma4TextConfig(
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=35,
            num_attention_heads=8,
            num_key_value_heads=1,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            final_logit_softcapping=30.0,
            layer_types=_NEAR * 7,
        ),
        {"hidden_size": 256, "intermediate_size": 2048},
        {"num_centroids": 2048, "centroid_intermediate_top_k": 32},
    ),
    "tiny-gemma": (
        lambda: Gemma4TextConfig(
            vocab_size=256,
            vocab_size_per_layer_input=256,
            hidden_size=64,
            hidden_size_per_layer_input=16,
            intermediate_size=128,
            num_hidden_layers=10,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_kv_shared_layers=5,
            head_dim=16,
            global_head_dim=32,
            sliding_window=32,
            layer_types=_NEAR * 2,
        ),
        {"hidden_size": 32, "intermediate_size": 64},
        {"num_centroids": 8, "centroid_intermediate_top_k": 2},
    ),
}
"""Models with assistants: the sizes of the model, those of the assistant, and its centroids."""


def write(folder: Path, shape: str) -> Path | None:
    """Writes the checkpoint with random weights in bfloat16. Returns the folder of its assistant, if the shape has
    one."""
    config = ASSISTED[shape][0]() if shape in ASSISTED else SHAPES[shape]()
    torch.manual_seed(0)
    made, weights = drawn(config)
    if shape not in ASSISTED:
        weights |= head_of(config, weights)
    save(folder, config, weights, type(made).__name__)
    words = {f"<{index}>": index for index in range(config.vocab_size)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<0>", eos_token="<1>", pad_token="<1>").save_pretrained(
        folder
    )
    return write_assistant(folder / "assistant", config, *ASSISTED[shape][1:]) if shape in ASSISTED else None


def drawn(config: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a model without weights, and random weights for it."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: torch.randn(each.shape, dtype=torch.bfloat16) * 0.02 for name, each in made.state_dict().items()}
    weights |= {name: torch.ones_like(each) for name, each in weights.items() if name.endswith("layer_scalar")}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return made, weights


def head_of(config: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights of a draft head, as Qwen3.5 stores them."""
    layer = f"model.layers.{config.layer_types.index('full_attention')}."
    head = {f"mtp.layers.0.{name.removeprefix(layer)}": each.clone() for name, each in weights.items() if layer in name}
    width = config.hidden_size
    names = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    head |= {f"{name}.weight": torch.zeros(width, dtype=torch.bfloat16) for name in names}
    return head | {"mtp.fc.weight": torch.randn(width, 2 * width, dtype=torch.bfloat16) * 0.02}


def write_assistant(folder: Path, model: Any, sizes: Mapping[str, int], centroids: Mapping[str, int]) -> Path:
    """Writes an assistant of four layers with random weights."""
    layers = ["sliding_attention"] * 3 + ["full_attention"]
    near, far = (model.per_layer_config[model.layer_types.index(kind)] for kind in (layers[0], layers[-1]))
    told = {"layer_types": layers, "num_hidden_layers": 4, "num_kv_shared_layers": 0, **BY_LAYER, **sizes}
    told |= {name: getattr(near, name) for name in ("head_dim", "num_key_value_heads")}
    told |= {name: getattr(model, name) for name in ("num_attention_heads", "vocab_size", "sliding_window")}
    text = Gemma4TextConfig(**told, global_head_dim=far.head_dim)
    width, size = model.hidden_size, text.hidden_size
    _, weights = drawn(text)
    shapes = {"pre_projection": (size, 2 * width), "post_projection": (width, size)}
    shapes["masked_embedding.centroids"] = (centroids["num_centroids"], size)
    weights |= {f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in shapes.items()}
    weights["masked_embedding.token_ordering"] = torch.randperm(text.vocab_size)
    text.num_kv_shared_layers = 4
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=width, use_ordered_embeddings=True, **centroids
    )
    folder.mkdir()
    save(folder, config, weights, "Gemma4AssistantForCausalLM")
    return folder


def save(folder: Path, config: Any, weights: dict[str, torch.Tensor], architecture: str) -> None:
    """Saves weights and configuration."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [architecture]
    config.save_pretrained(folder)


@contextmanager
def made_right(chance: float, text: Sequence[int]) -> Iterator[None]:
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
    try:
        yield
    finally:
        HeadProposer.propose = plain  # type: ignore[method-assign]


async def seconds(engine: triolet.Engine, tokens: int) -> tuple[float, tuple[int, ...]]:
    """Returns the seconds of one text, and its tokens."""
    sampling = triolet.SamplingParams(max_tokens=tokens, ignore_eos=True)
    begun = time.perf_counter()
    found = await engine.generate(prompt_token_ids=PROMPT, sampling=sampling)
    return time.perf_counter() - begun, tuple(found.token_ids)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="qwen3.5-0.8b", choices=sorted({*SHAPES, *ASSISTED} - {"lfm2-350m"}))
    parser.add_argument("--chance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--int8", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        head = write(folder, asked.shape)
        common = {
            "device": "cpu",
            "quantization": "int8" if asked.int8 else None,
            "dtype": "float32",
            "max_positions": 2048,
        }
        drafts = triolet.Speculation(tokens=asked.drafts)
        async with (
            triolet.Engine(folder, config=triolet.EngineConfig(**common, speculation=None)) as without,
            triolet.Engine(
                folder, config=triolet.EngineConfig(**common, speculation=drafts, draft_head=head)
            ) as with_drafts,
        ):
            _, text = await seconds(without, asked.tokens)
            times: list[tuple[float, float]] = []
            with made_right(asked.chance, text):
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
