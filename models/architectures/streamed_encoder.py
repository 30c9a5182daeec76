"""Encoders that hear audio piece by piece: how pieces are made, and how one is heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from ..checkpoints.loading import place_of
from ..machine.defaults import OwnDefaults

Caches = Mapping[str, Any]
"""The caches of a causal encoder, by the names of its arguments."""


@frozen(kw_only=True)
class Chunks:
    """The chunks in which a causal encoder hears. A chunk has as many frames as a frame sees at most: itself and
    ``ahead`` later ones.

    Args:
        factor: the hops of one frame.
        ahead: the later frames that a frame sees.
        lacks: the hops that the first frame of an audio has less than the others.
        together: the most chunks of one call.
    """

    factor: int
    ahead: int = 0
    lacks: int = 0
    together: int = 1

    @property
    def hops(self) -> int:
        """The hops of one chunk."""
        return self.factor * (self.ahead + 1)

    def frames(self, hops: int) -> int:
        """Returns the number of frames of the whole chunks that the first ``hops`` spectra are."""
        return (hops + self.lacks) // self.factor

    def ends(self, first: int, stop: int, *, last: bool = False) -> Iterator[int]:
        """Yields the ends, in hops, of the chunks between hop ``first``, where a chunk begins, and ``stop``.

        Args:
            last: the chunk in which ``stop`` lies is among them.
        """
        while first < stop:
            end = first + self.hops - (0 if first else self.lacks)
            if end > stop and not last:
                return
            yield end
            first = end


@frozen(kw_only=True, eq=False)
class AudioPiece:
    """The payload of an encoder item that continues another. It has all of the audio, so that it can be encoded without
    the memory of what came before.

    Args:
        features: the spectra from the beginning of the audio to the end of the piece or later, float32 [hops, bands].
            The pieces of one request share them.
        first: the first hop of the piece.
        stop: the hop after the last one.
        follows: the key of the item before; "": the piece is the first one.
        last: no piece follows.
        inputs: further inputs of the encoder.
        chunks: the chunks of the encoder.
    """

    features: Tensor = field(repr=False)
    first: int
    stop: int
    follows: str
    last: bool
    inputs: Mapping[str, Tensor]
    chunks: Chunks

    @property
    def frames(self) -> int:
        """The number of frames of the piece."""
        return self.chunks.frames(self.stop) - self.chunks.frames(self.first)


_AROUND = 4  # spectra before the new ones that are computed again: the first see silence in place of the audio before


@frozen(kw_only=True)
class Pieces:
    """Makes the pieces of an audio that comes bit by bit, for a causal encoder.

    Args:
        read: the spectra of samples, "input_features" [hops, bands], and the further inputs of the encoder.
        hop: the samples from one spectrum to the next.
        reach: the samples after a spectrum's place that it sees.
        chunks: the chunks of the encoder.
        most: the most frames of a piece.
    """

    read: Callable[[Any], Mapping[str, Tensor]] = field(repr=False)
    hop: int
    reach: int
    chunks: Chunks
    most: int

    def next(self, samples: Any, before: AudioPiece | None, follows: str, *, last: bool) -> AudioPiece | None:
        """Returns the next piece: all whole chunks of ``samples`` that are new, but no more than ``most`` frames. With
        ``last``, silence fills the last chunk up. ``None``: there is none."""
        first, chunks = 0 if before is None else before.stop, self.chunks
        whole = len(samples) // self.hop if last else (len(samples) - self.reach) // self.hop + 1
        most = chunks.frames(first) + self.most
        ends = [end for end in chunks.ends(first, whole, last=last) if chunks.frames(end) <= most]
        if not ends:
            return None
        again, end = min(first, _AROUND), ends[-1]
        heard = samples[(first - again) * self.hop :]
        with OwnDefaults():
            made = dict(self.read(np.pad(heard, (0, max((end + 1) * self.hop + self.reach - len(samples), 0)))))
        made.pop("attention_mask", None)
        spectra = made.pop("input_features")[again : again + end - first]
        known = spectra if before is None else torch.cat((before.features, spectra))
        ended = last and end >= whole
        return AudioPiece(
            features=known, first=first, stop=end, follows=follows, last=ended, inputs=made, chunks=chunks
        )


def hear_on(module: Any, piece: AudioPiece, state: Caches) -> tuple[Tensor, Caches]:
    """Hears ``piece``, some chunks in one call.

    Args:
        state: the caches after the audio before, which are changed; empty: all is heard from the beginning.

    Returns:
        The frames of the piece, [frames, width] in storage of their own, and the caches.
    """
    device, own = place_of(module)
    inputs: dict[str, Any] = {name: tensor[None].to(device) for name, tensor in piece.inputs.items()}
    if "num_lookahead_tokens" in inputs:
        inputs["num_lookahead_tokens"] = int(inputs["num_lookahead_tokens"])
    start, rows, together = piece.first if state else 0, list[Tensor](), piece.chunks.together
    *ends, final = piece.chunks.ends(start, piece.stop)
    for stop in (*ends[together - 1 :: together], final):
        features = piece.features[None, start:stop].to(device, own)
        with torch.no_grad():
            heard = module.get_audio_features(features, use_cache=True, **inputs, **state)
        state = {"past_key_values": heard.past_key_values, "padding_cache": heard.padding_cache}
        if stop > piece.first:
            rows.append(heard.pooler_output[0])
        start = stop
    return torch.cat(rows)[-piece.frames :].clone(), state
