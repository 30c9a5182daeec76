"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

_SUBPROTOCOL = "openai-insecure-api-key."


def key_fault(key: object) -> str | None:
    """Returns the reason why no client can send ``key``, in words that do not show the key; ``None``: clients can send
    it. Headers are ASCII (RFC 9110), and blanks around a key are lost."""
    if not isinstance(key, str) or not key:
        return f"is {'empty' if key == '' else f'a {type(key).__name__}'}; allowed: a text of visible ASCII characters"
    if all("!" <= letter <= "~" for letter in key):
        return None
    return "has a blank or a character other than visible ASCII (! to ~), which no client can send; choose another key"


class Keys:
    """The keys of the server. If there are none, every client is admitted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def who(self, presented: str | None) -> str | None:
        """Returns a name for the presented key that does not show the key, for logs and limits; ``None``: the key is
        wrong.

        The time of the comparison depends neither on how much of a key is right nor on which key it is.
        """
        digest = hashlib.sha256((presented or "").encode("utf-8", "surrogateescape")).digest()
        fits = [hmac.compare_digest(digest, one) for one in self._digests]
        return f"key-{digest.hex()[:8]}" if any(fits) else None


def presented_key(authorization: str | None, subprotocols: Iterable[str] = ()) -> str | None:
    """Returns the key that a request presents: ``Authorization: Bearer KEY``, or the subprotocol
    ``openai-insecure-api-key.KEY`` for WebSockets of browsers, which cannot set headers."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    named = (one.removeprefix(_SUBPROTOCOL) for one in subprotocols if one.startswith(_SUBPROTOCOL))
    return next(named, None)
