"""What travels between a `triolet.cluster.backend.RayBackend` and its replicas, beside `triolet.core.request.Request`.

All of it is pickled: frozen values, no tensors.
"""

from __future__ import annotations

from attrs import field, frozen

from ..actors.messages import End
from ..core.plan import SampledToken


@frozen
class News:
    """Of one request: tokens in their order, and its end when it has come."""

    sampled: tuple[SampledToken, ...] = ()
    end: End | None = None


@frozen(kw_only=True)
class Holding:
    """What a replica tells now and then, as the mapping that Serve carries.

    Attributes:
        keys: of the contents whose encoder outputs are resident, the newest last.
        requests: that have not ended.
    """

    keys: tuple[str, ...] = field(repr=False)
    requests: int
