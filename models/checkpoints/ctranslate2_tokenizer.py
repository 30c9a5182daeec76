"""The tokenizer of a Whisper of CTranslate2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ...core.errors import CheckpointError

_VOCABULARIES = ("vocabulary.json", "vocabulary.txt")
_END, _TIME = "<|endoftext|>", re.compile(r"<\|\d+\.\d\d\|>")


def read_backend(folder: Path) -> Tokenizer:
    """Returns the tokenizer of tokenizer.json, or else one made of the vocabulary. Raises `CheckpointError` if both are
    missing, or one is damaged."""
    path = folder / "tokenizer.json"
    names = [name for name in _VOCABULARIES if (folder / name).is_file()]
    if not path.is_file() and not names:
        raise CheckpointError(f"{folder} has neither tokenizer.json nor {' or '.join(_VOCABULARIES)}")
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else tokenizer_of(_tokens(folder / names[0]))
    except Exception as error:  # the package has no class of its own for its errors
        raise CheckpointError(f"the tokenizer of {folder} cannot be used: {error}; download it again") from error


def tokenizer_of(tokens: list[str]) -> Tokenizer:
    """Returns Whisper's tokenizer for its vocabulary. Byte-pair encoding numbers its tokens in the order of its merges
    (Sennrich et al. 2016), so these can be found again: a token is merged of the two that the earlier merges leave of
    its characters."""
    count = tokens.index(_END)
    ranks = {token: rank for rank, token in enumerate(tokens[:count])}
    merges = [pair for token in ranks if len(token) > 1 and (pair := _halves(token, ranks))]
    made = Tokenizer(models.BPE(vocab={**ranks, _END: count}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    times = [token for token in tokens[count:] if _TIME.fullmatch(token)]
    made.add_special_tokens([_added(token) for token in tokens[count:] if token not in set(times)])
    made.add_tokens([_added(token) for token in times])
    wrong = [token for index, token in enumerate(tokens) if made.token_to_id(token) != index]
    if wrong:
        raise ValueError(f"the vocabulary has {wrong[0]!r} twice")
    return made


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False, special=_TIME.fullmatch(token) is None)


def _halves(token: str, ranks: Mapping[str, int]) -> tuple[str, str] | None:
    """Returns the two tokens that ``token`` is merged of; ``None``: merges do not make it."""
    parts, own = list(token), ranks[token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, own) for a, b in pairwise(parts)]
        best = min(pairs)
        if best >= own:
            return None
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if all(part in ranks for part in parts) else None


def _tokens(path: Path) -> list[str]:
    """Returns the tokens of a vocabulary's file, in order."""
    text = path.read_text(encoding="utf-8")
    tokens: Any = json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
    if not isinstance(tokens, list) or not all(isinstance(one, str) for one in tokens) or _END not in tokens:
        raise ValueError(f"{path.name} has no list of texts with {_END}")
    return tokens
