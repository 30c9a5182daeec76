"""The contender llama.cpp: ``llama_cpp_text.py FILE.gguf KIND THREADS``. It answers one prompt after the other."""

from __future__ import annotations

import sys
from typing import Any

from serve import in_order, serve


def open_model() -> tuple[Any, dict[str, str]]:
    import llama_cpp

    path, _, threads = sys.argv[1:]
    model = llama_cpp.Llama(path, n_threads=int(threads), n_ctx=2048, verbose=False)
    return model, {"llama-cpp-python": llama_cpp.__version__}


def run(model: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
    return in_order(task, task["prompts"], lambda prompt: generate(model, prompt, task["tokens"]))


def generate(model: Any, prompt: str, count: int) -> dict[str, Any]:
    model.reset()
    fed = model.tokenize(prompt.encode(), add_bos=False)
    tokens: list[int] = []
    for token in model.generate(fed, temp=0.0, reset=True):
        tokens.append(int(token))
        if len(tokens) == count:
            break
    return {"text": model.detokenize(tokens).decode(errors="replace"), "tokens": tokens}


if __name__ == "__main__":
    serve(open_model, run)
