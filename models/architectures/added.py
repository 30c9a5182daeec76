"""Speech models that write in step with the audio: at each position, an embedding of the audio is added to that of the
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from ...core.errors import CheckpointError, InvalidRequest
from ..checkpoints.loading import load_part, place_of
from ..checkpoints.parts import Find
from ..checkpoints.settings import Settings
from .heard import HeardAudio
from .prompts import Read
from .streamed import Chunks, Pieces

_PAD = "[STREAMING_PAD]"
_WORD = 10  # positions after the audio in which its last word is written, as in mistral_common
_MOST_SECONDS = 120  # the memory of the encoder's attention grows with the square of the length
_TOGETHER = 64  # positions that are encoded in one call where audio is heard piece by piece


@frozen(kw_only=True)
class Pace:
    """The steps in which a checkpoint hears and writes, by the section "audio" of its tekken.json."""

    step: int  # samples of one position
    silence: int  # positions before the audio
    delay: int  # positions by which the text is behind the audio

    @property
    def flush(self) -> int:
        """The positions of silence after the audio, in which the rest of the text is written."""
        return self.delay + 1 + _WORD

    @classmethod
    def read(cls, folder: Path) -> Pace:
        """Reads the file in ``folder``. Raises `CheckpointError` if it is missing or wrong."""
        path = folder / "tekken.json"
        whole = Settings.read_if_there(path)
        if whole is None:
            raise CheckpointError(f"{folder} has no tekken.json, which has the delay of the text; download it")
        audio = Settings(path, whole.table("audio"))
        rate, milliseconds = audio.get("frame_rate"), audio.whole("transcription_delay_ms")
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
            raise audio.bad("frame_rate", "a number above 0")
        if milliseconds * rate % 1000:
            raise audio.bad("transcription_delay_ms", f"a multiple of {1000 / rate:g}, one position")
        return cls(
            step=int(audio.whole("sampling_rate") // rate),
            silence=audio.whole("streaming_n_left_pad_tokens", least=0),
            delay=int(milliseconds * rate // 1000),
        )


@frozen(kw_only=True)
class AddedFeatures:
    """Makes the features of audio between two stretches of silence.

    Args:
        extractor: transformers' own.
        positions: those of the model.
        step: the samples of one position.
        hop: the samples from one row of the features to the next.
        reach: the samples after a row's place that it sees.
        around: the positions of the silence before and after the audio.
        begins: the tokens of padding in the prompt.
        lead: the positions by which the first token after the prompt is earlier than the audio.
    """

    extractor: Any = field(repr=False)
    positions: int
    step: int
    hop: int
    reach: int
    around: int
    begins: int
    lead: int = 0

    @property
    def sampling_rate(self) -> int:
        """The sampling rate of the audio, in Hz."""
        return int(self.extractor.sampling_rate)

    @property
    def longest(self) -> int:
        """The most samples of one audio."""
        return min(_MOST_SECONDS * self.sampling_rate, (self.positions - self.around) * self.step)

    @property
    def pieces(self) -> Pieces:
        """Makes the pieces of audio that is `padded`."""
        chunks = Chunks(factor=self.step // self.hop, together=_TOGETHER)
        most = max(_TOGETHER, self.begins + 2)
        return Pieces(read=self.spectra, hop=self.hop, reach=self.reach, chunks=chunks, most=most)

    def to_json_string(self) -> str:
        """All that the features depend on, as text."""
        return f"{self.extractor.to_json_string()}{self}"

    def __call__(self, samples: np.ndarray[Any, Any]) -> tuple[Tensor, int]:
        """Returns the features [1, rows, values] of samples [n], and how many positions they have."""
        padded = self.padded(samples, last=True)
        return self.spectra(padded)["input_features"][None], len(padded) // self.step

    def padded(self, samples: np.ndarray[Any, Any], *, last: bool) -> np.ndarray[Any, Any]:
        """Returns samples [n] after the silence with which an audio begins; ``last``: with the silence at its end."""
        raise NotImplementedError

    def spectra(self, samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """Returns the "input_features" [rows, values] of samples [n] that are `padded`."""
        raise NotImplementedError


@frozen(kw_only=True)
class PacedFeatures(AddedFeatures):
    """The features of a Voxtral Realtime."""

    pace: Pace

    def padded(self, samples: np.ndarray[Any, Any], *, last: bool) -> np.ndarray[Any, Any]:
        pace = self.pace
        after = -len(samples) % pace.step + pace.flush * pace.step if last else 0
        return np.pad(samples, (pace.silence * pace.step, after))

    def spectra(self, samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        made = self.extractor(samples, sampling_rate=self.sampling_rate, return_tensors="pt")
        return {"input_features": made["input_features"][0].T.contiguous()}


@frozen(kw_only=True)
class AddedAudio(HeardAudio):
    """A model whose transformers class adds the embeddings of the audio to those of the tokens."""

    added: bool = True

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes the items one by one, since the encoder has no mask for the padding of shorter ones."""
        encode = super().encode
        return [encode(module, [payload])[0] for payload in payloads]

    def read(self, processor: Any, config: Any, token: str, item: np.ndarray[Any, Any]) -> Read:  # noqa: ARG002
        if not 1 <= len(item) <= processor.longest:
            raise InvalidRequest(
                f"the audio has {len(item)} samples; allowed: 1 to {processor.longest}, at "
                f"{processor.sampling_rate} Hz. Cut longer audio into pieces"
            )
        made, positions = processor(item)
        payload = {"input_features": made, "embeddings": torch.tensor(positions)}
        return Read(payload=payload, text=token * processor.begins, embeddings=positions)


