"""The speech model whose encoder is a codec: a position of audio is the sum of the embeddings of its codes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from ...core.errors import CheckpointError
from ..checkpoints.loading import load_part
from ..checkpoints.parts import Find
from ..checkpoints.settings import Settings
from ..checkpoints.turns import TURNS
from ..machine.defaults import OURS
from .added import AddedAudio, AddedFeatures, AddedModel


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

    def load(self, folder: Path, dtype: torch.dtype, *, without: Find | None = None) -> nn.Module:
        """Returns the model without the part of the codec that makes sound."""

        def unread(made: Any) -> list[nn.Module]:
            decoder = [made.model.layers, made.model.norm, made.lm_head]  # not the tokens: codes are among them
            return [made.codec_model.decoder, *([] if without is None else decoder)]

        module = super().load(folder, dtype, without=unread)
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
        stored = sum(tensor.numel() for tensor in codec.state_dict().values())
        del codec.decoder
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
        if not hasattr(self, "lm_head"):
            del self.model.embed_tokens
            return
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
    settings = Settings.read_if_there(folder / "generation_config.json")
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
