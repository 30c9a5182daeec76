"""Transducers with causal encoders as `StreamingModel`: live audio is heard piece by piece, each piece once."""

from __future__ import annotations

import hashlib
from typing import Any

from attrs import evolve, frozen

from ...core.model import ModelDescription
from ...core.request import EncoderItem, LogitRules
from ...core.speech import Draft, Sound
from ..architectures.streamed import AudioPiece, Pieces
from .frames import FrameSpeech


@frozen(kw_only=True, slots=False)
class StreamedSpeech(FrameSpeech):
    """A transducer that hears on where it was. An item has the frames of one piece; the request of a piece begins with
    the tokens of all pieces before, which the prediction network reads again."""

    @property
    def _pieces(self) -> Pieces:
        pieces = self._preparer.pieces
        assert pieces is not None, "a causal encoder hears pieces"
        return pieces

    def hear_on(self, samples: Any, before: Sound | None, language: str | None, *, last: bool) -> Sound | None:
        """Returns the next piece, as many whole chunks of the encoder as are new; with ``last``, silence fills the last
        chunk up."""
        known = None if before is None else before.item
        payload, follows = (None, "") if known is None else (known.payload, known.key)
        piece = self._pieces.next(samples, payload, follows, last=last)
        if piece is None:
            return None
        piece = evolve(piece, inputs=self._preparer.in_language(piece.inputs, language))
        frames = self._pieces.frames(len(piece.features)) - self._pieces.frames(piece.first)
        settings = self._preparer.settings
        item = EncoderItem(
            key=_key(settings.identity, piece),
            payload=piece,
            embeddings=frames,
            size=frames * settings.embedding_bytes,
        )
        return Sound(samples=samples, item=item)

    def draft_on(self, sound: Sound, written: tuple[int, ...]) -> Draft:
        """Returns the draft of the text of a piece."""
        start = self._preparer.begin(())
        most = self.model.max_positions - len(start) - len(written)
        return Draft(token_ids=(*start, *written), items=(sound.item,), rules=LogitRules(), max_tokens=most)


def frame_speech(description: ModelDescription, checkpoint: Any) -> FrameSpeech:  # noqa: ARG001  (see `known.Make`)
    """Returns the speech model of a CTC model or transducer."""
    found = FrameSpeech(model=description)
    return StreamedSpeech(model=description) if found.facts.piece_samples else found


def _key(identity: str, piece: AudioPiece) -> str:
    """Returns the key of a piece: a hash of the key before it and of what is new."""
    digest = hashlib.blake2b(repr((identity, piece.follows, piece.first)).encode(), digest_size=16)
    for name, tensor in sorted(piece.inputs.items()):
        digest.update(f"{name} {tensor.tolist()}".encode())
    digest.update(piece.features[piece.first :].contiguous().numpy().data)
    return digest.hexdigest()
