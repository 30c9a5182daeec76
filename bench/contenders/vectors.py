"""The part that contenders of vectors share whose model returns a row for each token. Several texts at once are batches
of texts of similar length, as sentence-transformers makes them. A vector is the mean over the rows of its text, divided
by its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serve import at_once

BATCH = 16
Rows = Callable[[dict[str, Any]], Any]
"""Returns the rows of a padded batch, [texts, tokens, width], from ``input_ids``, ``attention_mask`` and
``token_type_ids``, which are int64 [texts, tokens]."""


def open_tokenizer(folder: str) -> Any:
    """Returns the tokenizer of a folder, without padding and truncation."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def answer(model: tuple[Any, Rows], task: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers a task: its texts at once, or one after the other."""
    return at_once(task, task["texts"], lambda texts: vectors_of(model, texts))


def vectors_of(model: tuple[Any, Rows], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the vectors of texts, in their order."""
    import numpy as np

    tokenizer, rows = model
    tokens = [one.ids for one in tokenizer.encode_batch(list(texts))]
    order = sorted(range(len(texts)), key=lambda index: len(tokens[index]))
    found: list[dict[str, Any]] = [{} for _ in texts]
    for batch in (order[start : start + BATCH] for start in range(0, len(order), BATCH)):
        ids = np.zeros((len(batch), len(tokens[batch[-1]])), np.int64)
        mask = np.zeros_like(ids)
        for row, index in enumerate(batch):
            ids[row, : len(tokens[index])] = tokens[index]
            mask[row, : len(tokens[index])] = 1
        hidden = rows({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
        sums = (hidden * mask[:, :, None].astype(np.float32)).sum(axis=1)  # a mean has the direction of its sum
        for index, vector in zip(batch, sums / np.linalg.norm(sums, axis=1, keepdims=True), strict=True):
            found[index] = {"vector": vector.tolist()}
    return found
