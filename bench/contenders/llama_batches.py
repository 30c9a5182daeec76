"""The part that llama.cpp and ik_llama.cpp share: greedy decoding of several prompts in one batch, by the functions of
C, which have the same names in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from serve import at_once

PAGE = 256  # positions; contexts are made for multiples, so that a first round makes them for all others
CHUNK = 2048  # tokens in a call, at most


class Row(NamedTuple):
    """A token of a batch. The most probable token after it is asked for if it is the last of its sequence."""

    token: int
    position: int
    sequence: int
    last: bool


class Library:
    """A library of C with an open model. It keeps a context for each number and length of sequences.

    Args:
        api: the functions of C.
        vocabulary: how many tokens there are.
        open_context: returns a context for a number of sequences of so many positions.
        clear: makes a context forget its sequences.
    """

    def __init__(
        self, api: Any, vocabulary: int, open_context: Callable[[int, int], Any], clear: Callable[[Any], object]
    ) -> None:
        self._api, self._vocabulary, self._open, self._clear = api, vocabulary, open_context, clear
        self._contexts: dict[tuple[int, int], Any] = {}
        self._batch = api.llama_batch_init(CHUNK, 0, 1)

    def generate(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """Returns ``count`` tokens after each prompt."""
        pages = -(-(max(map(len, prompts)) + count) // PAGE)
        key = (len(prompts), pages * PAGE)
        if key not in self._contexts:
            self._contexts[key] = self._open(*key)
        context = self._contexts[key]
        self._clear(context)
        rows = [
            Row(token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        found = [[token] for token in self._step(context, rows)]
        while len(found[0]) < count:
            rows = [
                Row(text[-1], len(prompt) + len(text) - 1, sequence, True)
                for sequence, (prompt, text) in enumerate(zip(prompts, found, strict=True))
            ]
            for text, token in zip(found, self._step(context, rows), strict=True):
                text.append(token)
        return found

    def _step(self, context: Any, rows: Sequence[Row]) -> list[int]:
        """Feeds rows. Returns the most probable tokens after those that are the last of their sequences."""
        import numpy as np

        found, batch = [], self._batch
        for part in (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)):
            batch.n_tokens = len(part)
            for index, row in enumerate(part):
                batch.token[index], batch.pos[index], batch.logits[index] = row.token, row.position, row.last
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row.sequence
            status = self._api.llama_decode(context, batch)
            if status:
                raise RuntimeError(f"llama_decode returns {status} for {len(part)} tokens")
            for index, row in enumerate(part):
                if row.last:
                    logits = self._api.llama_get_logits_ith(context, index)
                    found.append(int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax()))
        return found


def answer(model: tuple[Library, Callable[[str], list[int]], Callable[[list[int]], str]], task: Any) -> Any:
    """Answers a task: its prompts in one batch, or one after the other when they arrive."""
    library, tokenize, detokenize = model

    def write(prompts: Sequence[str]) -> list[dict[str, Any]]:
        found = library.generate([tokenize(prompt) for prompt in prompts], task["tokens"])
        return [{"tokens": tokens, "text": detokenize(tokens)} for tokens in found]

    return at_once(task, task["prompts"], write)
