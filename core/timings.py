"""The seconds that each stage of a request took, as a value."""

from __future__ import annotations

from typing import Self

from attrs import evolve, frozen


@frozen(kw_only=True)
class Timings:
    """The durations of a request, in seconds from the call on. ``queued``: until the request had a place, waiting at
    the door included. ``encoder_wait``: the part of ``queued`` in which the request waited for encoder outputs.
    ``first_token``: until the first token; ``None``: the request had no token. ``total``: until the end.

    A transcription makes one or more requests for each window. Its ``queued`` and ``encoder_wait`` are those of its
    first request: how long the transcription waited before anything of it ran. ``first_token`` is that of the first
    window's text, and ``total`` ends with the last window. A slow reader of a stream of segments makes ``total``
    longer, since the request for a window is only made when the window's segments are read.
    """

    queued: float
    encoder_wait: float
    first_token: float | None
    total: float

    def since(self, seconds: float) -> Self:
        """Returns the same timings, counted from a moment that lies ``seconds`` earlier."""
        return evolve(
            self,
            queued=self.queued + seconds,
            first_token=None if self.first_token is None else self.first_token + seconds,
            total=self.total + seconds,
        )