@frozen(kw_only=True)
class VoxtralRealtime(AddedAudio):
    """Voxtral Realtime: a position for each 80 ms, with text that is some positions behind the audio. The prompt is
    silence, and as much audio as the text is behind."""

    architecture: str = "VoxtralRealtimeForConditionalGeneration"
    options: Mapping[str, Any] = field(factory=lambda: {"use_cache": False})

    def load(self, folder: Path, dtype: torch.dtype, *, without: Find | None = None) -> nn.Module:
        module = super().load(folder, dtype, without=without)
        return PacedModel(module, Pace.read(folder).delay).eval()

    def processor(self, folder: Path, config: Any) -> Any:
        extractor, pace = load_part("AutoFeatureExtractor", folder, trust_remote_code=False), Pace.read(folder)
        if pace.step != extractor.hop_length * config.audio_length_per_tok:
            raise CheckpointError(
                f"tekken.json of {folder} has positions of {pace.step} samples; config.json and the feature extractor "
                f"ask for {extractor.hop_length * config.audio_length_per_tok}"
            )
        return PacedFeatures(
            pace=pace,
            extractor=extractor,
            positions=config.text_config.max_position_embeddings,
            step=pace.step,
            hop=int(extractor.hop_length),
            reach=int(extractor.n_fft) // 2,
            around=pace.silence + pace.flush,
            begins=pace.silence + pace.delay,
        )

    def state_bytes(self, config: Any, dtype: torch.dtype) -> int:
        audio = config.audio_config
        of_a_layer = 2 * audio.num_key_value_heads * audio.head_dim * (audio.sliding_window - 1)
        numbers = audio.num_hidden_layers * of_a_layer + 2 * audio.num_mel_bins + audio.hidden_size
        return int(numbers) * dtype.itemsize

    def placeholder(self, tokenizer: Any, config: Any) -> int:  # noqa: ARG002
        found = tokenizer.get_vocab().get(_PAD)
        if found is None or tokenizer.bos_token is None:
            raise CheckpointError(f"the tokenizer has no {_PAD} or no bos_token; download the checkpoint again")
        return int(found)

    def start(self, processor: PacedFeatures, tokenizer: Any, placeholder: int) -> tuple[int, ...]:
        return (tokenizer.bos_token_id, *[placeholder] * processor.begins)


class AddedModel(nn.Module):
    """The parts of a loaded model that the engine runs. transformers' own class refuses to run without audio, which the
    engine adds.

    Args:
        module: the model as transformers loads it.
        language: the name of the language model in it.
        encoder: the parts that encode, if they are not in ``module.model``.
    """

    def __init__(self, module: Any, language: str, **encoder: nn.Module) -> None:
        super().__init__()
        for name, part in encoder.items():
            self.add_module(name, part)  # first, since audio is read in the dtype of the first weight
        self.model, self.config, self._language = module.model, module.config, language
        if hasattr(module, "lm_head"):  # else it is the encoder alone
            self.lm_head = module.lm_head

    @property
    def base_model(self) -> nn.Module:
        """The language model without its head."""
        return self.get_submodule(self._language)

    def get_input_embeddings(self) -> nn.Module:
        """The embeddings of the tokens."""
        part: nn.Module = self.model.get_input_embeddings()
        return part

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        part: nn.Module = self.lm_head
        return part

    def get_audio_features(self, input_features: Tensor, **inputs: Any) -> Any:
        """Encodes features [1, rows, values], as transformers' class does."""
        return self.model.get_audio_features(input_features.transpose(1, 2), **inputs)

    def forward(self, input_ids: Tensor | None = None, logits_to_keep: Any = slice(None), **inputs: Any) -> Any:
        """Returns the ``logits`` of the rows ``logits_to_keep``."""
        hidden = self.base_model(input_ids, **inputs).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden[:, logits_to_keep]))


class PacedModel(AddedModel):
    """A Voxtral Realtime, whose language model also reads by how many positions text is behind."""

    def __init__(self, module: Any, delay: int) -> None:
        super().__init__(module, "model.language_model")
        device, dtype = place_of(module)
        with torch.no_grad():
            condition = module.model.time_embedding(torch.full((1,), delay, device=device, dtype=dtype))[None]
        del self.model.time_embedding
        if hasattr(self, "lm_head"):
            language = self.base_model
            language.register_buffer("condition", condition, persistent=False)
            language.register_forward_pre_hook(_conditioned, with_kwargs=True)


def _conditioned(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**inputs, "t_cond": module.condition.clone()}  # compiled code keeps its first inputs
