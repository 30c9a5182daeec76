"""The contender llama.cpp: ``llama_cpp_text.py FILE.gguf KIND THREADS``. Several prompts at once are one batch."""

from __future__ import annotations

import sys
from typing import Any

from llama_batches import CHUNK, Library, answer
from serve import serve


def open_model() -> tuple[Any, dict[str, str]]:
    import llama_cpp

    path, _, threads = sys.argv[1:]
    model = llama_cpp.Llama(path, n_threads=int(threads), n_ctx=256, verbose=False)

    def open_context(sequences: int, positions: int) -> Any:
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_seq_max, asked.n_batch = sequences * positions, sequences, CHUNK
        asked.n_threads = asked.n_threads_batch = int(threads)
        return llama_cpp.llama_init_from_model(model.model, asked)

    def clear(context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def tokenize(prompt: str) -> list[int]:
        return list(model.tokenize(prompt.encode(), add_bos=False))

    def detokenize(tokens: list[int]) -> str:
        return str(model.detokenize(tokens).decode(errors="replace"))

    library = Library(llama_cpp, model.n_vocab(), open_context, clear)
    return (library, tokenize, detokenize), {"llama-cpp-python": llama_cpp.__version__}


if __name__ == "__main__":
    serve(open_model, answer)
