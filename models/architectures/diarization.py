"""Checkpoints of Nemotron 3 Diarization, a streaming Sortformer (Park et al. 2024; Medennikov et al. 2025): which of up
to eight speakers speak in each frame.

The model reads a recording chunk by chunk, each with some frames that come after it. It keeps the frames by which it
knows the speakers in a cache, and the latest frames in a queue. transformers' module computes a chunk and updates both.
Between two chunks they are on the host, and travel with the items. So each chunk is a request of its own, and memory
does not grow with the recording.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from ...core.errors import UnsupportedModel
from ...core.request import EncoderItem
from ..checkpoints.files import file_stamps
from ..checkpoints.loading import load_part, place_of
from ..checkpoints.modules import DecoderShape, ModuleCheckpoint
from ..checkpoints.settings import FileSettings
from ..machine.defaults import OwnDefaults
from .prompts import payload_key
from .text_checkpoint import check_float_weights, read_transformers_config

LOADER = "Nemotron3DiarizationForAudioFrameClassification"
_WHOLE = "offline"  # the mode in which transformers reads a recording at once
_KEPT = ("cache", "scores", "queue")  # in a payload: the cache, its probabilities, and the queue


@frozen(kw_only=True)
class DiarizerCheckpoint(ModuleCheckpoint):
    """The facts in a diarizer's files, apart from the weights. Implements `triolet.core.diarizing.FrameDiarizer`."""

    frame_samples: int
    speakers: int
    modes: Mapping[str, tuple[int, int, int, int]]
    """For each mode, in encoder frames: a chunk, what is read after it, the queue, and what leaves it at once."""
    extractor: Any = field(repr=False, eq=False)
    loaded: str = ""  # the identity of the weights, once they are loaded

    def read(self, mode: str, hear: Callable[[Any], object]) -> Generator[Any, Any, None]:
        size, ahead, queue, moved = self.modes[mode]
        config, hop, around = self.config, self.frame_samples, self.extractor.n_fft // 2
        factor, cached = config.audio_config.subsampling_factor, config.streaming_config.speaker_cache_length
        hidden, most = self.shape.hidden, (size + ahead) * factor  # spectra of a chunk, and after it
        first_shapes = (cached, hidden), (cached, self.speakers), (queue, hidden)
        kept = [torch.zeros(shape, dtype=torch.float32) for shape in first_shapes]
        counts = [0, 0, 0]
        for first in itertools.count(0, size * factor):
            start = max(first * hop - around, 0)
            length = (first + most - 1) * hop + around - start
            samples = yield start, length
            last = len(samples) < length
            left = (start + len(samples)) // hop - first if last else most
            if left < 1:
                break
            spectra = min(left + (last and mode == _WHOLE), most)  # the last one is masked
            frames = -(-spectra // factor)
            chunk = frames if last and mode != _WHOLE else min(size, frames)
            payload = {
                **self._features(np.pad(samples, (start + around - first * hop, 0)), spectra, last=last),
                "sizes": torch.tensor([frames - chunk, moved, *counts]),
                **dict(zip(_KEPT, kept, strict=True)),
            }
            shapes = [(3,), (min(chunk * factor, spectra), self.speakers), *(part.shape for part in kept)]
            sizes = [torch.Size(shape).numel() for shape in shapes]
            answer = yield self._item(payload, frames + counts[0] + counts[1], sum(sizes))
            numbers: Any = torch.tensor(answer, dtype=torch.float32)
            found, probabilities, *kept = map(torch.reshape, numbers.split(sizes), shapes)
            counts = list(map(int, found))
            hear(probabilities[:left].numpy())
            if last and chunk == frames:
                break
        yield None

    def _features(self, samples: Any, spectra: int, *, last: bool) -> dict[str, Tensor]:
        """Returns the spectra, padded to ``spectra`` with zeros that are masked."""
        rate = self.extractor.sampling_rate
        with OwnDefaults():
            made = self.extractor(samples, sampling_rate=rate, center=False, is_last_audio_chunk=last)
        made = made["input_features"][0]
        padding = max(spectra - len(made), 0)
        return {
            "spectra": nn.functional.pad(made[:spectra], (0, 0, 0, padding)),
            "mask": torch.arange(spectra) < spectra - padding,
        }

    def _item(self, payload: Mapping[str, Tensor], frames: int, numbers: int) -> EncoderItem:
        """Returns the item for the one token of a prompt. ``frames`` count for the size of encoder batches."""
        key = payload_key(self.loaded, payload)
        return EncoderItem(key=key, payload=payload, embeddings=frames, size=4 * numbers, spans=((0, 1),))


def read_diarizer_checkpoint(plain: FileSettings) -> DiarizerCheckpoint | None:
    """Reads everything but the weights of the checkpoint whose config.json is ``plain``; ``None``: it is no diarizer.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModel: the checkpoint asks for something that the engine does not do.
    """
    folder = plain.path.parent
    if plain.get("model_type") != "nemotron3_diarization" or plain.get("architectures") != [LOADER]:
        return None
    stamps, config = file_stamps(folder), read_transformers_config(plain)
    check_float_weights(plain)
    processor, streams = load_part("AutoProcessor", folder, trust_remote_code=False), config.streaming_config
    sizes = config.chunk_length, config.chunk_right_context, config.fifo_length, config.speaker_cache_update_period
    modes = {_WHOLE: sizes}
    for name, (chunk, ahead) in processor.streaming_modes.items():
        modes[name] = chunk, ahead, streams.fifo_length, streams.speaker_cache_update_period
    if config.chunk_left_context or any(chunk < 1 or ahead < 0 for chunk, ahead, *_ in modes.values()):
        raise UnsupportedModel(
            f"{folder} has chunk_left_context={config.chunk_left_context} and the modes {modes}; allowed: 0, and "
            "chunks of one frame or more"
        )
    hidden = config.audio_config.hidden_size
    return DiarizerCheckpoint(
        folder=folder,
        architecture=LOADER,
        tokenizer=None,
        eos_token_ids=(),
        stamps=stamps,
        config=config,
        shape=DecoderShape(layers=0, kv_heads=1, head_dim=1, hidden=hidden, vocabulary=1, positions=1),
        allowed="Nemotron 3 Diarization",
        frame_samples=processor.feature_extractor.hop_length,
        speakers=config.head_config.num_speakers,
        modes=modes,
        extractor=processor.feature_extractor,
    )


def diarize_chunk(module: nn.Module, payload: Mapping[str, Tensor]) -> Tensor:
    """Returns the answer to one chunk, float32 [1, numbers]: the frames in cache and queue, and whether the cache is
    compressed; the probabilities of the chunk's frames; and cache, its probabilities and queue."""
    from transformers.models.nemotron3_diarization import modeling_nemotron3_diarization as transformers

    (device, dtype), ahead, moved = place_of(module), *payload["sizes"].tolist()[:2]
    model: Any = module
    make: Any = transformers.Nemotron3DiarizationSpeakerCache
    state = make(model.config.streaming_config, len(payload["queue"]), moved)
    state.num_cache_frames, state.num_fifo_frames, state.is_compressed = payload["sizes"].tolist()[2:]
    state.embeds, state.probs, state.fifo = (payload[name].to(device, dtype, copy=True)[None] for name in _KEPT)
    state.is_initialized = True
    found = model(
        input_features=payload["spectra"].to(device, dtype)[None],
        attention_mask=payload["mask"].to(device)[None],
        speaker_cache=state,
        num_lookahead_frames=ahead,
    )
    counts = [state.num_cache_frames, state.num_fifo_frames, state.is_compressed]
    parts = (torch.tensor(counts, device=device), found.logits.float().sigmoid(), state.embeds, state.probs, state.fifo)
    return torch.cat([part.float().flatten() for part in parts])[None]
