"""The contender transformers: ``transformers_embed.py FOLDER DTYPE THREADS``."""

from __future__ import annotations

from typing import Any

from serve import serve
from transformers_models import open_as
from vectors import answer, open_tokenizer


def open_model() -> tuple[Any, dict[str, str]]:
    import torch
    import transformers

    model, folder, versions = open_as("AutoModel")
    known = set(transformers.AutoTokenizer.from_pretrained(folder).model_input_names)

    def rows(batch: dict[str, Any]) -> Any:
        with torch.inference_mode():
            found = model(**{name: torch.from_numpy(array) for name, array in batch.items() if name in known})
        return found.last_hidden_state.float().numpy()

    return (open_tokenizer(folder), rows), versions


if __name__ == "__main__":
    serve(open_model, answer)
