"""The places of tokens in the texts of completions come from the text itself, whole and as a stream."""

from __future__ import annotations

import random
from typing import Any

import pytest

from triolet import Completion, Delta
from triolet.api.outputs.results import Usage
from triolet.core.detokenizer import TextDeltas, TokenBytes
from triolet.core.request import FinishReason
from triolet.server.endpoints.sampling import Places, completion_logprobs

from ..api.test_outputs import TOKENIZERS, sentencepiece, sequences


def texts_of(known: TokenBytes) -> TextDeltas:
    return TextDeltas(known, frozenset())


def whole(known: TokenBytes, tokens: list[int]) -> tuple[str, list[int]]:
    usage = Usage(prompt_tokens=1, completion_tokens=len(tokens))
    ended: dict[str, Any] = {"finish_reason": FinishReason.LENGTH, "usage": usage}
    text = texts_of(known).whole(tokens)
    completion = Completion(text=text, token_ids=tuple(tokens), logprobs=(-1.0,) * len(tokens), **ended)
    return text, completion_logprobs(known, completion, Places(texts_of(known))).text_offset


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_begins_where_the_text_before_it_ends(name: str) -> None:
    """Lengths of tokens that were decoded alone gave 39 for a text of 14 characters."""
    known, rng = TokenBytes(TOKENIZERS[name]), random.Random(name)
    for tokens, _ in zip(sequences(rng, TOKENIZERS[name]), range(40), strict=False):
        text, found = whole(known, tokens)
        begun = ["".join(map(texts_of(known).add, tokens[:place])) for place in range(len(tokens))]
        assert found == list(map(len, begun))
        assert all(map(text.startswith, begun))
        places, streamed = Places(texts_of(known)), list[int]()
        for token in tokens:
            delta = Delta(text="", token_ids=(token,), logprobs=(-1.0,))
            streamed += completion_logprobs(known, delta, places).text_offset
        assert streamed == found


def test_the_space_that_is_not_written_has_no_place() -> None:
    tokenizer = sentencepiece()
    tokens = tokenizer.convert_tokens_to_ids(["▁ab", "▁a", "<0xC3>", "<0xA9>", "b"])
    assert whole(TokenBytes(tokenizer), tokens) == ("ab aéb", [0, 2, 4, 4, 5])
