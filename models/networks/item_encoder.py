"""`ItemEncoder`: the encoder of a model whose items are whole, or pieces of an audio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from ...core.request import EncoderItem
from ..architectures.crossed_family import CrossedFamily
from ..architectures.family import Family
from ..architectures.frame_family import FrameFamily
from ..architectures.streamed_encoder import AudioPiece, hear_on
from ..checkpoints.loading import apart, place_of, placed
from ..memory.encoder_states import MOST_STATES, EncoderStates
from ..memory.module import TransformerModel
from ..memory.rows import Rows
from ..native.runner import Runner
from ..native.speech_encoders import Tails, known_encoder
from ..native.towers import known_tower


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
        pieces = [job for job in jobs if isinstance(job.payload, AudioPiece)]
        hear = self._hear_each if self.native is None else self._hear_together
        parts = [pieces[start : start + MOST_STATES] for start in range(0, len(pieces), MOST_STATES)]
        found = {job.key: rows for part in parts for job, rows in zip(part, hear(part), strict=True)}
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
        tower = known_tower(self.model.module) if isinstance(self.family, Family) else ""
        if not isinstance(tower, str) and tower.packed:
            with tower.computed():
                return [rows for payload in payloads for rows in self.family.encode(self.model.module, [payload])]
        if self.native is None:
            return self.family.encode(self.model.module, payloads)
        encoder, (family, module) = self._speech(), self._parts
        _, own = place_of(module)
        clips = [encoder.embed(family.fresh(module, placed(module, payload)), self._stem) for payload in payloads]
        lengths = list(map(len, clips))
        fed, every = torch.cat(clips), Rows.all_of(*lengths)
        found = self.native.step(fed.float() if fed.is_floating_point() else fed.tolist(), every).to(own)
        heard = zip(torch.split(found, lengths), payloads, strict=True)
        return apart([family.finished(module, rows, payload) for rows, payload in heard])

    @property
    def _parts(self) -> tuple[CrossedFamily | FrameFamily, Any]:
        assert not isinstance(self.family, Family), "the library computes encoders of speech alone"
        return self.family, self.model.module

    def _speech(self) -> Any:
        """Returns the encoder that the library computes."""
        family, module = self._parts
        encoder = known_encoder(family.encoder(module))
        assert not isinstance(encoder, str), f"the library computes an encoder although {encoder}"
        return encoder

    def _stem(self, windows: Tensor) -> Tensor:
        assert self.stem is not None, "a program of layers has a stem"
        return self.stem.step(windows.float(), Rows.all_of(len(windows))).to(windows.dtype)

    def _hear_each(self, jobs: Sequence[EncoderItem]) -> Iterator[Tensor]:
        """Encodes items that continue others, from the states after those. No state is kept after the last piece."""
        for job in jobs:
            assert self.states is not None, "a piece is heard, but the encoder hears whole items"
            rows, state = hear_on(self.model.module, job.payload, self.states.take(job.payload.follows))
            self._keep(job, state)
            yield rows

    def _hear_together(self, jobs: Sequence[EncoderItem]) -> Iterator[Tensor]:
        """Does what `_hear_each` does, by the library: the pieces of several audios in one call."""
        assert self.states is not None, "a piece is heard, but the encoder hears whole items"
        assert self.native is not None, "the library computes the encoder"
        encoder, native, (family, module) = self._speech(), self.native, self._parts
        states: list[dict[str, Any]] = [
            dict(self.states.take(job.payload.follows))
            or {"rows": native.new_state(), "frames": 0, "hops": 0, "padding_cache": Tails()}
            for job in jobs
        ]
        heard, (_, own) = [list[Tensor]() for _ in jobs], place_of(module)
        while left := [index for index, job in enumerate(jobs) if states[index]["hops"] < job.payload.stop]:
            pieces = [_next(jobs[index].payload, states[index], native) for index in left]
            clips = [encoder.hear_on(features.to(own), tails, self._stem) for features, tails in pieces]
            kept = [min(states[index]["frames"], native.kept) for index in left]
            rows = Rows.all_of(*map(len, clips))
            chunks = [(len(clip), 0, 0, count) for clip, count in zip(clips, kept, strict=True)]
            rows = evolve(rows, chunks=chunks, states=[states[index]["rows"] for index in left])
            found = native.step(torch.cat(clips).float(), rows).to(own)
            for index, part in zip(left, torch.split(found, list(map(len, clips))), strict=True):
                states[index]["frames"] += len(part)
                heard[index].append(part)
        for job, state, parts in zip(jobs, states, heard, strict=True):
            self._keep(job, state)
            yield family.finished(module, torch.cat(parts)[-job.payload.frames :], job.payload.inputs).clone()

    def _keep(self, job: EncoderItem, state: Mapping[str, Any]) -> None:
        if self.states is not None and not job.payload.last:
            self.states.keep(job.key, state)


def _next(piece: AudioPiece, state: dict[str, Any], native: Runner) -> tuple[Tensor, Tails]:
    """Returns the next spectra of a piece that one call may hear, and the ends of those before."""
    assert piece.chunks.ahead + 1 == native.block, f"chunks of {piece.chunks.ahead + 1} frames, not {native.block}"
    start = state["hops"]
    *_, stop = islice(piece.chunks.ends(start, piece.stop), native.rows // native.block)
    state["hops"] = stop
    return piece.features[start:stop], state["padding_cache"]
