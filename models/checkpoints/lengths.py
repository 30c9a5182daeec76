"""The fewest tokens of a text, by the most characters that a token stands for, where a tokenizer's parts prove it.

Then a text of n characters has n / most tokens or more, and one that is far too long for a model is refused before it
is tokenized. Every character of a text must be in some token for that, and no token may stand for any number of them.
So it is with byte pairs over all 256 bytes, or with a token for each byte or each unknown character, as in Whisper and
nearly all decoders. It is not so where characters are dropped (blanks between words, control characters, accents, those
that a charset map of sentencepiece leaves out), where a word of any length is one unknown token (WordPiece, WordLevel),
where unknown characters in a row are one (Unigram), or where a special token takes the blanks around it with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tokenizers import models

from ...core.model import Lengths

_COMPOSED = 4  # characters at most that Unicode's compositions make one (UAX #15: no decomposition is longer)
_KEPT = {"NFD": 1, "NFKD": 1, "NFC": _COMPOSED, "NFKC": _COMPOSED, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTING = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"})
_ASCII = range(128)
_CONTROLS = "".join(map(chr, range(32)))
_SEEN = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that stand for themselves in vocabularies
_OTHERS = [byte for byte in range(256) if byte not in _SEEN]
_LETTERS = [chr(byte) if byte in _SEEN else chr(256 + _OTHERS.index(byte)) for byte in range(256)]
Part = Mapping[str, Any]


def lengths_of(tokenizer: Any) -> Lengths | None:
    """The lengths that are sure of ``tokenizer``; ``None``: nothing is.

    Args:
        tokenizer: transformers', or `WhisperTokenizer`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE):  # Python's own, slow ones have no backend
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


def _state(part: Any) -> Part | None:
    """A normalizer, or what parts a text into words, as tokenizer.json has it."""
    found: Part | None = None if part is None else json.loads(part.__getstate__())
    return found


def _shrinks(normalizer: Part | None) -> int | None:
    """The most characters that become one; ``None``: any number, or nobody knows."""
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


def _keeps(parting: Part | None) -> bool:
    """True if words have all characters of the text together."""
    if parting is None:
        return True
    if parting["type"] == "Sequence":
        return all(map(_keeps, parting["pretokenizers"]))
    return parting["type"] in _SPLITTING and parting.get("behavior") != "Removed"


def _unread(backend: Any, vocabulary: Mapping[str, int]) -> str | None:
    """The characters that become no token; ``None``: nobody knows which."""
    if any(_has_bytes(_state(part)) for part in (backend.normalizer, backend.pre_tokenizer)):
        return _without_bytes(vocabulary, normalized=backend.normalizer is not None)
    model = backend.model
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return ""
    return "" if model.unk_token in vocabulary and not model.fuse_unk else None


def _without_bytes(vocabulary: Mapping[str, int], *, normalized: bool) -> str | None:
    """The characters of bytes that the vocabulary lacks: it has those that its training saw. All but ASCII have a byte
    of 128 to 191. What a normalizer makes is no control character, but may be any other."""
    lacks = [byte for byte, letter in enumerate(_LETTERS) if letter not in vocabulary]
    if any(128 <= byte < 192 for byte in lacks):
        return None
    unread = "".join(map(chr, filter(_ASCII.__contains__, lacks)))
    return None if normalized and unread.strip(_CONTROLS) else unread


def _has_bytes(part: Part | None) -> bool:
    if part is None:
        return False
    return part["type"] == "ByteLevel" or any(
        map(_has_bytes, [*part.get("normalizers", ()), *part.get("pretokenizers", ())])
    )
