"""The contender transformers: ``transformers_text.py FOLDER DTYPE THREADS``. Several prompts at once are one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve import at_once, serve
from transformers_models import open_as


def open_model() -> tuple[Any, dict[str, str]]:
    import transformers

    model, folder, versions = open_as("AutoModelForCausalLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return (model, tokenizer), versions


def run(models: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    return at_once(task, task["prompts"], lambda prompts: generate(models, prompts, task["tokens"]))


def generate(models: Any, prompts: Sequence[str], count: int) -> list[dict[str, Any]]:
    import torch

    model, tokenizer = models
    asked = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        rows = model.generate(**asked, do_sample=False, max_new_tokens=count, min_new_tokens=count)
    tokens = rows[:, asked["input_ids"].shape[1] :].tolist()
    return [{"text": tokenizer.decode(row), "tokens": row} for row in tokens]


if __name__ == "__main__":
    serve(open_model, run)
