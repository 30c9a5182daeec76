"""The encoder of a model behind `Network`, without its decoder: items in, outputs out, no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import field, frozen
from torch import Tensor

from ...core.plan import EncodeJob
from .network import Feed, Outputs, Record


@frozen(kw_only=True, eq=False)
class EncoderAlone:
    """An encoder at work."""

    positions: int
    _encode: Callable[[Sequence[EncodeJob]], Sequence[Tensor]] = field(repr=False)

    def encode(self, jobs: Sequence[EncodeJob]) -> Sequence[Tensor]:
        return self._encode(jobs)

    def write_cross(self, slot: int, output: Tensor) -> None:
        raise AssertionError(f"slot {slot} is to be written with {tuple(output.shape)}, but there is no decoder")

    def start(self, record: Record) -> None:
        raise AssertionError(f"sequence {record.start.sequence_id} is to be started, but there is no decoder")

    def logits(self, feeds: Sequence[Feed], wanted: Sequence[tuple[int, int]], outputs: Outputs) -> Tensor:
        raise AssertionError(f"{wanted} of {len(feeds)} chunks are to be logits besides {outputs}, without a decoder")

    def vectors(self, feeds: Sequence[Feed], outputs: Outputs) -> list[tuple[float, ...] | None]:
        raise AssertionError(f"{len(feeds)} chunks are to be pooled with {outputs}, but there is no decoder")
