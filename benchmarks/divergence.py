"""The price of int8 to a decoder: perplexity, and how far its distributions are from those in float32.

    python benchmarks/divergence.py MODEL [TEXT_FILE] [--tokens 2000]

Both are read by the native library, whole. MODEL may be "tiny": a random one, which shows that this runs. Without a
text it is this project's ARCHITECTURE.md. The claims: a perplexity of at most 1.01 times that in float32, and a
Kullback-Leibler divergence of at most 0.005.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch
from torch import Tensor

from triolet import EngineConfig
from triolet.models.blueprints.read import read_blueprint
from triolet.models.blueprints.text import TextBlueprint
from triolet.models.memory.rows import Rows
from triolet.models.native.decoders import Decoder
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner
from triolet.testing.families import make_checkpoint

PERPLEXITY, DIVERGENCE = 1.01, 0.005
TEXT = Path(__file__).parents[1] / "ARCHITECTURE.md"


def distributions(model: str, text: str, tokens: int, quantization: str | None) -> tuple[list[int], Tensor]:
    """The first ``tokens`` of ``text``, and the log-probabilities [tokens, vocabulary] behind each."""
    config = EngineConfig(device="cpu", dtype="float32", quantization=quantization)
    blueprint = read_blueprint(model, config)
    if not isinstance(blueprint, TextBlueprint):
        raise click.UsageError(f"{model} is no decoder of text")
    ids = blueprint.checkpoint.tokenizer(text, add_special_tokens=False).input_ids[:tokens]
    loaded, shape, library = blueprint.load(blueprint.files()), blueprint.checkpoint.shape, Library.load()
    module = loaded.module
    decoder = Decoder(module, module, shape.windows)
    if library is None or (why := decoder.unknown()) is not None:
        raise click.UsageError(f"the native library does not compute {model}: {why if library else 'it is not there'}")
    pages = torch.zeros(shape.layers, 1, len(ids), 2 * shape.kv_heads * shape.head_dim)
    options = {"rows": 256, "positions": len(ids), "threads": torch.get_num_threads()}
    runner = Runner.open(library, decoder.program(len(ids)), pages, **options)
    count = range(len(ids))
    rows = Rows(positions=count, chunks=[(len(ids), 0, 0, 0)], tables=[0], wanted=count)
    logits = runner.step(module.get_input_embeddings()(torch.tensor(ids)), rows)
    return ids, logits.double().log_softmax(-1)


def perplexity(ids: list[int], found: Tensor) -> float:
    """Perplexity of the tokens behind the first."""
    return math.exp(-float(found[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()))


@click.command()
@click.argument("model")
@click.argument("text", default=TEXT, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", default=2000, show_default=True)
@torch.inference_mode()
def main(model: str, text: Path, tokens: int) -> None:
    """Prints a table and the claims; ends with 1 where one fails."""
    with TemporaryDirectory() as folder:
        path = str(make_checkpoint("llama", folder)) if model == "tiny" else model
        ids, exact = distributions(path, text.read_text(encoding="utf-8"), tokens, None)
        _, rounded = distributions(path, text.read_text(encoding="utf-8"), tokens, "int8")
    apart = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    same = float((exact.argmax(-1) == rounded.argmax(-1)).double().mean())
    before, after = perplexity(ids, exact), perplexity(ids, rounded)
    print("| tokens | perplexity float32 | int8 | divergence | likeliest token as in float32 |")
    print("|---|---|---|---|---|")
    print(f"| {len(ids)} | {before:.2f} | {after:.2f} | {apart:.4f} | {same:.3f} |")
    claims = {
        f"perplexity {after / before:.4f} times as large, of {PERPLEXITY}": after <= PERPLEXITY * before,
        f"divergence {apart:.4f} of {DIVERGENCE}": apart <= DIVERGENCE,
    }
    for told, holds in claims.items():
        print("holds:" if holds else "FAILS:", told)
    sys.exit(not all(claims.values()))


if __name__ == "__main__":
    main()
