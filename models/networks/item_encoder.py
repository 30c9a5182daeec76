"""`ItemEncoder`: the encoder of a model whose items are whole, or pieces of an audio."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor

from ...core.request import EncoderItem
from ..architectures.crossed_family import CrossedFamily
from ..architectures.family import Family
from ..architectures.frame_family import FrameFamily
from ..architectures.streamed_encoder import AudioPiece, hear_on
from ..memory.encoder_states import EncoderStates
from ..memory.module import TransformerModel


@frozen(kw_only=True, eq=False)
class ItemEncoder:
    """An encoder. Items are whole ones, or pieces of an audio.

    Args:
        family: encodes whole items.
        alike: only items of the same shape share a launch, since padding could change the output of a shorter item.
        states: the states between two pieces; ``None``: the encoder hears whole items only.
    """

    model: TransformerModel
    family: Family | CrossedFamily | FrameFamily
    alike: bool = False
    states: EncoderStates | None = None

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        """Encodes items, as `Network.encode` does."""
        found = {job.key: self._hear_on(job) for job in jobs if isinstance(job.payload, AudioPiece)}
        groups: dict[object, list[EncoderItem]] = {}
        for job in (job for job in jobs if job.key not in found):
            shapes = [(name, tuple(one.shape)) for name, one in sorted(job.payload.items())] if self.alike else ()
            groups.setdefault(tuple(shapes), []).append(job)
        for group in groups.values():
            outputs = self.family.encode(self.model.module, [job.payload for job in group])
            found.update(zip([job.key for job in group], outputs, strict=True))
        for job in jobs:
            length = len(found[job.key])
            assert length == job.embeddings, f"item {job.key!r} has {length} embeddings, not {job.embeddings}"
        return [found[job.key] for job in jobs]

    def _hear_on(self, job: EncoderItem) -> Tensor:
        """Encodes an item that continues another, from the state after that one. No state is kept after the last
        piece."""
        piece = job.payload
        assert self.states is not None, "a piece is heard, but the encoder hears whole items"
        rows, state = hear_on(self.model.module, piece, self.states.take(piece.follows))
        if not piece.last:
            self.states.keep(job.key, state)
        return rows
