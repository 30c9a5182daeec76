"""The contender transformers: ``transformers_text.py FOLDER DTYPE THREADS``. Several prompts at once are one batch."""

from __future__ import annotations

import sys
from typing import Any

from serve import in_order, serve


def open_model() -> tuple[Any, dict[str, str]]:
    import torch
    import transformers

    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return (model, tokenizer), {"transformers": transformers.__version__, "torch": torch.__version__}


def run(models: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    count, prompts = task["tokens"], task["prompts"]
    if task.get("arrivals"):
        return in_order(task, prompts, lambda prompt: generate(models, [prompt], count)[0])
    return generate(models, prompts, count)


def generate(models: Any, prompts: list[str], count: int) -> list[dict[str, Any]]:
    import torch

    model, tokenizer = models
    asked = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        rows = model.generate(**asked, do_sample=False, max_new_tokens=count, min_new_tokens=count)
    tokens = rows[:, asked["input_ids"].shape[1] :].tolist()
    return [{"text": tokenizer.decode(row), "tokens": row} for row in tokens]


if __name__ == "__main__":
    serve(open_model, run)
