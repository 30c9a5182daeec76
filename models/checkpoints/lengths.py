"""A lower bound on the number of a text's tokens, by the most characters that one token can stand for.

A text of n characters has at least n / most tokens, so a text that is far too long for a model is refused before it is
tokenized. The bound holds if every character of a text is in some token, and no token can stand for any number of
characters. This is true for byte pairs over all 256 bytes, and if each byte or each unknown character has its own
token, as in Whisper and nearly all decoders.

There is no bound in four cases. Characters are dropped (blanks between words, control characters, accents, characters
that a charset map of sentencepiece leaves out). A word of any length can be one unknown token (WordPiece, WordLevel).
Several unknown characters in a row become one token (Unigram). A special token absorbs the blanks around it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tokenizers import models

from ...core.model import Lengths
from .gguf_tokenizer import GgufTokenizer

_COMPOSED = 4  # most characters that Unicode composes into one (UAX #15: no decomposition is longer)
_KEPT = {"NFD": 1, "NFKD": 1, "NFC": _COMPOSED, "NFKC": _COMPOSED, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTING = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"})
_ASCII = range(128)
_CONTROLS = "".join(map(chr, range(32)))
_SEEN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that vocabularies write as themselves
_OTHERS = [byte for byte in range(256) if byte not in _SEEN]
_LETTERS = [chr(byte) if byte in _SEEN else chr(256 + _OTHERS.index(byte)) for byte in range(256)]
TokenizerPart = Mapping[str, Any]


def lengths_of(tokenizer: Any) -> Lengths | None:
    """Returns the lengths that are certain for ``tokenizer``; ``None``: no bound is certain.

    Args:
        tokenizer: a tokenizer of transformers, a `WhisperTokenizer`, or a `GgufTokenizer`, which knows them.
    """
    if isinstance(tokenizer, GgufTokenizer):
        return tokenizer.lengths
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers, in Python, have none
    return None if backend is None else lengths_of_backend(backend)


def lengths_of_backend(backend: Any) -> Lengths | None:
    """Returns the same for a tokenizer of the package ``tokenizers``."""
    if not isinstance(backend.model, models.BPE):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    shrinks, unread = _shrinks(_state(backend.normalizer)), _unread(backend, vocabulary)
    if (
        shrinks is None
        or unread is None
        or not _keeps(_state(backend.pre_tokenizer))
        or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    ):
        return None
    return Lengths(shrinks * max(map(len, vocabulary), default=1), unread)


def _state(part: Any) -> TokenizerPart | None:
    """Returns a normalizer or pre-tokenizer as tokenizer.json describes it."""
    found: TokenizerPart | None = None if part is None else json.loads(part.__getstate__())
    return found


def _shrinks(normalizer: TokenizerPart | None) -> int | None:
    """The most characters that ``normalizer`` turns into one; ``None``: any number, or unknown."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        factors = [_shrinks(one) for one in normalizer["normalizers"]]
        known = [factor for factor in factors if factor is not None]
        return math.prod(known) if len(known) == len(factors) else None
    if kind == "Replace":
        text, content = normalizer["pattern"].get("String"), normalizer["content"]
        return math.ceil(len(text) / len(content)) if text and content and content.isprintable() else None
    return _KEPT.get(kind)


def _keeps(parting: TokenizerPart | None) -> bool:
    """True if the words together contain all characters of the text."""
    if parting is None:
        return True
    if parting["type"] == "Sequence":
        return all(map(_keeps, parting["pretokenizers"]))
    return parting["type"] in _SPLITTING and parting.get("behavior") != "Removed"


def _unread(backend: Any, vocabulary: Mapping[str, int]) -> str | None:
    """The characters for which no token is made; ``None``: unknown."""
    if any(_has_bytes(_state(part)) for part in (backend.normalizer, backend.pre_tokenizer)):
        return _without_bytes(vocabulary, normalized=backend.normalizer is not None)
    model = backend.model
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return ""
    return "" if model.unk_token in vocabulary and not model.fuse_unk else None


def _without_bytes(vocabulary: Mapping[str, int], *, normalized: bool) -> str | None:
    """Returns the characters that become no token, since the vocabulary lacks their byte. ``None``: they cannot be
    listed. A missing byte from 128 to 191 may be part of many characters, or a normalizer may turn another character
    into a missing one. Normalizers produce no control characters.
    """
    lacks = [byte for byte, letter in enumerate(_LETTERS) if letter not in vocabulary]
    if any(128 <= byte < 192 for byte in lacks):
        return None
    unread = "".join(map(chr, filter(_ASCII.__contains__, lacks)))
    return None if normalized and unread.strip(_CONTROLS) else unread


def _has_bytes(part: TokenizerPart | None) -> bool:
    if part is None:
        return False
    return part["type"] == "ByteLevel" or any(
        map(_has_bytes, [*part.get("normalizers", ()), *part.get("pretokenizers", ())])
    )
