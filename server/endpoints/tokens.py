"""Single tokens in answers: as text and as bytes."""

from __future__ import annotations

from ...core.detokenizer import TokenBytes

_CUT = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character


def token_text(tokens: TokenBytes, token: int) -> tuple[str, list[int] | None]:
    """Returns the text and the bytes of a token. The joined bytes of all tokens are the answer in UTF-8, with the space
    before its first word. ``None`` for the bytes: the token has no text, and its name is returned."""
    if utf8 := tokens.of(token, token):
        return utf8.decode(errors="replace"), list(utf8)
    return tokens.tokenizer.convert_ids_to_tokens(token) or "", None  # a padded vocabulary has ids without a name


def token_name(tokens: TokenBytes, token: int) -> str:
    """Returns a text that identifies a token. For a part of a character it shows the bytes, as in OpenAI's
    completions."""
    text, utf8 = token_text(tokens, token)
    return text if _CUT not in text or utf8 is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
