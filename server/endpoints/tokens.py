"""Single tokens, as answers have them: as text and as bytes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_CUT = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a part of a character
_BLANK = "▁"  # SentencePiece's, which is lost where a token is decoded alone
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's


def token_text(tokenizer: Any, token: int) -> tuple[str, list[int] | None]:
    """Returns a token as text and as its bytes, which joined are the answer's in UTF-8; ``None``: the token has no
    text, or its tokenizer does not tell the bytes of a part of a character."""
    text: str = tokenizer.decode([token], skip_special_tokens=True)
    name: str = tokenizer.convert_ids_to_tokens(token) or ""  # vocabularies may be padded
    if name.startswith(_BLANK) and not text.startswith(" "):
        text = f" {text}"
    if _CUT in text:
        return text, _bytes_of(name)
    return (text, list(text.encode())) if text else (name, None)


def token_name(tokenizer: Any, token: int) -> str:
    """Returns a text that tells a token from others: a part of a character by its bytes, as OpenAI's completions do."""
    text, utf8 = token_text(tokenizer, token)
    return text if _CUT not in text or utf8 is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def _bytes_of(name: str) -> list[int] | None:
    """Returns the bytes of a token by its name in the vocabulary."""
    told = _BYTE.fullmatch(name)
    if told:
        return [int(told[1], 16)]
    alphabet = _alphabet()
    return [alphabet[one] for one in name] if set(name) <= alphabet.keys() else None


@cache
def _alphabet() -> dict[str, int]:
    """Returns the bytes that GPT-2's characters stand for: printable ones for themselves, the others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
