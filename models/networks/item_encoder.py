"""`ItemEncoder`: the encoder of a model whose items are whole, or pieces of an audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from ...core.request import EncoderItem
from ..architectures.crossed_family import CrossedFamily
from ..architectures.family import Family
from ..architectures.frame_family import FrameFamily
from ..architectures.streamed_encoder import AudioPiece, hear_on
from ..checkpoints.loading import apart
from ..memory.encoder_states import EncoderStates
from ..memory.module import TransformerModel
from ..memory.rows import Rows
from ..native.runner import Runner
from ..native.speech_encoders import known_encoder


@frozen(kw_only=True, eq=False)
class ItemEncoder:
    """An encoder. Items are whole ones, or pieces of an audio.

    Args:
        family: encodes whole items.
        alike: only items of the same shape share a launch, since padding could change the output of a shorter item.
        states: the states between two pieces; ``None``: the encoder hears whole items only.
        native: computes the layers; ``None``: torch computes them.
        stem: computes what is before the layers, see `SpeechEncoder.stem_program`.
    """

    model: TransformerModel
    family: Family | CrossedFamily | FrameFamily
    alike: bool = False
    states: EncoderStates | None = None
    native: Runner | None = None
    stem: Runner | None = None

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        """Encodes items, as `Network.encode` does."""
        found = {job.key: self._hear_on(job) for job in jobs if isinstance(job.payload, AudioPiece)}
        groups: dict[object, list[EncoderItem]] = {}
        for job in (job for job in jobs if job.key not in found):
            padded = self.alike and self.native is None
            shapes = [(name, tuple(one.shape)) for name, one in sorted(job.payload.items())] if padded else ()
            groups.setdefault(tuple(shapes), []).append(job)
        for group in groups.values():
            outputs = self.encode_all([job.payload for job in group])
            found.update(zip([job.key for job in group], outputs, strict=True))
        for job in jobs:
            length = len(found[job.key])
            assert length == job.embeddings, f"item {job.key!r} has {length} embeddings, not {job.embeddings}"
        return [found[job.key] for job in jobs]

    def encode_all(self, payloads: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Encodes the payloads of whole items."""
        if self.native is None:
            return self.family.encode(self.model.module, payloads)
        assert not isinstance(self.family, Family), "the library computes encoders of speech alone"
        encoder = known_encoder(self.family.encoder(self.model.module))
        assert not isinstance(encoder, str), f"the library computes an encoder although {encoder}"
        clips = [encoder.embed(payload, self._stem) for payload in payloads]
        lengths = list(map(len, clips))
        found = self.native.step(torch.cat(clips), Rows.all_of(*lengths))
        return [self.family.finished(self.model.module, rows) for rows in apart(torch.split(found, lengths))]

    def _stem(self, windows: Tensor) -> Tensor:
        assert self.stem is not None, "a program of layers has a stem"
        return self.stem.step(windows, Rows.all_of(len(windows)))

    def _hear_on(self, job: EncoderItem) -> Tensor:
        """Encodes an item that continues another, from the state after that one. No state is kept after the last
        piece."""
        piece = job.payload
        assert self.states is not None, "a piece is heard, but the encoder hears whole items"
        rows, state = hear_on(self.model.module, piece, self.states.take(piece.follows))
        if not piece.last:
            self.states.keep(job.key, state)
        return rows
