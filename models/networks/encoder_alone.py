"""An encoder as a `Network`, without a decoder: it turns items into encoder outputs, and reads no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import field, frozen
from torch import Tensor

from ...core.request import EncoderItem
from ..memory.encoder_outputs import EncoderOutputs
from .network import Feed, Network, Record


@frozen(kw_only=True, eq=False)
class EncoderAlone(Network):
    """An encoder as a network."""

    positions: int
    _encode: Callable[[Sequence[EncoderItem]], Sequence[Tensor]] = field(repr=False)

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        return self._encode(jobs)

    def start(self, record: Record) -> None:
        assert record.start.pooling is not None, f"sequence {record.start.sequence_id}: an encoder generates no tokens"

    def vectors(self, feeds: Sequence[Feed], outputs: EncoderOutputs) -> list[tuple[float, ...] | None]:
        """Returns the encoder output of the one item of each prompt, as numbers."""
        return [tuple(outputs.get(feed.record.start.placeholders[0].key).flatten().tolist()) for feed in feeds]
