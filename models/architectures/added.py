"""Speech models that write in step with the audio: at each position, an embedding of the audio is added to that of the
token. The encoder of one of them is a codec: a position of audio is the sum of the embeddings of its codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn

from ...core.errors import CheckpointError
from ..checkpoints.loading import load_part, place_of
from ..checkpoints.settings import FileSettings
from ..checkpoints.turns import TURNS
from ..machine.defaults import OURS
from .heard import HeardAudio, check_samples
from .prompts import ReadItem
from .streamed_encoder import Chunks, Pieces

_PAD = "[STREAMING_PAD]"
_WORD = 10  # positions after the audio in which its last word is written, as in mistral_common
_MOST_SECONDS = 120  # the memory of the encoder's attention grows with the square of the length
_TOGETHER = 64  # positions that are encoded in one call where audio is heard piece by piece


@frozen(kw_only=True)
class AudioPace:
    """The steps in which a checkpoint hears and writes, by the section "audio" of its tekken.json."""

    step: int  # samples of one position
    silence: int  # positions before the audio
    delay: int  # positions by which the text is behind the audio

    @property
    def flush(self) -> int:
        """The positions of silence after the audio, in which the rest of the text is written."""
        return self.delay + 1 + _WORD

    @classmethod
    def read(cls, folder: Path) -> AudioPace:
        """Reads the file in ``folder``. Raises `CheckpointError` if it is missing or wrong."""
        path = folder / "tekken.json"
        whole = FileSettings.read_if_there(path)
        if whole is None:
            raise CheckpointError(f"{folder} has no tekken.json, which has the delay of the text; download it")
        audio = FileSettings(path, whole.table("audio"))
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

    pace: AudioPace

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
    alone: bool = True

    def read(self, processor: Any, config: Any, token: str, item: np.ndarray[Any, Any]) -> ReadItem:  # noqa: ARG002
        check_samples(item, processor.sampling_rate, most=processor.longest)
        made, positions = processor(item)
        payload = {"input_features": made, "embeddings": torch.tensor(positions)}
        return ReadItem(payload=payload, text=token * processor.begins, embeddings=positions)


@frozen(kw_only=True)
class VoxtralRealtime(AddedAudio):
    """Voxtral Realtime: a position for each 80 ms, with text that is some positions behind the audio. The prompt is
    silence, and as much audio as the text is behind."""

    architecture: str = "VoxtralRealtimeForConditionalGeneration"
    options: Mapping[str, Any] = field(factory=lambda: {"use_cache": False})

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        module = super().load(folder, dtype)
        return PacedModel(module, AudioPace.read(folder).delay).eval()

    def processor(self, folder: Path, config: Any) -> Any:
        extractor, pace = load_part("AutoFeatureExtractor", folder, trust_remote_code=False), AudioPace.read(folder)
        if pace.step != extractor.hop_length * config.audio_length_per_tok:
            raise CheckpointError(
                f"tekken.json of {folder} has positions of {pace.step} samples; config.json and the feature extractor "
                f"ask for {extractor.hop_length * config.audio_length_per_tok}; download the checkpoint again"
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
        language = self.base_model
        language.register_buffer("condition", condition, persistent=False)
        language.register_forward_pre_hook(_conditioned, with_kwargs=True)


def _conditioned(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**inputs, "t_cond": module.condition}


# -- the codec ---------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class CodedFeatures(AddedFeatures):
    """Makes the frames of samples that the codec hears: first one that stands for no audio.

    Args:
        again: the frames at the beginning that are heard twice, which is how transformers begins where its
            ``audio_window_size`` is set.
        before: the samples of silence before the audio.
        after: those after it.
        first: the token of the first position. It need not be in the vocabulary.
    """

    again: int
    before: int
    after: int
    first: int

    def padded(self, samples: np.ndarray[Any, Any], *, last: bool) -> np.ndarray[Any, Any]:
        frames = (self.before + len(samples) + self.after) // self.step  # transformers' limit, whatever is heard twice
        heard = np.pad(samples, (self.before, self.after if last else 0))
        twice = heard[: self.again * self.step]
        if not last and len(twice) < self.again * self.step:
            return samples[:0]  # the beginning is not known yet
        return np.concatenate((np.zeros(self.step, np.float32), twice, heard))[: (frames + 1) * self.step]

    def spectra(self, samples: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        whole = samples[: len(samples) // self.step * self.step]
        return {"input_features": torch.from_numpy(whole.reshape(-1, self.step))}


@frozen(kw_only=True)
class KyutaiSpeech(AddedAudio):
    """Kyutai STT (Zeghidour et al. 2025): a position for each 80 ms, with text that is some positions behind the audio.
    The prompt is one token, and the text ends with the audio. transformers' cache makes its attention one of sliding
    windows, although its mask does not."""

    architecture: str = "KyutaiSpeechToTextForConditionalGeneration"
    language: str = "model"
    left_out: str = "codec_model.decoder"  # makes sound

    def load(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        module = super().load(folder, dtype)
        config: Any = module.config
        first, codebooks = _generation(folder, "bos_token_id", config.bos_token_id), config.codec_config.num_quantizers
        tokens = config.vocab_size + config.num_codebooks * config.codebook_vocab_size
        if codebooks != config.num_codebooks or first > tokens:
            raise CheckpointError(
                f"{folder} has {codebooks} codebooks and bos_token_id={first}; allowed: {config.num_codebooks}, and up "
                f"to {tokens}, by the sizes in config.json. Download the checkpoint again"
            )
        return CodedModel(module, first).eval()

    def buffer_bytes(self, config: Any, dtype: torch.dtype) -> int:
        with TURNS.making(OURS):
            from transformers import AutoModel

            make: Any = AutoModel  # transformers has no types for it
            codec = make.from_config(config.codec_config)
        del codec.decoder
        stored = sum(tensor.numel() for tensor in codec.state_dict().values())
        held = sum(tensor.nbytes for tensor in (*codec.parameters(), *codec.buffers()))
        return int(held - stored * dtype.itemsize)

    def processor(self, folder: Path, config: Any) -> Any:
        extractor, step = load_part("AutoFeatureExtractor", folder, trust_remote_code=False), config.frame_size
        again = _generation(folder, "audio_window_size", 0)
        before = int(extractor.audio_silence_prefix_seconds * extractor.sampling_rate)
        delay = extractor.audio_delay_seconds * extractor.sampling_rate
        after = int((extractor.audio_delay_seconds + 1.0) * extractor.sampling_rate)
        return CodedFeatures(
            extractor=extractor,
            positions=config.max_position_embeddings,
            step=step,
            hop=step,
            reach=step,
            around=1 - (before + after) // -step,
            begins=1,
            lead=1 + again + round((before + delay) / step),
            again=again,
            before=before,
            after=after,
            first=_generation(folder, "bos_token_id", config.bos_token_id),
        )

    def state_bytes(self, config: Any, dtype: torch.dtype) -> int:  # noqa: ARG002
        """The most bytes of Mimi's state, float32: keys and values, and the ends of what its convolutions read."""
        codec = config.codec_config
        of_a_layer = 2 * codec.num_key_value_heads * codec.head_dim * (codec.sliding_window - 1)
        width, ends = codec.num_filters, codec.kernel_size - 1 + 2 * codec.hidden_size
        for ratio in reversed(codec.upsampling_ratios):
            grown = sum(codec.dilation_growth_rate**layer for layer in range(codec.num_residual_layers))
            ends += width * ((codec.residual_kernel_size - 1) * grown + ratio)
            width *= 2
        return 4 * int(codec.num_hidden_layers * of_a_layer + ends + width * (codec.last_kernel_size - 1))

    def placeholder(self, tokenizer: Any, config: Any) -> int:  # noqa: ARG002
        return int(config.pad_token_id)

    def start(self, processor: CodedFeatures, tokenizer: Any, placeholder: int) -> tuple[int, ...]:  # noqa: ARG002
        """Returns padding, from which the encoder output makes the first token (see `CodedModel`)."""
        return (placeholder,)


