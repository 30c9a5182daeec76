"""Each command of the documents that serves models within a memory budget can load each of its models.

The models are not here. Each is stood for by the settings that its publisher's config.json has, and a file of weights
with the names and shapes that transformers gives these settings, and no bytes: estimates read nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from triolet import EngineConfig, demo
from triolet.models.blueprints.estimate import estimate
from triolet.server.command import _Bytes

from ..checkpoints.families import make_checkpoint

ROOT = Path(__file__).parents[2]
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *(path for path in ROOT.glob("deploy/*") if path.is_file()))
COMMAND = re.compile(r"((?:--model[ =]\S+=\S+[\s\\]+)+)--memory-budget (\d+\w+)")
WHISPER = {"encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
BERT = {"num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "hidden_size": 768}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai/whisper-base": (
        "whisper",
        {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 51_865, **WHISPER},
    ),
    "openai/whisper-small": (
        "whisper",
        {
            "d_model": 768,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "vocab_size": 51_865,
            **{name: 2 * count if "layers" in name else 12 for name, count in WHISPER.items()},
        },
    ),
    "Qwen/Qwen3-0.6B": (
        "qwen3",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    "Qwen/Qwen2-VL-2B-Instruct": (  # its language model, the larger part; the tower is tiny here
        "qwen2_vl",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    "BAAI/bge-small-en-v1.5": ("bert", {**BERT, "hidden_size": 384, "intermediate_size": 1536, "vocab_size": 30_522}),
    "BAAI/bge-reranker-base": ("bert_reranker", {**BERT, "vocab_size": 250_002}),
    "cardiffnlp/twitter-roberta-base-sentiment-latest": ("bert_classifier", {**BERT, "vocab_size": 50_265}),
}


def documented() -> list[tuple[str, str, str]]:
    """Page, model and budget of each model of each command."""
    found = []
    for page in PAGES:
        for models, budget in COMMAND.findall(page.read_text()):
            found += [(page.name, name, budget) for name in re.findall(r"--model[ =]\S+?=(\S+)", models)]
    return found


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("skeleton") / "model"
            _make_skeleton(made[name], *PUBLISHED[name])
        return made[name]

    return make


def _make_skeleton(folder: Path, family: str, sizes: dict[str, Any]) -> None:
    if family == "whisper":
        shutil.copytree(demo.checkpoint(), folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        known = {one["id"] for one in tokenizer["added_tokens"]} | set(tokenizer["model"]["vocab"].values())
        for number in range(sizes["vocab_size"]):
            if number not in known:
                tokenizer["model"]["vocab"][f"<{number}>"] = number
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    else:
        make_checkpoint(family, folder)
    written = json.loads((folder / "config.json").read_text())
    settings = written.get("text_config", written)
    settings.update(sizes)
    settings.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module = getattr(transformers, config.architectures[0])(config)
    width = 2 if sizes.get("dtype") == "bfloat16" else 4
    header, end = {}, 0
    for name, value in module.state_dict().items():
        if name != "lm_head.weight" or not sizes.get("tie_word_embeddings"):
            begin, end = end, end + value.numel() * width
            header[name] = {
                "dtype": {2: "BF16", 4: "F32"}[width],
                "shape": [*value.shape],
                "data_offsets": [begin, end],
            }
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)  # a hole, which takes no room on the disk


def test_each_documented_budget_holds_each_of_its_models(skeleton):
    commands = documented()
    assert {page for page, _, _ in commands} >= {"deployment.md", "command_line.md", "serving.md", "triolet.service"}
    for page, name, text in commands:
        budget = _Bytes().convert(text, None, None)
        needs = estimate(skeleton(name), EngineConfig()).total
        assert needs <= budget, f"{page}: {name} needs {needs >> 20} MiB of {text}"


def test_the_full_context_of_a_documented_model_would_not_fit(skeleton):
    """Without a default that fits, the budgets would not hold it."""
    whole = estimate(skeleton("Qwen/Qwen3-0.6B"), EngineConfig(max_positions=40_960))
    assert whole.total > 8 << 30
    assert whole.by_owner["self_kv"] == (40_960 // 16 + 1) * 16 * 28 * 2 * 8 * 128 * 4
