"""`ItemEncoder`: the encoder of a model whose items are whole, or pieces of an audio."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import field, frozen
from torch import Tensor

from ...core.request import EncoderItem
from ..architectures.streamed_encoder import AudioPiece, hear_on
from ..memory.encoder_states import EncoderStates
from ..memory.module import TransformerModel


@frozen(kw_only=True, eq=False)
class ItemEncoder:
    """An encoder. Items are whole ones, or pieces of an audio.

    Args:
        together: encodes whole items, as `Network.encode` does.
        states: the states between two pieces; ``None``: the encoder hears whole items only.
    """

    model: TransformerModel
    together: Callable[[Sequence[EncoderItem]], Sequence[Tensor]] = field(repr=False)
    states: EncoderStates | None

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        """Encodes items, as `Network.encode` does."""
        found = {job.key: self._hear_on(job) for job in jobs if isinstance(job.payload, AudioPiece)}
        whole = [job for job in jobs if job.key not in found]
        if whole:
            found.update(zip([job.key for job in whole], self.together(whole), strict=True))
        return [found[job.key] for job in jobs]

    def _hear_on(self, job: EncoderItem) -> Tensor:
        """Encodes an item that continues another, from the state after that one. No state is kept after the last
        piece."""
        piece = job.payload
        assert self.states is not None, "a piece is heard, but the encoder hears whole items"
        rows, state = hear_on(self.model.module, piece, self.states.take(piece.follows))
        assert len(rows) == job.embeddings, f"item {job.key!r} has {len(rows)} embeddings, not {job.embeddings}"
        if not piece.last:
            self.states.keep(job.key, state)
        return rows
