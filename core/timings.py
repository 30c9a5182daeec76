"""How long each stage of a request took, as a value."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Timings:
    """Seconds, from the call on. ``queued``: until the request had a place, waiting at the door included.
    ``encoder_wait``: the part of it that went by waiting for encoder outputs. ``first_token``: until the first token;
    ``None`` where there was none. ``total``: until the end."""

    queued: float
    encoder_wait: float
    first_token: float | None
    total: float
