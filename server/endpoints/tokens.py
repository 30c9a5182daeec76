"""Single tokens in answers: as text and as bytes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_CUT = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character
_BLANK = "▁"  # SentencePiece's; it is lost if a token is decoded alone
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's


def token_text(tokenizer: Any, token: int) -> tuple[str, list[int] | None]:
    """Returns the text and the bytes of a token. The joined bytes of all tokens are the answer in UTF-8. ``None`` for
    the bytes: the token has no text, or is part of a character and its tokenizer does not give the bytes."""
    text: str = tokenizer.decode([token], skip_special_tokens=True)
    name: str = tokenizer.convert_ids_to_tokens(token) or ""  # a padded vocabulary has ids without a name
    if name.startswith(_BLANK) and not text.startswith(" "):
        text = f" {text}"
    if _CUT in text:
        return text, _bytes_of(name)
    return (text, list(text.encode())) if text else (name, None)


def token_name(tokenizer: Any, token: int) -> str:
    """Returns a text that identifies a token. For a part of a character it shows the bytes, as in OpenAI's
    completions."""
    text, utf8 = token_text(tokenizer, token)
    return text if _CUT not in text or utf8 is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _bytes_of(name: str) -> list[int] | None:
    """Returns the bytes of the token with this name in the vocabulary."""
    told = _BYTE.fullmatch(name)
    if told:
        return [int(told[1], 16)]
    alphabet = _alphabet()
    return [alphabet[one] for one in name] if set(name) <= alphabet.keys() else None


@cache
def _alphabet() -> dict[str, int]:
    """Returns the byte for each character of GPT-2's vocabulary. Printable characters stand for their own byte;
    characters from 256 on stand for the other bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
