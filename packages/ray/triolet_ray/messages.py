"""The messages between a `triolet_ray.backend.RayBackend` and its replicas, apart from
`triolet.core.request.Request`.

All messages are pickled: they are frozen values without tensors.
"""

from __future__ import annotations

from attrs import frozen

from triolet.actors.messages import End
from triolet.core.plan import SampledToken


@frozen
class News:
    """The news of one request: its next tokens, in order, and its end if it has ended."""

    sampled: tuple[SampledToken, ...] = ()
    end: End | None = None
