"""The messages between a `triolet.cluster.backend.RayBackend` and its replicas, beside `triolet.core.request.Request`.

All of it is pickled: frozen values, no tensors.
"""

from __future__ import annotations

from attrs import frozen

from ..actors.messages import End
from ..core.plan import SampledToken


@frozen
class News:
    """The news of one request: tokens in their order, and its end when it has come."""

    sampled: tuple[SampledToken, ...] = ()
    end: End | None = None
