"""Single tokens in answers: as text and as bytes."""

from __future__ import annotations

from typing import Any

from ...api.outputs.detokenizer import TokenBytes

_CUT = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character


def token_text(tokenizer: Any, token: int) -> tuple[str, list[int] | None]:
    """Returns the text and the bytes of a token. The joined bytes of all tokens are the answer in UTF-8, with the space
    before its first word. ``None`` for the bytes: the token has no text, and its name is returned."""
    utf8 = TokenBytes(tokenizer).of(token, token)
    name: str = tokenizer.convert_ids_to_tokens(token) or ""  # a padded vocabulary has ids without a name
    return (utf8.decode(errors="replace"), list(utf8)) if utf8 else (name, None)


def token_name(tokenizer: Any, token: int) -> str:
    """Returns a text that identifies a token. For a part of a character it shows the bytes, as in OpenAI's
    completions."""
    text, utf8 = token_text(tokenizer, token)
    return text if _CUT not in text or utf8 is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
