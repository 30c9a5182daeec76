"""The encoder of a model as a `Network`, without its decoder: it turns items into encoder outputs, and reads no
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import field, frozen
from torch import Tensor

from ...core.request import EncoderItem
from .network import Network


@frozen(kw_only=True, eq=False)
class EncoderAlone(Network):
    """An encoder as a network."""

    positions: int
    _encode: Callable[[Sequence[EncoderItem]], Sequence[Tensor]] = field(repr=False)

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        return self._encode(jobs)
