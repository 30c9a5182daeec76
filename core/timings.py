"""The seconds that each stage of a request took, as a value."""

from __future__ import annotations

from typing import Self

from attrs import evolve, frozen


@frozen(kw_only=True)
class Timings:
    """Seconds, from the call on. ``queued``: until the request had a place, waiting at the door included.
    ``encoder_wait``: the part of ``queued`` spent waiting for encoder outputs. ``first_token``: until the first token;
    ``None`` where there was none. ``total``: until the end.

    A transcription makes a request for each window, one after another, and perhaps several: ``queued`` and
    ``encoder_wait`` are the sums over all its requests, ``first_token`` is that of the first window's text, and
    ``total`` ends with the last window. A slow reader of a stream of segments makes ``total`` longer, since a window's
    request is only made when its segments are read.
    """

    queued: float
    encoder_wait: float
    first_token: float | None
    total: float

    def since(self, seconds: float) -> Self:
        """The same timings, counted from ``seconds`` before."""
        return evolve(
            self,
            queued=self.queued + seconds,
            first_token=None if self.first_token is None else self.first_token + seconds,
            total=self.total + seconds,
        )
