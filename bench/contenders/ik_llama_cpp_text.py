"""The contender ik_llama.cpp: ``ik_llama_cpp_text.py FILE.gguf KIND THREADS``. Several prompts at once are one
batch."""

from __future__ import annotations

import sys
from typing import Any

from llama_batches import CHUNK, Library, answer
from serve import serve


def open_model() -> tuple[Any, dict[str, str]]:
    import ik_llama_cpp
    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp._internals import IkModel

    path, _, threads = sys.argv[1:]
    model = IkModel(path)

    def open_context(sequences: int, positions: int) -> Any:
        asked = api.llama_context_default_params()
        asked.n_ctx, asked.n_seq_max, asked.n_batch = sequences * positions, sequences, CHUNK
        asked.flash_attn = False  # it fails an assertion when a batch has several sequences (0.1.5)
        asked.n_threads = asked.n_threads_batch = int(threads)
        return api.llama_init_from_model(model.model, asked)

    library = Library(api, model.n_vocab, open_context, api.llama_kv_cache_clear)
    versions = {"ik-llama-cpp-python": ik_llama_cpp.__version__}
    return (library, lambda prompt: model.tokenize(prompt, add_bos=False), model.detokenize), versions


if __name__ == "__main__":
    serve(open_model, answer)
