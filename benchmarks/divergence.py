"""The price of int8 and bfloat16 to a decoder: perplexity, and how far its distributions are from those in float32.

    python benchmarks/divergence.py MODEL [--tokens 2000]

The native library reads the beginning of this project's docs/verification.md each time. MODEL may be "tiny": a random
one, which shows that this runs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from claims import Claims
from tiny import make_checkpoint
from torch import Tensor

from triolet import EngineConfig
from triolet.models.blueprints.read import read_blueprint
from triolet.models.memory.rows import Rows
from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner


def distributions(model: str, text: str, tokens: int, **changes: str) -> tuple[list[int], Tensor]:
    """Returns the first ``tokens`` of ``text``, and the log-probabilities [tokens, vocabulary] after each of them."""
    blueprint = read_blueprint(model, EngineConfig(**{"device": "cpu", "dtype": "float32", **changes}))
    ids = blueprint.checkpoint.tokenizer(text, add_special_tokens=False).input_ids[:tokens]
    module, shape = blueprint.load(blueprint.files()).module, blueprint.checkpoint.shape
    program = CausalDecoder(module, module, shape.windows).program(len(ids))
    pages = [torch.zeros(1, len(ids), layer.numbers, dtype=blueprint.kv_dtype) for layer in shape.kv]
    options = {"rows": 256, "positions": len(ids), "threads": torch.get_num_threads()}
    runner = Runner.open(Library.load(), program, pages, **options)
    rows = Rows(positions=range(len(ids)), chunks=[(len(ids), 0, 0, 0)], tables=[0], wanted=range(len(ids)))
    logits = runner.step(ids, rows)
    return ids, logits.double().log_softmax(-1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2000)
    asked = parser.parse_args()
    text = (Path(__file__).parents[1] / "docs" / "verification.md").read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        model = str(make_checkpoint("llama", folder)) if asked.model == "tiny" else asked.model
        ids, exact = distributions(model, text, asked.tokens)
        others = {
            "int8": distributions(model, text, asked.tokens, quantization="int8")[1],
            "bfloat16": distributions(model, text, asked.tokens, dtype="bfloat16")[1],
        }
    following, claim = torch.tensor(ids[1:])[:, None], Claims()
    before = math.exp(-float(exact[:-1].gather(1, following).mean()))
    for name, rounded in others.items():
        after = math.exp(-float(rounded[:-1].gather(1, following).mean()))
        apart = float((exact.exp() * (exact - rounded)).sum(-1).mean())
        same = float((exact.argmax(-1) == rounded.argmax(-1)).double().mean())
        print(f"{len(ids)} tokens in {name}: the likeliest token is that of float32 for {same:.3f} of them")
        claim(after <= 1.01 * before, f"perplexity {before:.2f} in float32, {after:.2f}; claimed: at most 1 % more")
        claim(apart <= 0.005, f"Kullback-Leibler divergence {apart:.4f}; claimed: at most 0.005")
    claim.exit()


if __name__ == "__main__":
    main()
