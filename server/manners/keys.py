"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

_SUBPROTOCOL = "openai-insecure-api-key."


def key_fault(key: object) -> str | None:
    """Returns the reason why no client can send ``key``, in words that hide it; ``None``: one can. Headers are ASCII
    (RFC 9110), and blanks around a key are lost."""
    if not isinstance(key, str) or not key:
        return f"is {'empty' if key == '' else f'a {type(key).__name__}'}; allowed: a text of visible ASCII characters"
    if all("!" <= letter <= "~" for letter in key):
        return None
    return "has a blank, or another character than visible ASCII (! to ~), which no client can send; choose another key"


class Keys:
    """The keys that open the server; without any, everybody may enter."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def who(self, presented: str | None) -> str | None:
        """Returns a name of the key for logs and limits, which hides it; ``None``: it opens nothing.

        The time that this takes depends neither on how much of a key is right nor on which key it is.
        """
        digest = hashlib.sha256((presented or "").encode("utf-8", "surrogateescape")).digest()
        fits = [hmac.compare_digest(digest, one) for one in self._digests]
        return f"key-{digest.hex()[:8]}" if any(fits) else None


def presented_key(authorization: str | None, subprotocols: Iterable[str] = ()) -> str | None:
    """Returns the key of a request: ``Authorization: Bearer KEY``, or, for browsers' WebSockets, which cannot set
    headers, the subprotocol ``openai-insecure-api-key.KEY``."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    named = (one.removeprefix(_SUBPROTOCOL) for one in subprotocols if one.startswith(_SUBPROTOCOL))
    return next(named, None)