class CodedModel(AddedModel):
    """The parts of a loaded Kyutai STT. Its table of embeddings is cut into those of tokens and those of codes.

    Args:
        first: the token of the first position. transformers finds its embedding anywhere in the table, also among those
            of codes.
    """

    codes: nn.Embedding
    offsets: Tensor
    begin: Tensor

    def __init__(self, module: Any, first: int) -> None:
        config, table = module.config, module.model.embed_tokens.embed_tokens.weight.detach()
        codes = _embedding(table[config.vocab_size :])
        super().__init__(module, "model", codec_model=module.codec_model, codes=codes)
        config.codec_config = None  # else transformers would set, with a warning, our attention for the codec
        offsets = torch.arange(config.num_codebooks) * config.codebook_vocab_size
        begin = table[offsets + config.vocab_size + config.audio_bos_token_id].sum(0)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("begin", (begin + table[first] - table[config.pad_token_id])[None], persistent=False)
        for part in module.codec_model.modules():
            _settle(part)
        self.model.embed_tokens = _embedding(table[: config.vocab_size])
        self.model.register_forward_pre_hook(_windowed, with_kwargs=True)

    def get_audio_features(self, input_features: Tensor, **inputs: Any) -> Any:
        """Encodes frames [1, n, samples], as ``pooler_output`` [1, n, hidden]. The first frame of an audio, which has
        no caches, has no samples."""
        codec: Any = self.codec_model
        streams, before = inputs.get("use_cache", False), inputs.get("padding_cache")
        heard = codec.encode(
            input_features[:, before is None :].flatten(1)[:, None],
            encoder_past_key_values=inputs.get("past_key_values"),
            padding_cache=before,
            use_streaming=streams,
        )
        rows = self.codes(heard.audio_codes.transpose(1, 2) + self.offsets).sum(2)
        caches = heard.padding_cache
        if streams:  # without the tensors that they are parts of
            caches.padding_cache = [one.clone() for one in caches.padding_cache]
        return SimpleNamespace(
            pooler_output=torch.cat((self.begin[None], rows), 1) if before is None else rows,
            past_key_values=heard.encoder_past_key_values,
            padding_cache=caches,
        )


def _generation(folder: Path, name: str, instead: int) -> int:
    """Returns a number in generation_config.json, or ``instead`` of one that is not there."""
    settings = FileSettings.read_if_there(folder / "generation_config.json")
    return instead if settings is None or settings.get(name) is None else settings.whole(name, least=0)


def _embedding(rows: Tensor) -> nn.Embedding:
    return nn.Embedding(len(rows), rows.shape[1], _weight=rows.clone(), _freeze=True)


def _settle(part: Any) -> None:
    """Computes the vectors of a codebook now, which transformers would keep outside of its buffers. Takes numbers
    without memory from other parts, which are for layers that are not causal."""
    vars(part).pop("padding_left", None)
    vars(part).pop("padding_right", None)
    if hasattr(part, "embed_sum"):
        vectors = part.embed
        del part._embed, part.embed_sum, part.cluster_usage, part.initialized
        part.register_buffer("_embed", vectors, persistent=False)


def _windowed(module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**inputs, "sliding_window": module.config.sliding_window}
