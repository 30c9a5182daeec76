"""The models that write in step with the audio, as transformers computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from attrs import field, frozen

from triolet import EngineConfig
from triolet.api.inputs.audio import Samples

NAMES = ("voxtral_realtime", "kyutai_speech_to_text")
SCARCE = EngineConfig(  # pages for less than two long sequences, steps shorter than prompts, room for two encodings
    device="cpu",
    dtype="float32",
    verify=True,
    page_size=4,
    self_kv_bytes=34 * 2 * 2 * 2 * 12 * 4 * 4,
    max_positions=128,
    encoder_cache_bytes=2 * 70 * 48 * 4,
    max_step_tokens=5,
)
SILENCE, DELAY = 3, 2  # of the tiny checkpoints, in positions


@frozen(kw_only=True, eq=False)
class Reference:
    """transformers' own model and feature extractor of a tiny checkpoint. A position has ``step`` samples, and the
    silence around an audio takes ``around`` positions, and the first token is ``lead`` positions ahead of it."""

    name: str
    folder: Path
    module: Any
    tokenizer: Any
    extractor: Any
    step: int
    around: int
    lead: int
    known: dict[bytes, tuple[int, ...]] = field(factory=dict)

    @classmethod
    def of(cls, name: str, folder: Path) -> Reference:
        """Reads a checkpoint."""
        paced = name == "voxtral_realtime"
        named = "VoxtralRealtime" if paced else "KyutaiSpeechToText"
        return cls(
            name=name,
            folder=folder,
            module=getattr(transformers, f"{named}ForConditionalGeneration").from_pretrained(folder).eval(),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            extractor=transformers.AutoFeatureExtractor.from_pretrained(folder),
            step=1_280 if paced else 1_920,
            around=SILENCE + DELAY + (11 if paced else 14),  # a second, and a position without audio
            lead=0 if paced else SILENCE + DELAY + 3,  # two positions are heard twice
        )

    @property
    def rate(self) -> int:
        """The sampling rate."""
        return int(self.extractor.sampling_rate)

    def positions(self, samples: int) -> int:
        """Returns the number of positions with which so many samples are encoded."""
        if self.name == "voxtral_realtime":
            return -(-samples // self.step) + self.around
        return (samples + (SILENCE + DELAY) * self.step + self.rate) // self.step

    def tokens(self, samples: Samples) -> tuple[int, ...]:
        """Returns what the model generates of an utterance, up to the end of text."""
        if (key := samples.tobytes()) not in self.known:
            self.known[key] = self._generated(samples)
        return self.known[key]

    def _generated(self, samples: Samples) -> tuple[int, ...]:
        rate, padded, prompt = self.rate, samples, None
        options: dict[str, Any] = {"do_sample": False}
        if self.name == "voxtral_realtime":
            pads = [self.tokenizer.convert_tokens_to_ids("[STREAMING_PAD]")] * (SILENCE + DELAY)
            prompt = torch.tensor([[self.tokenizer.bos_token_id, *pads]])
            padded = np.pad(samples, (SILENCE * self.step, -len(samples) % self.step + (DELAY + 11) * self.step))
            options |= {"input_ids": prompt, "num_delay_tokens": DELAY, "max_new_tokens": 999}  # the audio ends it
        with torch.inference_mode():
            found = self.module.generate(**self.extractor(padded, sampling_rate=rate, return_tensors="pt"), **options)
        tokens = found[0, 1 if prompt is None else prompt.shape[1] :].tolist()
        ends = self.module.generation_config.eos_token_id
        return tuple(tokens[: tokens.index(ends)] if ends in tokens else tokens)
